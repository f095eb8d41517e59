"""Moving an unpacked layer over a merged directory, where no overlay can be mounted.

The result is what overlayfs would show: whiteouts and opaque directories hide what lower layers brought, a
directory over a directory joins it and gives it its attributes, anything else replaces what was there; a
link is replaced, never followed. Files are renamed, not copied. A directory that a layer only passed
through (no entry of its own) keeps the attributes it has, times included. Both sides are ours and private
while this runs: names were checked when the layer was unpacked, and every step is by descriptor all the
same. Cost: one pass over the directories that both sides have.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from unlade.errors import UnsafeArchive
from unlade.kernel.files import remove_tree
from unlade.model import Deadline
from unlade.tree.attributes import copy_attributes, open_directory
from unlade.unpack.policy import Unpacked


class DanglingLink(UnsafeArchive):
    """A hard link to a name that neither the layer nor those below it have."""

    code = "dangling-link"


def merge_into(dst_fd: int, src_fd: int, unpacked: Unpacked, *, deadline: Deadline | None = None) -> None:
    """Move the layer at `src_fd` over the directory at `dst_fd`; `src_fd` is left with empty directories.

    The layer must have been unpacked with whiteouts recorded, not made. Not atomic: merge into a staging.
    """
    _Merge(dst_fd, src_fd, unpacked, deadline or Deadline.never()).run()


class _Side:
    """One of the two directories: opens what is beneath it and remembers how it was before."""

    def __init__(self, root: int) -> None:
        self._root = root
        self.before: dict[bytes, os.stat_result] = {b"": os.fstat(root)}

    def open(self, path: bytes) -> int | None:
        """A directory beneath the root, following no link; None when there is none. Caller closes."""
        here = os.dup(self._root)
        done = b""
        try:
            for name in path.split(b"/") if path else ():
                try:
                    below, before = open_directory(here, name)
                except (FileNotFoundError, NotADirectoryError):
                    os.close(here)
                    return None
                except OSError as error:
                    # O_NOFOLLOW says ELOOP for a link: something other than a directory, as above.
                    if error.errno != errno.ELOOP:
                        raise
                    os.close(here)
                    return None
                os.close(here)
                here = below
                done = done + b"/" + name if done else name
                self.before.setdefault(done, before)
        except BaseException:
            os.close(here)
            raise
        return here

    @contextmanager
    def opened(self, path: bytes) -> Iterator[int]:
        """Like `open`, for a directory that is known to be there."""
        fd = self.open(path)
        if fd is None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fsdecode(path))
        try:
            yield fd
        finally:
            os.close(fd)


class _Merge:
    def __init__(self, dst_fd: int, src_fd: int, unpacked: Unpacked, deadline: Deadline) -> None:
        self._dst = _Side(dst_fd)
        self._src = _Side(src_fd)
        self._unpacked = unpacked
        self._deadline = deadline
        self._implicit = frozenset(unpacked.implicit_dirs)
        self._own: set[bytes] = set()

    def run(self) -> None:
        self._inherit()
        self._hide()
        self._join()
        for name, target in self._unpacked.pending_links:
            self._deadline.check()
            self._link(name, target)
        self._settle()

    def _inherit(self) -> None:
        """A directory without an entry has the attributes of the lower one even where an opaque parent hides
        that one's content: so do umoci and containerd, which look for them before they hide anything.
        """
        above = tuple(path + b"/" if path else b"" for path in self._unpacked.opaques)
        for path in self._unpacked.implicit_dirs if above else ():
            if not path or not path.startswith(above):
                continue
            lower = self._dst.open(path)
            if lower is not None:
                try:
                    with self._src.opened(path) as layer:
                        copy_attributes(lower, layer, self._dst.before[path])
                finally:
                    os.close(lower)

    def _hide(self) -> None:
        for path in self._unpacked.opaques:
            self._empty(path)
        for path in (*self._unpacked.whiteouts, *self._unpacked.skipped):
            self._deadline.check()
            if path in self._implicit and self._empty(path):
                # Hidden and passed through by the same layer: as if opaque, it keeps its attributes.
                continue
            parent, _, name = path.rpartition(b"/")
            fd = self._dst.open(parent)
            if fd is not None:
                try:
                    self._remove(fd, parent, name)
                finally:
                    os.close(fd)

    def _empty(self, path: bytes) -> bool:
        """Remove all that a directory holds; False when there is no such directory."""
        fd = self._dst.open(path)
        if fd is None:
            return False
        try:
            for child in os.listdir(fd):
                self._remove(fd, path, os.fsencode(child))
        finally:
            os.close(fd)
        return True

    def _join(self) -> None:
        todo = [b""]
        while todo:
            self._deadline.check()
            path = todo.pop()
            if path not in self._implicit:
                self._own.add(path)
            with self._src.opened(path) as source, self._dst.opened(path) as target:
                for child in os.listdir(source):
                    name = os.fsencode(child)
                    below = path + b"/" + name if path else name
                    if self._move(source, target, path, name):
                        todo.append(below)

    def _move(self, source: int, target: int, path: bytes, name: bytes) -> bool:
        """Move one name; True when both sides are directories and must be joined instead."""
        arriving = os.stat(name, dir_fd=source, follow_symlinks=False)
        try:
            present = os.stat(name, dir_fd=target, follow_symlinks=False)
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISDIR(present.st_mode) and stat.S_ISDIR(arriving.st_mode):
                return True
            self._remove(target, path, name)
        try:
            os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
        except PermissionError:
            if not stat.S_ISDIR(arriving.st_mode):
                raise
            # A directory changes its parent only by the hand of someone who may write to it.
            fd, before = open_directory(source, name)
            try:
                os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
                os.fchmod(fd, stat.S_IMODE(before.st_mode))
            finally:
                os.close(fd)
        return False

    def _link(self, name: bytes, target: bytes) -> None:
        parent, _, last = name.rpartition(b"/")
        target_parent, _, target_last = target.rpartition(b"/")
        source = self._dst.open(target_parent)
        if source is None:
            raise dangling(name, target)
        try:
            try:
                info = os.stat(target_last, dir_fd=source, follow_symlinks=False)
            except FileNotFoundError:
                raise dangling(name, target) from None
            if stat.S_ISDIR(info.st_mode):
                raise dangling(name, target)
            if name == target:
                return
            with self._dst.opened(parent) as fd:
                self._remove(fd, parent, last)
                os.link(target_last, last, src_dir_fd=source, dst_dir_fd=fd, follow_symlinks=False)
        finally:
            os.close(source)

    def _remove(self, fd: int, path: bytes, name: bytes) -> None:
        remove_tree(fd, name)
        gone = path + b"/" + name if path else name
        if gone in self._dst.before:
            # What stands there later is something else: it must not get the attributes of what stood there.
            below = gone + b"/"
            for known in [known for known in self._dst.before if known.startswith(below)]:
                del self._dst.before[known]
            del self._dst.before[gone]

    def _settle(self) -> None:
        # Deepest first: an unprivileged owner loses the way down last.
        for path in sorted(self._dst.before, key=lambda path: path.count(b"/") + bool(path), reverse=True):
            target = self._dst.open(path)
            if target is None:
                continue
            try:
                if path in self._own:
                    with self._src.opened(path) as source:
                        copy_attributes(source, target, self._src.before[path])
                else:
                    before = self._dst.before[path]
                    if os.fstat(target).st_mode != before.st_mode:
                        os.fchmod(target, stat.S_IMODE(before.st_mode))
                    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
            finally:
                os.close(target)


def dangling(name: bytes, target: bytes) -> DanglingLink:
    """The error for a hard link whose target does not exist."""
    return DanglingLink(
        f"hard link {os.fsdecode(name)!r} leads to {os.fsdecode(target)!r}, which does not exist",
        next_step="build the layer again: its lower layers do not hold what it links to",
    )

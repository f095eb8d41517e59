"""Layers that cannot stand alone: what they say depends on the layers below them.

Two things in an image layer mean nothing without its parents. A hard link to a lower layer's file: the file
is copied up into the layer, as overlayfs does on link(2), and linked there. And a directory that the layer
passes through without an entry of its own: overlay shows the topmost directory's attributes, so it gets
those of the lower directory. Looking up a name in the stack honours whiteouts, opaque directories and
whatever is not a directory on the way; links are never followed. Such a layer is keyed with the chain of
its parents, any other by itself alone, so that images share it. Called by `deliver` after the layers below
are complete; the layer itself is still staged.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from unlade.errors import UnsafeArchive
from unlade.kernel.files import remove_tree, write_all
from unlade.model import Deadline
from unlade.tree.attributes import copy_attributes, is_opaque, is_whiteout
from unlade.tree.merge import dangling
from unlade.unpack.checksum import crc32
from unlade.unpack.filelist import FileListWriter
from unlade.unpack.policy import Unpacked

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK: Final = 1 << 20


def needs_context(unpacked: Unpacked) -> bool:
    """Whether a layer depends on those below it; its root alone is the stack's business (DirTrees)."""
    return bool(unpacked.pending_links) or any(unpacked.implicit_dirs)


def resolve_context(
    layer: Path,
    lower: Sequence[Path],
    unpacked: Unpacked,
    *,
    files_out: BinaryIO | None = None,
    deadline: Deadline | None = None,
) -> None:
    """Complete an unpacked layer (overlay's whiteout form) from those below it, lowest first.

    Records what it adds or changes in `files_out`. Raises DanglingLink for a hard link to nothing.
    """
    with ExitStack() as stack:
        fds = [_open_root(stack, path) for path in (*lower, layer)]
        writer = FileListWriter(files_out) if files_out is not None else None
        _Context(fds[-1], fds[:-1], unpacked, writer, deadline or Deadline.never()).run()
        if writer is not None:
            writer.flush()


@dataclass(slots=True)
class _Found:
    """A name in the stack: the directory it is in (to be closed), its last component, what it is."""

    parent: int
    name: bytes
    info: os.stat_result


class _Context:
    def __init__(
        self,
        layer: int,
        lower: list[int],
        unpacked: Unpacked,
        writer: FileListWriter | None,
        deadline: Deadline,
    ) -> None:
        self._layer = layer
        self._lower = lower
        self._unpacked = unpacked
        self._writer = writer
        self._deadline = deadline
        self._implicit = frozenset(unpacked.implicit_dirs)
        # Times of the layer's own directories, to be put back after names were added to them.
        self._times: dict[bytes, tuple[int, int]] = {}

    def run(self) -> None:
        for path in sorted(self._implicit, key=lambda path: path.count(b"/") + bool(path)):
            self._deadline.check()
            self._adopt_directory(path)
        for name, target in self._unpacked.pending_links:
            self._deadline.check()
            self._link(name, target)
        for path, times in self._times.items():
            fd = _open_beneath(self._layer, path)
            try:
                os.utime(fd, ns=times)
            finally:
                os.close(fd)

    def _adopt_directory(self, path: bytes) -> None:
        # Also where an opaque parent hides the lower directory's content: umoci and containerd look for the
        # attributes before they hide anything.
        found = _lookup(self._lower, path)
        if found is None:
            return
        try:
            if not stat.S_ISDIR(found.info.st_mode):
                return
            source = os.open(found.name, _DIRECTORY, dir_fd=found.parent)
            try:
                target = _open_beneath(self._layer, path)
                try:
                    copy_attributes(source, target, found.info)
                finally:
                    os.close(target)
            finally:
                os.close(source)
        finally:
            os.close(found.parent)
        self._times.pop(path, None)
        self._note("d", path, found.info)

    def _link(self, name: bytes, target: bytes) -> None:
        self._copy_up(name, target)
        parent, _, last = name.rpartition(b"/")
        target_parent, _, target_last = target.rpartition(b"/")
        if name == target:
            return
        here = self._open_for_change(parent)
        try:
            there = _open_beneath(self._layer, target_parent)
            try:
                remove_tree(here, last)
                os.link(target_last, last, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
            finally:
                os.close(there)
        finally:
            os.close(here)
        if self._writer is not None:
            self._writer.add("h", name.decode("latin-1"), 0, 0, 0, 0, 0, 0, target.decode("latin-1"))

    def _copy_up(self, name: bytes, target: bytes) -> None:
        """Make the target part of the layer, unless it already is."""
        own = _lookup([self._layer], target)
        if own is not None:
            os.close(own.parent)
            if stat.S_ISDIR(own.info.st_mode):
                raise dangling(name, target)
            return
        if self._hidden_by_layer(target) or _is_whiteout_at(self._layer, target):
            raise dangling(name, target)
        found = _lookup(self._lower, target)
        if found is None:
            raise dangling(name, target)
        try:
            if stat.S_ISDIR(found.info.st_mode):
                raise dangling(name, target)
            parent, _, last = target.rpartition(b"/")
            here = self._make_parents(parent)
            try:
                checksum = _copy(found, here, last, self._deadline)
            finally:
                os.close(here)
            self._note_file(target, found, checksum)
        finally:
            os.close(found.parent)

    def _make_parents(self, path: bytes) -> int:
        """A directory of the layer, made with the attributes of the lower one where it is missing."""
        here = os.dup(self._layer)
        done = b""
        try:
            for name in path.split(b"/") if path else ():
                done_parent, done = done, done + b"/" + name if done else name
                try:
                    below = os.open(name, _DIRECTORY, dir_fd=here)
                except FileNotFoundError:
                    self._remember_times(done_parent, here)
                    os.mkdir(name, 0o755, dir_fd=here)
                    below = os.open(name, _DIRECTORY, dir_fd=here)
                    os.fchmod(below, 0o755)
                    self._adopt_directory(done)
                os.close(here)
                here = below
            self._remember_times(path, here)
        except BaseException:
            os.close(here)
            raise
        return here

    def _open_for_change(self, path: bytes) -> int:
        fd = _open_beneath(self._layer, path)
        self._remember_times(path, fd)
        return fd

    def _remember_times(self, path: bytes, fd: int) -> None:
        info = os.fstat(fd)
        self._times.setdefault(path, (info.st_atime_ns, info.st_mtime_ns))

    def _hidden_by_layer(self, path: bytes) -> bool:
        """Whether a directory of the layer above this name is opaque."""
        here = os.dup(self._layer)
        try:
            for name in path.split(b"/")[:-1] if path else []:
                if is_opaque(here):
                    return True
                try:
                    below = os.open(name, _DIRECTORY, dir_fd=here)
                except (FileNotFoundError, NotADirectoryError):
                    return False
                os.close(here)
                here = below
            return bool(path) and is_opaque(here)
        finally:
            os.close(here)

    def _note(self, kind: str, path: bytes, info: os.stat_result) -> None:
        if self._writer is not None:
            self._writer.add(
                kind,
                path.decode("latin-1"),
                stat.S_IMODE(info.st_mode),
                info.st_uid,
                info.st_gid,
                info.st_mtime_ns,
            )

    def _note_file(self, path: bytes, found: _Found, checksum: int) -> None:
        if self._writer is None:
            return
        info = found.info
        link = stat.S_ISLNK(info.st_mode)
        target = os.readlink(found.name, dir_fd=found.parent) if link else b""
        self._writer.add(
            "l" if link else "f",
            path.decode("latin-1"),
            stat.S_IMODE(info.st_mode),
            info.st_uid,
            info.st_gid,
            info.st_mtime_ns,
            0 if link else info.st_size,
            checksum,
            target.decode("latin-1"),
        )


def _lookup(layers: Sequence[int], path: bytes) -> _Found | None:
    """Find a name in a stack, lowest first, as overlay would; None when it is missing or hidden."""
    names = path.split(b"/") if path else [b"."]
    for layer in reversed(layers):
        here = os.dup(layer)
        try:
            last = is_opaque(here)
            for depth, name in enumerate(names):
                try:
                    info = os.stat(name, dir_fd=here, follow_symlinks=False)
                except FileNotFoundError:
                    break
                if is_whiteout(info):
                    return None
                if depth == len(names) - 1:
                    found, here = _Found(here, name, info), -1
                    return found
                if not stat.S_ISDIR(info.st_mode):
                    return None
                below = os.open(name, _DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
                last = last or is_opaque(here)
            if last:
                return None
        finally:
            if here >= 0:
                os.close(here)
    return None


def _is_whiteout_at(layer: int, path: bytes) -> bool:
    """Whether this layer hides the name or a directory above it."""
    here = os.dup(layer)
    try:
        for name in path.split(b"/"):
            try:
                info = os.stat(name, dir_fd=here, follow_symlinks=False)
            except FileNotFoundError:
                return False
            if not stat.S_ISDIR(info.st_mode):
                return True
            below = os.open(name, _DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
        return False
    finally:
        os.close(here)


def _copy(found: _Found, target: int, name: bytes, deadline: Deadline) -> int:
    """Copy a file, symbolic link or device with its attributes; returns the checksum of its content."""
    info = found.info
    if stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(found.name, dir_fd=found.parent), name, dir_fd=target)
        made = os.stat(name, dir_fd=target, follow_symlinks=False)
        if (made.st_uid, made.st_gid) != (info.st_uid, info.st_gid):
            os.chown(name, info.st_uid, info.st_gid, dir_fd=target, follow_symlinks=False)
        times = (info.st_atime_ns, info.st_mtime_ns)
        os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)
        return 0
    if not stat.S_ISREG(info.st_mode):
        raise UnsafeArchive(
            f"hard link to {os.fsdecode(name)!r}, which is neither a file nor a symbolic link",
            next_step="build the layer again without links to devices",
        )
    source = os.open(found.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=found.parent)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        copy = os.open(name, flags, 0o600, dir_fd=target)
        try:
            checksum = 0
            while chunk := os.read(source, _CHUNK):
                deadline.check()
                checksum = crc32(chunk, checksum)
                write_all(copy, chunk)
            copy_attributes(source, copy, info)
        finally:
            os.close(copy)
    finally:
        os.close(source)
    return checksum


def _open_root(stack: ExitStack, path: Path) -> int:
    fd = os.open(path, _DIRECTORY)
    stack.callback(os.close, fd)
    return fd


def _open_beneath(root: int, path: bytes) -> int:
    here = os.dup(root)
    for name in path.split(b"/") if path else ():
        try:
            below = os.open(name, _DIRECTORY, dir_fd=here)
        finally:
            os.close(here)
        here = below
    return here

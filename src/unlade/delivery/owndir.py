"""A directory of the caller's own: staged beside it, synced, then put in place by one rename.

Nobody sees a half-made directory: until the rename the old state stands, after it the new one does (but
for a destination that is a mount point or the working directory, which is filled entry by entry). The
staging is a hidden sibling, because a rename cannot cross file systems; a lock on it tells the living
from the dead, so what a killed delivery left behind is removed by the next one to the same place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from typing import Final

import msgspec

from unlade.errors import InvalidInput, StoreError
from unlade.kernel import failpoints
from unlade.kernel.beneath import open_beneath
from unlade.kernel.files import exchange, remove_tree, rename_new
from unlade.model import Deadline
from unlade.tree.sync import sync_tree
from unlade.unpack import Unpacked

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MARK: Final = b".unlade-"
_FRESH: Final = b".unlade-fresh-"
# A staging takes microseconds from its making to its lock; one that took this long has no owner.
_FRESH_SECONDS: Final = 600.0
_ROOT: Final = b"root"
_OLD: Final = b"old"
# The root of an image without an entry of its own, whatever our umask.
_ROOT_MODE: Final = 0o755


class DestinationInUse(InvalidInput):
    """The destination exists and holds something."""

    code = "destination-in-use"


@contextlib.contextmanager
def staged_beside(path: str, *, replace: bool) -> Iterator[OwnDirectory]:
    """Prepare a delivery to `path`; what was not committed is gone when the block ends."""
    absolute = os.path.abspath(path)
    parent_path, name = os.path.split(absolute)
    if not name:
        raise InvalidInput("the root directory cannot be a destination", next_step="name another directory")
    os.makedirs(parent_path, exist_ok=True)
    with contextlib.ExitStack() as stack:
        parent = os.open(parent_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, parent)
        own = OwnDirectory(parent, os.fsencode(name), absolute, replace=replace)
        own.check()
        own.stage(stack)
        yield own


class _Scratch(msgspec.Struct, frozen=True):
    dirfd: int
    files_out: None = None  # a caller's own directory has no record, so nothing would read a list


class OwnDirectory:
    """One destination, staged; a `Target`. See `staged_beside`."""

    dirfd: int
    files_out: None = None

    def __init__(self, parent: int, name: bytes, path: str, *, replace: bool) -> None:
        self._parent = parent
        self._name = name
        self._path = path
        self._replace = replace
        # A hidden name that sorts beside its destination and that a person recognises.
        self._prefix = b"." + name[:200] + _MARK
        self._inside = False
        self._home = -1
        self._stack = contextlib.ExitStack()
        self._scratches = 0

    def check(self) -> None:
        """Refuse early what the commit would refuse: nothing is downloaded in vain."""
        # Also when the answer is no: one killed right after its commit left a destination that is not empty.
        _remove_dead(self._parent, self._prefix)
        try:
            info = os.stat(self._name, dir_fd=self._parent, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(info.st_mode):
            raise DestinationInUse(
                f"{self._path} exists and is not a directory", next_step="remove it or name another directory"
            )
        # A mount point cannot be renamed over, and a working directory must not be swapped under a shell's
        # feet: there the staging lies inside, and the content moves up entry by entry.
        self._inside = info.st_dev != os.fstat(self._parent).st_dev or os.path.samestat(info, os.stat("."))
        if self._replace and self._inside and not self._is_empty():
            raise DestinationInUse(
                f"{self._path} is a mount point or the working directory and cannot be replaced",
                next_step="empty it first, or name a directory inside it",
            )
        if not self._replace and not self._is_empty():
            raise DestinationInUse(
                f"{self._path} is not empty", next_step="name another directory, or replace it with --replace"
            )

    def stage(self, stack: contextlib.ExitStack) -> None:
        """Make the locked, hidden sibling; the stack takes it away."""
        holder = self._parent
        if self._inside:
            holder = os.open(self._name, _DIRECTORY, dir_fd=self._parent)
            stack.callback(os.close, holder)
            _remove_dead(holder, self._prefix)
        token = secrets.token_hex(8).encode()
        # Locked before it has the name by which others look for dead ones.
        name, fresh = self._prefix + token, _FRESH + token
        stack.callback(remove_tree, holder, name)
        stack.callback(remove_tree, holder, fresh)
        os.mkdir(fresh, 0o700, dir_fd=holder)
        self._home = os.open(fresh, _DIRECTORY, dir_fd=holder)
        stack.callback(os.close, self._home)
        fcntl.flock(self._home, fcntl.LOCK_EX)
        failpoints.reach("deliver.directory.fresh")
        os.rename(fresh, name, src_dir_fd=holder, dst_dir_fd=holder)
        failpoints.reach("deliver.directory.staged")
        self._stack = stack
        self.dirfd = self._make(_ROOT)

    def scratch(self) -> _Scratch:
        """A directory beside the root for one part."""
        self._scratches += 1
        return _Scratch(self._make(b"part-%d" % self._scratches))

    def merge(self, scratch: _Scratch, unpacked: Unpacked, *, deadline: Deadline) -> None:
        """Move a part over what is there so far."""
        from unlade.tree import merge_into

        merge_into(self.dirfd, scratch.dirfd, unpacked, deadline=deadline)

    def _make(self, name: bytes) -> int:
        os.mkdir(name, dir_fd=self._home)
        fd = os.open(name, _DIRECTORY, dir_fd=self._home)
        self._stack.callback(os.close, fd)
        os.fchmod(fd, _ROOT_MODE)
        return fd

    def commit(self, sub_path: str) -> None:
        """Sync, then put the directory (or its sub-path) in place."""
        sync_tree(self._home)
        failpoints.reach("deliver.directory.synced")
        with contextlib.ExitStack() as stack:
            holder, source = self._home, _ROOT
            if sub_path:
                holder, source = self._part(stack, sub_path)
            self._put(holder, source)
        failpoints.reach("deliver.directory.renamed")
        os.fsync(self._parent)
        failpoints.reach("deliver.directory.committed")

    def _part(self, stack: contextlib.ExitStack, sub_path: str) -> tuple[int, bytes]:
        from unlade.mount import NoSuchSubPath

        parts = [part for part in os.fsencode(sub_path).split(b"/") if part not in (b"", b".")]
        if not parts or b".." in parts:
            raise NoSuchSubPath(f"sub-path {sub_path!r} is not a path inside the content")
        try:
            holder = open_beneath(self.dirfd, b"/".join(parts[:-1]) or b".", _DIRECTORY)
            stack.callback(os.close, holder)
            info = os.stat(parts[-1], dir_fd=holder, follow_symlinks=False)
        except OSError as error:
            raise NoSuchSubPath(
                f"sub-path {sub_path!r}: {error.strerror}",
                next_step="`unlade plan REF` lists the paths; links on the way are refused",
            ) from error
        if not stat.S_ISDIR(info.st_mode):
            raise NoSuchSubPath(
                f"sub-path {sub_path!r} is not a directory", next_step="name a directory of the content"
            )
        return holder, parts[-1]

    def _put(self, holder: int, source: bytes) -> None:
        if self._inside:
            self._move_children(holder, source)
            return
        try:
            rename_new(holder, source, self._parent, self._name)
            return
        except FileExistsError:
            pass
        if self._replace:
            self._swap(holder, source)
            return
        try:
            # rename(2) replaces an empty directory; one that was filled meanwhile it does not.
            os.rename(source, self._name, src_dir_fd=holder, dst_dir_fd=self._parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise DestinationInUse(
                    f"{self._path} was filled meanwhile", next_step="name another directory"
                ) from error
            raise

    def _swap(self, holder: int, source: bytes) -> None:
        try:
            exchange(holder, source, self._parent, self._name)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise StoreError(
                    f"{self._path} cannot be replaced: {error.strerror}", next_step="name another directory"
                ) from error
            # Two renames where the system has no exchange: for a moment there is no directory of that name.
            os.rename(self._name, _OLD, src_dir_fd=self._parent, dst_dir_fd=self._home)
            os.rename(source, self._name, src_dir_fd=holder, dst_dir_fd=self._parent)

    def _move_children(self, holder: int, source: bytes) -> None:
        target = os.open(self._name, _DIRECTORY, dir_fd=self._parent)
        origin = os.open(source, _DIRECTORY, dir_fd=holder)
        try:
            for entry in os.listdir(origin):
                rename_new(origin, os.fsencode(entry), target, os.fsencode(entry))
            os.fsync(target)
        finally:
            os.close(origin)
            os.close(target)

    def _is_empty(self) -> bool:
        fd = os.open(self._name, _DIRECTORY, dir_fd=self._parent)
        try:
            return all(os.fsencode(entry).startswith((self._prefix, _FRESH)) for entry in os.listdir(fd))
        finally:
            os.close(fd)


def _remove_dead(parent: int, prefix: bytes) -> None:
    # Compared as text: a thousand deliveries side by side look at each other's names a million times.
    marks = (os.fsdecode(_FRESH), os.fsdecode(prefix))
    for entry in [entry for entry in os.listdir(parent) if entry.startswith(marks)]:
        name = os.fsencode(entry)
        fresh = name.startswith(_FRESH)
        try:
            fd = os.open(name, _DIRECTORY, dir_fd=parent)
        except OSError:
            continue
        try:
            if fresh and os.fstat(fd).st_mtime > time.time() - _FRESH_SECONDS:
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            remove_tree(parent, name)
        finally:
            os.close(fd)

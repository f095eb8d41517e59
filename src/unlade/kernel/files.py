"""File calls the standard library does not have, or does not have by descriptor.

Renames that must not (or must) replace, syncing one file system, removing a whole tree without ever
following a link, extended attributes of a link itself. Raises OSError; callers give it meaning. Linux
first; elsewhere the nearest call with the same guarantee, or ENOSYS.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import sys
from typing import Final

from unlade.kernel import libc

_RENAME_NOREPLACE: Final = 1
_RENAME_EXCHANGE: Final = 2
_SYNC_FILE_RANGE_WRITE: Final = 2
# Begun in pieces this large: the disk works in long runs, and one call serves sixteen chunks.
_EARLY_BYTES: Final = 16 << 20

_known_umask: int | None = None

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def rename_new(old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
    """Rename, but fail with EEXIST when the new name is taken."""
    if _renameat2(old_dir, old, new_dir, new, _RENAME_NOREPLACE):
        return
    # Not atomic against another writer of the same name; callers without renameat2(2) hold a lock.
    with contextlib.suppress(FileNotFoundError):
        os.stat(new, dir_fd=new_dir, follow_symlinks=False)
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    os.rename(old, new, src_dir_fd=old_dir, dst_dir_fd=new_dir)


def exchange(old_dir: int, old: bytes, new_dir: int, new: bytes) -> None:
    """Swap two existing names atomically; ENOSYS where the system cannot."""
    if not _renameat2(old_dir, old, new_dir, new, _RENAME_EXCHANGE):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _renameat2(old_dir: int, old: bytes, new_dir: int, new: bytes, flags: int) -> bool:
    if not libc.supported or not hasattr(libc.library, "renameat2"):
        return False
    try:
        libc.checked(
            libc.library.renameat2(
                ctypes.c_int(old_dir),
                ctypes.c_char_p(old),
                ctypes.c_int(new_dir),
                ctypes.c_char_p(new),
                ctypes.c_uint(flags),
            )
        )
    except OSError as error:
        # EINVAL: the file system (some FUSE and network ones) has no such rename.
        if error.errno in (errno.ENOSYS, errno.EINVAL):
            return False
        raise
    return True


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte; a short write is continued."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class EarlyWriter:
    """Writes a file in order, from `position`, and has the kernel begin with the disk meanwhile.

    Left alone the kernel begins when a tenth of all memory is dirty: then the sync at the end waits for all
    of it, on a disk that did nothing before. Beginning early is best effort, and no promise that anything is
    on the disk: fsync is.
    """

    def __init__(self, fd: int, position: int = 0) -> None:
        self._fd = fd
        self._written = self._begun = position

    def write(self, data: bytes | memoryview) -> None:
        """Write every byte."""
        write_all(self._fd, data)
        self._written += len(data)
        if self._written - self._begun >= _EARLY_BYTES:
            if libc.supported and hasattr(libc.library, "sync_file_range"):
                libc.library.sync_file_range(
                    ctypes.c_int(self._fd),
                    ctypes.c_longlong(self._begun),
                    ctypes.c_longlong(self._written - self._begun),
                    ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
                )
            self._begun = self._written


def syncfs(fd: int) -> None:
    """Write the whole file system that holds `fd` to its disk; errors since it was opened are reported."""
    if libc.supported and hasattr(libc.library, "syncfs"):
        libc.checked(libc.library.syncfs(ctypes.c_int(fd)))
    else:
        os.sync()


def remove_tree(dirfd: int, name: bytes) -> None:
    """Remove a name and all below it, following no link; a missing name is no error.

    Directories without write permission are opened up first, so that a tree of read-only directories
    can be removed by the user who owns it.
    """
    try:
        os.unlink(name, dir_fd=dirfd)
        return
    except FileNotFoundError:
        return
    except OSError as error:
        # EISDIR on Linux, EPERM by POSIX and on macOS.
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
    # Iterative, so that depth costs a descriptor and no Python frame (unpack caps the depth). Each level
    # is: descriptor of the parent, name, descriptor of the directory, names left in it.
    levels = [(dirfd, name, *_open_and_list(dirfd, name))]
    try:
        while levels:
            parent, here, fd, names = levels[-1]
            while names:
                child = names.pop()
                try:
                    os.unlink(child, dir_fd=fd)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if error.errno not in (errno.EISDIR, errno.EPERM):
                        raise
                    levels.append((fd, child, *_open_and_list(fd, child)))
                    break
            else:
                os.close(fd)
                levels.pop()
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(here, dir_fd=parent)
    finally:
        for _, _, fd, _ in levels:
            os.close(fd)


def _open_and_list(dirfd: int, name: bytes) -> tuple[int, list[bytes]]:
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=dirfd)
    except PermissionError:
        # Not readable by its owner. O_PATH needs no permission; chmod through the descriptor's own name
        # changes the directory that was opened, whatever stands at its path now.
        if sys.platform != "linux":
            raise
        path_fd = os.open(name, _DIRECTORY | os.O_PATH, dir_fd=dirfd)
        try:
            os.chmod(f"/proc/self/fd/{path_fd}", stat.S_IRWXU)
        finally:
            os.close(path_fd)
        fd = os.open(name, _DIRECTORY, dir_fd=dirfd)
    try:
        mode = os.fstat(fd).st_mode
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            os.fchmod(fd, stat.S_IRWXU)
        return fd, [os.fsencode(child) for child in os.listdir(fd)]
    except BaseException:
        os.close(fd)
        raise


def set_link_xattr(dirfd: int, name: bytes, attribute: bytes, value: bytes) -> None:
    """Set an extended attribute on `name` itself, link or not; it is never followed."""
    if sys.platform != "linux":
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dirfd)
    try:
        # setxattr(2) wants a path or a readable descriptor; the magic link of an O_PATH descriptor leads
        # to exactly what was opened, and is not followed any further.
        os.setxattr(f"/proc/self/fd/{fd}", attribute, value)
    except FileNotFoundError:  # no /proc here
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP)) from None
    finally:
        os.close(fd)


def make_whiteout(dirfd: int, name: bytes) -> None:
    """Create overlayfs's whiteout: a character device 0:0 (allowed without privilege since Linux 5.8)."""
    os.mknod(name, stat.S_IFCHR, 0, dir_fd=dirfd)


def set_umask(mask: int) -> None:
    """Set this process's umask for good, so that `current_umask` need not ask again."""
    global _known_umask  # noqa: PLW0603 — the umask itself is one per process
    os.umask(mask)
    _known_umask = mask


def current_umask() -> int:
    """This process's umask, read without changing it for other threads; all bits when it cannot be read."""
    if _known_umask is not None:
        return _known_umask
    try:
        with open("/proc/self/status", "rb") as status:
            for line in status:
                if line.startswith(b"Umask:"):
                    return int(line[6:], 8)
    except OSError:
        pass
    return 0o777

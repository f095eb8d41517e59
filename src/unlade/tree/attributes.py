"""Reading and setting a file's attributes by descriptor, for merging and for copying up.

Nothing here takes a path that could be a link: a descriptor, or a directory descriptor and one name. A
directory that its owner may not enter or write (mode 0555, 0) is opened up for the work and its mode put
back afterwards; root needs none of that. Attributes of the overlay itself are never copied: they would be
obeyed by the next mount.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import Final

_OVERLAY: Final = ("trusted.overlay.", "user.overlay.")
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(dirfd: int, name: bytes) -> tuple[int, os.stat_result]:
    """Open a directory by one name for listing and writing, whatever its mode says to its owner.

    Returns the descriptor, which the caller closes, and its attributes before it was opened up.
    """
    before = os.stat(name, dir_fd=dirfd, follow_symlinks=False)
    closed = before.st_mode & stat.S_IRWXU != stat.S_IRWXU
    if closed and stat.S_ISDIR(before.st_mode) and os.geteuid() != 0:
        _chmod(dirfd, name, stat.S_IMODE(before.st_mode) | stat.S_IRWXU)
    return os.open(name, _DIRECTORY, dir_fd=dirfd), before


def open_file(dirfd: int, name: bytes) -> int:
    """Open a regular file by one name for reading, whatever its mode says to its owner; caller closes."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=dirfd)
    except PermissionError:
        mode = stat.S_IMODE(os.stat(name, dir_fd=dirfd, follow_symlinks=False).st_mode)
        _chmod(dirfd, name, mode | stat.S_IRUSR)
        try:
            return os.open(name, flags, dir_fd=dirfd)
        finally:
            _chmod(dirfd, name, mode)


def copy_attributes(source: int, target: int, info: os.stat_result) -> None:
    """Give `target` the owner, mode, extended attributes and times that `source` has (`info`: its stat).

    The order matters: chown clears set-id bits, and everything but the times changes nothing they say.
    """
    set_owner(target, info)
    os.fchmod(target, stat.S_IMODE(info.st_mode))
    copy_xattrs(source, target)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))


def set_owner(target: int, info: os.stat_result) -> None:
    """Give `target` the owner of `info` where it differs; an unprivileged owner has only itself to give."""
    now = os.fstat(target)
    if (now.st_uid, now.st_gid) != (info.st_uid, info.st_gid):
        os.fchown(target, info.st_uid, info.st_gid)


def copy_xattrs(source: int, target: int) -> None:
    """Make the extended attributes of `target` those of `source`, overlay's own left alone on both."""
    if sys.platform != "linux":
        return
    wanted = {name: os.getxattr(source, name) for name in _plain_xattrs(source)}
    for name in _plain_xattrs(target):
        if name not in wanted:
            os.removexattr(target, name)
    for name, value in wanted.items():
        os.setxattr(target, name, value)


def is_opaque(fd: int) -> bool:
    """Whether overlayfs would take this directory to hide all below it in lower layers."""
    if sys.platform != "linux":
        return False
    for prefix in _OVERLAY:
        try:
            if os.getxattr(fd, prefix + "opaque") == b"y":
                return True
        except OSError:
            # No such attribute, or none of this kind without privilege: not opaque to us either way.
            continue
    return False


def is_whiteout(info: os.stat_result) -> bool:
    """Whether overlayfs would take this to hide the name in lower layers: a character device 0:0."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _plain_xattrs(fd: int) -> list[str]:
    if sys.platform != "linux":
        return []  # none were set there
    try:
        names = os.listxattr(fd)
    except OSError:
        return []
    return [name for name in names if not name.startswith(_OVERLAY) and name != "security.selinux"]


def _chmod(dirfd: int, name: bytes, mode: int) -> None:
    if sys.platform != "linux":
        os.chmod(name, mode, dir_fd=dirfd, follow_symlinks=False)
        return
    # O_PATH needs no permission, and the descriptor's own name leads to what was opened, link or race or not.
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dirfd)
    try:
        os.chmod(f"/proc/self/fd/{fd}", mode)
    finally:
        os.close(fd)

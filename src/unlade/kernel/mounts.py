"""The mount system calls (fsopen(2), fsconfig(2), fsmount(2), open_tree(2), move_mount(2), mount_setattr(2)).

The new interface is used because `mount(2)` takes one page of options, which sixty overlay layers
outgrow, and because it works on descriptors: what was checked is what is mounted. Only `unlade.mount`
and, for the file systems of writable volumes, `unlade.csi.writable` call this. Linux only; on other
systems every call raises MountError.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from unlade.errors import MountError
from unlade.kernel import libc

# Since Linux 5.2 new system calls have one number on every architecture (but alpha, which adds 110).
_OPEN_TREE: Final = 428
_MOVE_MOUNT: Final = 429
_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_MOUNT_SETATTR: Final = 442

_OPEN_TREE_CLONE: Final = 1
_OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH: Final = 0x4
_MOVE_MOUNT_T_EMPTY_PATH: Final = 0x40
_FSOPEN_CLOEXEC: Final = 1
_FSMOUNT_CLOEXEC: Final = 1
_FSCONFIG_SET_FLAG: Final = 0
_FSCONFIG_SET_STRING: Final = 1
_FSCONFIG_CMD_CREATE: Final = 6
_AT_EMPTY_PATH: Final = 0x1000
_AT_RECURSIVE: Final = 0x8000

ATTR_RDONLY: Final = 0x1
ATTR_NOSUID: Final = 0x2
ATTR_NODEV: Final = 0x4
ATTR_NOEXEC: Final = 0x8

# umount2(2): detach now, clean up when the last user is gone; never follow a link at the mount point.
_MNT_DETACH: Final = 2
_UMOUNT_NOFOLLOW: Final = 8


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def supported() -> bool:
    """Whether this system has these calls at all; permission is another question."""
    return sys.platform == "linux" and platform.machine() != "alpha"


def require() -> None:
    """Raise MountError, with what to do instead, where there are no such calls."""
    if not supported():
        raise MountError(
            "this system has no Linux mounts",
            next_step="use `unlade pull REF DIR` to get a directory instead",
        )


def _libc() -> ctypes.CDLL:
    require()
    return libc.library


def _call(what: str, number: int, *arguments: object) -> int:
    result = int(_libc().syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise failure(what, ctypes.get_errno())
    return result


def failure(what: str, code: int, detail: str = "") -> MountError:
    """A MountError for an errno, with what to do about it."""
    steps = {
        errno.EPERM: "mounting needs root (CAP_SYS_ADMIN); `unlade pull REF DIR` needs none",
        errno.ENOSYS: "mounting needs Linux 5.12 or later; `unlade pull REF DIR` works anywhere",
        errno.EBUSY: "something is in use or mounted there already; unmount it first",
        errno.ENOENT: "the mount point must exist",
        errno.ENODEV: "the kernel has no overlay file system; load its module",
        errno.EINVAL: "see the kernel's log for the option it refused",
    }
    suffix = f": {detail}" if detail else ""
    return MountError(f"{what}: {os.strerror(code)}{suffix}", next_step=steps.get(code, ""))


@dataclass(frozen=True, slots=True)
class Upper:
    """What makes an overlay writable: both directories are on one file system, and empty at first."""

    directory: str
    work: str


def overlay(
    lower: list[str], attributes: int, *, context: str = "", upper: Upper | None = None, source: str = ""
) -> int:
    """A detached overlay of directories, topmost first; returns its descriptor, caller closes.

    Read-only without `upper`. `source` is what the mount table shows as its source. Each directory is
    given by a call of its own (`lowerdir+`, Linux 6.5), so neither their number nor the length of their
    names has a page's limit; older kernels get the joined option and its limit.
    """
    fs = _call("fsopen overlay", _FSOPEN, ctypes.c_char_p(b"overlay"), ctypes.c_uint(_FSOPEN_CLOEXEC))
    try:
        if source:
            _set_string(fs, "source", source)
        if context:
            _set_string(fs, "context", context)
        try:
            for directory in lower:
                _set_string(fs, "lowerdir+", directory)
        except MountError:
            joined = ":".join(directory.replace("\\", "\\\\").replace(":", "\\:") for directory in lower)
            _set_string(fs, "lowerdir", joined)
        if upper is None:
            _set_flag(fs, "ro")
        else:
            _set_string(fs, "upperdir", upper.directory)
            _set_string(fs, "workdir", upper.work)
            # A change of owner or mode must not copy a file's content up; metacopy needs redirects.
            _set_string(fs, "redirect_dir", "on")
            _set_string(fs, "metacopy", "on")
            # The index ties the upper directory to the lower one's inodes, which a tree that was fetched
            # again does not have; what it gives in return (unbroken hard links) is not worth the volume.
            _set_string(fs, "index", "off")
        return _create(fs, "overlay", attributes)
    finally:
        os.close(fs)


def block_device(
    device: str, file_system: str, attributes: int, *, options: Sequence[str] = (), readonly: bool = False
) -> int:
    """A detached mount of the file system on a device; returns its descriptor, caller closes.

    A device that is mounted already gives one more mount of the same, live file system.
    """
    name = file_system.encode()
    fs = _call(f"fsopen {file_system}", _FSOPEN, ctypes.c_char_p(name), ctypes.c_uint(_FSOPEN_CLOEXEC))
    try:
        _set_string(fs, "source", device)
        if readonly:
            _set_flag(fs, "ro")
        for option in options:
            _set_flag(fs, option)
        return _create(fs, file_system, attributes)
    finally:
        os.close(fs)


def _create(fs: int, file_system: str, attributes: int) -> int:
    _config(fs, _FSCONFIG_CMD_CREATE, None, None)
    return _call(
        f"fsmount {file_system}",
        _FSMOUNT,
        ctypes.c_int(fs),
        ctypes.c_uint(_FSMOUNT_CLOEXEC),
        ctypes.c_uint(attributes),
    )


def clone(directory: int, attributes: int, *, clear: int = 0) -> int:
    """A detached bind mount of what the descriptor names, with these attributes; caller closes.

    It inherits the attributes of the mount it is taken from, but for those in `clear`.
    """
    tree = _call(
        "open_tree",
        _OPEN_TREE,
        ctypes.c_int(directory),
        ctypes.c_char_p(b""),
        ctypes.c_uint(_OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC | _AT_EMPTY_PATH),
    )
    try:
        set_attributes(tree, attributes, clear=clear & ~attributes)
    except BaseException:
        os.close(tree)
        raise
    return tree


def set_attributes(mount: int, attributes: int, *, clear: int = 0) -> None:
    """Set these attributes on a mount and everything below it; the others, but for `clear`, stay."""
    attr = _MountAttr(attributes, clear, 0, 0)
    _call(
        "mount_setattr",
        _MOUNT_SETATTR,
        ctypes.c_int(mount),
        ctypes.c_char_p(b""),
        ctypes.c_uint(_AT_EMPTY_PATH | _AT_RECURSIVE),
        ctypes.byref(attr),
        ctypes.c_size_t(ctypes.sizeof(attr)),
    )


def attach(mount: int, target: int) -> None:
    """Put a detached mount onto the directory or file that `target` names."""
    _call(
        "move_mount",
        _MOVE_MOUNT,
        ctypes.c_int(mount),
        ctypes.c_char_p(b""),
        ctypes.c_int(target),
        ctypes.c_char_p(b""),
        ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH),
    )


def detach(path: str, *, lazy: bool) -> None:
    """Unmount what is at path, never through a link; raises MountError (EBUSY unless lazy)."""
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0)
    if _libc().umount2(ctypes.c_char_p(os.fsencode(path)), ctypes.c_int(flags)) < 0:
        raise failure(f"unmount {path}", ctypes.get_errno())


def _set_flag(fs: int, key: str) -> None:
    _config(fs, _FSCONFIG_SET_FLAG, key, None)


def _set_string(fs: int, key: str, value: str) -> None:
    _config(fs, _FSCONFIG_SET_STRING, key, value)


def _config(fs: int, command: int, key: str | None, value: str | None) -> None:
    result = int(
        _libc().syscall(
            ctypes.c_long(_FSCONFIG),
            ctypes.c_int(fs),
            ctypes.c_uint(command),
            ctypes.c_char_p(key.encode() if key is not None else None),
            ctypes.c_char_p(os.fsencode(value) if value is not None else None),
            ctypes.c_int(0),
        )
    )
    if result < 0:
        code = ctypes.get_errno()
        raise failure(f"fsconfig {key or 'create'}", code, _messages(fs))


def _messages(fs: int) -> str:
    # The descriptor hands out the reasons the kernel would otherwise only log, one per read.
    lines = []
    os.set_blocking(fs, False)
    for _ in range(8):
        try:
            line = os.read(fs, 1024)
        except OSError:
            break
        if not line:
            break
        lines.append(line.decode(errors="replace").strip().removeprefix("e ").removeprefix("w "))
    return "; ".join(lines)

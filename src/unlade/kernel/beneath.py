"""Opening names that somebody else chose, beneath a directory descriptor and nowhere else.

`open_beneath` is openat2(2) with RESOLVE_BENEATH and friends; where the call is missing (Linux before 5.6,
macOS, a seccomp filter) a walk opens one component at a time with O_NOFOLLOW and resolves links itself,
holding a descriptor for every level so that `..` never asks the kernel where the parent is. Both give the
same errors: ELOOP for a link that may not be followed, EXDEV for a name that would leave the directory.
There is no third way: no realpath, no comparison of path prefixes.

`forced_walk` makes the whole process use the walk, for tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
from collections.abc import Iterator
from typing import Final, Literal

from unlade.kernel import libc

Links = Literal["refuse", "beneath", "in-root"]
"""What a symbolic link on the way does: an error; followed while it stays beneath; or resolved as if the
directory were the root of the file system, `/` and `..` included."""

_RESOLVE: Final[dict[Links, int]] = {
    "refuse": 0x08 | 0x04,  # RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS (which implies NO_MAGICLINKS)
    "beneath": 0x08 | 0x02,  # RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS
    "in-root": 0x10 | 0x02,  # RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS
}

# What the kernel itself allows in one lookup (MAXSYMLINKS).
_MAX_LINKS: Final = 40

# O_PATH needs no permission on the directory itself; elsewhere reading it is the nearest thing.
_STEP: Final = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class _Choice:
    walk: bool = False


_choice: Final = _Choice()


@functools.cache
def has_openat2() -> bool:
    """Whether this kernel answers openat2(2)."""
    if not libc.supported:
        return False
    try:
        os.close(_openat2(_at_cwd(), b".", _how(_STEP, 0, _RESOLVE["beneath"])))
    except OSError as error:
        # EPERM: filters written before 2020 answer so for calls they do not know.
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return False
        raise
    return True


@contextlib.contextmanager
def forced_walk() -> Iterator[None]:
    """Walk component by component even where openat2(2) exists (every thread: a test's switch)."""
    before = _choice.walk
    _choice.walk = True
    try:
        yield
    finally:
        _choice.walk = before


def open_beneath(
    dirfd: int, unsafe_path: bytes, flags: int, mode: int = 0, *, links: Links = "refuse"
) -> int:
    """Open a name beneath `dirfd`; the caller closes the descriptor, which is close-on-exec.

    Raises OSError: ELOOP for a link not to be followed, EXDEV for a way out, EINVAL for a NUL.
    """
    if b"\0" in unsafe_path:
        raise OSError(errno.EINVAL, "NUL in a file name")
    flags |= os.O_CLOEXEC
    if _choice.walk or not has_openat2():
        return _walk(dirfd, unsafe_path, flags, mode, links)
    if not flags & os.O_CREAT:
        mode = 0  # openat2 refuses a mode without O_CREAT
    how = _how(flags, mode, _RESOLVE[links])
    for _ in range(100):
        try:
            return _openat2(dirfd, unsafe_path or b".", how)
        except OSError as error:
            # A rename elsewhere on the system during the lookup: the kernel asks us to try again.
            if error.errno != errno.EAGAIN:
                raise
    return _walk(dirfd, unsafe_path, flags, mode, links)


def _at_cwd() -> int:
    return -100


@functools.lru_cache(maxsize=64)
def _how(flags: int, mode: int, resolve: int) -> _OpenHow:
    return _OpenHow(flags, mode, resolve)


def _openat2(dirfd: int, path: bytes, how: _OpenHow) -> int:
    return libc.syscall(
        libc.OPENAT2, ctypes.c_int(dirfd), ctypes.c_char_p(path), ctypes.byref(how), ctypes.c_size_t(24)
    )


def _walk(dirfd: int, path: bytes, flags: int, mode: int, links: Links) -> int:
    if path.startswith(b"/") and links != "in-root":
        raise OSError(errno.EXDEV, "an absolute name beneath a directory")
    todo = [part for part in reversed(path.split(b"/")) if part not in (b"", b".")]
    wants_directory = path.endswith((b"/", b"/.")) or bool(flags & os.O_DIRECTORY)
    held: list[int] = []  # one descriptor per level below dirfd
    followed = 0
    try:
        while todo:
            part = todo.pop()
            here = held[-1] if held else dirfd
            if part == b"..":
                if held:
                    os.close(held.pop())
                elif links != "in-root":
                    raise OSError(errno.EXDEV, "`..` above the directory")
                continue
            last = not todo
            target = _link_target(here, part)
            if target is None:
                if last:
                    extra = os.O_DIRECTORY if wants_directory and not flags & os.O_CREAT else 0
                    return os.open(part, flags | os.O_NOFOLLOW | extra, mode, dir_fd=here)
                held.append(os.open(part, _STEP, dir_fd=here))
                continue
            if last and flags & os.O_CREAT and flags & os.O_EXCL:
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
            if last and flags & os.O_NOFOLLOW and not wants_directory:
                # O_PATH | O_NOFOLLOW opens the link itself, which only "refuse" forbids, as the kernel does.
                if links != "refuse" and flags & getattr(os, "O_PATH", 0):
                    return os.open(part, flags, dir_fd=here)
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            followed += 1
            if links == "refuse" or followed > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if target.startswith(b"/"):
                if links != "in-root":
                    raise OSError(errno.EXDEV, "a link to an absolute name")
                while held:
                    os.close(held.pop())
            todo.extend(p for p in reversed(target.split(b"/")) if p not in (b"", b"."))
            wants_directory = wants_directory or target.endswith(b"/")
        # The name was the directory itself, or ended at a level that is already held.
        return os.open(
            b".", flags & ~(os.O_CREAT | os.O_EXCL) | os.O_DIRECTORY, dir_fd=held[-1] if held else dirfd
        )
    finally:
        for fd in held:
            os.close(fd)


def _link_target(dirfd: int, name: bytes) -> bytes | None:
    """Where a link points, or None when `name` is something else or nothing at all."""
    try:
        return os.readlink(name, dir_fd=dirfd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise

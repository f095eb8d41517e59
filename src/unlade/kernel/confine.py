"""Giving up, for good, what a process that parses hostile bytes does not need.

The unpack worker calls these before it reads its first byte: no new privileges, no network, no file
beyond one directory (landlock(7)), few capabilities, and limits on memory, files and cores. Each is
best effort and says whether it took: an older kernel or a container's filter may refuse one of them, and
the others still hold. None can be undone. Linux only; elsewhere only the resource limits apply.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys
from typing import Final

from unlade.kernel import libc

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38

_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_CLONE_NEWIPC: Final = 0x08000000

_LANDLOCK_CREATE_RULESET_VERSION: Final = 1
_LANDLOCK_RULE_PATH_BENEATH: Final = 1

# landlock(7): rights known to each ABI. What is handled is denied unless a rule allows it.
_FS_RIGHTS_BY_ABI: Final = {2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_FS_EXECUTE: Final = 1 << 0
_FS_IOCTL_DEV: Final = 1 << 15
_NET_TCP: Final = 0b11  # bind and connect, since ABI 4
_SCOPES: Final = 0b11  # abstract sockets and signals, since ABI 6

CAP_CHOWN: Final = 0
CAP_DAC_OVERRIDE: Final = 1
CAP_DAC_READ_SEARCH: Final = 2
CAP_FOWNER: Final = 3
CAP_FSETID: Final = 4
CAP_SYS_ADMIN: Final = 21  # trusted.* extended attributes
CAP_MKNOD: Final = 27
CAP_SETFCAP: Final = 31  # security.capability

_LINUX_CAPABILITY_VERSION_3: Final = 0x20080522


def no_new_privileges() -> bool:
    """No setuid program or file capability gives anything from here on."""
    if not libc.supported:
        return False
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent(signal: int) -> bool:
    """Have the kernel send this signal when the parent ends, so that no worker outlives its owner."""
    return libc.supported and _prctl(_PR_SET_PDEATHSIG, signal)


def no_network() -> bool:
    """Move to an empty network namespace (a user namespace of its own when that is needed for it)."""
    if not libc.supported:
        return False
    uid, gid = os.geteuid(), os.getegid()
    try:
        libc.checked(libc.library.unshare(ctypes.c_int(_CLONE_NEWNET | _CLONE_NEWIPC)))
    except OSError as error:
        if error.errno != errno.EPERM:
            return False
    else:
        return True
    try:
        libc.checked(libc.library.unshare(ctypes.c_int(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC)))
        # Stay who we are, in name too: files are still created as this user.
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as mapping:
                mapping.write(line)
    except OSError:
        return False
    return True


def root_at(dirfd: int) -> bool:
    """Make a directory the root: no name of the host exists any more, its Unix sockets included."""
    try:
        os.fchdir(dirfd)
        os.chroot(".")
    except OSError:
        return False
    return True


def only_beneath(dirfd: int) -> int:
    """Allow file system access beneath `dirfd` only, and no TCP; returns the landlock ABI used, 0 for none.

    Descriptors that are already open keep working. Nothing may be executed, not even beneath.
    """
    if not libc.supported:
        return 0
    try:
        abi = libc.syscall(
            libc.LANDLOCK_CREATE_RULESET,
            ctypes.c_void_p(None),
            ctypes.c_size_t(0),
            ctypes.c_uint(_LANDLOCK_CREATE_RULESET_VERSION),
        )
    except OSError:
        return 0
    if abi < 2:
        return 0  # the first version forbids hard links between directories, and cannot be told otherwise
    rights = _FS_RIGHTS_BY_ABI[max(known for known in _FS_RIGHTS_BY_ABI if known <= abi)]
    attributes = struct.pack("=QQQ", rights, _NET_TCP if abi >= 4 else 0, _SCOPES if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = libc.syscall(
        libc.LANDLOCK_CREATE_RULESET,
        ctypes.c_char_p(attributes[:size]),
        ctypes.c_size_t(size),
        ctypes.c_uint(0),
    )
    try:
        rule = struct.pack("=Qi", rights & ~(_FS_EXECUTE | _FS_IOCTL_DEV), dirfd)
        libc.syscall(
            libc.LANDLOCK_ADD_RULE,
            ctypes.c_int(ruleset),
            ctypes.c_int(_LANDLOCK_RULE_PATH_BENEATH),
            ctypes.c_char_p(rule),
            ctypes.c_uint(0),
        )
        libc.syscall(libc.LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)
    return int(abi)


def keep_capabilities(wanted: frozenset[int]) -> bool:
    """Drop every capability that is not wanted from all sets; what was absent stays absent."""
    if not libc.supported:
        return False
    header = struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    try:
        libc.checked(libc.library.capget(ctypes.c_char_p(header), data))
        effective, permitted, _, effective_high, permitted_high, _ = struct.unpack("=6I", data.raw)
        mask = sum(1 << capability for capability in wanted)
        low, high = mask & 0xFFFFFFFF, mask >> 32
        sets = struct.pack(
            "=6I", effective & low, permitted & low, 0, effective_high & high, permitted_high & high, 0
        )
        libc.checked(libc.library.capset(ctypes.c_char_p(header), ctypes.c_char_p(sets)))
    except OSError:
        return False
    return True


def limit(*, memory: int, file_size: int, descriptors: int) -> None:
    """Set resource limits: memory beyond what is in use now, one file's size, open files; no core dumps."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, file_size)
    _lower(resource.RLIMIT_NOFILE, descriptors)
    if sys.platform == "linux":
        # RLIMIT_DATA counts private writable memory, which is what a bomb makes us allocate; RLIMIT_AS
        # would also count the address space that thread stacks and malloc merely reserve.
        _lower(resource.RLIMIT_DATA, _data_in_use() + memory)


def _lower(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(which, (value, value))


def _data_in_use() -> int:
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"VmData:"):
                return int(line.split()[1]) * 1024
    return 0


def _prctl(option: int, argument: int) -> bool:
    # prctl(2) is variadic: every argument must be a long, or the upper halves are whatever was there.
    zero = ctypes.c_ulong(0)
    return int(libc.library.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero)) == 0

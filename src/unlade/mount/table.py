"""The mount table: what is mounted where, read from /proc/self/mountinfo (proc(5)).

Paths there are escaped as octal; they are kept as bytes, because a mount point need not be text.
Reading costs one pass over the table: linear in the number of mounts of this namespace.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Final

_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountPoint:
    """One line of the table."""

    mount_id: int
    path: bytes
    root: bytes
    options: frozenset[str]
    file_system: str
    source: bytes
    super_options: str


def read_table() -> list[MountPoint]:
    """Every mount of this process's namespace, in order; empty where there is no such table."""
    if sys.platform != "linux":
        return []
    with open("/proc/self/mountinfo", "rb") as table:
        return [parse_line(line) for line in table]


def parse_line(line: bytes) -> MountPoint:
    """One line of mountinfo."""
    fields = line.split()
    # A variable number of optional fields ends with a lone hyphen.
    dash = fields.index(b"-", 6)
    return MountPoint(
        mount_id=int(fields[0]),
        root=_unescape(fields[3]),
        path=_unescape(fields[4]),
        options=frozenset(fields[5].decode().split(",")),
        file_system=fields[dash + 1].decode(),
        source=_unescape(fields[dash + 2]),
        super_options=fields[dash + 3].decode(errors="surrogateescape") if len(fields) > dash + 3 else "",
    )


def find(path: bytes) -> MountPoint | None:
    """The topmost mount exactly at this path."""
    found = [entry for entry in read_table() if entry.path == path]
    return found[-1] if found else None


def is_mount_point(path: str) -> bool:
    """Whether something is mounted exactly here; a missing path, or a link, is none.

    Asked of two descriptors, so the size of the table is no matter.
    """
    try:
        here = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        above = os.open(os.path.dirname(os.path.abspath(path)), os.O_PATH | os.O_CLOEXEC)
        try:
            return _mount_id(here) != _mount_id(above)
        finally:
            os.close(above)
    finally:
        os.close(here)


def _mount_id(descriptor: int) -> int:
    with open(f"/proc/self/fdinfo/{descriptor}", "rb") as info:
        return next(int(line[7:]) for line in info if line.startswith(b"mnt_id:"))


def _unescape(field: bytes) -> bytes:
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field)

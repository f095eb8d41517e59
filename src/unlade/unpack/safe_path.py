"""The one grammar for names that people put on files: titles, file paths, prefixes.

A safe path is relative, has no empty part, no `.` or `..`, no NUL, and fits PATH_MAX and NAME_MAX. It is
checked before any use (formats, "Rules that decide", 4); archives' own names are a wider language that
`unpack.names` reads. Passing this check says nothing about links that stand on the way: opening beneath
a descriptor does.
"""

from __future__ import annotations

import os
from typing import Final

from unlade.unpack.refusals import UnsafeName, show

_MAX_PATH: Final = 4095  # PATH_MAX counts the NUL
_MAX_PART: Final = 255  # NAME_MAX of every file system we meet
_MAX_DEPTH: Final = 128  # as Limits.max_depth


def check(unsafe: bytes | str) -> tuple[bytes, ...]:
    """The parts of a safe relative path; raises UnsafeName."""
    if isinstance(unsafe, str):
        try:
            unsafe = unsafe.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            raise UnsafeName(f"the name {unsafe[:200]!a} is not valid Unicode") from None
    parts = tuple(unsafe.split(b"/"))
    problem = ""
    if not unsafe:
        problem = "is empty"
    elif b"\0" in unsafe:
        problem = "contains NUL"
    elif unsafe.startswith(b"/"):
        problem = "is absolute"
    elif b".." in parts:
        problem = "contains '..'"
    elif b"" in parts or b"." in parts:
        problem = "has an empty or '.' part"
    elif len(unsafe) > _MAX_PATH or len(max(parts, key=len)) > _MAX_PART or len(parts) > _MAX_DEPTH:
        problem = "is too long"
    if problem:
        raise UnsafeName(
            f"the name {show(unsafe)} {problem}",
            next_step="the publisher must give a plain relative path",
        )
    return parts


def check_text(unsafe: str) -> str:
    """As `check`, for callers that keep text: the same path back; raises UnsafeName."""
    return os.fsdecode(b"/".join(check(unsafe)))

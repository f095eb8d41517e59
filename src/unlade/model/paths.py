"""The one grammar for names that become paths beneath a directory: titles, filepaths, prefixes.

A title or filepath comes from whoever pushed the artifact. It is accepted only when it names something
strictly beneath the directory it will be written into, in one spelling: relative, no `..` or `.`, no empty
part, no NUL, valid Unicode, and short enough for the kernel. Everything else is refused, not repaired: a
repaired name is a second name for the same file, and two names for one file is how checks are bypassed.
This is a check of the text alone; links on the way are the business of descriptor-based opening.
"""

from __future__ import annotations

from typing import Final

from unlade.errors import InvalidInput

# Linux's NAME_MAX and PATH_MAX (less the terminating NUL): a longer name cannot be created anyway, and
# refusing it here leaves nothing half-made.
MAX_PART_BYTES: Final = 255
MAX_PATH_BYTES: Final = 4095
# What unpacking allows too: removing a tree takes one descriptor per level.
MAX_DEPTH: Final = 128


class UnsafeTitle(InvalidInput):
    """A title or filepath that is not a plain relative path; the whole artifact is refused."""

    code = "unsafe-title"


def check_relative(unsafe: str) -> str:
    """The path itself when it is relative and canonical; raises UnsafeTitle otherwise."""
    try:
        problem = relative_problem(unsafe.encode("utf-8"))
    except UnicodeEncodeError:
        problem = "is not valid Unicode"
    if problem:
        shown = unsafe if len(unsafe) <= 140 else unsafe[:140] + "…"
        raise UnsafeTitle(
            f"the path {shown!a} {problem}",
            next_step="ask the publisher to push it again with relative titles, without '.' and '..' parts",
        )
    return unsafe


def relative_problem(unsafe: bytes) -> str | None:
    """Why these bytes are no plain relative path, as the end of a sentence; None when they are one."""
    if b"\0" in unsafe:
        return "contains a NUL"
    if len(unsafe) > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES} bytes"
    if unsafe.startswith(b"/"):
        return "is absolute"
    if unsafe.count(b"/") >= MAX_DEPTH:
        return f"is more than {MAX_DEPTH} parts deep"
    for part in unsafe.split(b"/"):
        if not part:
            return "has an empty part"
        if part in (b".", b".."):
            return f"has a part {part.decode()!r}"
        if len(part) > MAX_PART_BYTES:
            return f"has a part longer than {MAX_PART_BYTES} bytes"
    return None

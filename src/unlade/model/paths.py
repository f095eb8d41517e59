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


class UnsafeTitle(InvalidInput):
    """A title or filepath that is not a plain relative path; the whole artifact is refused."""

    code = "unsafe-title"


def check_relative(unsafe: str) -> str:
    """The path itself when it is relative and canonical; raises UnsafeTitle otherwise."""
    if problem := _problem(unsafe):
        shown = unsafe if len(unsafe) <= 140 else unsafe[:140] + "…"
        raise UnsafeTitle(
            f"the path {shown!a} {problem}",
            next_step="ask the publisher to push it again with relative titles, without '.' and '..' parts",
        )
    return unsafe


def _problem(unsafe: str) -> str | None:
    try:
        encoded = unsafe.encode("utf-8")
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if b"\0" in encoded:
        return "contains a NUL"
    if len(encoded) > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES} bytes"
    if encoded.startswith(b"/"):
        return "is absolute"
    for part in encoded.split(b"/"):
        if not part:
            return "has an empty part"
        if part in (b".", b".."):
            return f"has a part {part.decode()!r}"
        if len(part) > MAX_PART_BYTES:
            return f"has a part longer than {MAX_PART_BYTES} bytes"
    return None

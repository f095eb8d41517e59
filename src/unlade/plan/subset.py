"""Subsets: which paths of a plan are wanted (`--only`, and the part of V10 that saves fetching).

A pattern is matched against the whole path from the root: `*` and `?` stay within one part, `**` crosses
parts, `[…]` is a class. A pattern that matches a directory takes everything below it. Files that are not
wanted are skipped, not fetched; archives are fetched whole and filtered while they are unpacked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from unlade.errors import InvalidInput

# Long enough for any path; bounds the expression built from it.
_MAX_PATTERN: Final = 1024
_SPECIAL: Final = re.compile(r"([*?\[])")


class InvalidPattern(InvalidInput):
    """A glob that cannot be used."""

    code = "invalid-pattern"


def matches(patterns: Sequence[str], path: str) -> bool:
    """Whether a path is wanted; every path is when there are no patterns."""
    return not patterns or any(_compiled(pattern).fullmatch(path) for pattern in patterns)


def check(patterns: Sequence[str]) -> tuple[str, ...]:
    """The patterns themselves when all of them can be used; raises InvalidPattern."""
    for pattern in patterns:
        _compiled(pattern)
    return tuple(patterns)


def beneath(path: str) -> tuple[str, ...]:
    """Patterns for one path and everything below it, taken literally: what a subPath needs."""
    return (_SPECIAL.sub(r"[\1]", path),)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    trimmed = pattern.rstrip("/")
    if not trimmed or trimmed.startswith("/") or len(pattern) > _MAX_PATTERN or "\0" in pattern:
        raise InvalidPattern(
            f"{pattern[:140]!r} is not a pattern for paths in the content",
            next_step="write it relative to the content's root, such as 'weights/*.safetensors'",
        )
    # Whatever is below a match belongs to it.
    return re.compile(f"{_translate(trimmed)}(?:/.*)?", re.DOTALL)


def _translate(pattern: str) -> str:
    out, i = [], 0
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out.append("(?:[^/]+/)*")
            i += 3
        elif pattern.startswith("**", i):
            out.append(".*")
            i += 2
        elif pattern[i] == "*":
            out.append("[^/]*")
            i += 1
        elif pattern[i] == "?":
            out.append("[^/]")
            i += 1
        elif pattern[i] == "[" and (end := pattern.find("]", i + 2)) > 0:
            out.append(_character_class(pattern[i + 1 : end]))
            i = end + 1
        else:
            out.append(re.escape(pattern[i]))
            i += 1
    return "".join(out)


def _character_class(body: str) -> str:
    negated = body[0] in "!^"
    members = (body[1:] if negated else body).replace("\\", r"\\").replace("[", r"\[").replace("&", r"\&")
    members = members.replace("~", r"\~").replace("|", r"\|").replace("^", r"\^")
    # A class never matches a separator, or a pattern could leave its part.
    try:
        return re.compile(f"(?!/)[{'^' if negated else ''}{members}]").pattern
    except re.error as error:
        raise InvalidPattern(f"[{body[:64]}] is not a character class: {error}") from error

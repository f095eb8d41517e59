"""Subsets: which paths of a plan are wanted (`--only`, and the part of V10 that saves fetching).

A pattern is matched against the whole path from the root: `*` and `?` stay within one part, a part `**`
stands for any number of parts, `[…]` is a class. A pattern that matches a directory takes everything below
it. Files that are not wanted are skipped, not fetched; archives are fetched whole and filtered afterwards.
Matching is two pointers and a set, not regular expressions: patterns and paths both come from strangers,
and backtracking over them takes exponential time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from unlade.errors import InvalidInput

# PATH_MAX: a longer pattern matches nothing that can exist.
_MAX_PATTERN: Final = 4096
_ANY_PARTS: Final = "**"
# One character of a pattern: whether it is negated, and the ranges it names. `?` is "not nothing".
_Class = tuple[bool, tuple[tuple[str, str], ...]]


class InvalidPattern(InvalidInput):
    """A glob that cannot be used."""

    code = "invalid-pattern"


def matches(patterns: Sequence[str], path: str) -> bool:
    """Whether a path is wanted; every path is when there are no patterns."""
    if not patterns:
        return True
    parts = path.split("/")
    return any(_matches(_compiled(pattern), parts) for pattern in patterns)


def check(patterns: Sequence[str]) -> tuple[str, ...]:
    """The patterns themselves when all of them can be used; raises InvalidPattern."""
    for pattern in patterns:
        _compiled(pattern)
    return tuple(patterns)


def beneath(path: str) -> tuple[str, ...]:
    """Patterns for one path and everything below it, taken literally: what a subPath needs."""
    return ("".join(f"[{c}]" if c in "*?[" else c for c in path),)


class _Part:
    """One part of a pattern; a token of None is `*`."""

    def __init__(self, text: str) -> None:
        self.tokens: list[_Class | None] = []
        i = 0
        while i < len(text):
            end = text.find("]", i + 2) if text[i] == "[" else -1
            if text[i] == "*":
                self.tokens.append(None)
            elif text[i] == "?":
                self.tokens.append((True, ()))
            elif end > 0:
                self.tokens.append(_class(text[i + 1 : end]))
                i = end
            else:
                self.tokens.append((False, ((text[i], text[i]),)))
            i += 1

    def accepts(self, name: str) -> bool:
        """Greedy, with steps back to the last star only: at most the product of the lengths."""
        t = n = resume = 0
        star = -1
        while n < len(name):
            token = self.tokens[t] if t < len(self.tokens) else (False, ())
            if token is None:
                star, resume, t = t, n, t + 1
            elif token[0] != any(low <= name[n] <= high for low, high in token[1]):
                t, n = t + 1, n + 1
            elif star >= 0:
                resume += 1
                t, n = star + 1, resume
            else:
                return False
        return all(token is None for token in self.tokens[t:])


def _class(body: str) -> _Class:
    negated = body[0] in "!^" and len(body) > 1
    members = body[1:] if negated else body
    ranges: list[tuple[str, str]] = []
    i = 0
    while i < len(members):
        last = members[i + 2] if members[i + 1 : i + 2] == "-" and i + 2 < len(members) else members[i]
        if last < members[i]:
            raise InvalidPattern(
                f"[{body[:64]}] has a range that ends before it begins", next_step="write it as [a-z]"
            )
        ranges.append((members[i], last))
        i += 3 if last != members[i] or members[i + 1 : i + 3] == f"-{last}" else 1
    return negated, tuple(ranges)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> tuple[_Part | None, ...]:
    trimmed = pattern.rstrip("/")
    if not trimmed or trimmed.startswith("/") or len(pattern) > _MAX_PATTERN or "\0" in pattern:
        raise InvalidPattern(
            f"{pattern[:140]!r} is not a pattern for paths in the content",
            next_step="write it relative to the content's root, such as 'weights/*.safetensors'",
        )
    return tuple(None if part == _ANY_PARTS else _Part(part) for part in trimmed.split("/"))


def _matches(pattern: tuple[_Part | None, ...], parts: list[str]) -> bool:
    # How many parts of the path the pattern so far may have used up.
    used = {0}
    for index, part in enumerate(pattern):
        if part is None:
            # A last `**` is everything below, and so needs at least one part more.
            least = min(used) + (1 if index == len(pattern) - 1 else 0)
            used = set(range(least, len(parts) + 1))
        else:
            used = {count + 1 for count in used if count < len(parts) and part.accepts(parts[count])}
        if not used:
            return False
    # Whatever is below a match belongs to it.
    return True

"""WWW-Authenticate, parsed (RFC 9110 section 11.6.1; distribution's token authentication).

The header is hostile: the grammar is walked once, linearly, within caps, and what does not fit is dropped
rather than guessed at. Several challenges may stand in one header; the caller picks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec

# A scope with many repositories is a few KB at most.
_MAX_HEADER: Final = 16 << 10
_MAX_CHALLENGES: Final = 8
_MAX_PARAMETERS: Final = 32
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_BLANK: Final = re.compile(r"[ \t]*", re.ASCII)
_SEPARATOR: Final = re.compile(r"[ \t,]*", re.ASCII)
_QUOTED: Final = re.compile(r'"((?:[^"\\\x00-\x08\x0a-\x1f\x7f]|\\[\t !-~])*)"')
_TOKEN68: Final = re.compile(r"[A-Za-z0-9._~+/-]+=*(?=[ \t]*(?:,|$))", re.ASCII)


class Challenge(msgspec.Struct, frozen=True):
    """A scheme in lower case and its parameters, names in lower case."""

    scheme: str
    parameters: Mapping[str, str]


def parse_challenges(unsafe_header: str) -> list[Challenge]:
    """The challenges in a header; an empty list when it cannot be understood."""
    if len(unsafe_header) > _MAX_HEADER:
        return []
    found: list[Challenge] = []
    position = _skip(_SEPARATOR, unsafe_header, 0)
    while position < len(unsafe_header) and len(found) < _MAX_CHALLENGES:
        scheme = _TOKEN.match(unsafe_header, position)
        if scheme is None:
            return []
        position = _skip(_BLANK, unsafe_header, scheme.end())
        parameters: dict[str, str] = {}
        token68 = _TOKEN68.match(unsafe_header, position) if position > scheme.end() else None
        if token68 is not None:
            position = token68.end()
        else:
            parsed = _parameters(unsafe_header, position, parameters)
            if parsed is None:
                return []
            position = parsed
        found.append(Challenge(scheme[0].lower(), parameters))
        position = _skip(_SEPARATOR, unsafe_header, position)
    return found


def _parameters(text: str, position: int, into: dict[str, str]) -> int | None:
    """Read `name=value` pairs until the next scheme; the position after them, None for a syntax error."""
    while position < len(text):
        start = _skip(_SEPARATOR, text, position)
        name = _TOKEN.match(text, start)
        if name is None:
            return position if start >= len(text) else None
        equals = _skip(_BLANK, text, name.end())
        if not text.startswith("=", equals):
            # A token without `=` starts the next challenge.
            return start
        value_at = _skip(_BLANK, text, equals + 1)
        quoted = _QUOTED.match(text, value_at)
        plain = _TOKEN.match(text, value_at) if quoted is None else None
        if quoted is not None:
            value, position = re.sub(r"\\(.)", r"\1", quoted[1]), quoted.end()
        elif plain is not None:
            value, position = plain[0], plain.end()
        else:
            return None
        if len(into) >= _MAX_PARAMETERS:
            return None
        # The first wins: a second realm must not replace the one that a proxy or log has seen.
        into.setdefault(name[0].lower(), value)
        position = _skip(_BLANK, text, position)
        if position < len(text) and text[position] != ",":
            return None
    return position


def _skip(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position

"""What a YAML scalar's text means, and how to write a value in a given style.

Decoding is exact for single-line scalars; folding over several lines is delegated to ruamel.yaml, whose
scanner is the reference we trust. Encoding keeps the style it is asked for whenever the value can be
written in it. The YAML 1.1 words (y, n, yes, on, ...) are quoted when written plain, as kpt does, because
the API server's reader still takes them for booleans.
"""

import re
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_NUMBER = re.compile(
    r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|(?:\d[\d_]*)(?:\.[\d_]*)?(?:[eE][-+]?\d+)?"
    r"|\.\d[\d_]*(?:[eE][-+]?\d+)?|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)"
)
_BOOLS = frozenset({"true", "True", "TRUE", "false", "False", "FALSE"})
# YAML 1.1 booleans that YAML 1.2 reads as text.
_OLD_BOOLS = frozenset(
    word for base in ("y", "n", "yes", "no", "on", "off") for word in (base, base.capitalize(), base.upper())
)
_TIMESTAMP = re.compile(r"\d{4}-\d{1,2}-\d{1,2}(?:[Tt ].*)?")
_PLAIN_START = re.compile(r"[^\s\-?:,\[\]{}#&*!|>'\"%@`]|[-?:](?=[^\s,\[\]{}])")
_ESCAPES = {
    "0": "\0", "a": "\a", "b": "\b", "t": "\t", "\t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r",
    "e": "\x1b", " ": " ", '"': '"', "/": "/", "\\": "\\", "N": "\x85", "_": "\xa0", "L": "\u2028",
    "P": "\u2029",
}  # fmt: skip
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")


def is_null_text(text: str) -> bool:
    """Whether a plain scalar with this text is null."""
    return text in _NULLS


def resolves_to_string(text: str) -> bool:
    """Whether a plain scalar with this text is a string for every reader, old and new."""
    return not (
        text in _NULLS
        or text in _BOOLS
        or text in _OLD_BOOLS
        or _NUMBER.fullmatch(text)
        or _TIMESTAMP.fullmatch(text)
    )


def decode_double(body: str) -> str:
    """The value of a single-line double-quoted scalar, quotes removed; ValueError on an unknown escape."""
    if "\\" not in body:
        return body

    def one(match: re.Match[str]) -> str:
        code = match.group(1) or match.group(2) or match.group(3)
        if code:
            return chr(int(code, 16))
        if match.group(4) not in _ESCAPES:
            raise ValueError(f"unknown escape \\{match.group(4)}")
        return _ESCAPES[match.group(4)]

    return _ESCAPE.sub(one, body)


def decode_with_ruamel(text: str) -> str:
    """The value of any scalar, folding included; ValueError when it is not one scalar."""
    yaml = YAML(typ="safe", pure=True)
    try:
        node = cast("Any", yaml.compose(text + "\n" if not text.endswith("\n") else text))
    except YAMLError as error:
        raise ValueError(str(error)) from error
    if node is None:
        return ""
    if not isinstance(node.value, str):
        raise ValueError("not a scalar")
    return node.value


def can_be_plain(value: str) -> bool:
    """Whether the text can stand unquoted in a block mapping and still read as the same text."""
    return bool(
        value
        and _PLAIN_START.match(value)
        and value == value.strip()
        and ": " not in value
        and " #" not in value
        and not value.endswith(":")
        and value.isprintable()
        and not value.startswith(("---", "..."))
    )


def _double(value: str) -> str:
    out = []
    for char in value:
        if char in '"\\':
            out.append("\\" + char)
        elif char == "\n":
            out.append("\\n")
        elif char == "\t":
            out.append("\\t")
        elif char.isprintable():
            out.append(char)
        elif ord(char) <= 0xFF:
            out.append(f"\\x{ord(char):02x}")
        elif ord(char) <= 0xFFFF:
            out.append(f"\\u{ord(char):04x}")
        else:
            out.append(f"\\U{ord(char):08x}")
    return '"' + "".join(out) + '"'


def _literal(value: str, indent: int) -> str | None:
    """A literal block for the value, or None where only quotes can hold it."""
    body = value.rstrip("\n")
    lines = body.split("\n")
    if not body or not all(
        line == "" or (line.strip() and line.replace("\t", " ").isprintable()) for line in lines
    ):
        return None
    trailing = len(value) - len(body)
    chomp = "-" if trailing == 0 else "" if trailing == 1 else "+"
    # An indentation indicator is needed when the first line starts with a space.
    hint = "2" if body.startswith((" ", "\n")) else ""
    lines = [" " * indent + line if line else "" for line in lines]
    lines += [""] * (trailing - 1 if trailing > 1 else 0)
    return "|" + hint + chomp + "\n" + "\n".join(lines) + "\n"


def render_scalar(value: str, style: str, *, text: bool, parent_indent: int) -> str:
    """The scalar's source in the asked style ('', ', ", | or >), or the nearest style that can hold it.

    text: the value is known to be a string, so it is quoted where a plain form would read otherwise.
    A block scalar ends with its newline; every other form has none.
    """
    if style in ("|", ">") or (style == "" and "\n" in value):
        block = _literal(value, parent_indent + 2)
        return block if block is not None else _double(value)
    if style == "'" and "\n" not in value and value.isprintable():
        return "'" + value.replace("'", "''") + "'"
    if style in ("'", '"'):
        return _double(value)
    if (text and not resolves_to_string(value)) or not can_be_plain(value):
        return _double(value)
    return value

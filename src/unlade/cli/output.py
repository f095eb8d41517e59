"""Results on stdout: one value, three formats.

Every command builds plain data (dicts, lists, strings, numbers) and hands it here with its table; JSON
and YAML show the data whole, the table what a person wants first. Names from archives and registries are
hostile text: no control character reaches a terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def emit(data: Any, output: str, columns: Sequence[str] = (), rows: Sequence[Sequence[object]] = ()) -> None:
    """Print data as JSON or YAML, or the rows as a table."""
    if output == "json":
        print(json.dumps(data, indent=2, ensure_ascii=True))
    elif output == "yaml":
        from ruamel.yaml import YAML

        yaml = YAML(typ="safe")
        yaml.default_flow_style = False
        yaml.allow_unicode = False
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # keep the order of the data
        yaml.width = 4096
        yaml.dump(data, sys.stdout)
    else:
        print_table(columns, rows)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns, two spaces apart; the last column is never padded."""
    cells = [list(columns), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    for row in cells:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


def printable(text: str) -> str:
    """Text safe for a terminal: control characters and undecodable bytes escaped, never interpreted."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8 (surrogateescape)
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode("ascii")


def count(number: int, one: str, many: str) -> str:
    """A number of things, in the right form."""
    return f"{number} {one if number == 1 else many}"


def human(size: int | None) -> str:
    """A size as people read it; `?` where nobody knows it yet."""
    if size is None:
        return "?"
    value = float(size)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable: the last unit always returns")

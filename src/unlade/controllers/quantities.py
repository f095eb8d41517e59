"""Kubernetes quantities as bytes, and back: `1Gi`, `1.5Gi`, `1e9`, `500M`, `1000000m`.

Spec: the API reference, "Quantity". Sizes of claims and volumes are the only use; fractions round up.
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal
from typing import Final

from unlade.errors import InvalidInput

_FORM: Final = re.compile(r"([+-]?[0-9]*\.?[0-9]*)([eE][+-]?[0-9]{1,3}|[numkKMGTPE]?i?)")
_BINARY: Final = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60}
_DECIMAL: Final = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
}


def parse(text: str) -> int:
    """A quantity in whole bytes, rounded up; raises InvalidInput."""
    match = _FORM.fullmatch(text)
    if match is None or not any(char.isdigit() for char in match[1]):
        raise InvalidInput(f"{text[:40]!r} is not a quantity", next_step="write for example 10Gi")
    number, suffix = Decimal(match[1]), match[2]
    if suffix[:1] in ("e", "E") and len(suffix) > 1 and suffix != "Ei":
        factor = Decimal(10) ** int(suffix[1:])
    elif suffix in _BINARY:
        factor = Decimal(_BINARY[suffix])
    elif suffix in _DECIMAL:
        factor = _DECIMAL[suffix]
    else:
        raise InvalidInput(f"{text[:40]!r} is not a quantity", next_step="write for example 10Gi")
    return int((number * factor).to_integral_value(ROUND_CEILING))


def write(size: int) -> str:
    """Bytes as the shortest exact binary quantity."""
    for suffix, factor in reversed(_BINARY.items()):
        if size and size % factor == 0:
            return f"{size // factor}{suffix}"
    return str(size)

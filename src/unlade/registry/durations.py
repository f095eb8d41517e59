"""Durations as Go programs write them: "1m30.5s", "12h", "0"; hosts.toml and the kubelet use them."""

from __future__ import annotations

import re
from typing import Final

_WHOLE: Final = re.compile(r"(?:\d{1,12}(?:\.\d{1,12})?(?:ns|us|µs|ms|s|m|h))+|0", re.ASCII)
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)", re.ASCII)
_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float | None:
    """Seconds; None when it is not a duration."""
    if len(text) > 100 or not _WHOLE.fullmatch(text):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))

"""Figures that tests measure, kept for the docs: one JSON line each in the file that UNLADE_FIGURES names.

`make full` sets it; without it a figure is only asserted, not kept.
"""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime


def figure(name: str, *facts: object) -> None:
    """Keep one measurement: its name, and alternating values and units."""
    path = os.environ.get("UNLADE_FIGURES")
    if path:
        line = {"date": datetime.now(UTC).date().isoformat(), "name": name, "facts": list(facts)}
        with open(path, "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")


def peak_memory() -> int:
    """The most memory this process has held since it was started, in bytes.

    Not `ru_maxrss`: a process inherits that from the one that started it, here a large pytest.
    """
    with open("/proc/self/status", encoding="ascii") as status:
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read())
    assert found is not None
    return int(found[1]) * 1024

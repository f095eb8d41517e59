"""Bombs: peak memory under 256 MB and bounded time for every one of them, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.bombs import BOMBS

MEMORY = 256 << 20
# Generous for a loaded machine of two cores; unbounded work would take hours.
SECONDS = 300
SLOW = {"a million entries"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BOMBS]
)
def test_bomb(name: str, tmp_path: Path) -> None:
    if name in SLOW and not os.environ.get("UNLADE_FULL"):
        pytest.skip("in the full run only")
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.bombs", name, str(tmp_path)],
        capture_output=True,
        check=False,
        timeout=SECONDS,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr.decode()
    result = json.loads(done.stdout)
    assert result["code"] == BOMBS[name][2]
    assert result["peak"] < MEMORY

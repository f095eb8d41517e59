"""Failpoints: listed by the code, silent unless armed, deadly or failing when armed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from unlade.kernel import failpoints

PROGRAM = """
from unlade.kernel import failpoints
for _ in range(3):
    failpoints.reach("a.point")
    print("alive", flush=True)
"""


def run(value: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != failpoints.VARIABLE}
    if value is not None:
        environment[failpoints.VARIABLE] = value
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("value", "turns"), [("a.point", 0), ("a.point:1", 0), ("a.point:3", 2)])
def test_an_armed_point_kills(value: str, turns: int) -> None:
    done = run(value)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "alive\n" * turns


@pytest.mark.parametrize("value", [None, "", "another.point", "a.point:9"])
def test_others_do_not(value: str | None) -> None:
    done = run(value)
    assert (done.returncode, done.stdout) == (0, "alive\n" * 3)


def test_an_armed_point_fails() -> None:
    done = run("a.point:2=ENOSPC")
    assert done.returncode == 1
    assert done.stdout == "alive\n"
    assert "No space left on device" in done.stderr


def test_the_code_lists_them() -> None:
    names = failpoints.names()
    assert len(names) == len(set(names))
    assert {"store.ingest.synced", "store.gc.forgotten", "tree.commit.renamed"} <= set(names)
    assert all(name.count(".") >= 2 for name in names)

"""kill -9 at the durable steps of writable volumes over content in containerd.

The scenario and the promise are those of `tests/unit/csi/writable/test_crash.py`. CI takes a few points by
seed, UNLADE_FULL=1 all. After every second kill the machine restarts, too.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from tests.rig.containerd.daemon import Daemon
from tests.unit.csi.writable.conftest import fake
from tests.unit.csi.writable.test_crash import _unmounted, reboot, run, sound, traced

pytestmark = [pytest.mark.root, pytest.mark.slow]
__all__ = ["_unmounted", "fake"]

FULL = os.environ.get("UNLADE_FULL") == "1"
PARTS = range(8 if FULL else 1)
SAMPLE = 3


@pytest.mark.parametrize("part", PARTS)
def test_killed_anywhere_nothing_leaks_and_nothing_is_lost(
    daemon: Daemon, fake: FakeRegistry, tmp_path: Path, part: int
) -> None:
    def fresh() -> str:
        return f"{daemon.address},crash-{secrets.token_hex(4)}"

    points = traced(tmp_path / "traced", fake.host, f"containerd={fresh()}")
    chosen = points[part :: len(PARTS)]
    if not FULL:
        ours = [point for point in points if point.startswith(("csi.writable.", "volume.lease."))]
        chosen = random.Random(15).sample(ours, SAMPLE)
    for number, point in enumerate(chosen):
        base, contained = tmp_path / str(number), fresh()
        killed = run(base, fake.host, f"containerd={contained}", point=point)
        assert killed.returncode == -signal.SIGKILL, f"{point}: {killed.stderr}"
        if number % 2:
            reboot(base)
        again = run(base, fake.host, f"containerd={contained}")
        assert again.returncode == 0, f"retry after {point}: {again.stderr}"
        if "wrote" in killed.stdout:
            assert "wrote" not in again.stdout, f"what the pod wrote was lost by a kill at {point}"
        sound(base, fake.host, point, contained)

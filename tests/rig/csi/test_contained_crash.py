"""kill -9 at every durable step of volumes whose content is in containerd, its own steps among them.

The scenario and the promise are those of `tests/unit/csi/test_crash.py`. CI takes a few points by seed,
UNLADE_FULL=1 all. After every second kill the machine restarts, too; after every third, containerd.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
from pathlib import Path

import pytest

from tests.fakes.driver import contained_trees
from tests.fakes.registry import FakeRegistry
from tests.rig.containerd.daemon import Daemon
from tests.unit.csi.conftest import Put, fake, put
from tests.unit.csi.crash_scenario import in_containerd, publish, target_of, volumes
from tests.unit.csi.test_crash import _unmounted, reboot, run, traced
from unlade.containerd import ContainerdTrees, leases
from unlade.containerd.images import ImageRecords
from unlade.mount import is_mount_point, read_table

pytestmark = [pytest.mark.root, pytest.mark.slow]
__all__ = ["_unmounted", "fake", "put"]

FULL = os.environ.get("UNLADE_FULL") == "1"
PARTS = range(8 if FULL else 1)
SAMPLE = 4


def _fresh(daemon: Daemon) -> str:
    return f"{daemon.address},crash-{secrets.token_hex(4)}"


@pytest.mark.parametrize("part", PARTS)
def test_killed_anywhere_nothing_leaks_and_nothing_changes(
    daemon: Daemon, fake: FakeRegistry, put: Put, tmp_path: Path, part: int
) -> None:
    put("team/model", "v1", {"weights": b"one"})
    put("team/other", "v1", {"file": b"other"})
    points = traced(tmp_path / "traced", fake.host, f"containerd={_fresh(daemon)}")
    names = {point.partition(":")[0] for point in points}
    assert {"volume.lease.kept", "volume.lease.ended", "containerd.snapshot.committed"} <= names
    assert {"containerd.record.id", "csi.publish.held", "csi.unpublish.released"} <= names
    chosen = points[part :: len(PARTS)] if FULL else _sample(points)
    for number, point in enumerate(chosen):
        put("team/model", "v1", {"weights": b"one"})
        base, contained = tmp_path / str(number), _fresh(daemon)
        killed = run(base, fake.host, f"containerd={contained}", point=point)
        assert killed.returncode == -signal.SIGKILL, f"{point}: {killed.stderr}"
        put("team/model", "v1", {"weights": b"two"})
        if number % 2:
            reboot(base)
        if number % 3 == 2:
            daemon.restart(kill=True)
        again = run(base, fake.host, f"containerd={contained}")
        assert again.returncode == 0, f"retry after {point}: {again.stderr}"
        if "saw one" in killed.stdout:
            assert "saw one" in again.stdout, f"changed by a kill at {point}"
        _sound(base, fake.host, contained, point)


def _sample(points: list[str]) -> list[str]:
    ours = [point for point in points if point.startswith(("csi.", "containerd.", "volume."))]
    return random.Random(15).sample(ours, SAMPLE)


def _sound(base: Path, host: str, contained: str, point: str) -> None:
    """The live volume is whole and kept; then it goes, and nothing at all is left in containerd either."""
    settings = in_containerd(base, contained)
    with settings.connect() as containerd, volumes(base, host, contained) as (inline, store):
        records = ImageRecords(containerd)
        target = target_of(base, "live")
        seen = (target / "weights").read_bytes()
        for row in records.all():
            records.delete(row.name)
        leases.collect(containerd)
        assert publish(inline, base, "live", reference=f"{host}/team/model:v1", pullPolicy="Always") == target
        assert (target / "weights").read_bytes() == seen, point
        assert len(os.listdir(base / "csi" / "volumes")) == 1, f"left by {point}"
        inline.unpublish("csi-live", str(target))
        assert not is_mount_point(str(target)), point
        assert not target.exists(), point
        assert os.listdir(base / "csi" / "volumes") == [], f"left by {point}"
        assert leases.kept(containerd, "") == [], f"left by {point}"
        left = [entry.path for entry in read_table() if entry.path.startswith(os.fsencode(base) + b"/")]
        assert left == [], f"left by {point}"
        for row in records.all():
            records.delete(row.name)
        leases.collect(containerd)
        assert contained_trees(containerd, "overlayfs") == set(), f"left by {point}"
        assert ContainerdTrees(containerd).stagings() == [], f"left by {point}"
        assert os.listdir(store.layout.trees) == []

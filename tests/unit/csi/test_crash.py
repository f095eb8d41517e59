"""kill -9 at every durable step of publish and unpublish: calls are idempotent, nothing leaks, and a pod that
has seen its content never sees another, though its tag moves.

Every point of the traced scenario counts once per time it is reached, those of the store below included. CI
takes a few by seed; UNLADE_FULL=1 takes all. After every second kill the machine restarts, too.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from tests.unit.csi.conftest import Put
from tests.unit.csi.crash_scenario import publish, target_of, volumes
from unlade.kernel import failpoints
from unlade.mount import is_mount_point, read_table, unpublish
from unlade.store import collect, remove_image
from unlade.store.gc import garbage
from unlade.tree import fsck

pytestmark = [pytest.mark.root, pytest.mark.slow]

FULL = bool(os.environ.get("UNLADE_FULL"))
ROOT = Path(__file__).parents[3]
PARTS = range(8 if FULL else 1)
SAMPLE = 5


def run(base: Path, host: str, *options: str, point: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != failpoints.VARIABLE}
    environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'src'}"
    if point:
        environment[failpoints.VARIABLE] = point
    base.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "tests.unit.csi.crash_scenario", str(base), host, *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )


@pytest.fixture(autouse=True)
def _unmounted(tmp_path: Path) -> Iterator[None]:
    yield
    reboot(tmp_path)


def reboot(base: Path) -> None:
    """Every mount below gone; files stay."""
    for entry in reversed(read_table()):
        if entry.path.startswith(os.fsencode(base) + b"/"):
            unpublish(os.fsdecode(entry.path))


def traced(base: Path, host: str, *options: str) -> list[str]:
    """Every name:count that an undisturbed run passes."""
    ran = run(base, host, "trace", *options)
    assert ran.returncode == 0, ran.stderr
    seen: Counter[str] = Counter()
    found = []
    for name in ran.stdout.split():
        if "." in name:
            seen[name] += 1
            found.append(f"{name}:{seen[name]}")
    return found


@pytest.fixture
def points(fake: FakeRegistry, put: Put, tmp_path: Path) -> list[str]:
    """Every name:count of an undisturbed run."""
    put("team/model", "v1", {"weights": b"one"})
    put("team/other", "v1", {"file": b"other"})
    found = traced(tmp_path / "traced", fake.host)
    reached = {point.partition(":")[0] for point in found}
    ours = {name for name in failpoints.names() if name.startswith(("csi.", "mount."))}
    assert {name for name in ours if not name.startswith("csi.writable.")} <= reached
    assert len(found) >= 150
    return found


@pytest.mark.parametrize("part", PARTS)
def test_killed_anywhere_nothing_leaks_and_nothing_changes(
    fake: FakeRegistry, put: Put, points: list[str], tmp_path: Path, part: int
) -> None:
    chosen = points[part :: len(PARTS)] if FULL else _sample(points)
    for number, point in enumerate(chosen):
        put("team/model", "v1", {"weights": b"one"})
        base = tmp_path / str(number)
        killed = run(base, fake.host, point=point)
        assert killed.returncode == -signal.SIGKILL, f"{point}: {killed.stderr}"
        put("team/model", "v1", {"weights": b"two"})
        if number % 2:
            reboot(base)
        again = run(base, fake.host)
        assert again.returncode == 0, f"retry after {point}: {again.stderr}"
        if "saw one" in killed.stdout:
            assert "saw one" in again.stdout, f"changed by a kill at {point}"
        _sound(base, fake.host, point)


def _sample(points: list[str]) -> list[str]:
    ours = [point for point in points if point.startswith(("csi.", "mount."))]
    return random.Random(6).sample(ours, SAMPLE)


def _sound(base: Path, host: str, point: str) -> None:
    """The live volume is whole and kept; then it goes, and nothing at all is left."""
    with volumes(base, host) as (inline, store):
        target = target_of(base, "live")
        seen = (target / "weights").read_bytes()
        collect(store, mounted=[])
        assert publish(inline, base, "live", reference=f"{host}/team/model:v1", pullPolicy="Always") == target
        assert (target / "weights").read_bytes() == seen, point
        assert len(os.listdir(base / "csi" / "volumes")) == 1, f"left by {point}"
        inline.unpublish("csi-live", str(target))
        assert not is_mount_point(str(target)), point
        assert not target.exists(), point
        assert os.listdir(base / "csi" / "volumes") == [], f"left by {point}"
        assert [lease for lease in store.leases.all() if not lease.owner] == [], f"left by {point}"
        left = [entry.path for entry in read_table() if entry.path.startswith(os.fsencode(base) + b"/")]
        assert left == [], f"left by {point}"
        for record in store.images.all():
            remove_image(store, record.reference, record.handler)
        collect(store, mounted=[])
        assert garbage(store) == []
        assert os.listdir(store.layout.trees) == []
        assert fsck(store) == []

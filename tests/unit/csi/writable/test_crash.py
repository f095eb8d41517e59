"""kill -9 at every durable step of a writable volume's life: nothing leaks, no live claim's data is lost.

Every point of the traced scenario counts once per time it is reached, those of the store below included. CI
takes a few by seed; UNLADE_FULL=1 takes all.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from tests.unit.csi.writable.crash_scenario import KEPT
from tests.unit.csi.writable.scene import MIB, MODEL, loops_of, mounts_below, node, put_model
from unlade.kernel import failpoints, mounts
from unlade.store.gc import garbage
from unlade.tree import fsck

pytestmark = [pytest.mark.root, pytest.mark.slow]

FULL = bool(os.environ.get("UNLADE_FULL"))
ROOT = Path(__file__).parents[4]
PARTS = range(10 if FULL else 1)
SAMPLE = 5


@pytest.fixture(scope="module")
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as fake:
        put_model(fake)
        yield fake


@pytest.fixture(autouse=True)
def _unmounted(tmp_path: Path) -> Iterator[None]:
    yield
    reboot(tmp_path)


def run(base: Path, host: str, *options: str, point: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != failpoints.VARIABLE}
    environment["PYTHONPATH"] = str(ROOT)
    if point:
        environment[failpoints.VARIABLE] = point
    return subprocess.run(
        [sys.executable, "-m", "tests.unit.csi.writable.crash_scenario", str(base), host, *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )


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


@pytest.fixture(scope="module")
def points(registry: FakeRegistry, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Every name:count of an undisturbed run."""
    return traced(tmp_path_factory.mktemp("traced"), registry.host)


def test_the_scenario_passes_every_failpoint_of_writable_volumes(points: list[str]) -> None:
    reached = {point.partition(":")[0] for point in points}
    ours = {name for name in failpoints.names() if name.startswith("csi.writable.")}
    # Growing a file system in use ends here where root has no CAP_SYS_RESOURCE.
    assert ours - reached <= {"csi.writable.fs-grown"}
    assert len(points) >= 150


@pytest.mark.parametrize("part", PARTS)
def test_killed_anywhere_nothing_leaks_and_nothing_is_lost(
    registry: FakeRegistry, points: list[str], tmp_path: Path, part: int
) -> None:
    chosen = points[part :: len(PARTS)] if FULL else _sample(points)
    for number, point in enumerate(chosen):
        base = tmp_path / str(number)
        killed = run(base, registry.host, point=point)
        assert killed.returncode == -signal.SIGKILL, f"{point}: {killed.stderr}"
        if number % 2:
            reboot(base)
        again = run(base, registry.host)
        assert again.returncode == 0, f"retry after {point}: {again.stderr}"
        if "wrote" in killed.stdout:
            assert "wrote" not in again.stdout, f"what the pod wrote was lost by a kill at {point}"
        sound(base, registry.host, point)


def _sample(points: list[str]) -> list[str]:
    ours = [point for point in points if point.startswith("csi.writable.")]
    return random.Random(6).sample(ours, SAMPLE)


def reboot(base: Path) -> None:
    """Every mount gone, and with them the devices; files stay.

    Namespaces that others on this machine made meanwhile have copies of our mounts, as after no reboot; the
    kernel takes those away with the mount point.
    """
    for path in reversed(mounts_below(base)):
        mounts.detach(path, lazy=True)
        with contextlib.suppress(OSError):
            os.rmdir(path)
            os.mkdir(path, 0o750)


def sound(base: Path, host: str, point: str, contained: str = "") -> None:
    """The live claim is whole; then it is deleted, and nothing at all is left."""
    with node(base, host, contained=contained) as here:
        here.writable.recover()
        claim = here.writable.create("pvc-live", 32 * MIB, here.parameters)
        target = here.target("a")
        here.writable.publish(claim.id, target)
        assert Path(target, KEPT).read_text() == "by the pod", point
        assert Path(target, "weights.bin").read_bytes() == MODEL["weights.bin"], point
        here.writable.unpublish(claim.id, target)
        assert [volume.id for volume in here.writable.volumes()] == [claim.id], f"left by {point}"
        assert here.writable.snapshots() == []
        here.writable.delete(claim.id)
        end = time.monotonic() + 5
        while loops_of(base) and time.monotonic() < end:
            time.sleep(0.01)
        assert loops_of(base) == [], f"left by {point}"
        assert mounts_below(base) == [], f"left by {point}"
        assert os.listdir(here.writable.root) == ["locks"], f"left by {point}"
        assert os.listdir(here.writable.root / "locks") == [], f"left by {point}"
        assert here.holder.held() == set(), f"left by {point}"
        here.holder.tidy()
        here.collect()
        assert garbage(here.store) == []
        assert here.trees() == set(), f"left by {point}"
        assert fsck(here.store) == []

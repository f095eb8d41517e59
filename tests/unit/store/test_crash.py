"""kill -9 at every durable step: the store is sound afterwards, and the same work then succeeds.

Every point of the traced scenario counts once per time it is reached. CI takes 20 of them by seed;
UNLADE_FULL=1 takes all.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from unlade.kernel import failpoints
from unlade.store import DirStore, collect
from unlade.store.gc import garbage
from unlade.tree import fsck

FULL = bool(os.environ.get("UNLADE_FULL"))
ROOT = Path(__file__).parents[3]


def run(store: Path, mode: str, *options: str, point: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != failpoints.VARIABLE}
    environment["PYTHONPATH"] = str(ROOT)
    if point:
        environment[failpoints.VARIABLE] = point
    return subprocess.run(
        [sys.executable, "-m", "tests.unit.store.crash_scenario", str(store), mode, *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


@cache
def points() -> list[tuple[str, str]]:
    """Every (mode, name:count) of an undisturbed run."""
    found = []
    for mode in ("live", "rot"):
        with TemporaryDirectory() as scratch:
            traced = run(Path(scratch) / "store", mode, "trace")
            assert traced.returncode == 0, traced.stderr
        seen: Counter[str] = Counter()
        for name in traced.stdout.split():
            seen[name] += 1
            found.append((mode, f"{name}:{seen[name]}"))
    return found


# In parts, because a single test may take ten minutes at most.
PARTS = range(20 if FULL else 1)


def chosen(part: int) -> list[tuple[str, str]]:
    every = points()
    return every[part :: len(PARTS)] if FULL else random.Random(20).sample(every, 20)


def test_the_scenario_passes_every_failpoint_of_store_and_tree() -> None:
    reached = {point.partition(":")[0] for _, point in points()}
    ours = {name for name in failpoints.names() if name.startswith(("store.", "tree."))}
    assert ours - reached == set()


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_killed_anywhere_it_is_sound_and_the_retry_succeeds(tmp_path: Path, part: int) -> None:
    for number, (mode, point) in enumerate(chosen(part)):
        path = tmp_path / str(number)
        killed = run(path, mode, point=point)
        assert killed.returncode == -signal.SIGKILL, f"{mode} {point}: {killed.stderr}"
        with DirStore(path) as store:
            if mode == "rot":
                fsck(store, repair=True)
            assert fsck(store) == [], f"after a kill at {mode} {point}"
            assert os.listdir(store.layout.staging) == []
            assert os.listdir(store.layout.trash) == []
        again = run(path, mode)
        assert again.returncode == 0, f"retry after {mode} {point}: {again.stderr}"
        with DirStore(path) as store:
            assert fsck(store) == [], f"after the retry of {mode} {point}"
            collect(store, mounted=[])
            assert garbage(store) == []
            for place in (store.layout.staging, store.layout.trash, store.layout.locks):
                assert os.listdir(place) == [], f"left by {mode} {point}"
            assert store.leases.all() == []


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_disk_that_fails_anywhere_leaves_nothing_behind(tmp_path: Path, part: int) -> None:
    """ENOSPC, EIO and EMFILE at points by seed: said so, rolled back, and the retry succeeds."""
    chance = random.Random(part)
    every = [point for mode, point in points() if mode == "live"]
    for number in range(15 if FULL else 12):
        failure = ("ENOSPC", "EIO", "EMFILE")[number % 3]
        point = f"{chance.choice(every)}={failure}"
        path = tmp_path / str(number)
        failed = run(path, "live", point=point)
        assert failed.returncode == 1, f"{point}: {failed.stderr}"
        last = failed.stderr.strip().splitlines()[-1]
        # Points between two uses of the disk raise it bare; no call of the system stands there.
        ours = last.startswith("unlade.store.failure.")
        assert ours or last.endswith(f"(failpoint {point.partition(':')[0]})"), f"{point}: {failed.stderr}"
        assert not ours or ("NoSpace" in last) == (failure == "ENOSPC"), last
        with DirStore(path) as store:
            assert fsck(store) == [], f"after {point}"
            assert os.listdir(store.layout.staging) == []
            assert os.listdir(store.layout.locks) == [], f"left by {point}"
            assert os.listdir(store.layout.owners) == [store.leases.owner.name], f"left by {point}"
        again = run(path, "live")
        assert again.returncode == 0, f"retry after {point}: {again.stderr}"
        with DirStore(path) as store:
            assert fsck(store) == [], f"after the retry of {point}"
            assert garbage(store) == []

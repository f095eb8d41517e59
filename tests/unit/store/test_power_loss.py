"""Power loss at any instant: never a valid record over short, empty or wrong data.

The store lives on ext4 (ordered data, as it comes) in a file on XFS. While a program pulls, commits, records
and collects without end, that file is cloned by reflink at random instants: the clone is what the disk would
hold if the power went at that instant, all that was written to it and nothing that was still in memory. It is
mounted, ext4 replays its journal, and `fsck` reads every byte. 8 instants here, 200 with UNLADE_FULL=1.

What this cannot see: a disk that reorders or loses what it was given before a flush, because the clone holds
every write that reached the device. That the method sees what it should is shown by a program that does not
sync: it is caught.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from unlade.store import DirStore, Problem
from unlade.tree import fsck

FULL = bool(os.environ.get("UNLADE_FULL"))
ROOT = Path(__file__).parents[3]
FICLONE = 0x40049409  # ioctl_ficlone(2)

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(shutil.which(tool) for tool in ("mkfs.xfs", "mkfs.ext4", "mount")),
        reason="needs mkfs and mount",
    ),
]


def command(*arguments: object) -> None:
    subprocess.run([str(argument) for argument in arguments], check=True, capture_output=True)


@contextmanager
def mounted(image: Path, point: Path) -> Iterator[Path]:
    point.mkdir(exist_ok=True)
    command("mount", "-o", "loop", image, point)
    try:
        yield point
    finally:
        command("umount", point)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system in a file that can be cloned at once; gives its mount point."""
    outer = tmp_path / "outer.img"
    with open(outer, "wb") as file:
        file.truncate(1 << 30)
    command("mkfs.xfs", "-q", "-m", "reflink=1", outer)
    with ExitStack() as stack:
        host = stack.enter_context(mounted(outer, tmp_path / "host"))
        image = host / "disk.img"
        with open(image, "wb") as file:
            file.truncate(192 << 20)
        command("mkfs.ext4", "-q", image)
        yield stack.enter_context(mounted(image, tmp_path / "disk"))


@contextmanager
def working(disk: Path, mode: str) -> Iterator[None]:
    """A program at work on the disk, until the block ends."""
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.store.crash_scenario", str(disk / "store"), mode],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with program:
        assert program.stdout and program.stdout.readline() == "1\n"
        try:
            yield
        finally:
            alive = program.poll() is None
            program.kill()
        assert alive, "it must not end by itself"


def lose_power(disk: Path) -> list[Problem]:
    """What a check finds on the disk as it is at this instant, after ext4 recovered."""
    host = disk.parent / "host"
    with open(host / "disk.img", "rb") as source, open(host / "clone.img", "wb") as clone:
        fcntl.ioctl(clone, FICLONE, source.fileno())
    with mounted(host / "clone.img", disk.parent / "clone") as found, DirStore(found / "store") as store:
        return fsck(store)


@pytest.mark.parametrize("part", range(5 if FULL else 1))
def test_the_store_is_sound_after_power_loss_at_any_instant(disk: Path, part: int) -> None:
    chance = random.Random(part)
    with working(disk, "forever"):
        for number in range(40 if FULL else 8):
            time.sleep(chance.uniform(0, 0.2))
            assert lose_power(disk) == [], f"at instant {number}"


def test_a_program_that_does_not_sync_is_caught(disk: Path) -> None:
    chance = random.Random(6)
    with working(disk, "careless"):
        for _ in range(100):
            time.sleep(chance.uniform(0, 0.2))
            if lose_power(disk):
                return
    pytest.fail("data that was never synced always survived: the method sees nothing")

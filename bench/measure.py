"""Running one command and saying what it cost: seconds, CPU seconds, peak memory, bytes written.

Caches are dropped before each run where that is allowed (root), so that nobody profits from the run before.
Two times are taken: when the command ended, and when a sync of its file system that follows it had ended.
Memory is the sum over all processes of the run, sampled, and over daemons that work for it; pages that
processes share count in each. Bytes written are the disk's own count over the run and the sync that ends it,
so they are only exact on an otherwise quiet machine.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SECTOR: Final = 512  # what /sys/block/*/stat counts in, whatever the disk's own size
# Five looks a second cost about one per cent of a core and see what lasts; what is shorter than that is
# caught by the kernel's own high-water mark of the largest process.
SAMPLE_SECONDS: Final = 0.2
TICKS: Final = os.sysconf("SC_CLK_TCK")
PAGE: Final = os.sysconf("SC_PAGESIZE")
ROOT: Final = Path(__file__).resolve().parents[1]  # where `python -m bench.library` finds itself
# Numbers of ioctl_iflags(2).
_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602
_TOP_DIRECTORY: Final = 0x00020000
TOLD: Final = "told.json"  # where a program that times itself leaves its figures


@dataclass(frozen=True, slots=True)
class Cost:
    """One run: until its result was durable, until its command ended, and what it took. Bytes and seconds."""

    seconds: float
    unsynced: float
    cpu: float
    peak: int
    written: int


class Failed(Exception):
    """A contender that did not do its work."""


def quiet() -> None:
    """Write everything out and drop clean caches, so that each run starts from the same state."""
    os.sync()
    with suppress(OSError), open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as control:
        control.write("3")


def spread(directory: Path) -> None:
    """Have ext4 put each directory made in this one somewhere else on the disk, as `chattr +T` does.

    It does not give out again an inode that was removed in the last minutes, and looks at every such inode in
    the group before it takes another: whoever came after the removal of 48,000 files would pay for them.
    """
    with suppress(OSError):
        fd = os.open(directory, os.O_RDONLY)
        try:
            flags = bytearray(8)
            fcntl.ioctl(fd, _GET_FLAGS, flags)
            number = int.from_bytes(flags[:4], sys.byteorder) | _TOP_DIRECTORY
            fcntl.ioctl(fd, _SET_FLAGS, number.to_bytes(8, sys.byteorder))
        finally:
            os.close(fd)


# A process inherits the peak of the one that started it, so a small one stands between us and the command.
_LAUNCHER = """
import resource, subprocess, sys, time
began = time.monotonic()
done = subprocess.run(["bash", "-o", "pipefail", "-c", sys.argv[1]], stdout=subprocess.DEVNULL)
ended = time.monotonic()
if done.returncode == 0 and sys.argv[2] == "sync":
    subprocess.run(["sync", "-f", "."], check=True)
synced = time.monotonic()
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(done.returncode, ended - began, synced - ended, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""


def run(
    command: str,
    where: Path,
    *,
    sync: bool,
    daemons: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    told: bool = True,
) -> Cost:
    """Run a shell command in a directory; `sync` has a sync of its file system follow. Raises Failed.

    A command that leaves `told.json` ({"seconds", "cpu"}) has timed itself: programs that use the library
    are not charged for starting an interpreter.
    """
    quiet()
    before, busy = _written(where), sum(map(_cpu, daemons))
    with subprocess.Popen(
        [sys.executable, "-S", "-c", _LAUNCHER, command, "sync" if sync else "as-is"],
        cwd=where,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
    ) as launcher:
        peak = 0
        while True:
            with suppress(subprocess.TimeoutExpired):
                out, err = launcher.communicate(timeout=SAMPLE_SECONDS)
                break
            peak = max(peak, _resident(launcher.pid, daemons))
    if launcher.returncode != 0 or out.split()[0] != "0":
        raise Failed(f"{command}: {out} {err[-2000:]}")
    unsynced, syncing, cpu, largest = map(float, out.split()[1:])
    if told and (where / TOLD).exists():
        figures = json.loads((where / TOLD).read_text())
        unsynced, cpu = figures["seconds"], figures["cpu"]
    cpu += sum(map(_cpu, daemons)) - busy
    os.sync()
    peak = max(peak, int(largest) * 1024)
    return Cost(unsynced + syncing, unsynced, cpu, peak, _written(where) - before)


def _stat(pid: str | int) -> list[str]:
    """A process' stat fields after its name; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _cpu(pid: int) -> float:
    """CPU seconds of a daemon and of its children that ended."""
    return sum(int(ticks) for ticks in _stat(pid)[11:15]) / TICKS


def _resident(session: int, daemons: Sequence[int]) -> int:
    total = 0
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == session:
            continue
        fields = _stat(name)
        if fields and (int(fields[3]) == session or int(name) in daemons or int(fields[1]) in daemons):
            total += int(fields[21]) * PAGE
    return total


def _written(where: Path) -> int:
    device = os.stat(where).st_dev
    try:
        with open(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat", encoding="ascii") as stat:
            return int(stat.read().split()[6]) * SECTOR
    except OSError:
        return 0

"""Running one command and saying what it cost: seconds, CPU seconds, peak memory, bytes written.

Caches are dropped before each run where that is allowed (root), so that nobody profits from the run before.
Bytes written are the disk's own count over the run and the sync that ends it, so they are only exact on an
otherwise quiet machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

SECTOR = 512  # what /sys/block/*/stat counts in, whatever the disk's own size


@dataclass(frozen=True, slots=True)
class Cost:
    """One run. `peak` is the largest single process, in bytes."""

    seconds: float
    cpu: float
    peak: int
    written: int


class Failed(Exception):
    """A contender that did not do its work."""


def quiet() -> None:
    """Write everything out and drop clean caches, so that each run starts from the same state."""
    os.sync()
    try:
        with open("/proc/sys/vm/drop_caches", "w", encoding="ascii") as control:
            control.write("3")
    except OSError:
        pass


# A process inherits the peak of the one that started it, so a small one stands between us and the command.
_LAUNCHER = """
import os, resource, subprocess, sys, time
began = time.monotonic()
done = subprocess.run(["bash", "-c", sys.argv[1]], stdout=subprocess.DEVNULL)
if done.returncode == 0 and sys.argv[2] == "durable":
    subprocess.run(["sync", "-f", "."], check=True)
seconds = time.monotonic() - began
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(done.returncode, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss)
"""


def run(command: str, where: str, *, durable: bool) -> Cost:
    """Run a shell command in a directory; `durable` adds a sync of its file system. Raises Failed."""
    quiet()
    before = _written(where)
    done = subprocess.run(
        [sys.executable, "-S", "-c", _LAUNCHER, command, "durable" if durable else "as-is"],
        cwd=where,
        capture_output=True,
        text=True,
        check=True,
    )
    code, seconds, cpu, peak = done.stdout.split()
    if code != "0":
        raise Failed(f"{command}: exit {code}: {done.stderr[-2000:]}")
    os.sync()
    return Cost(float(seconds), float(cpu), int(peak) * 1024, _written(where) - before)


def _written(where: str) -> int:
    device = os.stat(where).st_dev
    try:
        with open(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat", encoding="ascii") as stat:
            return int(stat.read().split()[6]) * SECTOR
    except OSError:
        return 0

"""What a process and those below it take: memory at its highest, CPU time, file descriptors."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

# Workers live for at least the time of one archive; a shorter pause would cost more than it tells.
_PAUSE = 0.05


def family(pid: int) -> list[int]:
    """A process and all below it, as they are now."""
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += family(int(child))
    return found


def highest_memory(pid: int) -> int:
    """The most memory that a process has held so far, in bytes; 0 when it is gone."""
    with suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        if found is not None:
            return int(found[1]) * 1024
    return 0


def memory(pid: int) -> int:
    """The memory that a process holds now, in bytes; 0 when it is gone."""
    with suppress(OSError):
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        if found is not None:
            return int(found[1]) * 1024
    return 0


def cpu_seconds(pid: int) -> float:
    """The CPU time that a process has used so far, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descriptors(pid: int) -> int:
    """How many files a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


class Watched:
    """Watches a process and those below it: `peak` is the highest sum of what each held at its most."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid = pid
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._end.wait(_PAUSE):
            self._look()

    def _look(self) -> None:
        self.peak = max(self.peak, sum(map(highest_memory, family(self._pid))))

"""Programs that use the library, each run in a process of its own: `python -m bench.library NAME ARGUMENT…`.

What they measure stands in `told.json` in the working directory: seconds and CPU seconds of the work alone,
without the start of the interpreter, because a program that delivers pays for that once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import unlade
from bench.measure import TOLD
from unlade.delivery import AsTree, Directory, Engine, Mounted, Request
from unlade.library import connect
from unlade.model import Descriptor, Digest, Reference
from unlade.mount import unmount
from unlade.store import DirStore, collect


class Clock:
    """Wall and CPU time of a block, children that ended included."""

    def __enter__(self) -> Clock:
        self._began, self._busy = time.monotonic(), sum(os.times()[:4])
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.monotonic() - self._began
        self.cpu = sum(os.times()[:4]) - self._busy


def tell(**facts: Any) -> None:
    """Leave the figures for whoever started this."""
    Path(TOLD).write_text(json.dumps(facts))


def deliver(host: str, reference: str) -> None:
    """One delivery to a directory by the front door."""
    with Clock() as clock:
        unlade.deliver(reference, "out", plain_http=[host])
    tell(seconds=clock.seconds, cpu=clock.cpu)


def many(host: str, prefix: str, count: str, at_once: str) -> None:
    """Many packages, each to a directory of its own, by one engine."""
    os.mkdir("out")
    with Clock() as clock, connect(plain_http=[host]) as registry, Engine(registry) as engine:

        def one(number: int) -> None:
            request = Request(
                references=(Reference.parse(f"{prefix}:{number}"),),
                destination=Directory(f"out/{number}"),
                pull="always",
            )
            engine.deliver(request)

        with ThreadPoolExecutor(int(at_once)) as pool:
            list(pool.map(one, range(int(count))))
    tell(seconds=clock.seconds, cpu=clock.cpu)


def mounted(host: str, reference: str, count: str) -> None:
    """Deliver a tree once, then mount it again and again: the time of each further delivery."""
    os.mkdir("at")
    times = []
    with connect(plain_http=[host]) as registry, DirStore("st") as store, Engine(registry, store) as engine:
        request = Request(references=(Reference.parse(reference),), destination=Mounted("at"), pull="missing")
        for _ in range(int(count) + 1):
            began = time.perf_counter()
            engine.deliver(request)
            times.append(time.perf_counter() - began)
            unmount("at")
            store.mounts.remove(os.fsencode(os.path.abspath("at")))
    times = sorted(times[1:])  # the first one had to fetch it
    tell(p50=times[len(times) // 2], p99=times[int(len(times) * 0.99)], worst=times[-1], count=len(times))


def update(host: str, before: str, after: str) -> None:
    """A cold delivery as a tree, then one of an image that shares all layers but one."""
    with connect(plain_http=[host]) as registry, DirStore("st") as store, Engine(registry, store) as engine:
        figures = []
        for reference in (before, after):
            request = Request(references=(Reference.parse(reference),), destination=AsTree(), pull="always")
            with Clock() as clock:
                engine.deliver(request)
            figures.append(clock)
    cold, warm = figures
    tell(seconds=warm.seconds, cpu=warm.cpu, cold=cold.seconds, cold_cpu=cold.cpu)


def gc(host: str, prefix: str, packages: str, count: str) -> None:
    """Pulls into a store beside a collection of many blobs by another process, and without one.

    Each pull is a whole delivery of a small package as a tree: requests, unpacking, syncs, records.
    """
    with DirStore("st") as store:
        _fill(store, int(count))
    alone: list[float] = []
    beside: list[float] = []
    with connect(plain_http=[host]) as registry, DirStore("st") as store, Engine(registry, store) as engine:

        def one(number: int) -> float:
            reference = Reference.parse(f"{prefix}:{number}")
            began = time.perf_counter()
            engine.deliver(Request(references=(reference,), destination=AsTree(), pull="always"))
            return time.perf_counter() - began

        numbers = iter(range(int(packages)))
        one(next(numbers))  # the first one pays for connections and workers
        alone.extend(one(next(numbers)) for _ in range(int(packages) // 5))
        began = time.perf_counter()
        with subprocess.Popen([sys.executable, "-m", "bench.library", "collect"]) as collector:
            for number in numbers:
                if collector.poll() is not None:
                    break
                beside.append(one(number))
        collecting = time.perf_counter() - began
        left = sum(info.size == 0 for info in store.walk())
    alone.sort()
    beside.sort()
    tell(
        alone=_spread(alone),
        beside=_spread(beside),
        collecting=collecting,
        pulls=len(beside),
        left=left,
    )


def collect_all() -> None:
    """The collection, as `unlade gc` runs it, in a process of its own."""
    with DirStore("st") as store:
        collect(store)


def _spread(times: list[float]) -> dict[str, float]:
    return {"p50": times[len(times) // 2], "p99": times[int(len(times) * 0.99)], "worst": times[-1]}


def _fill(store: DirStore, count: int) -> None:
    """Many unreferenced blobs at once, as a long life would leave them: empty files with a record each."""
    digests = [Digest.of(b"%d" % number) for number in range(count)]
    first = Descriptor(media_type="application/octet-stream", digest=Digest.of(b""), size=0)
    store.put(first, b"")
    for digest in digests:
        store.layout.blob(digest).touch()
    with store.database.write() as connection:
        connection.executemany(
            "INSERT INTO objects (name, size, created) VALUES (?, 0, 0)",
            [(f"b:{digest}",) for digest in digests],
        )


PROGRAMS: Final[dict[str, Callable[..., None]]] = {
    "deliver": deliver,
    "many": many,
    "mounted": mounted,
    "update": update,
    "gc": gc,
    "collect": collect_all,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])

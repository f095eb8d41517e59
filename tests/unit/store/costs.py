"""What a store costs as it grows; prints the table of docs/store.md. Run: python -m tests.unit.store.costs

Blobs are empty files with records made in one transaction; every time is the median of repeated calls.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.conformance.content_store import blob
from tests.unit.store.test_gc import fill
from unlade.model import Digest
from unlade.store import DirStore, ImageRecord, collect
from unlade.tree import DirTrees


def median_ms(call: Callable[[int], object], times: int) -> float:
    taken = []
    for number in range(times):
        started = time.perf_counter()
        call(number)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1000


def measure(blobs: int, leases: int, images: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "store"
        with DirStore(path) as store:
            fill(store, blobs)
            trees = DirTrees(store)
            for number in range(images):
                key = Digest.of(b"tree %d" % number)
                with trees.stage(key) as staging:
                    staging.commit(size=1)
                store.images.put(ImageRecord(f"r.test/{number}:v1", "", blob(b"manifest"), tree=key))
            everything = store.leases.keep("all", "test", ttl=3600)
            with store.database.write() as connection:
                connection.execute("INSERT INTO edges SELECT 'l:all', name FROM objects WHERE name < 'b;'")
            held = [store.leases.open("test", ttl=3600) for _ in range(leases)]

            def put(number: int) -> None:
                data = b"new %d" % number
                store.put(blob(data), data, lease=held[0])

            def find(_: int) -> None:
                trees.find(Digest.of(b"tree 0"), lease=held[0])

            def record(number: int) -> None:
                key = Digest.of(b"tree %d" % (number % images))
                store.images.put(ImageRecord("r.test/new:v1", "", blob(b"manifest"), tree=key))

            result = {
                "stat": median_ms(lambda number: store.stat(Digest.of(b"%d" % number)), 200),
                "put under a lease": median_ms(put, 50),
                "find a tree under a lease": median_ms(find, 200),
                "record an image": median_ms(record, 20),
                "sizes of all images": median_ms(lambda _: store.images.sizes(), 3),
                "open the store": median_ms(lambda _: DirStore(path).close(), 5),
                "collect, nothing to do": median_ms(lambda _: collect(store), 3),
            }
            everything.release()
            started = time.perf_counter()
            removed = collect(store).blobs
            result["collect, per blob removed"] = (time.perf_counter() - started) * 1000 / max(removed, 1)
            return result


def main() -> None:
    columns = [(100, 1, 10), (10_000, 100, 100), (100_000, 1000, 300)]
    if "--quick" in sys.argv:
        columns = columns[:2]
    results = [measure(*column) for column in columns]
    print("| ms | " + " | ".join(f"{b:,} blobs, {n} leases, {i} images" for b, n, i in columns) + " |")
    print("| --- " * (len(columns) + 1) + "|")
    for name in results[0]:
        print(f"| {name} | " + " | ".join(f"{result[name]:.2f}" for result in results) + " |")


if __name__ == "__main__":
    main()

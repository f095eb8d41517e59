"""A store that tends itself: a small disk never fills, nothing in use is lost, the oldest goes first (V6)."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.content_store import blob
from unlade.errors import InvalidInput
from unlade.kernel import failpoints
from unlade.model import Digest
from unlade.mount import MountOptions, mount_layers, unmount
from unlade.mount.table import read_table
from unlade.store import DirStore, ImageRecord, NoSpace, Upkeep, Usage
from unlade.tree import DirTrees, Tree, fsck
from unlade.unpack.filelist import FileListWriter

MIB = 1 << 20
# Trees that each of two streams sends through a disk of 96 MiB; 3.5 MiB each on average.
STREAM = 140 if os.environ.get("UNLADE_FULL") else 30


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirStore]:
    with DirStore(tmp_path / "store") as opened:
        yield opened


def bring(store: DirStore, number: int, size: int = 10, *, record: bool = True) -> Tree:
    """A tree with one file of `size` bytes, recorded as r.test/<number>:v1."""
    manifest = b"manifest %d" % number
    with store.lease("bring") as lease:
        store.put(blob(manifest), manifest, lease=lease)
        with DirTrees(store).stage(Digest.of(b"tree %d" % number), lease=lease) as staging:
            tree = staging.existing
            if tree is None:
                data = random.Random(number).randbytes(size)
                (staging.path / "file").write_bytes(data)
                info = (staging.path / "file").stat()
                writer = FileListWriter(staging.files_out)
                owner = (info.st_uid, info.st_gid)
                writer.add(
                    "f", "file", info.st_mode & 0o7777, *owner, info.st_mtime_ns, size, zlib.crc32(data)
                )
                writer.flush()
                tree = staging.commit(size=size, entries=1)
        if record:
            store.images.put(ImageRecord(f"r.test/{number}:v1", "", blob(manifest), tree=tree.key))
    return tree


def names(store: DirStore) -> list[str]:
    return [record.reference for record in store.images.all()]


def aged(store: DirStore, number: int, used: float) -> None:
    with store.database.write() as connection:
        connection.execute("UPDATE images SET used = ? WHERE reference = ?", (used, f"r.test/{number}:v1"))


class Disk:
    """A disk of `total` bytes on which the store's objects are all there is."""

    def __init__(self, store: DirStore, total: int) -> None:
        self.store = store
        self.total = total

    def __call__(self) -> Usage:
        return Usage(self.store.images.total_size(), self.total)


def kept(store: DirStore, total: int, **options: float) -> Upkeep:
    return Upkeep(store, mounted=list, usage=Disk(store, total), **{"high": 80.0, "low": 50.0, **options})  # type: ignore[arg-type]


def test_nothing_is_done_below_the_mark(store: DirStore) -> None:
    for number in range(7):
        bring(store, number, 100)
    garbage = bring(store, 7, 10, record=False)
    assert kept(store, 1000).tidy() is None
    assert len(names(store)) == 7
    assert garbage.path
    assert garbage.path.exists()  # cheap to keep, and may be wanted again


def test_garbage_goes_before_records(store: DirStore) -> None:
    for number in range(8):
        bring(store, number, 100, record=number < 4)
    done = kept(store, 900).tidy()
    assert done
    assert done.records == 0
    assert len(names(store)) == 4


def test_the_least_recently_used_go_first_and_no_more_than_needed(store: DirStore) -> None:
    for number in range(9):
        bring(store, number, 100)
        aged(store, number, [50, 10, 90, 30, 20, 80, 40, 70, 60][number])
    done = kept(store, 1000).tidy()
    assert done
    assert (done.records, done.before.percent > 80, done.after.percent <= 50) == (5, True, True)
    assert names(store) == [f"r.test/{number}:v1" for number in (2, 5, 7, 8)]
    assert store.mounts.all() == []


def test_what_is_in_use_stays_even_when_the_disk_is_full(store: DirStore) -> None:
    trees = [bring(store, number, 100) for number in range(9)]
    for number in range(9):
        aged(store, number, number)
    for number in (0, 3):
        with store.mounts.mounting(b"/mnt/%d" % number, trees[number].key):
            pass
    held = store.leases.keep("writable", "a claim", ttl=1000)
    assert held.hold_tree(trees[1].key)
    upkeep = Upkeep(store, mounted=lambda: [b"/mnt/0", b"/mnt/3"], usage=Disk(store, 500), high=80, low=10)
    assert upkeep.tidy()
    assert names(store) == ["r.test/0:v1", "r.test/1:v1", "r.test/3:v1"]
    assert all((tree.path or Path()).exists() for tree in (trees[0], trees[1], trees[3]))
    assert upkeep.tidy() is None  # 60 % are used, below the upper mark, and nothing more could go


@pytest.mark.parametrize("how", ["mount", "lease"])
def test_what_is_in_use_counts_as_used_now(store: DirStore, how: str) -> None:
    trees = [bring(store, number, 100) for number in range(3)]
    for number in range(3):
        aged(store, number, number)
    lease = store.leases.keep("csi:volume", "a pod", ttl=1000)
    if how == "lease":
        assert lease.hold_tree(trees[0].key)
    else:
        with store.mounts.mounting(b"/mnt", trees[0].key):
            pass
    upkeep = kept(store, 10_000)
    assert upkeep.tidy() is None
    lease.release()
    store.mounts.remove(b"/mnt")
    upkeep = Upkeep(store, mounted=list, usage=Disk(store, 350), high=80, low=35)
    assert upkeep.tidy()
    assert names(store) == ["r.test/0:v1"]


def test_room_is_made_before_it_is_needed(store: DirStore) -> None:
    for number in range(5):
        bring(store, number, 100)
        aged(store, number, number)
    upkeep = kept(store, 1000)
    with upkeep.room(100):
        assert len(names(store)) == 5
        with upkeep.room(300):
            # 500 and some are used and 400 promised: only half may remain beside what comes
            assert len(names(store)) < 5
    assert upkeep.usage().used == store.images.total_size()


def test_room_that_cannot_be_had_is_refused(store: DirStore) -> None:
    trees = [bring(store, number, 100) for number in range(8)]
    for number, tree in enumerate(trees):
        with store.mounts.mounting(b"/mnt/%d" % number, tree.key):
            pass
    here = [b"/mnt/%d" % number for number in range(8)]
    upkeep = Upkeep(store, mounted=lambda: here, usage=Disk(store, 1000), high=80, low=50)
    with upkeep.room(40):
        pass
    with pytest.raises(NoSpace, match="200 bytes are needed") as caught, upkeep.room(200):
        pass
    assert "larger disk" in caught.value.next_step
    assert len(names(store)) == 8
    assert upkeep.usage().used == store.images.total_size()


def test_marks_that_make_no_sense_are_refused(store: DirStore) -> None:
    for high, low in ((80, 90), (99, 50), (50, 0), (-1, -2)):
        with pytest.raises(InvalidInput):
            Upkeep(store, mounted=list, high=high, low=low)


def test_the_thread_looks_by_itself(store: DirStore) -> None:
    told = threading.Event()
    upkeep = Upkeep(
        store,
        mounted=list,
        usage=Disk(store, 1000),
        high=80,
        low=50,
        poll=0.02,
        told=lambda _: told.set(),
    )
    upkeep.start()
    for number in range(9):
        bring(store, number, 100)
    assert told.wait(10)
    upkeep.stop()
    upkeep.stop()
    assert len(names(store)) < 9


def test_a_failure_does_not_end_it(store: DirStore, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def usage() -> Usage:
        seen.append(1)
        if len(seen) == 1:
            raise NoSpace("once", next_step="")
        return Usage(1, 100)

    upkeep = Upkeep(store, mounted=list, usage=usage, poll=0.01)
    upkeep.start()
    until = time.monotonic() + 10
    while len(seen) < 3 and time.monotonic() < until:
        time.sleep(0.01)
    upkeep.stop()
    assert len(seen) >= 3


def test_its_step_can_be_killed() -> None:
    assert "store.upkeep.dropped" in failpoints.names()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 96 MiB in a file."""
    image, where = tmp_path / "disk", tmp_path / "mnt"
    with image.open("wb") as file:
        file.truncate(96 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    where.mkdir()
    subprocess.run(["mount", "-o", "loop", str(image), str(where)], check=True)
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.mark.root
def test_a_small_disk_never_fills(small_disk: Path, tmp_path: Path) -> None:
    """Many times the disk's size goes through it, two trees at a time, while four others stay mounted."""
    worst = 0.0
    with DirStore(small_disk / "store") as store:
        upkeep = Upkeep(
            store, mounted=lambda: [entry.path for entry in read_table()], high=70, low=50, poll=0.05
        )
        upkeep.start()
        points = []
        for number in range(4):
            tree = bring(store, number, 4 * MIB)
            point = tmp_path / f"pod-{number}"
            point.mkdir()
            with store.mounts.mounting(os.fsencode(point), tree.key):
                mount_layers([str(layer) for layer in tree.layers], str(point), MountOptions())
            points.append(point)

        def stream(first: int) -> None:
            nonlocal worst
            for number in range(first, first + STREAM):
                size = random.Random(number).randrange(1, 7) * MIB
                with upkeep.room(size):
                    bring(store, number, size)
                worst = max(worst, upkeep.usage().percent)

        threads = [threading.Thread(target=stream, args=(first,)) for first in (1000, 2000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        upkeep.stop()
        try:
            assert 50 < worst < 95
            for number, point in enumerate(points):
                data = random.Random(number).randbytes(4 * MIB)
                assert (point / "file").read_bytes() == data
                assert store.images.get(f"r.test/{number}:v1") is not None
            assert any(store.images.get(f"r.test/{first + STREAM - 1}:v1") for first in (1000, 2000))
            assert fsck(store) == []
        finally:
            for point in points:
                unmount(str(point))

"""A short life of a store that passes every durable step, to be killed at any of them by test_crash.

Run as a program: STORE MODE [trace]. It can be run again on what an earlier run left, and ends well.
`forever` repeats it with new content until killed, for test_power_loss; `careless` does so without syncing.
"""

from __future__ import annotations

import os
import sys
import zlib
from unittest import mock

from tests.conformance.content_store import blob, image
from unlade.kernel import failpoints
from unlade.model import DiffID, Digest, mediatypes
from unlade.store import DirStore, ImageRecord, Upkeep, Usage, collect, remove_image
from unlade.store.leases import DirLease
from unlade.tree import DirTrees, Scratch, Staging, fsck
from unlade.unpack.filelist import FileListWriter
from unlade.unpack.policy import Unpacked

LOW, HIGH, STACK, MERGED, CONTEXT = (
    Digest.of(name) for name in (b"low", b"high", b"stack", b"merged", b"ctx")
)
NO_DIFF = DiffID(Digest.of(b""))
POINT = b"/mnt/crash"
OLD = "r.test/old:v1"


def live(store: DirStore) -> None:
    """Pull, unpack, stack, mount, replace, hold, remove, collect, drop what is used least."""
    trees = DirTrees(store)
    with store.lease("pull") as lease:
        with store.ingest(blob(b"layer"), lease=lease) as ingest:
            if not ingest.present:
                ingest.discard()
                ingest.write(b"lay")
        with store.ingest(blob(b"layer"), lease=lease) as ingest:
            if not ingest.present:
                ingest.write(b"layer"[ingest.offset :])
            ingest.commit()
        raw = image(blob(b"layer"), config=blob(b"{}"))
        manifest = blob(raw, mediatypes.OCI_MANIFEST)
        store.put(blob(b"{}"), b"{}", lease=lease)
        store.put(manifest, raw, lease=lease)
        store.images.put(ImageRecord("r.test/app:v1", "", manifest, content=True))
        for key in (LOW, HIGH):
            with trees.stage(key, lease=lease) as staging:
                if staging.existing is None:
                    write(staging, "file", b"text " + key.hex.encode())
                    staging.commit(size=1, has_root=key == LOW)
        with trees.stage(STACK, lease=lease) as staging:
            staging.commit(size=2, layers=[LOW, HIGH])
        with trees.stage(MERGED, lease=lease) as merged:
            if merged.existing is None:
                for name in ("one", "two"):
                    scratch = merged.scratch()
                    write(scratch, name, name.encode())
                    merged.merge(scratch, Unpacked(1, 3, NO_DIFF, implicit_dirs=(b"",)))
                merged.commit(size=6)
        with trees.stage(Digest.of(b"detached"), lease=lease) as staging:
            if staging.existing is None:
                write(staging, "file", b"context")
                staging.detach()
                staging.commit(size=7, key=CONTEXT)
        with store.ingest(blob(b"moved")) as ingest, trees.stage(Digest.of(b"raw"), lease=lease) as staging:
            if staging.existing is None:
                ingest.discard()
                ingest.write(b"moved")
                ingest.move_into(staging.dirfd, b"file", mode=0o644)
                record(staging, "file", b"moved")
                staging.commit(size=5)
        store.images.put(ImageRecord(OLD, "", manifest, tree=CONTEXT))
        store.images.put(ImageRecord("r.test/app:v1", "", manifest, tree=STACK))
        store.images.put(ImageRecord("r.test/app:v1", "kata", manifest, tree=MERGED))
        with store.mounts.mounting(POINT, STACK):
            pass
    store.leases.pin("volume", "a volume", STACK, ttl=3600)
    remove_image(store, "r.test/app:v1", "kata")
    collect(store, mounted=[POINT])
    full_disk(store).tidy()
    DirLease(store.database, "volume").release()
    store.mounts.remove(POINT)
    leave_strays(store)
    with DirStore(store.path):
        pass
    collect(store, mounted=[])


def full_disk(store: DirStore) -> Upkeep:
    """Upkeep of a file system that is full as long as one image is there."""

    def usage() -> Usage:
        return Usage(90 if store.images.get(OLD) else 10, 100)

    return Upkeep(store, mounted=lambda: [POINT], usage=usage)


def leave_strays(store: DirStore) -> None:
    """What crashes of long ago left."""
    (store.layout.staged(Digest.of(b"stale")) / "root").mkdir(parents=True, exist_ok=True)
    store.layout.blob(Digest.of(b"stray")).write_bytes(b"stray")
    partial = store.layout.partial(Digest.of(b"partial"))
    partial.write_bytes(b"par")
    os.utime(partial, (0, 0))
    taken_back = store.layout.blob(Digest.of(b"taken back"))
    if store.stat(Digest.of(b"taken back")) is None:
        taken_back.write_bytes(b"taken back")
    with store.ingest(blob(b"taken back")) as ingest:
        ingest.commit()
    store.delete(Digest.of(b"taken back"))


def rot(store: DirStore) -> None:
    """Damage something of each kind, and repair."""
    trees = DirTrees(store)
    raw = image(config=blob(b"{}"))
    manifest = blob(raw, mediatypes.OCI_MANIFEST)
    with store.lease("pull") as lease:
        store.put(blob(b"{}"), b"{}", lease=lease)
        store.put(manifest, raw, lease=lease)
        with trees.stage(LOW, lease=lease) as staging:
            if staging.existing is None:
                write(staging, "file", b"text")
                staging.commit(size=4)
        with trees.stage(STACK, lease=lease) as staging:
            staging.commit(size=4, layers=[LOW])
        store.images.put(ImageRecord("r.test/app:v1", "", manifest, content=True))
        store.images.put(ImageRecord("r.test/app:v1", "kata", manifest, tree=STACK, content=True))
        store.layout.blob(Digest.of(b"{}")).write_bytes(b"[]")
        fsck(store, repair=True)
        tree = trees.find(LOW)
        if tree and tree.path:
            (tree.path / "file").write_bytes(b"rust")
        fsck(store, repair=True)


def write(staging: Staging | Scratch, name: str, data: bytes) -> None:
    (staging.path / name).write_bytes(data)
    record(staging, name, data)


def record(staging: Staging | Scratch, name: str, data: bytes) -> None:
    info = (staging.path / name).stat()
    writer = FileListWriter(staging.files_out)
    mode = info.st_mode & 0o7777
    writer.add("f", name, mode, info.st_uid, info.st_gid, info.st_mtime_ns, len(data), zlib.crc32(data))
    writer.flush()


def live_forever(store: DirStore) -> None:
    """One life after another, each with content that was never there before; says so after each."""
    trees = DirTrees(store)
    turn = 0
    while True:
        turn += 1
        data = os.urandom(300_000)
        key = Digest.of(data[:100])
        with store.lease("pull") as lease:
            store.put(blob(data), data, lease=lease)
            with trees.stage(key, lease=lease) as staging:
                for number in range(turn % 30):
                    write(staging, str(number), data[: number * 1000])
                staging.commit(size=1)
            store.images.put(ImageRecord(f"r.test/{turn % 5}:v1", "", blob(data), tree=key, content=True))
        live(store)
        announce(str(turn))
        sys.stdout.flush()


def live_carelessly(store: DirStore) -> None:
    """As an author would who never lost power: sqlite syncs its own file, nothing else is synced."""
    with mock.patch("os.fsync"), mock.patch("unlade.tree.dirtrees.sync_tree"):
        live_forever(store)


def announce(name: str) -> None:
    print(name)


def main() -> None:
    path, mode, *trace = sys.argv[1:]
    if trace:
        failpoints.reach = announce
    with DirStore(path) as store:
        MODES[mode](store)


MODES = {"live": live, "rot": rot, "forever": live_forever, "careless": live_carelessly}

if __name__ == "__main__":
    main()

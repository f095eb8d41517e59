"""Any life of a store: pulls, mounts, leases, removals, collections and deaths, in any order (V6, R4).

A model says what must be there. Nothing that a record, lease or mount of the living needs is ever lost, and
nothing else survives a collection. 1,000 steps here, 100,000 with UNLADE_FULL=1.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.conformance.content_store import blob, image
from tests.unit.store.crash_scenario import write
from unlade.model import Digest, mediatypes
from unlade.store import DirStore, ImageRecord, collect, remove_image
from unlade.store.gc import garbage
from unlade.store.leases import DirLease
from unlade.tree import DirTrees, fsck

FULL = bool(os.environ.get("UNLADE_FULL"))
HANDLERS = ["", "kata"]
# Images that share layers, as images do: number -> its layers.
IMAGES = {0: (b"base", b"app"), 1: (b"base", b"other"), 2: (b"base",), 3: (b"lonely", b"app")}
KEYS = {number: Digest.of(b"tree %d" % number) for number in IMAGES}


def layer_key(layer: bytes) -> Digest:
    return Digest.of(b"layer tree " + layer)


def manifest_of(number: int) -> bytes:
    return image(*map(blob, IMAGES[number]), config=blob(b"config %d" % number))


def blobs_of(number: int) -> set[str]:
    every = (manifest_of(number), b"config %d" % number, *IMAGES[number])
    return {f"b:{Digest.of(data)}" for data in every}


def trees_of(number: int) -> set[str]:
    return {f"t:{KEYS[number]}", *(f"t:{layer_key(layer)}" for layer in IMAGES[number])}


class Process:
    """One process that uses the store, as far as the store can tell."""

    def __init__(self, path: Path) -> None:
        self.store = DirStore(path)
        self.leases: list[tuple[DirLease, set[str]]] = []

    def die(self) -> None:
        """What the kernel does: locks are released, nothing else happens."""
        self.store.leases.owner.close()
        self.store.database.close()


class Life(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="unlade-life-")) / "store"
        self.processes = [Process(self.path), Process(self.path)]
        self.records: dict[tuple[int, str], set[str]] = {}
        self.mounts: dict[bytes, set[str]] = {}

    def teardown(self) -> None:
        for process in self.processes:
            process.die()
        shutil.rmtree(self.path.parent)

    def needed(self) -> set[str]:
        held = [names for process in self.processes for _, names in process.leases]
        return set().union(*self.records.values(), *self.mounts.values(), *held)

    def allowed(self) -> set[str]:
        """A record keeps its manifest, and so what of its blobs happens to be there."""
        return set().union(*(blobs_of(number) for number, _ in self.records))

    @rule(
        who=st.integers(0, 1),
        number=st.sampled_from(sorted(IMAGES)),
        handler=st.sampled_from(HANDLERS),
        blobs=st.booleans(),
        keep=st.booleans(),
    )
    def pull(self, who: int, number: int, handler: str, blobs: bool, keep: bool) -> None:
        process = self.processes[who]
        store, trees = process.store, DirTrees(process.store)
        lease = store.leases.open("pull", ttl=60)
        raw = manifest_of(number)
        manifest = blob(raw, mediatypes.OCI_MANIFEST)
        names: set[str] = set()
        if blobs:
            for data in (b"config %d" % number, *IMAGES[number]):
                store.put(blob(data), data, lease=lease)
            store.put(manifest, raw, lease=lease)
            names |= blobs_of(number)
        else:
            for layer in IMAGES[number]:
                with trees.stage(layer_key(layer), lease=lease) as staging:
                    if staging.existing is None:
                        write(staging, "file", layer)
                        staging.commit(size=len(layer))
            with trees.stage(KEYS[number], lease=lease) as staging:
                staging.commit(size=9, layers=[layer_key(layer) for layer in IMAGES[number]])
            names |= trees_of(number)
        tree = None if blobs else KEYS[number]
        store.images.put(ImageRecord(str(number), handler, manifest, tree=tree, content=blobs))
        # The same manifest joins what the record had.
        self.records[number, handler] = self.records.get((number, handler), set()) | names
        if keep:
            process.leases.append((lease, names))
        else:
            lease.release()

    @precondition(lambda self: any(process.leases for process in self.processes))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([one for one in self.processes if one.leases]))
        lease, _ = process.leases.pop(data.draw(st.integers(0, len(process.leases) - 1)))
        lease.release()

    @precondition(lambda self: any(process.leases for process in self.processes))
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([one for one in self.processes if one.leases]))
        lease, _ = process.leases.pop(data.draw(st.integers(0, len(process.leases) - 1)))
        lease.renew(-1)

    @rule(who=st.integers(0, 1), point=st.sampled_from([b"/mnt/a", b"/mnt/b"]), data=st.data())
    def mount(self, who: int, point: bytes, data: st.DataObject) -> None:
        there = [number for (number, _), names in self.records.items() if f"t:{KEYS[number]}" in names]
        if not there or point in self.mounts:
            return
        number = data.draw(st.sampled_from(sorted(there)))
        with self.processes[who].store.mounts.mounting(point, KEYS[number]):
            pass
        self.mounts[point] = trees_of(number)

    @precondition(lambda self: self.mounts)
    @rule(who=st.integers(0, 1), data=st.data(), tell=st.booleans())
    def unmount(self, who: int, data: st.DataObject, tell: bool) -> None:
        """With or without telling the store: the mount table tells it in the end."""
        point = data.draw(st.sampled_from(sorted(self.mounts)))
        if tell:
            self.processes[who].store.mounts.remove(point)
        del self.mounts[point]

    @precondition(lambda self: self.records)
    @rule(who=st.integers(0, 1), data=st.data(), all_handlers=st.booleans())
    def rmi(self, who: int, data: st.DataObject, all_handlers: bool) -> None:
        number, handler = data.draw(st.sampled_from(sorted(self.records)))
        remove_image(self.processes[who].store, str(number), None if all_handlers else handler)
        for key in [key for key in self.records if key[0] == number and (all_handlers or key[1] == handler)]:
            del self.records[key]

    @rule(who=st.integers(0, 1))
    def gc(self, who: int) -> None:
        store = self.processes[who].store
        collect(store, mounted=list(self.mounts))
        with store.database.read() as connection:
            left = {row[0] for row in connection.execute("SELECT name FROM objects")}
        assert self.needed() <= left <= self.needed() | self.allowed()
        assert garbage(store) == []

    @rule(who=st.integers(0, 1))
    def crash(self, who: int) -> None:
        self.processes[who].die()
        self.processes[who] = Process(self.path)

    @invariant()
    def nothing_needed_is_lost(self) -> None:
        store = self.processes[0].store
        with store.database.read() as connection:
            there = {row[0] for row in connection.execute("SELECT name FROM objects")}
        assert self.needed() <= there
        for name in self.needed():
            digest = Digest.parse(name[2:])
            if name.startswith("b:"):
                assert store.layout.blob(digest).exists()
            elif digest not in KEYS.values():
                assert (store.layout.tree(digest) / "root" / "file").exists()

    @rule()
    def check(self) -> None:
        assert fsck(self.processes[1].store) == []


# In parts, because a single test may take ten minutes at most.
@pytest.mark.parametrize("part", range(20 if FULL else 1))
def test_any_life(part: int) -> None:
    @seed(part)
    class Seeded(Life):
        pass

    limits = settings(
        max_examples=100 if FULL else 20,
        stateful_step_count=50,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Seeded, settings=limits)

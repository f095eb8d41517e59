"""Leases end when they are released, when their time is over, or with their process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.content_store import blob
from unlade.model import Digest
from unlade.store import DirStore, LeaseEnded, collect

HELD = Digest.of(b"held")

HOLDER = """
import sys, time
from unlade.model import Descriptor, Digest
from unlade.store import DirStore
store = DirStore(sys.argv[1])
with store.lease("holder") as lease:
    store.put(Descriptor(media_type="a/b", digest=Digest.of(b"held"), size=4), b"held", lease=lease)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirStore]:
    with DirStore(tmp_path / "store") as store:
        yield store


def test_a_killed_process_holds_nothing(store: DirStore) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store.path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        collect(store)
        assert store.stat(HELD), "a living process holds it"
        holder.send_signal(signal.SIGKILL)
    report = collect(store)
    assert report.leases == 1
    assert store.stat(HELD) is None
    assert os.listdir(store.layout.owners) == [store.leases.owner.name]


def test_a_kept_lease_outlives_its_process(store: DirStore) -> None:
    with DirStore(store.path) as other:
        lease = other.leases.keep("node/volume-1", "a volume", ttl=60)
        other.put(blob(b"held"), b"held", lease=lease)
    collect(store)
    assert store.stat(HELD)
    assert [(lease.id, lease.owner) for lease in store.leases.all()] == [("node/volume-1", "")]
    store.leases.keep("node/volume-1", "a volume", ttl=-1)
    collect(store)
    assert store.stat(HELD) is None


def test_nothing_is_held_by_a_lease_that_ended(store: DirStore) -> None:
    store.put(blob(b"held"), b"held")
    with store.lease("short", ttl=-1) as lease:
        collect(store)
        store.put(blob(b"held"), b"held")
        with pytest.raises(LeaseEnded):
            lease.hold(HELD)
        with pytest.raises(LeaseEnded):
            store.put(blob(b"other"), b"other", lease=lease)
    with store.database.read() as connection:
        assert connection.execute("SELECT count(*) FROM edges").fetchone() == (0,)


def test_release_is_idempotent(store: DirStore) -> None:
    with store.lease("one") as lease:
        lease.release()
        lease.release()
    assert store.leases.all() == []

"""A cached private object is not handed to a credential that cannot pull it (V5)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unlade.model import Digest
from unlade.store import DirStore, collect

DIGEST = Digest.of(b"private")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirStore]:
    with DirStore(tmp_path / "store") as store:
        yield store


def test_a_grant_is_for_one_repository_digest_and_credential(store: DirStore) -> None:
    store.grants.remember("r.test/a", DIGEST, "alice", ttl=60)
    assert store.grants.allows("r.test/a", DIGEST, "alice")
    assert not store.grants.allows("r.test/a", DIGEST, "bob")
    assert not store.grants.allows("r.test/b", DIGEST, "alice")
    assert not store.grants.allows("r.test/a", Digest.of(b"other"), "alice")


def test_a_grant_ends(store: DirStore) -> None:
    store.grants.remember("r.test/a", DIGEST, "alice", ttl=-1)
    assert not store.grants.allows("r.test/a", DIGEST, "alice")
    collect(store)
    with store.database.read() as connection:
        assert connection.execute("SELECT count(*) FROM grants").fetchone() == (0,)


def test_a_grant_can_be_renewed_and_revoked(store: DirStore) -> None:
    store.grants.remember("r.test/a", DIGEST, "alice", ttl=-1)
    store.grants.remember("r.test/a", DIGEST, "alice", ttl=60)
    store.grants.remember("r.test/a", DIGEST, "bob", ttl=60)
    store.grants.revoke("r.test/a", fingerprint="alice")
    assert not store.grants.allows("r.test/a", DIGEST, "alice")
    assert store.grants.allows("r.test/a", DIGEST, "bob")
    store.grants.revoke("r.test/a")
    assert not store.grants.allows("r.test/a", DIGEST, "bob")


def test_other_processes_see_it(store: DirStore) -> None:
    store.grants.remember("r.test/a", DIGEST, "alice", ttl=60)
    with DirStore(store.path) as other:
        assert other.grants.allows("r.test/a", DIGEST, "alice")

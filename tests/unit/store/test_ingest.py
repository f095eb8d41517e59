"""Ingest beyond the conformance suite: what crashes and full disks leave, pipelines, moves into trees."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.content_store import blob, image
from unlade.errors import IntegrityError, StoreError
from unlade.kernel import failpoints
from unlade.model import Digest, mediatypes
from unlade.store import DirStore, NoSpace, collect
from unlade.store.ingest import children_of
from unlade.tree import DirTrees

DATA = b"hello"
DIGEST = Digest.of(DATA)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirStore]:
    with DirStore(tmp_path / "store") as store:
        yield store


def test_a_blob_without_a_record_is_hashed_again(store: DirStore) -> None:
    """Renamed, and then the power went before the record."""
    store.layout.blob(DIGEST).write_bytes(DATA)
    assert store.stat(DIGEST) is None
    with store.ingest(blob(DATA)) as ingest:
        assert (ingest.present, ingest.offset) == (False, 5)
        ingest.commit()
    assert store.stat(DIGEST)


def test_a_blob_without_a_record_is_not_believed(store: DirStore) -> None:
    store.layout.blob(DIGEST).write_bytes(b"jello")
    with pytest.raises(IntegrityError), store.ingest(blob(DATA)) as ingest:
        ingest.commit()
    assert not store.layout.blob(DIGEST).exists()
    store.put(blob(DATA), DATA)
    assert store.stat(DIGEST)


def test_a_partial_that_is_too_long_starts_over(store: DirStore) -> None:
    store.layout.partial(DIGEST).write_bytes(b"hello, world")
    with store.ingest(blob(DATA)) as ingest:
        assert ingest.offset == 0


def test_an_empty_partial_leaves_no_file(store: DirStore) -> None:
    with store.ingest(blob(DATA)):
        pass
    assert os.listdir(store.layout.ingest) == []


def test_a_pipeline_writes_and_hashes_apart(store: DirStore) -> None:
    with store.ingest(blob(DATA)) as ingest:
        ingest.write(b"he")
        os.write(ingest.fd, b"llo")
        ingest.hasher.update(b"llo")
        ingest.commit()
    with store.open(DIGEST) as stream:
        assert stream.read() == DATA


def test_a_pipeline_that_hashed_other_bytes_is_refused(store: DirStore) -> None:
    with store.ingest(blob(DATA)) as ingest:
        os.write(ingest.fd, DATA)
        ingest.hasher.update(b"jello")
        with pytest.raises(IntegrityError):
            ingest.commit()
    assert store.stat(DIGEST) is None


def test_verified_bytes_move_into_a_tree_without_a_second_write(store: DirStore) -> None:
    with store.ingest(blob(DATA)) as ingest:
        ingest.write(b"hel")
    with DirTrees(store).stage(Digest.of(b"tree")) as staging:
        with store.ingest(blob(DATA)) as ingest:
            inode = os.fstat(ingest.fd).st_ino
            ingest.write(DATA[ingest.offset :])
            ingest.move_into(staging.dirfd, b"file", mode=0o640)
        placed = os.stat(staging.path / "file")
        assert (placed.st_ino, placed.st_mode & 0o7777, placed.st_nlink) == (inode, 0o640, 1)
    assert store.stat(DIGEST) is None
    assert os.listdir(store.layout.ingest) == []


def test_unverified_bytes_do_not_move(store: DirStore) -> None:
    with DirTrees(store).stage(Digest.of(b"tree")) as staging:
        with store.ingest(blob(DATA)) as ingest, pytest.raises(IntegrityError):
            ingest.write(b"jello")
            ingest.move_into(staging.dirfd, b"file", mode=0o644)
        (staging.path / "taken").touch()
        with store.ingest(blob(DATA)) as ingest, pytest.raises(StoreError):
            ingest.write(DATA)
            ingest.move_into(staging.dirfd, b"taken", mode=0o644)
        assert os.listdir(staging.dirfd) == ["taken"]
        with store.ingest(blob(DATA)) as ingest:
            assert ingest.offset == 5, "what was verified is kept for the next try"


@pytest.mark.parametrize("failure", ["ENOSPC", "EIO", "EMFILE"])
@pytest.mark.parametrize("point", ["verified", "synced", "renamed", "directory-synced"])
def test_a_disk_that_fails_is_said_so_and_nothing_is_lost(
    store: DirStore, monkeypatch: pytest.MonkeyPatch, failure: str, point: str
) -> None:
    armed = failpoints._Armed(f"store.ingest.{point}={failure}")
    monkeypatch.setattr(failpoints, "_armed", armed)
    with pytest.raises(StoreError) as caught:
        store.put(blob(DATA), DATA)
    assert isinstance(caught.value, NoSpace) == (failure == "ENOSPC")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == getattr(errno, failure)
    assert caught.value.retryable == (failure != "EIO")
    assert store.stat(DIGEST) is None
    store.put(blob(DATA), DATA)
    with store.open(DIGEST) as stream:
        assert stream.read() == DATA


def test_a_database_that_fails_leaves_no_record(store: DirStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_armed", failpoints._Armed("store.database.before-commit=ENOSPC"))
    with pytest.raises(NoSpace):
        store.put(blob(DATA), DATA)
    assert store.stat(DIGEST) is None
    collect(store)
    assert not store.layout.blob(DIGEST).exists()


def test_children_are_found_in_manifests_and_nowhere_else() -> None:
    raw = image(blob(b"layer"), config=blob(b"{}"))
    assert children_of(raw, mediatypes.OCI_MANIFEST) == [Digest.of(b"{}"), Digest.of(b"layer")]
    assert children_of(b"not json", mediatypes.OCI_MANIFEST) == []


def test_a_record_without_its_file_says_what_to_do(store: DirStore) -> None:
    store.put(blob(DATA), DATA)
    store.layout.blob(DIGEST).unlink()
    with pytest.raises(StoreError) as caught:
        store.open(DIGEST)
    assert "fsck --repair" in caught.value.next_step

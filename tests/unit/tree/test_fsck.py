"""Rot is found wherever it sits, taken out of use, and what is pulled again is whole."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.content_store import blob, image
from tests.unit.store.crash_scenario import record, write
from unlade.model import Digest, mediatypes
from unlade.store import DirStore, ImageRecord, collect
from unlade.tree import DirTrees, fsck

FULL = bool(os.environ.get("UNLADE_FULL"))
LOW, HIGH, STACK = Digest.of(b"low"), Digest.of(b"high"), Digest.of(b"stack")
REF = "r.test/app:v1"
LAYER = random.Random(1).randbytes(50_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirStore]:
    with DirStore(tmp_path / "store") as store:
        pull(store)
        assert fsck(store) == []
        yield store


def pull(store: DirStore) -> None:
    """An image with blobs, two layer trees and their stack: all that is missing is brought."""
    trees = DirTrees(store)
    raw = image(blob(LAYER), config=blob(b"{}"))
    manifest = blob(raw, mediatypes.OCI_MANIFEST)
    with store.lease("pull") as lease:
        for descriptor, data in ((blob(b"{}"), b"{}"), (blob(LAYER), LAYER), (manifest, raw)):
            store.put(descriptor, data, lease=lease)
        for key in (LOW, HIGH):
            with trees.stage(key, lease=lease) as staging:
                if staging.existing is None:
                    (staging.path / "dir").mkdir()
                    write(staging, "dir/file", b"content of " + key.hex.encode())
                    write(staging, "empty", b"")
                    (staging.path / "link").symlink_to("dir/file")
                    info = os.lstat(staging.path / "link")
                    staging.files_out.write(
                        b'["l","link",511,%d,%d,%d,0,0,"dir/file"]\n'
                        % (info.st_uid, info.st_gid, info.st_mtime_ns)
                    )
                    staging.commit(size=75)
        with trees.stage(STACK, lease=lease) as staging:
            staging.commit(size=150, layers=[LOW, HIGH])
        store.images.put(ImageRecord(REF, "", manifest, tree=STACK, content=True))


def tree_file(store: DirStore, key: Digest, name: str = "dir/file") -> Path:
    return store.layout.tree(key) / "root" / name


def kinds(store: DirStore, *, repair: bool = False) -> set[str]:
    return {problem.kind for problem in fsck(store, repair=repair)}


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    info = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_flipped_bits_are_found_quarantined_and_brought_again(store: DirStore) -> None:
    """1,000 bits in the full run, 40 otherwise: in blobs, in files of trees, in file lists."""
    chance = random.Random(3)
    targets = [store.layout.blob(info.digest) for info in store.walk()]
    targets += [tree_file(store, key) for key in (LOW, HIGH)]
    targets += [store.layout.tree(key) / "files" for key in (LOW, HIGH)]
    for _ in range(1000 if FULL else 40):
        path = chance.choice(targets)
        flip(path, chance.randrange(path.stat().st_size * 8))
        found = fsck(store, repair=True)
        assert found, f"a flipped bit in {path} was not found"
        assert all(problem.repaired for problem in found)
        assert fsck(store) == []
        assert os.listdir(store.layout.quarantine)
        pull(store)
        assert fsck(store) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.chmod(0o600),
        lambda path: os.utime(path, (1, 1)),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
        lambda path: path.with_name("extra").touch(),
        lambda path: path.parent.with_name("link").unlink(),
        lambda path: (path.parent.with_name("link").unlink(), path.parent.with_name("link").symlink_to("x")),
    ],
)
def test_whatever_is_wrong_in_a_tree_is_found(store: DirStore, spoil: Callable[[Path], object]) -> None:
    spoil(tree_file(store, LOW))
    problems = fsck(store)
    assert [(problem.kind, problem.subject) for problem in problems] == [("tree-damaged", str(LOW))]
    assert not problems[0].repaired
    assert DirTrees(store).find(LOW), "a check alone changes nothing"


def test_a_damaged_layer_takes_its_stack_and_the_record_keeps_its_blobs(store: DirStore) -> None:
    flip(tree_file(store, LOW), 5)
    problems = fsck(store, repair=True)
    assert [problem.kind for problem in problems] == ["tree-damaged", "tree-damaged", "record-incomplete"]
    trees = DirTrees(store)
    assert trees.find(LOW) is None and trees.find(STACK) is None
    assert trees.find(HIGH)
    left = store.images.get(REF)
    assert left and left.tree is None and left.content
    pull(store)
    assert fsck(store) == []


def test_a_damaged_blob_leaves_the_record_its_tree(store: DirStore) -> None:
    flip(store.layout.blob(Digest.of(LAYER)), 5)
    assert kinds(store) == {"blob-damaged"}
    assert kinds(store, repair=True) == {"blob-damaged", "record-incomplete", "index-stale"}
    left = store.images.get(REF)
    assert left and left.tree == STACK and not left.content
    collect(store)
    assert DirTrees(store).find(STACK)


def test_a_record_with_nothing_left_goes(store: DirStore) -> None:
    store.layout.blob(Digest.of(LAYER)).unlink()
    tree_file(store, LOW).unlink()
    assert kinds(store, repair=True) == {"blob-missing", "tree-damaged", "record-incomplete", "index-stale"}
    assert store.images.get(REF) is None
    assert fsck(store) == []


def test_index_json_and_marker_are_checked(store: DirStore) -> None:
    store.layout.index.write_text("{}")
    (store.path / "oci-layout").write_text("{}")
    assert kinds(store) == {"index-stale", "layout-marker"}
    assert kinds(store, repair=True) == {"index-stale", "layout-marker"}
    assert fsck(store) == []


def test_a_missing_tree_directory_is_found(store: DirStore) -> None:
    os.rename(store.layout.tree(LOW), store.layout.trash / "gone")
    assert kinds(store, repair=True) == {"tree-damaged", "record-incomplete"}
    assert fsck(store) == []


def test_names_of_one_file_are_all_checked(store: DirStore) -> None:
    key = Digest.of(b"links")
    with DirTrees(store).stage(key) as staging:
        write(staging, "a", b"content")
        os.link(staging.path / "a", staging.path / "b")
        record(staging, "b", b"content")
        staging.commit(size=7)
    assert fsck(store) == []
    (store.layout.tree(key) / "root" / "b").unlink()
    assert kinds(store) == {"tree-damaged"}

"""Nothing mounted is ever collected, and what is no longer mounted is (V6)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unlade.kernel import failpoints
from unlade.model import Digest
from unlade.store import DirStore, NotInStore, collect
from unlade.tree import DirTrees

TREE, OTHER = Digest.of(b"tree"), Digest.of(b"other")
POINT = b"/mnt/a \xff\n"


MAKER = """
import sys
from unlade.model import Digest
from unlade.store import DirStore
with DirStore(sys.argv[1]) as store, store.mounts.mounting(b"/mnt", Digest.parse(sys.argv[2])):
    pass
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirStore]:
    with DirStore(tmp_path / "store") as store:
        for key in (TREE, OTHER):
            with DirTrees(store).stage(key) as staging:
                staging.commit(size=1)
        yield store


def test_a_mounted_tree_stays(store: DirStore) -> None:
    with store.mounts.mounting(POINT, TREE):
        assert [(record.mountpoint, record.mounting) for record in store.mounts.all()] == [(POINT, True)]
    assert [(record.mountpoint, record.mounting) for record in store.mounts.all()] == [(POINT, False)]
    collect(store, mounted=[POINT])
    assert DirTrees(store).find(TREE)
    assert store.mounts.remove(POINT)
    assert not store.mounts.remove(POINT)
    collect(store, mounted=[])
    assert DirTrees(store).find(TREE) is None


def test_a_mount_that_failed_leaves_no_record(store: DirStore) -> None:
    with pytest.raises(ValueError), store.mounts.mounting(POINT, TREE):
        raise ValueError
    assert store.mounts.all() == []


def test_a_missing_tree_is_not_mounted(store: DirStore) -> None:
    with pytest.raises(NotInStore), store.mounts.mounting(POINT, Digest.of(b"missing")):
        pass
    assert store.mounts.all() == []


def test_the_mount_table_is_believed(store: DirStore) -> None:
    with store.mounts.mounting(POINT, TREE):
        pass
    report = collect(store, mounted=[])
    assert report.mounts == 1
    assert DirTrees(store).find(TREE) is None


def test_without_a_mount_table_every_record_counts(store: DirStore) -> None:
    with store.mounts.mounting(POINT, TREE):
        pass
    collect(store)
    assert DirTrees(store).find(TREE)


def test_a_mount_in_the_making_is_not_in_the_table_yet(store: DirStore) -> None:
    with store.mounts.mounting(POINT, TREE):
        assert store.mounts.reconcile([]) == []
        with DirStore(store.path) as other:
            assert other.mounts.reconcile([]) == []
            collect(other, mounted=[])
    assert DirTrees(store).find(TREE)


@pytest.mark.parametrize("point", ["store.mount.announced", "store.mount.mounted"])
def test_a_mount_that_its_maker_did_not_live_to_see(store: DirStore, point: str) -> None:
    maker = subprocess.run(
        [sys.executable, "-c", MAKER, str(store.path), str(TREE)],
        env={**os.environ, failpoints.VARIABLE: point},
        check=False,
    )
    assert maker.returncode == -signal.SIGKILL
    assert [record.mounting for record in store.mounts.all()] == [True]
    assert store.mounts.reconcile([b"/mnt"]) == [], "it was mounted before its maker died"
    assert [record.mountpoint for record in store.mounts.reconcile([])] == [b"/mnt"]


def test_other_namespaces_are_not_judged_but_other_boots_are(store: DirStore) -> None:
    for point, tree in ((POINT, TREE), (b"/mnt/b", OTHER)):
        with store.mounts.mounting(point, tree):
            pass
    with store.database.write() as connection:
        connection.execute("UPDATE mounts SET namespace = 'mnt:[1]' WHERE tree = ?", (str(TREE),))
        connection.execute("UPDATE mounts SET boot = 'earlier' WHERE tree = ?", (str(OTHER),))
    assert [record.tree for record in store.mounts.reconcile([])] == [OTHER]


def test_two_trees_on_one_mount_point(store: DirStore) -> None:
    for tree in (TREE, OTHER):
        with store.mounts.mounting(POINT, tree):
            pass
    collect(store, mounted=[POINT, b"/", POINT])
    assert DirTrees(store).find(TREE) and DirTrees(store).find(OTHER)
    store.mounts.remove(POINT)
    assert [record.tree for record in store.mounts.all()] == [TREE]


def test_a_mount_point_that_was_used_again_counts_for_the_newest(store: DirStore) -> None:
    """Unmounted behind our back, then mounted with something else."""
    for tree in (TREE, OTHER):
        with store.mounts.mounting(POINT, tree):
            pass
    assert [record.tree for record in store.mounts.reconcile([POINT])] == [TREE]
    collect(store, mounted=[POINT])
    assert DirTrees(store).find(TREE) is None
    assert DirTrees(store).find(OTHER)

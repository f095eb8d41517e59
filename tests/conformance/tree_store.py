"""The suite that every TreeStore passes. Subclass it and give it a `trees` fixture."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from unlade.errors import DeadlineExceeded, StoreError
from unlade.model import Deadline, DiffID, Digest
from unlade.store import Lease
from unlade.tree import Staging, Tree, TreeStore
from unlade.unpack import Unpacked
from unlade.unpack.filelist import FileListWriter

KEY = Digest.of(b"tree")
LOW, HIGH = Digest.of(b"low"), Digest.of(b"high")


def fill(staging: Staging, **files: str) -> None:
    """Write files into a staging."""
    for name, text in files.items():
        (staging.path / name).write_text(text)


class TreeStoreSuite:
    """What is promised by unlade.tree.trees, one test per promise."""

    def reopen(self, trees: TreeStore) -> TreeStore:
        """The same trees as another process would open them."""
        raise NotImplementedError

    def collect(self, trees: TreeStore) -> None:
        """Run a garbage collection."""
        raise NotImplementedError

    def lease(self, trees: TreeStore) -> AbstractContextManager[Lease]:
        """A lease in the store that holds the trees."""
        raise NotImplementedError

    def leftovers(self, trees: TreeStore) -> list[str]:
        """What is left on disk of stagings that were given up."""
        raise NotImplementedError

    def read(self, tree: Tree, name: str) -> str:
        for layer in reversed(tree.layers):
            if (layer / name).exists():
                return (layer / name).read_text()
        raise FileNotFoundError(name)

    def make(self, trees: TreeStore, key: Digest, lease: Lease | None = None, **files: str) -> Tree:
        with trees.stage(key, lease=lease) as staging:
            fill(staging, **files)
            return staging.commit(size=sum(map(len, files.values())), entries=len(files))

    def test_a_committed_tree_is_found(self, trees: TreeStore) -> None:
        assert trees.find(KEY) is None
        made = self.make(trees, KEY, a="one", b="two")
        found = trees.find(KEY)
        assert found == made
        assert (made.key, made.size, made.entries) == (KEY, 6, 2)
        assert made.layers == (made.path,)
        assert self.read(made, "a") == "one"
        assert self.reopen(trees).find(KEY) == made

    def test_a_staging_is_private(self, trees: TreeStore) -> None:
        with trees.stage(KEY) as staging:
            fill(staging, a="one")
            assert trees.find(KEY) is None

    def test_a_staging_that_is_left_leaves_nothing(self, trees: TreeStore) -> None:
        with trees.stage(KEY) as staging:
            fill(staging, a="one")
        with pytest.raises(ConnectionError), trees.stage(KEY) as staging:
            fill(staging, a="one")
            raise ConnectionError
        assert trees.find(KEY) is None
        assert self.leftovers(trees) == []

    def test_a_staging_starts_empty(self, trees: TreeStore) -> None:
        with trees.stage(KEY) as staging:
            fill(staging, a="one")
        with trees.stage(KEY) as staging:
            assert os.listdir(staging.dirfd) == []

    def test_the_directory_is_the_descriptor(self, trees: TreeStore) -> None:
        with trees.stage(KEY) as staging:
            assert os.path.samestat(os.fstat(staging.dirfd), os.stat(staging.path))

    def test_the_second_waits_and_finds(self, trees: TreeStore) -> None:
        other = self.reopen(trees)
        started = threading.Event()

        def second() -> str:
            started.set()
            with other.stage(KEY) as staging:
                assert staging.existing is not None
                return self.read(staging.existing, "a")

        with ThreadPoolExecutor(1) as pool:
            with trees.stage(KEY) as staging:
                future = pool.submit(second)
                started.wait()
                fill(staging, a="one")
                staging.commit(size=3)
            assert future.result(timeout=10) == "one"

    def test_the_second_takes_over_when_the_first_gives_up(self, trees: TreeStore) -> None:
        other = self.reopen(trees)
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(ConnectionError), trees.stage(KEY) as staging:
                future = pool.submit(self.make, other, KEY, None, a="two")
                fill(staging, a="one")
                raise ConnectionError
            assert self.read(future.result(timeout=10), "a") == "two"

    def test_different_keys_do_not_wait(self, trees: TreeStore) -> None:
        with trees.stage(LOW), trees.stage(HIGH, deadline=Deadline.after(5)) as staging:
            assert staging.existing is None

    def test_waiting_ends_with_the_deadline(self, trees: TreeStore) -> None:
        other = self.reopen(trees)
        with (
            trees.stage(KEY),
            pytest.raises(DeadlineExceeded),
            other.stage(KEY, deadline=Deadline.after(0.05)),
        ):
            pass

    def test_many_threads_make_it_once(self, trees: TreeStore) -> None:
        made = []

        def deliver(number: int) -> None:
            with trees.stage(KEY) as staging:
                if staging.existing is None:
                    fill(staging, a="one")
                    staging.commit(size=3)
                    made.append(number)

        with ThreadPoolExecutor(20) as pool:
            list(pool.map(deliver, range(100)))
        assert len(made) == 1

    def test_parts_are_merged_in_order(self, trees: TreeStore) -> None:
        told = Unpacked(0, 0, DiffID(Digest.of(b"")), implicit_dirs=(b"",))
        with trees.stage(KEY) as staging:
            for number, names in enumerate((("a", "b"), ("b", "c"))):
                scratch = staging.scratch()
                for name in names:
                    (scratch.path / name).write_text(str(number))
                    writer = FileListWriter(scratch.files_out)
                    writer.add("f", name, 0o644, 0, 0, 0, 1, 0)
                    writer.flush()
                staging.merge(scratch, told)
            tree = staging.commit(size=3, entries=3)
        assert tree.path is not None
        assert sorted(os.listdir(tree.path)) == ["a", "b", "c"]
        assert [self.read(tree, name) for name in "abc"] == ["0", "1", "1"]
        assert self.leftovers(trees) == []

    def test_delete(self, trees: TreeStore) -> None:
        tree = self.make(trees, KEY, a="one")
        assert trees.delete(KEY) is True
        assert trees.find(KEY) is None
        assert not any(layer.exists() for layer in tree.layers)
        assert trees.delete(KEY) is False
        assert self.read(self.make(trees, KEY, a="two"), "a") == "two"

    def test_what_is_held_is_not_deleted(self, trees: TreeStore) -> None:
        self.make(trees, KEY, a="one")
        with self.lease(trees) as lease:
            assert trees.find(KEY, lease=lease)
            with pytest.raises(StoreError):
                trees.delete(KEY)
        assert trees.delete(KEY)

    def test_collection_takes_what_nobody_holds(self, trees: TreeStore) -> None:
        with self.lease(trees) as lease:
            self.make(trees, LOW, lease, a="one")
            self.make(trees, HIGH, a="one")
            self.collect(trees)
            assert trees.find(LOW) and not trees.find(HIGH)
            assert trees.find(HIGH, lease=lease) is None

    def test_trees_that_nobody_may_write_to_are_deleted(self, trees: TreeStore) -> None:
        with trees.stage(KEY) as staging:
            _closed_directories(staging.path)
            staging.commit(size=3)
        assert trees.delete(KEY)
        assert self.leftovers(trees) == []

    def test_deleting_follows_no_link(self, trees: TreeStore, tmp_path: Path) -> None:
        sentinel = tmp_path / "sentinel"
        sentinel.mkdir()
        (sentinel / "file").write_text("safe")
        with trees.stage(KEY) as staging:
            (staging.path / "link").symlink_to(sentinel)
            (staging.path / "file").symlink_to(sentinel / "file")
            staging.commit(size=0)
        trees.delete(KEY)
        assert (sentinel / "file").read_text() == "safe"


def _closed_directories(root: Path) -> None:
    for name, mode in (("none", 0), ("read", 0o555), ("search", 0o111)):
        directory = root / name
        (directory / "below").mkdir(parents=True)
        (directory / "below" / "file").write_text("one")
        (directory / "below").chmod(mode)
        directory.chmod(mode)

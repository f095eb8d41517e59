"""The suite that every TreeStore passes. Subclass it and give it a `trees` fixture."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from unlade.errors import DeadlineExceeded, StoreError
from unlade.model import Deadline, Digest
from unlade.store import Lease
from unlade.tree import Staging, Tree, TreeStore

KEY = Digest.of(b"tree")
LOW, HIGH, STACK = Digest.of(b"low"), Digest.of(b"high"), Digest.of(b"stack")


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

    def test_a_stack_shows_its_layers(self, trees: TreeStore) -> None:
        with self.lease(trees) as lease:
            low = self.make(trees, LOW, lease, a="low", b="low")
            high = self.make(trees, HIGH, lease, a="high")
            with trees.stage(STACK, lease=lease) as staging:
                stack = staging.commit(size=10, entries=3, layers=[LOW, HIGH])
        assert stack.path is None
        assert stack.layers == (low.path, high.path)
        assert (stack.size, stack.entries) == (10, 3)
        assert (self.read(stack, "a"), self.read(stack, "b")) == ("high", "low")
        assert trees.find(STACK) == stack

    def test_a_layer_that_occurs_twice_counts_once_at_the_top(self, trees: TreeStore) -> None:
        with self.lease(trees) as lease:
            low = self.make(trees, LOW, lease, a="low")
            high = self.make(trees, HIGH, lease, a="high")
            with trees.stage(STACK, lease=lease) as staging:
                stack = staging.commit(size=1, layers=[LOW, HIGH, LOW])
        assert stack.layers == (high.path, low.path)

    def test_a_stack_of_missing_layers_is_refused(self, trees: TreeStore) -> None:
        with trees.stage(STACK) as staging, pytest.raises(StoreError):
            staging.commit(size=1, layers=[LOW, HIGH])
        assert trees.find(STACK) is None

    def test_a_stack_keeps_its_layers(self, trees: TreeStore) -> None:
        with self.lease(trees) as lease:
            with self.lease(trees) as making:
                self.make(trees, LOW, making, a="low")
                self.make(trees, HIGH, making, a="high")
                with trees.stage(STACK, lease=lease) as staging:
                    staging.commit(size=1, layers=[LOW, HIGH])
            self.collect(trees)
            assert trees.find(LOW) and trees.find(HIGH) and trees.find(STACK)
        self.collect(trees)
        assert not (trees.find(LOW) or trees.find(HIGH) or trees.find(STACK))

    def test_layers_are_shared_between_stacks(self, trees: TreeStore) -> None:
        other = Digest.of(b"other stack")
        with self.lease(trees) as lease:
            with self.lease(trees) as making:
                self.make(trees, LOW, making, a="low")
                self.make(trees, HIGH, making, a="high")
                with trees.stage(STACK, lease=making) as staging:
                    staging.commit(size=1, layers=[LOW, HIGH])
                with trees.stage(other, lease=lease) as staging:
                    staging.commit(size=1, layers=[LOW])
            self.collect(trees)
            assert trees.find(STACK) is None and trees.find(HIGH) is None
            assert trees.find(other) and trees.find(LOW)

    def test_a_stack_root_looks_as_the_last_layer_with_a_root_says(self, trees: TreeStore) -> None:
        with self.lease(trees) as lease:
            with trees.stage(LOW, lease=lease) as staging:
                os.chmod(staging.path, 0o1777)
                staging.commit(size=0)
            with trees.stage(HIGH, lease=lease) as staging:
                staging.commit(size=0, has_root=False)
            with trees.stage(STACK, lease=lease) as staging:
                stack = staging.commit(size=0, layers=[LOW, HIGH])
        assert os.stat(stack.layers[-1]).st_mode & 0o7777 == 0o1777
        assert os.listdir(stack.layers[-1]) == []
        assert trees.find(STACK) == stack

    def test_commit_under_another_key(self, trees: TreeStore) -> None:
        with trees.stage(KEY) as staging:
            fill(staging, a="one")
            tree = staging.commit(size=3, key=HIGH)
        assert tree.key == HIGH
        assert trees.find(KEY) is None
        assert trees.find(HIGH) == tree

    def test_commit_under_a_key_that_exists_gives_that_tree(self, trees: TreeStore) -> None:
        first = self.make(trees, HIGH, a="one")
        with trees.stage(KEY) as staging:
            fill(staging, a="two")
            assert staging.commit(size=3, key=HIGH) == first
        assert self.read(first, "a") == "one"
        assert self.leftovers(trees) == []

    def test_a_detached_staging_lets_others_in(self, trees: TreeStore) -> None:
        """Two layers that wait for each other's tree: each lets go of its own key first."""
        with trees.stage(LOW) as low:
            fill(low, a="low")
            low.detach()
            with trees.stage(LOW, deadline=Deadline.after(5)) as again:
                assert again.existing is None
                fill(again, a="again")
                other = again.commit(size=1)
            fill(low, b="more")
            made = low.commit(size=2, key=HIGH)
        assert (self.read(made, "a"), self.read(made, "b")) == ("low", "more")
        assert self.read(other, "a") == "again"
        assert self.leftovers(trees) == []

    def test_two_detached_stagings_of_one_tree(self, trees: TreeStore) -> None:
        with trees.stage(LOW) as first:
            fill(first, a="first")
            first.detach()
            with trees.stage(LOW, deadline=Deadline.after(5)) as second:
                fill(second, a="second")
                second.detach()
                made = second.commit(size=1, key=HIGH)
            assert first.commit(size=1, key=HIGH) == made
        assert self.read(made, "a") == "second"
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

    def test_a_layer_of_a_stack_is_not_deleted(self, trees: TreeStore) -> None:
        self.make(trees, LOW, a="one")
        with trees.stage(STACK) as staging:
            staging.commit(size=1, layers=[LOW])
        with pytest.raises(StoreError):
            trees.delete(LOW)

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

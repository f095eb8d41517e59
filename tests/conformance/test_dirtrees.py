"""DirTrees is a TreeStore, and keeps stacks of layers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import pytest

from tests.conformance.tree_store import HIGH, KEY, LOW, TreeStoreSuite, fill
from unlade.errors import StoreError
from unlade.model import Deadline, Digest
from unlade.store import DirStore, Lease, collect
from unlade.tree import DirTrees, TreeStore

STACK = Digest.of(b"stack")


def store_of(trees: TreeStore) -> DirStore:
    return cast("DirTrees", trees).store


class TestDirTrees(TreeStoreSuite):
    @pytest.fixture
    def trees(self, tmp_path: Path) -> Iterator[DirTrees]:
        self.handles: list[DirStore] = []
        with DirStore(tmp_path / "store") as store:
            yield DirTrees(store)
        for handle in self.handles:
            handle.close()

    def reopen(self, trees: TreeStore) -> TreeStore:
        self.handles.append(DirStore(store_of(trees).path))
        return DirTrees(self.handles[-1])

    def collect(self, trees: TreeStore) -> None:
        collect(store_of(trees))

    def lease(self, trees: TreeStore) -> AbstractContextManager[Lease]:
        return store_of(trees).lease("test")

    def leftovers(self, trees: TreeStore) -> list[str]:
        layout = store_of(trees).layout
        return [name for place in (layout.staging, layout.trash, layout.locks) for name in os.listdir(place)]

    # What DirTrees has beyond the protocol: stacks of layer trees, made side by side.

    def test_a_stack_shows_its_layers(self, trees: DirTrees) -> None:
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

    def test_a_layer_that_occurs_twice_counts_once_at_the_top(self, trees: DirTrees) -> None:
        with self.lease(trees) as lease:
            low = self.make(trees, LOW, lease, a="low")
            high = self.make(trees, HIGH, lease, a="high")
            with trees.stage(STACK, lease=lease) as staging:
                stack = staging.commit(size=1, layers=[LOW, HIGH, LOW])
        assert stack.layers == (high.path, low.path)

    def test_a_stack_of_missing_layers_is_refused(self, trees: DirTrees) -> None:
        with trees.stage(STACK) as staging, pytest.raises(StoreError):
            staging.commit(size=1, layers=[LOW, HIGH])
        assert trees.find(STACK) is None

    def test_a_stack_keeps_its_layers(self, trees: DirTrees) -> None:
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

    def test_layers_are_shared_between_stacks(self, trees: DirTrees) -> None:
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

    def test_a_stack_root_looks_as_the_last_layer_with_a_root_says(self, trees: DirTrees) -> None:
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

    def test_commit_under_another_key(self, trees: DirTrees) -> None:
        with trees.stage(KEY) as staging:
            fill(staging, a="one")
            tree = staging.commit(size=3, key=HIGH)
        assert tree.key == HIGH
        assert trees.find(KEY) is None
        assert trees.find(HIGH) == tree

    def test_commit_under_a_key_that_exists_gives_that_tree(self, trees: DirTrees) -> None:
        first = self.make(trees, HIGH, a="one")
        with trees.stage(KEY) as staging:
            fill(staging, a="two")
            assert staging.commit(size=3, key=HIGH) == first
        assert self.read(first, "a") == "one"
        assert self.leftovers(trees) == []

    def test_a_detached_staging_lets_others_in(self, trees: DirTrees) -> None:
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

    def test_two_detached_stagings_of_one_tree(self, trees: DirTrees) -> None:
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

    def test_a_layer_of_a_stack_is_not_deleted(self, trees: DirTrees) -> None:
        self.make(trees, LOW, a="one")
        with trees.stage(STACK) as staging:
            staging.commit(size=1, layers=[LOW])
        with pytest.raises(StoreError):
            trees.delete(LOW)

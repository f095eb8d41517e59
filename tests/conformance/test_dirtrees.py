"""DirTrees is a TreeStore."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import cast

import pytest

from tests.conformance.tree_store import TreeStoreSuite
from unlade.store import DirStore, Lease, collect
from unlade.tree import DirTrees, TreeStore


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

"""containerd's content store and snapshots pass the suites that the directory backends pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import cast

import pytest

from tests.conformance.content_store import ContentStoreSuite
from tests.conformance.tree_store import TreeStoreSuite
from tests.rig.containerd.conftest import Connect
from tests.rig.containerd.daemon import Daemon
from unlade.containerd import ContainerdStore, ContainerdTrees, leases
from unlade.store import ContentStore, Lease
from unlade.tree import TreeStore

pytestmark = pytest.mark.root


class TestContainerdStore(ContentStoreSuite):
    @pytest.fixture
    def store(self, connect: Connect) -> ContainerdStore:
        self.connect = connect
        return ContainerdStore(connect())

    def reopen(self, store: ContentStore) -> ContentStore:
        return ContainerdStore(self.connect())

    def collect(self, store: ContentStore) -> None:
        leases.collect(cast("ContainerdStore", store).containerd)


class TestContainerdTrees(TreeStoreSuite):
    snapshotter = "overlayfs"

    @pytest.fixture
    def trees(self, connect: Connect, daemon: Daemon) -> Iterator[ContainerdTrees]:
        self.connect, self.daemon = connect, daemon
        connection = connect()
        leases.collect(connection)
        self.before = daemon.directories(self.snapshotter)
        trees = ContainerdTrees(connection, self.snapshotter)
        yield trees
        leases.collect(connection)
        assert daemon.directories(self.snapshotter) == self.before

    def reopen(self, trees: TreeStore) -> TreeStore:
        return ContainerdTrees(self.connect(), self.snapshotter)

    def collect(self, trees: TreeStore) -> None:
        leases.collect(cast("ContainerdTrees", trees).containerd)

    def lease(self, trees: TreeStore) -> AbstractContextManager[Lease]:
        return leases.lease(cast("ContainerdTrees", trees).containerd, "test", snapshotter=self.snapshotter)

    def leftovers(self, trees: TreeStore) -> list[str]:
        return cast("ContainerdTrees", trees).stagings()


class TestNativeTrees(TestContainerdTrees):
    snapshotter = "native"

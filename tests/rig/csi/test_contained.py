"""containerd as the driver's store: the suite of holders, and the driver's own tests once more upon it.

The tests of `tests/unit/csi` say what the driver promises; here the same functions run with a driver whose
content is in a real containerd.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.holder import HolderSuite
from tests.unit.csi import test_inline
from tests.unit.csi.conftest import fake, put
from unlade.containerd import Containerd, leases
from unlade.csi.contained import ContainerdHolder
from unlade.csi.holding import Holder
from unlade.csi.service import InContainerd
from unlade.store import DirStore

pytestmark = pytest.mark.root
__all__ = ["fake", "put"]

# Not those that are about parts of the driver and start none.
globals().update(
    {
        name: test
        for name, test in vars(test_inline).items()
        if name.startswith("test_") and "driver" in inspect.signature(test).parameters
    }
)


class TestContainerdHolder(HolderSuite):
    snapshotter = "overlayfs"

    @pytest.fixture
    def holder(self, contained: InContainerd, tmp_path: Path) -> Iterator[ContainerdHolder]:
        self.contained = contained
        self.made: list[Containerd] = []
        with DirStore(tmp_path / "store") as self.store:
            yield self._open()
            for connection in self.made:
                leases.collect(connection)
                connection.close()

    def _open(self) -> ContainerdHolder:
        self.made.append(self.contained.connect())
        return ContainerdHolder(
            self.made[-1], self.store, scope="/var/lib/unlade", snapshotter=self.snapshotter
        )

    def reopen(self, holder: Holder) -> Holder:
        self.made.pop().close()
        return self._open()

    def collect(self, holder: Holder) -> None:
        leases.collect(self.made[-1])


class TestNativeHolder(TestContainerdHolder):
    snapshotter = "native"

"""The directory store as what holds volumes' content."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conformance.holder import HolderSuite
from unlade.csi.holding import DirHolder, Holder
from unlade.store import DirStore, collect


class TestDirHolder(HolderSuite):
    @pytest.fixture
    def holder(self, tmp_path: Path) -> Iterator[DirHolder]:
        self.path = tmp_path / "store"
        with ExitStack() as self.open:
            yield DirHolder(self._store())

    def _store(self) -> DirStore:
        self.store = self.open.enter_context(DirStore(self.path))
        return self.store

    def reopen(self, holder: Holder) -> Holder:
        self.store.close()
        return DirHolder(self._store())

    def collect(self, holder: Holder) -> None:
        collect(self.store, mounted=[])

"""DirStore is a ContentStore."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.conformance.content_store import ContentStoreSuite
from unlade.store import ContentStore, DirStore, collect


class TestDirStore(ContentStoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[DirStore]:
        self.handles: list[DirStore] = []
        with DirStore(tmp_path / "store") as store:
            yield store
        for handle in self.handles:
            handle.close()

    def reopen(self, store: ContentStore) -> ContentStore:
        self.handles.append(DirStore(cast("DirStore", store).path))
        return self.handles[-1]

    def collect(self, store: ContentStore) -> None:
        collect(cast("DirStore", store))

"""`keep_blobs`: a tree and the blobs it was made from, in whatever order they were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from unlade.delivery import AsTree, Engine, Request
from unlade.model import Reference
from unlade.pack import PushOptions, push
from unlade.registry import Registry, RegistryConfig
from unlade.store import DirStore


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    with FakeRegistry() as running:
        yield running


@pytest.mark.parametrize("image", [True, False], ids=["image", "artifact"])
@pytest.mark.parametrize("first", [True, False], ids=["at once", "after the tree"])
def test_the_record_is_whole(fake: FakeRegistry, tmp_path: Path, image: bool, first: bool) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_text("content")
    reference: Reference = fake.reference("a/b", "v1")
    config = RegistryConfig(plain_http=frozenset({fake.host}))
    with (
        Registry(config) as registry,
        DirStore(tmp_path / "store") as store,
        Engine(registry, store) as engine,
    ):
        pushed = push([tmp_path / "tree"], reference, registry=registry, options=PushOptions(image=image))
        for keep in (True,) if first else (False, True):
            engine.deliver(Request(references=(reference,), destination=AsTree(), keep_blobs=keep))
        record = store.images.get(str(reference))
        assert record is not None
        assert record.content
        assert record.tree is not None
        assert all(store.stat(layer.digest) for layer in pushed.layers)

"""Hostile archives, walked from the registry to the directory: nothing of a refused one is left anywhere.

Every case of the list as an image's layer and as a packed artifact; a sample of them unless UNLADE_FULL is
set. `test_archives.py` holds the unpacker alone to the same list.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from tests.fakes.tars import snapshot
from tests.hostile.archive_cases import CASES, OUTSIDE, Case
from unlade.delivery import AsTree, Destination, Directory, Engine, Request
from unlade.errors import UnladeError
from unlade.model import Deadline
from unlade.model.mediatypes import OCI_LAYER
from unlade.registry import Registry, RegistryConfig
from unlade.store import DirStore
from unlade.unpack import Limits

REPO = "team/app"
# Cases with limits of their own are the unpacker's: a delivery has the default ones.
LISTED = [case for case in CASES if case.limits == Limits()]
CHOSEN = LISTED if os.environ.get("UNLADE_FULL") else LISTED[::7]
UNPACK = {"io.deis.oras.content.unpack": "true"}


@pytest.fixture(scope="module")
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as running:
        yield running


@pytest.fixture(scope="module")
def outside() -> Iterator[bytes]:
    os.mkdir(OUTSIDE)
    yield OUTSIDE
    os.rmdir(OUTSIDE)


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def engine(registry: FakeRegistry, store_path: Path) -> Iterator[Engine]:
    client = Registry(RegistryConfig(plain_http=frozenset({registry.host})))
    with client, DirStore(str(store_path)) as store, Engine(client, store) as made:
        yield made


@pytest.mark.parametrize("kind", ["directory", "tree"])
@pytest.mark.parametrize(
    ("case", "rules"),
    [pytest.param(case, rules, id=f"{case.name}-{rules}") for case in CHOSEN for rules in case.rules],
)
def test_nothing_is_left(
    case: Case,
    rules: str,
    kind: str,
    registry: FakeRegistry,
    engine: Engine,
    store_path: Path,
    outside: bytes,
    tmp_path: Path,
) -> None:
    if rules == "image":
        registry.put_image(REPO, "bad", [registry.put_blob(REPO, case.build(), OCI_LAYER)])
    else:
        layer = registry.put_blob(REPO, case.build(), OCI_LAYER, UNPACK)
        registry.put_artifact(REPO, "bad", [layer], "application/x-test")
    target = tmp_path / "out" / "delivered"
    target.parent.mkdir()
    destination: Destination = Directory(str(target)) if kind == "directory" else AsTree()
    before = snapshot(outside)
    with pytest.raises(UnladeError) as caught:
        engine.deliver(
            Request(references=(registry.reference(REPO, "bad"),), destination=destination),
            deadline=Deadline.after(30),
        )
    if rules == "image":
        # An artifact may be turned down sooner, when planning looks at its first bytes.
        assert isinstance(caught.value, case.error)
    assert not caught.value.retryable
    assert str(caught.value).isprintable()
    assert os.listdir(target.parent) == []
    assert snapshot(outside) == before
    for name in ("trees", "staging"):
        place = store_path / ".unlade" / name
        assert not place.exists() or not [found for found in os.listdir(place) if not found.startswith(".")]

"""Sources that talk to a real registry, with a store of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.real_registry import RealRegistry
from unlade.packages.sources import Sources
from unlade.registry import NoCredentials, Registry, RegistryConfig
from unlade.store import DirStore


@pytest.fixture
def sources(registry: RealRegistry, other_registry: RealRegistry, tmp_path: Path) -> Iterator[Sources]:
    """Fetches from and pushes to the two plain registries."""
    config = RegistryConfig(plain_http=frozenset({registry.host, other_registry.host}))
    with (
        Registry(config, NoCredentials()) as client,
        Sources(client, DirStore(str(tmp_path / "store"))) as made,
    ):
        yield made

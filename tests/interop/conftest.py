"""Real registries and peers. A missing engine is an error, not a skip: `make interop` builds them first."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.engines import binary
from tests.interop.peers import Peers
from tests.interop.real_registry import RealRegistry


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is an interop test."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.interop)


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    """The plain distribution registry; shared, so tests use repositories of their own."""
    with RealRegistry(binary("registry"), tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="session")
def other_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    """A second plain registry, to copy to."""
    with RealRegistry(binary("registry"), tmp_path_factory.mktemp("other-registry")) as running:
        yield running


@pytest.fixture(scope="session")
def secure_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealRegistry]:
    """The registry behind TLS with a certificate of our own authority, and htpasswd."""
    with RealRegistry(binary("registry"), tmp_path_factory.mktemp("secure"), secure=True) as running:
        yield running


@pytest.fixture
def peers(tmp_path: Path) -> Peers:
    """crane, skopeo, umoci and ours, with a home of their own."""
    home = tmp_path / "home"
    home.mkdir()
    for tool in ("skopeo", "umoci"):
        subprocess.run([tool, "--version"], capture_output=True, check=True)
    return Peers(binary("crane"), home)

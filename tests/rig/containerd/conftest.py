"""A containerd for all tests here, and a namespace of its own for each of them."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rig.containerd.daemon import Daemon
from unlade.containerd import Containerd

Connect = Callable[[], Containerd]


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    # A short path: shims' sockets are limited to some hundred characters.
    with tempfile.TemporaryDirectory(prefix="ctd-", ignore_cleanup_errors=True) as base:
        running = Daemon(Path(base))
        try:
            yield running
        finally:
            running.close()


@pytest.fixture
def connect(daemon: Daemon, tmp_path: Path) -> Iterator[Connect]:
    """Connections to one fresh namespace, as processes that share a state directory would have them."""
    namespace = f"test-{secrets.token_hex(4)}"
    made: list[Containerd] = []

    def one() -> Containerd:
        made.append(Containerd(daemon.address, namespace=namespace, state=tmp_path / "state"))
        return made[-1]

    yield one
    for connection in made:
        connection.close()


@pytest.fixture
def connection(connect: Connect) -> Containerd:
    return connect()

"""A containerd for all tests here, and a namespace of its own for each of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from tests.rig.containerd.daemon import Daemon
from tests.rig.node.client import Client
from unlade.containerd import Containerd, Handler, OrdinaryImages
from unlade.cri.service import NodeConfig, NodeService
from unlade.model import Platform
from unlade.registry import NoCredentials, RegistryConfig

Connect = Callable[[], Containerd]


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    with Daemon.running() as running:
        yield running


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


HANDLERS = (
    Handler("guest", Platform.parse("linux/arm64")),
    Handler("plain", Platform.parse("linux/arm64"), "native"),
    Handler("twin", Platform.host()),
    Handler("hcs", Platform.parse("windows(10.0.20348.9)/amd64")),
    Handler("lazy", Platform.parse("linux(+erofs)/amd64")),
)


@dataclass
class Node:
    """The service, a client of it, and what containerd records."""

    client: Client
    connection: Containerd
    images: OrdinaryImages
    host: str
    daemon: Daemon

    def snapshots(self, snapshotter: str = "overlayfs") -> int:
        """How many snapshots there are."""
        return len(self.daemon.lines("k8s.io", "snapshots", "--snapshotter", snapshotter, "ls"))


@pytest.fixture
def node(daemon: Daemon, tmp_path: Path) -> Iterator[Node]:
    """The service before the daemon's CRI, and a registry; no image is left, whatever the test did."""
    with FakeRegistry(strict=False) as fake:
        daemon.without_tls(fake.host)
        config = NodeConfig(
            socket=str(tmp_path / "image.sock"),
            containerd=daemon.address,
            state=tmp_path / "state",
            handlers=HANDLERS,
            handlers_are_told=True,
            registry=RegistryConfig(plain_http=frozenset({fake.host})),
            credentials=NoCredentials(),
        )
        with NodeService(config), Containerd(daemon.address, state=config.state) as connection:
            images = OrdinaryImages(connection, "runc")
            made = Node(Client(config.socket), connection, images, fake.host, daemon)
            yield made
            for image in made.client.images():
                made.client.remove(image)

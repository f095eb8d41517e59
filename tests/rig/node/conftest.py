"""The image service beside the shared cluster, and that cluster's kubelet pointed at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.cluster import Rig
from tests.fakes.relay import SlowLink
from tests.rig.node.client import Client
from unlade.cri.service import NodeConfig, NodeService
from unlade.registry import NoCredentials, RegistryConfig

# Bytes a second of the slow link.
RATE = 2 << 20


def node_config(cluster: Rig, directory: Path) -> NodeConfig:
    """Configured as containerd is: the same hosts, no credentials of the node's own."""
    return NodeConfig(
        socket=str(directory / "image.sock"),
        containerd=str(cluster.node.containerd_socket),
        state=directory / "state",
        parallel_pulls=4,
        registry=RegistryConfig(certs_dirs=(str(cluster.node.directory / "certs.d"),)),
        credentials=NoCredentials(),
    )


@pytest.fixture(scope="module")
def through(cluster: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a service in this process."""
    config = node_config(cluster, tmp_path_factory.mktemp("cri"))
    with NodeService(config):
        yield Path(config.socket)


@pytest.fixture(scope="module")
def served(cluster: Rig, through: Path) -> Iterator[Rig]:
    """The cluster, its kubelet served by us."""
    cluster.restart_kubelet(cluster.node, image_service=through)
    yield cluster
    cluster.restart_kubelet(cluster.node, image_service=None)


@pytest.fixture
def ours(through: Path) -> Client:
    """A client of the service."""
    return Client(through)


@pytest.fixture
def direct(cluster: Rig) -> Client:
    """A client of containerd itself."""
    return Client(cluster.node.containerd_socket)


@pytest.fixture
def slow(cluster: Rig) -> Iterator[str]:
    """The plain registry's address, over a slow link that this machine and containerd reach."""
    host, _, port = cluster.registry.address.partition(":")
    with SlowLink((host, int(port)), rate=RATE, host=cluster.state.address(1)) as link:
        directory = cluster.node.directory / "certs.d" / link.address
        directory.mkdir()
        url = f"http://{link.address}"
        told = f'server = "{url}"\n[host."{url}"]\ncapabilities = ["pull", "resolve"]\n'
        (directory / "hosts.toml").write_text(told)
        yield link.address

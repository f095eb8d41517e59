"""The CSI driver beside the shared cluster: a stock kubelet with containerd's own image service, a directory
store, and no containerd socket given to the driver."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.cluster import Rig
from rig.kube import Json, until
from tests.fakes.driver import Driver
from tests.fakes.registry import FakeRegistry
from tests.rig.containerd.daemon import Daemon
from unlade.csi.service import CsiConfig, CsiService, InContainerd
from unlade.registry import RegistryConfig

DEPLOY = Path(__file__).parents[3] / "deploy" / "csi"
DRIVER = "oci.unlade.dev"


def csi_config(rig: Rig, state: Path, **more: Any) -> CsiConfig:
    """Where this rig's kubelet looks for drivers; its registries as containerd knows them."""
    root = rig.node.kubelet_root
    (root / "plugins" / DRIVER).mkdir(parents=True, exist_ok=True)
    (root / "plugins_registry").mkdir(parents=True, exist_ok=True)
    return CsiConfig(
        socket=str(root / "plugins" / DRIVER / "csi.sock"),
        registration=str(root / "plugins_registry" / f"{DRIVER}-reg.sock"),
        state=state,
        node_id=rig.node.name,
        registry=RegistryConfig(certs_dirs=(str(rig.node.directory / "certs.d"),)),
        **more,
    )


def contained_by(rig: Rig) -> InContainerd:
    """The containerd that runs this rig's pods, as the driver's store."""
    return InContainerd(address=str(rig.node.containerd_socket), state=rig.node.directory / "csi-locks")


def inline(reference: str = "", *, secret: str = "", **attributes: str) -> Json:
    """An inline volume of the driver, as a pod writes it."""
    told = {**({"reference": reference} if reference else {}), **attributes}
    volume: Json = {"driver": DRIVER, "readOnly": True, "volumeAttributes": told}
    if secret:
        volume["nodePublishSecretRef"] = {"name": secret}
    return {"csi": volume}


def wait_registered(rig: Rig) -> None:
    """Until the kubelet has taken the driver and told the cluster."""

    def listed() -> bool:
        found = rig.api.get("CSINode", rig.node.name, version="storage.k8s.io/v1")
        return any(one["name"] == DRIVER for one in found["spec"]["drivers"] or ())

    until("the driver is registered", listed, seconds=60)


@pytest.fixture(scope="module")
def service(cluster: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CsiService]:
    """The driver in this process, registered with the shared cluster's kubelet."""
    cluster.kubectl("apply", "-f", str(DEPLOY / "csidriver.yaml"))
    # Beside the kubelet's directories: what is mounted from here must be on a shared mount.
    state = cluster.node.directory / tmp_path_factory.mktemp("csi").name
    with CsiService(csi_config(cluster, state)) as made:
        wait_registered(cluster)
        yield made


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    with Daemon.running() as running:
        yield running


@pytest.fixture
def contained(daemon: Daemon, tmp_path: Path) -> InContainerd:
    """A namespace of a test's own."""
    namespace = f"test-{secrets.token_hex(4)}"
    return InContainerd(address=daemon.address, namespace=namespace, state=tmp_path / "locks", patience=3.0)


@pytest.fixture
def driver(tmp_path: Path, fake: FakeRegistry, contained: InContainerd) -> Iterator[Driver]:
    with Driver(tmp_path, fake, containerd=contained) as running:
        yield running

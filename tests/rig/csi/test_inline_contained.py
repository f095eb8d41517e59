"""Inline volumes with a stock kubelet, their content in the containerd that runs the pods.

The tests are those of `test_inline.py`; CI takes those that depend on the store, UNLADE_FULL=1 all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rig.cluster import Rig
from rig.kube import until
from rig.pods import Namespace
from tests.rig.csi import test_inline
from tests.rig.csi.conftest import DEPLOY, contained_by, csi_config, inline, wait_registered
from tests.rig.node.client import Client
from unlade.csi.service import CsiService

FULL = os.environ.get("UNLADE_FULL") == "1"
CHOSEN = (
    "test_every_format_family_arrives_whole",
    "test_merged_parts_and_flags",
    "test_nobody_writes_to_what_is_shared",
)

globals().update(
    {
        name: test
        for name, test in vars(test_inline).items()
        if name.startswith("test_") and (FULL or name in CHOSEN)
    }
)


@pytest.fixture(scope="module")
def service(cluster: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CsiService]:
    """The driver in this process, told where containerd is."""
    cluster.kubectl("apply", "-f", str(DEPLOY / "csidriver.yaml"))
    state = cluster.node.directory / tmp_path_factory.mktemp("csi").name
    with CsiService(csi_config(cluster, state, containerd=contained_by(cluster))) as made:
        wait_registered(cluster)
        yield made


def test_images_removed_under_running_pods(cluster: Rig, service: CsiService, namespace: Namespace) -> None:
    """What a kubelet does whose disk is full, by the same calls: pods go on, and what they leave is gone."""
    artifact = cluster.registry.push_artifact("inline/removed", {"f": b"still here"})
    cri = Client(cluster.node.containerd_socket)
    before = set(cri.images())
    pod = namespace.run("reader", volumes={"/data": inline(artifact.reference)})
    pod.wait_ready()
    (image,) = set(cri.images()) - before
    cri.remove(image)
    cluster.ctr(cluster.node, "content", "prune", "references")
    assert image not in cri.images()
    assert pod.exec("cat", "/data/f") == "still here"
    assert service.holder
    held = len(service.holder.held())
    pod.delete()
    until("its lease is gone", lambda: len(service.holder.held()) == held - 1)  # type: ignore[union-attr]

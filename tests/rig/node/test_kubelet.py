"""A stock kubelet that tells runtime handlers, and its image collection: nothing in use goes (R3, R5, V6)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rig.kube import until
from rig.pods import Namespace
from tests.corpus.pushing import push
from tests.rig.conftest import MakeRig
from tests.rig.node.artifacts import per_platform
from tests.rig.node.client import Client
from tests.rig.node.conftest import node_config
from unlade.containerd import Handler
from unlade.cri.service import NodeService
from unlade.model import Platform

# Any disk has less room than this, so the kubelet deletes every unused image at once. It would evict pods
# next; critical ones it leaves. Its ordinary collection runs every five minutes only.
PRESSURE = {
    "evictionHard": {"nodefs.available": "99%", "imagefs.available": "99%"},
    "imageMinimumGCAge": "1s",
}
CRITICAL = {"priorityClassName": "system-node-critical"}


def test_handlers_reach_us_and_nothing_in_use_is_collected(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(kubelets=False, feature_gates={"RuntimeClassInImageCriApi": True})
    config = node_config(rig, tmp_path)
    guest = Handler("second", Platform.parse("linux/arm64"))
    with NodeService(replace(config, handlers=(guest,))):
        client = Client(config.socket)
        rig.start_kubelet(rig.node, image_service=Path(config.socket))
        rig.wait_node(rig.node)
        namespace = Namespace(rig)
        push(rig.registry.address, "gate/index", per_platform())
        volume = {"/data": {"image": {"reference": f"{rig.registry.address}/gate/index:v1"}}}
        host = namespace.run("host", volumes=volume, spec=CRITICAL)
        other = namespace.run("guest", volumes=volume, spec={"runtimeClassName": "second", **CRITICAL})
        unused = rig.registry.push_artifact("gate/unused", {"f": b"unused"}).reference
        for pod in (host, other):
            pod.wait_ready()
        assert (host.exec("cat", "/data/arch"), other.exec("cat", "/data/arch")) == ("amd64", "arm64")
        client.pull(unused)
        rig.restart_kubelet(rig.node, config=PRESSURE, image_service=Path(config.socket))
        until("the unused artifact is collected", lambda: client.status(unused) is None, seconds=60)
        assert (host.exec("cat", "/data/arch"), other.exec("cat", "/data/arch")) == ("amd64", "arm64")
        listed = client.images()
        for handler in ("", "second"):
            kept = client.status(f"{rig.registry.address}/gate/index:v1", handler=handler)
            assert kept is not None
            assert kept.id in listed

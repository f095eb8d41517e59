"""A stock kubelet that tells runtime handlers, and its image collection: nothing in use goes (R3, R5, V6)."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rig import images, machine
from rig.cluster import Rig
from rig.images import tar
from rig.kube import until
from rig.pods import Namespace, Pod
from tests.corpus.pushing import push
from tests.rig.conftest import MakeRig
from tests.rig.node.artifacts import image_per_platform, per_platform
from tests.rig.node.client import Client
from tests.rig.node.conftest import node_config
from tests.rig.node.holdings import holdings
from unlade.containerd import Handler
from unlade.cri.service import NodeConfig, NodeService
from unlade.model import Platform

# Any disk has less room than this, so the kubelet deletes every unused image at once. It would evict pods
# next; critical ones it leaves. Its ordinary collection runs every five minutes only.
PRESSURE = {
    "evictionHard": {"nodefs.available": "99%", "imagefs.available": "99%"},
    "imageMinimumGCAge": "1s",
}
CRITICAL = {"priorityClassName": "system-node-critical"}


GATE = "RuntimeClassInImageCriApi"


class Turned:
    """A node whose kubelet has the gate on, then off, then on, while pods of two handlers run."""

    def __init__(self, rig: Rig, config: NodeConfig) -> None:
        self.rig = rig
        self.socket = Path(config.socket)
        self.client = Client(config.socket)
        self.namespace = Namespace(rig)
        self.pods: dict[str, tuple[Pod, str]] = {}
        busybox = images.IMAGES["busybox"].layer().read_bytes()
        push(rig.registry.address, "gate/image", image_per_platform([busybox]))
        push(rig.registry.address, "gate/index", per_platform())
        self.image = f"{rig.registry.address}/gate/image:v1"
        self.volume = f"{rig.registry.address}/gate/index:v1"

    def run(self, name: str, handler: str, expected: str) -> None:
        """A pod whose image and volume are indexes with an entry for each platform."""
        spec = {"runtimeClassName": handler, **CRITICAL} if handler else CRITICAL
        volume = {"/data": {"image": {"reference": self.volume}}}
        pod = self.namespace.run(name, image=self.image, volumes=volume, spec=spec)
        self.pods[name] = pod, expected

    def ready(self) -> None:
        """Wait for every pod."""
        for pod, _ in self.pods.values():
            pod.wait_ready()

    def turn(self, on: bool, **config: Any) -> None:
        self.rig.restart_kubelet(
            self.rig.node, config={"featureGates": {GATE: on}, **config}, image_service=self.socket
        )

    def pressed(self, number: int) -> None:
        """Have the kubelet delete all that it holds for unused; what pods use stays (R5)."""
        unused = [
            self.rig.registry.push_artifact(f"gate/unused-{number}", {"f": b"%d" % number}).reference,
            self.rig.registry.push_image(f"gate/idle-{number}", [tar({"f": b"%d" % number})]).reference,
        ]
        for name in unused:
            self.client.pull(name)
        for name in unused:
            until(f"{name} is collected", partial(self._absent, name), seconds=90)
        self.check()

    def end(self) -> None:
        """Delete the pods, and remove what they used: nothing of it is left in containerd (R5)."""
        ids = {
            self.client.pull(name, handler)
            for name in (self.image, self.volume)
            for handler in ("", "second")
        }
        for pod, _ in self.pods.values():
            pod.delete()
        for image in ids:
            self.client.remove(image)
        left = holdings(self.rig)
        assert [name for name in left.images if "/gate/" in name or name in ids] == []
        assert [digest for digest in left.content if digest in ids] == []
        assert [name for name in left.leases if name.startswith("unlade-")] == []

    def _absent(self, name: str) -> bool:
        return self.client.status(name) is None

    def check(self) -> None:
        """Every pod still sees its own entry, and containerd still has what it needs to start it again."""
        listed = set(self.client.images())
        for name, (pod, expected) in self.pods.items():
            assert (pod.exec("cat", "/arch"), pod.exec("cat", "/data/arch")) == (expected, expected), name
            statuses = pod.read()["status"]["containerStatuses"]
            assert [status["restartCount"] for status in statuses] == [0], name
            used = {status["imageID"].rpartition("@")[2] for status in statuses}
            known = {digest.rpartition("@")[2] for image in self.client.details() for digest in image}
            assert used <= listed | known, name


def test_handlers_reach_us_and_nothing_in_use_is_collected(
    make_rig: MakeRig, tmp_path: Path, full: bool
) -> None:
    """Gate on, off and on again under pressure: each pod keeps the entry that it was started with."""
    rig = make_rig(kubelets=False)
    config = replace(
        node_config(rig, tmp_path),
        handlers=(Handler("second", Platform.parse("linux/arm64")),),
        handlers_are_told=True,
    )
    with NodeService(config):
        rig.start_kubelet(rig.node, config={"featureGates": {GATE: True}}, image_service=Path(config.socket))
        rig.wait_node(rig.node)
        node = Turned(rig, config)
        node.run("host", "", "amd64")
        node.run("guest", "second", "arm64")
        node.ready()
        held = tuples(rig, config)
        assert {(one["reference"], one["handler"], one["platform"]) for one in held} >= {
            (reference, handler, platform)
            for reference in (node.image, node.volume)
            for handler, platform in (("runc", "linux/amd64"), ("second", "linux/arm64"))
        }
        if full:
            node.turn(True, **PRESSURE)
            node.pressed(1)
        # Off: nobody tells handlers, so a new pod gets the host's entry whatever its class.
        node.turn(False)
        node.run("untold", "second", "amd64")
        node.ready()
        node.turn(False, **PRESSURE)
        node.pressed(2)
        node.turn(True)
        node.run("told", "second", "arm64")
        node.ready()
        node.turn(True, **PRESSURE)
        node.pressed(3)
        # One tuple goes by a call that names it; the other is still there for its pods.
        for reference in (node.image, node.volume):
            node.client.remove(reference, handler="second")
            assert node.client.status(reference, handler="second") is None
            assert node.client.status(reference, handler="runc") is not None
        node.end()
        assert [one for one in tuples(rig, config) if "/gate/" in str(one["reference"])] == []


def test_a_snapshotter_of_its_own(make_rig: MakeRig, tmp_path: Path, full: bool) -> None:
    """R6, gate off: nobody says which handler will mount an artifact, so it is where each of them looks."""
    if not full:
        pytest.skip("takes a cluster of its own; in the full run")
    rig = make_rig(kubelets=False, snapshotters={"second": "native"})
    config = node_config(rig, tmp_path)
    with NodeService(config):
        rig.start_kubelet(rig.node, image_service=Path(config.socket))
        rig.wait_node(rig.node)
        namespace = Namespace(rig)
        artifact = rig.registry.push_artifact("own/model", {"f": b"weights"})
        image = rig.registry.push_image("own/image", [tar({"f": b"layer"})])
        volumes = {
            "/artifact": {"image": {"reference": artifact.reference}},
            "/image": {"image": {"reference": image.reference}},
        }
        command = "cat /artifact/f /image/f"
        for name, spec in (("host", {}), ("guest", {"runtimeClassName": "second"})):
            pod = namespace.run(name, command=command, volumes=volumes, spec=spec)
            pod.wait("Succeeded")
            assert pod.logs() == "weightslayer"
        [held] = [one for one in tuples(rig, config) if one["reference"] == artifact.reference]
        assert held["snapshotters"] == ["native", "overlayfs"]


def tuples(rig: Rig, config: NodeConfig) -> list[dict[str, Any]]:
    """What `unlade images` tells of the node."""
    out = machine.run(
        *(sys.executable, "-m", "unlade", "images", "-o", "json"),
        *("--containerd", str(rig.node.containerd_socket), "--containerd-state", str(config.state)),
    )
    found: list[dict[str, Any]] = json.loads(out)["images"]
    return found

"""Pulls over a slow link, seen while they run: by `unlade top`, by the pod's events, by the metrics (V18)."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

from rig.cluster import Rig
from rig.images import tar
from rig.kube import until
from rig.pods import Namespace
from tests.figures import figure
from tests.rig.node.client import Client
from tests.rig.node.conftest import RATE, node_config
from unlade.cli.node_events import RecordedEvents
from unlade.cri.announcing import Announcer
from unlade.cri.service import NodeService
from unlade.cri.watching import ShownPull, Watch, ask, shown

SIZE = 6 << 20


def test_a_long_pull_is_seen(cluster: Rig, namespace: Namespace, slow: str, tmp_path: Path) -> None:
    artifact = cluster.registry.push_artifact("slow/model", {"f": os.urandom(SIZE)})
    image = cluster.registry.push_image("slow/image", [tar({"f": os.urandom(SIZE)})])
    there = {pushed: pushed.reference.replace(cluster.registry.address, slow) for pushed in (artifact, image)}
    config = replace(node_config(cluster, tmp_path), parallel_pulls_per_registry=2)
    node = cluster.node
    # The kubelet's own credentials may write events of the pods of its node.
    kubeconfig = cluster.control_plane.kubeconfig(
        node.name, user=f"system:node:{node.name}", groups=("system:nodes",)
    )
    events = RecordedEvents(str(kubeconfig))
    with NodeService(config) as service:
        announcer = Announcer(service.pulls, events, after=1.0, every=1.0)
        announcer.start()
        watch = Watch(config.state, lambda: shown(service.pulls.states(), "test"))
        cluster.restart_kubelet(node, image_service=Path(config.socket))
        try:
            volume = {"/data": {"image": {"reference": there[artifact]}}}
            pod = namespace.run("waits", volumes=volume)
            pull = threading.Thread(target=Client(config.socket).pull, args=(there[image],))
            pull.start()
            seen = _until_both_moved(config.state / "pulls.sock", there[artifact], there[image])
            pull.join()
            pod.wait_ready(seconds=120)
            event = pod.wait_event("PullProgress", contains=there[artifact])
        finally:
            cluster.restart_kubelet(node, image_service=None)
            watch.close()
            announcer.close()
            events.close()
        numbers = service.metrics.text().decode()
        Client(config.socket).remove(there[image])
    of_pod, of_image = seen
    assert of_pod.pod is not None
    assert (of_pod.pod.namespace, of_pod.pod.name) == (namespace.name, "waits")
    assert (of_pod.phase, of_pod.total_bytes) == ("fetch", SIZE)
    assert of_pod.bytes_per_second is not None
    # Twice the link's rate would be somebody else's bytes; a busy machine may give less.
    assert 0 < of_pod.bytes_per_second < 2 * RATE
    assert of_pod.seconds_left is not None
    assert (of_image.phase, of_image.pod) == ("containerd", None)
    assert of_image.total_bytes is not None
    assert of_image.total_bytes >= SIZE
    figure("rate shown of a link of 2 MiB/s", round(of_pod.bytes_per_second / (1 << 20), 2), "MiB/s")
    assert event["type"] == "Normal"
    assert "fetching" in event["message"]
    assert " of 6.0 MiB (" in event["message"]
    for phase in ("wait", "resolve", "fetch", "commit", "register", "containerd"):
        assert f'unlade_node_pull_phase_seconds_count{{handler="runc",phase="{phase}"}}' in numbers


def _until_both_moved(socket: Path, artifact: str, image: str) -> tuple[ShownPull, ShownPull]:
    """Both pulls with bytes and a rate; each as it was when that was first so."""
    found: dict[str, ShownPull] = {}

    def moved() -> bool:
        for pull in ask(socket).pulls:
            if pull.done_bytes and pull.bytes_per_second:
                found.setdefault(pull.reference, pull)
        return {artifact, image} <= found.keys()

    until("both pulls move", moved, seconds=60)
    return found[artifact], found[image]

"""Faults that later tests make: components stopped, killed, restarted with other settings."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rig.cluster import Rig
from rig.kube import ApiError, until
from rig.pods import Namespace


def test_running_containers_survive_restarts_of_everything_around_them(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    namespace = Namespace(rig)
    pod = namespace.run("steady")
    before = pod.wait_ready()["status"]["containerStatuses"][0]["containerID"]

    rig.restart_apiserver()
    rig.restart_apiserver(grace=0)
    rig.restart_containerd(rig.node)
    rig.restart_kubelet(rig.node, config={"maxPods": 7})
    rig.restart_controller_manager()

    until(
        "the new kubelet's capacity",
        lambda: rig.api.get("Node", "node1")["status"]["capacity"]["pods"] == "7",
    )
    after = pod.wait_ready()["status"]["containerStatuses"][0]
    assert (after["containerID"], after["restartCount"]) == (before, 0)
    assert pod.exec("echo", "still here") == "still here\n"


def test_history_can_be_compacted_and_controllers_left_out(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(kubelets=False, controllers="*,-ephemeral-volume-controller")
    # Watch caches keep a window of their own, so the page after a compaction is what shows it.
    for index in range(3):
        rig.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"n{index}"}})
    page = rig.api.request("GET", "/api/v1/namespaces", query={"limit": "1"})
    token = page["metadata"]["continue"]
    rig.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "later"}})
    rig.compact_etcd()
    rig.restart_apiserver()
    with pytest.raises(ApiError) as gone:
        rig.api.request("GET", "/api/v1/namespaces", query={"limit": "1", "continue": token})
    assert gone.value.status == 410

    namespace = Namespace(rig)
    template = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}}
    volumes = {"/scratch": {"ephemeral": {"volumeClaimTemplate": template}}}
    namespace.run("claims", volumes=volumes)
    with pytest.raises(AssertionError):
        until("a claim", lambda: rig.api.list("PersistentVolumeClaim", namespace.name), seconds=3)
    rig.restart_controller_manager("*")
    (claim,) = until("a claim", lambda: rig.api.list("PersistentVolumeClaim", namespace.name))
    assert claim["metadata"]["name"] == "claims-v0"


class Forwarder:
    """Passes a unix socket's bytes to another: stands for an image service, and counts who called."""

    def __init__(self, listen: Path, target: Path) -> None:
        self.calls = 0
        self.target = target
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(listen))
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            self.calls += 1
            behind = socket.socket(socket.AF_UNIX)
            behind.connect(str(self.target))
            for source, sink in ((caller, behind), (behind, caller)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with source, sink:
            try:
                while data := source.recv(65536):
                    sink.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def test_kubelet_uses_an_image_service_of_its_own(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(kubelets=False, feature_gates={"RuntimeClassInImageCriApi": True})
    service = rig.node.directory / "image-service.sock"
    forwarder = Forwarder(service, rig.node.containerd_socket)
    rig.start_kubelet(rig.node, image_service=service)
    rig.wait_node(rig.node)
    pod = Namespace(rig).run("pulled", command="echo ran", spec={"runtimeClassName": "second"})
    pod.wait("Succeeded")
    assert forwarder.calls > 0
    rig.restart_kubelet(rig.node)
    assert rig.node.image_service is None
    forwarder.close()

"""Writable volumes seeded from a registry, on a real cluster with a stock kubelet (E7, E8, E9).

The agent is `unlade node csi --writable` under the account of deploy/csi, with a directory store; the claims
are made by the cluster's own controller for ephemeral volumes, and once by ours.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rig.cluster import Rig
from rig.kube import Json, until
from rig.oci import Pushed
from rig.pods import Namespace, Pod
from tests.figures import figure
from tests.rig.controllers.process import ControllerProcess, apply_account
from tests.rig.csi.seeded import (
    CLASS,
    MIB,
    NAMESPACE,
    STORAGE,
    Agent,
    by_hand,
    claim_spec,
    ephemeral,
    install,
    source,
    wait_claim_event,
)
from unlade.mount.table import read_table

FORBIDDEN = "*,-ephemeral-volume-controller"
LONG = 180.0


@pytest.fixture(scope="module")
def agent(cluster: Rig) -> Iterator[Agent]:
    made = Agent(cluster, install(cluster), cluster.node.directory / f"writable-{secrets.token_hex(3)}")
    made.start()
    yield made
    made.stop()
    cluster.kubectl("delete", "storageclass", CLASS)


@pytest.fixture
def clean(agent: Agent, namespace: Namespace) -> Iterator[Agent]:
    """The agent; after the test nothing of the namespace's volumes is left on the node."""
    before = set(agent.volumes())
    yield agent
    for pod in namespace.api.list("Pod", namespace.name):
        namespace.pod(pod["metadata"]["name"]).delete(wait=False)
    for claim in namespace.api.list("PersistentVolumeClaim", namespace.name):
        namespace.api.delete("PersistentVolumeClaim", claim["metadata"]["name"], namespace.name)
    until("the volumes are gone", lambda: set(agent.volumes()) <= before, seconds=90)
    until("their mounts are gone", lambda: not _mounts(agent), seconds=30)
    until("the objects are gone", lambda: not _objects(namespace), seconds=60)


def _mounts(agent: Agent) -> list[str]:
    kubelet = os.fsencode(agent.rig.node.kubelet_root)
    return [
        str(entry.path)
        for entry in read_table()
        if entry.source.startswith(b"unlade:w-") and entry.path.startswith(kubelet)
    ]


def _objects(namespace: Namespace) -> list[str]:
    found = namespace.api.list("PersistentVolume")
    return [
        volume["metadata"]["name"]
        for volume in found
        if volume["spec"].get("claimRef", {}).get("namespace") == namespace.name
    ]


def _pushed(rig: Rig, files: Mapping[str, bytes | Path]) -> Pushed:
    """An artifact of a name of its own: what one test pulled is another's cache otherwise."""
    return rig.registry.push_artifact(f"models/m-{secrets.token_hex(4)}", files)


def _claim(pod: Pod, number: int = 0) -> Json:
    return pod.rig.api.get("PersistentVolumeClaim", f"{pod.name}-v{number}", pod.namespace)


@pytest.mark.parametrize("ours", [False, True], ids=["built-in", "ours"])
def test_a_pod_gets_the_files_writes_among_them_and_keeps_its_writes(
    cluster: Rig, clean: Agent, namespace: Namespace, ours: bool
) -> None:
    pushed = _pushed(cluster, {"config.json": b"{}", "weights": b"w" * MIB})
    source(namespace, "model", pushed.reference)
    if not ours:
        _life(clean, namespace, pushed.digest)
        return
    kubeconfig = apply_account(cluster)
    cluster.restart_controller_manager(FORBIDDEN)
    try:
        with ControllerProcess(cluster, kubeconfig):
            _life(clean, namespace, pushed.digest)
    finally:
        cluster.restart_controller_manager()


def _life(agent: Agent, namespace: Namespace, digest: str) -> None:
    # The first start writes and fails; the second, in the same pod, finds what was written.
    script = (
        "cd /data; if [ -e mine ]; then cat mine; sleep 1000000; fi; "
        "[ $(wc -c <weights) = 1048576 ] && echo written >mine && echo '{\"changed\":1}' >config.json "
        "&& chown 1000:1000 weights && sync; exit 1"
    )
    pod = namespace.run(
        "app", command=script, volumes={"/data": ephemeral("model")}, spec={"restartPolicy": "Always"}
    )
    pod.wait_ready(LONG)
    until("the second start", lambda: "written" in pod.logs(), seconds=LONG)
    assert pod.exec("cat", "/data/config.json").strip() == '{"changed":1}'
    claim = _claim(pod)
    assert claim["metadata"]["annotations"]["unlade.dev/digest"] == digest
    volume = namespace.api.get("PersistentVolume", claim["spec"]["volumeName"])
    assert volume["metadata"]["annotations"]["unlade.dev/digest"] == digest
    assert volume["spec"]["csi"]["driver"] == "oci.unlade.dev"
    wait_claim_event(namespace, f"{pod.name}-v0", "ProvisioningSucceeded", digest)
    assert len(agent.volumes()) == 1
    pod.delete()
    until("the volume is given back", lambda: agent.volumes() == [], seconds=60)
    namespace.api.gone("PersistentVolume", volume["metadata"]["name"])


def test_ten_pods_share_one_artifact(
    cluster: Rig, clean: Agent, namespace: Namespace, full: bool, tmp_path: Path
) -> None:
    size = (2000 if full else 80) * MIB
    files = {f"weights-{number}": tmp_path / str(number) for number in range(8)}
    for path in files.values():
        with path.open("wb") as file:
            for _ in range(size // 8 // MIB):
                file.write(os.urandom(1024) * 1024)
    pushed = _pushed(cluster, files)
    for path in files.values():
        path.unlink()
    source(namespace, "model", pushed.reference)
    before = clean.taken()
    script = "echo mine >/data/own && sync && sleep 1000000"
    pods = [
        namespace.run(f"app-{n}", command=script, volumes={"/data": ephemeral("model", "256Mi")})
        for n in range(10)
    ]
    for pod in pods:
        pod.wait_ready(600 if full else LONG)
    assert len(clean.volumes()) == 10
    os.sync()
    taken = clean.taken() - before
    figure("ten writable volumes of one artifact", size // MIB, "MiB content", taken // MIB, "MiB on disk")
    # An ext4's own blocks are a few MiB each, which matters only for small content.
    assert taken < (size * 1.1 if full else size + 10 * 8 * MIB)
    for pod in pods:
        pod.delete(wait=False)
    until("all is given back", lambda: clean.volumes() == [], seconds=120)
    cluster.kubectl("-n", namespace.name, "delete", "ocisource", "model")


def test_a_full_volume_is_full_for_its_pod_alone(cluster: Rig, clean: Agent, namespace: Namespace) -> None:
    pushed = _pushed(cluster, {"weights": b"w" * (24 * MIB)})
    source(namespace, "model", pushed.reference)
    volume = {"/data": ephemeral("model", "20Mi")}
    full_up = namespace.run("full", volumes=volume)
    other = namespace.run("other", volumes=volume)
    for pod in (full_up, other):
        pod.wait_ready(LONG)
    wait_claim_event(namespace, "full-v0", "VolumeTooSmall", "ENOSPC")
    shown = full_up.exec("sh", "-c", "dd if=/dev/zero of=/data/fill bs=1M 2>&1; df -Pm /data | tail -1")
    assert "No space left" in shown
    other.exec("sh", "-c", "dd if=/dev/zero of=/data/fine bs=1M count=8 && sync")
    full_up.exec("sh", "-c", "rm /data/fill && echo again >/data/small && sync")


def test_classes_annotations_copies_and_events(cluster: Rig, clean: Agent, namespace: Namespace) -> None:
    pushed = _pushed(cluster, {"config.json": b"{}"})
    fixed = f"fixed-{secrets.token_hex(3)}"
    namespace.api.create(
        {
            "apiVersion": STORAGE,
            "kind": "StorageClass",
            "metadata": {"name": fixed},
            "provisioner": "oci.unlade.dev",
            "volumeBindingMode": "WaitForFirstConsumer",
            "parameters": {"reference": pushed.reference},
        }
    )
    try:
        late = f"{cluster.registry.address}/models/late-{secrets.token_hex(3)}"
        volumes = {
            "/class": by_hand(namespace, "by-class", claim_spec("", "32Mi", storage_class=fixed)),
            "/annotation": by_hand(
                namespace, "by-annotation", claim_spec("", "32Mi"), {"unlade.dev/reference": f"{late}:1"}
            ),
        }
        pod = namespace.run("app", volumes=volumes)
        failed = wait_claim_event(namespace, "by-annotation", "ProvisioningFailed", "late")
        assert "next:" in failed["message"]
        cluster.registry.push_artifact(late.partition("/")[2], {"late.txt": b"now"})
        pod.wait_ready(LONG)
        assert pod.exec("cat", "/annotation/late.txt") == "now"
        pod.exec("sh", "-c", "echo copied >/class/own && sync")
        copy = claim_spec("", "32Mi")
        copy["dataSource"] = {"kind": "PersistentVolumeClaim", "name": "by-class"}
        copy["storageClassName"] = fixed
        clone = namespace.run("clone", volumes={"/data": by_hand(namespace, "copy", copy)})
        clone.wait_ready(LONG)
        assert clone.exec("cat", "/data/own") == "copied\n"
        pod.exec("sh", "-c", "echo changed >/class/own")
        assert clone.exec("cat", "/data/own") == "copied\n"
        capacities = namespace.api.list("CSIStorageCapacity", NAMESPACE, version=STORAGE)
        assert {fixed, CLASS} <= {one["storageClassName"] for one in capacities}
        assert all(one["capacity"] not in ("0", "") for one in capacities)
    finally:
        namespace.api.delete("StorageClass", fixed, version=STORAGE)


def test_growing_and_agents_that_come_and_go(cluster: Rig, clean: Agent, namespace: Namespace) -> None:
    pushed = _pushed(cluster, {"config.json": b"{}"})
    source(namespace, "model", pushed.reference)
    volume = by_hand(namespace, "data", claim_spec("model", "32Mi"))
    writer = "i=0; while :; do i=$((i+1)); echo $i >>/data/log || exit 3; sync; sleep 0.05; done"
    pod = namespace.run("app", command=writer, volumes={"/data": volume})
    pod.wait_ready(LONG)
    clean.kill()
    namespace.api.patch(
        "PersistentVolumeClaim",
        "data",
        {"spec": {"resources": {"requests": {"storage": "96Mi"}}}},
        namespace.name,
    )
    seen = int(pod.exec("tail", "-n1", "/data/log"))
    clean.start()
    until("it writes on", lambda: int(pod.exec("tail", "-n1", "/data/log")) > seen + 3)
    assert pod.read()["status"]["phase"] == "Running", "no error was seen inside the pod"

    def capacity() -> str:
        claim = namespace.api.get("PersistentVolumeClaim", "data", namespace.name)
        pending = [c["type"] for c in claim["status"].get("conditions") or ()]
        return "pending" if "FileSystemResizePending" in pending else claim["status"]["capacity"]["storage"]

    until("the claim was looked at", lambda: capacity() in ("pending", "96Mi"), seconds=60)
    pod.delete()
    # As after a reboot: no mount is left, the agent is new, records are all there is.
    until("no mount is left", lambda: not _mounts(clean))
    clean.kill()
    clean.start()
    again = namespace.run("again", volumes={"/data": volume})
    again.wait_ready(LONG)
    assert int(again.exec("tail", "-n1", "/data/log")) > seen
    assert int(again.exec("sh", "-c", "df -Pm /data | tail -1").split()[1]) > 70
    until("the claim shows it", lambda: capacity() == "96Mi", seconds=60)


def test_killed_while_a_claim_is_served(cluster: Rig, clean: Agent, namespace: Namespace) -> None:
    pushed = _pushed(cluster, {"config.json": b"{}"})
    source(namespace, "model", pushed.reference)
    points = ("csi.writable.reserved", "csi.writable.ready", "csi.writable.target-mounted")
    for number, point in enumerate(points):
        clean.stop()
        clean.start(failpoint=point)
        assert clean.process is not None
        pod = namespace.run(f"app-{number}", volumes={"/data": ephemeral("model")})
        clean.process.wait(90)
        clean.start()
        pod.wait_ready(LONG)
        assert pod.exec("cat", "/data/config.json") == "{}"
    assert len(clean.volumes()) == len(points)

"""Large artifacts, many pods, many artifacts, a full disk: what it costs, on a node with a disk of its own.

Sizes are samples unless UNLADE_FULL=1; then the artifact is of 8 GB, and a hundred pods wait for one.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from rig.cluster import Rig
from rig.engines import binary
from rig.kube import until
from rig.oci import Pushed
from rig.pods import Namespace
from tests.figures import figure
from tests.rig.conftest import MakeRig
from tests.rig.node.agent import Agent
from tests.rig.node.disk import Disk
from tests.rig.node.footprint import Watched
from tests.rig.node.holdings import holdings

_LARGE = 8_000_000_000
_SAMPLE = 120_000_000
_MEMORY = 250_000_000
_BLOCK = 8_000_000
# More pods than a node has by default may come; a disk that is nearly full is our test's business.
_KUBELET = {"maxPods": 200, "evictionHard": {"imagefs.available": "1Mi"}}


@dataclass(frozen=True)
class LargeNode:
    """A node for a hundred pods, our service in front of its containerd, and containerd's disk."""

    rig: Rig
    agent: Agent
    disk: Disk


@pytest.fixture(scope="module")
def node(
    make_module_rig: MakeRig, tmp_path_factory: pytest.TempPathFactory, full: bool
) -> Iterator[LargeNode]:
    rig = make_module_rig(kubelets=False, kubelet_config=_KUBELET)
    rig.node.pod_network = rig.state.pod_network  # all addresses of the rig: its only node needs them
    disk = Disk(rig, 3 * (_LARGE if full else _SAMPLE) + (1 << 30))
    agent = Agent(rig, tmp_path_factory.mktemp("large"))
    try:
        agent.start()
        rig.start_kubelet(rig.node, image_service=agent.socket)
        rig.wait_node(rig.node)
        yield LargeNode(rig, agent, disk)
    finally:
        agent.close()


@pytest.fixture(scope="module")
def large(node: LargeNode, tmp_path_factory: pytest.TempPathFactory, full: bool) -> tuple[Pushed, Pushed]:
    """One file as an artifact, and as an image's only layer."""
    size = _LARGE if full else _SAMPLE
    directory = tmp_path_factory.mktemp("large")
    if shutil.disk_usage(directory).free < 7 * size:
        pytest.skip(f"needs {7 * size >> 30} GB of free disk")
    plain, layer = directory / "weights.bin", directory / "layer.tar"
    block = bytearray(os.urandom(_BLOCK))
    with plain.open("wb") as out:
        for number in range(size // _BLOCK):
            block[:8] = number.to_bytes(8, "big")
            out.write(block)
    artifact = node.rig.registry.push_artifact("large/model", {"weights.bin": plain})
    with tarfile.open(layer, "w") as tar:
        tar.add(plain, "weights.bin")
    plain.unlink()
    image = node.rig.registry.push_image("large/image", [layer])
    layer.unlink()
    return artifact, image


def test_a_large_artifact(node: LargeNode, large: tuple[Pushed, Pushed], full: bool) -> None:
    """Written once, in little memory, in about the time that containerd needs for an image of the same."""
    faulthandler.cancel_dump_traceback_later()  # every wait below has its own end
    artifact, image = large
    size = _LARGE if full else _SAMPLE
    client = node.agent.client()
    taken: dict[str, list[float]] = {"ours": [], "ctr": []}
    for number in range(2 if full else 1):
        _drop_caches()
        before = node.disk.written()
        began = time.monotonic()
        with Watched(node.agent.pid) as watched:
            pulled = client.pull(artifact.reference, seconds=900)
        taken["ours"].append(time.monotonic() - began)
        written = node.disk.written() - before
        found = client.status(artifact.reference)
        assert found is not None
        assert size <= found.size < size + 10_000
        figure("a large artifact as a volume: bytes written / its size", round(written / size, 4))
        figure("a large artifact as a volume: memory, all processes", watched.peak, "B")
        assert written <= 1.05 * size
        assert watched.peak < _MEMORY
        if number == 0:
            _read_by_a_pod(node, artifact, size)
        client.remove(pulled)
        _drop_caches()
        before = node.disk.written()
        began = time.monotonic()
        _ctr(node.rig, "images", "pull", "--plain-http", image.reference)
        taken["ctr"].append(time.monotonic() - began)
        figure("the same file, ctr images pull: bytes written / size",
               round((node.disk.written() - before) / size, 4))  # fmt: skip
        _ctr(node.rig, "images", "rm", "--sync", image.reference)
    figure(
        "a large artifact as a volume",
        *(size, "B", [round(one, 1) for one in taken["ours"]], "s"),
        *("ctr images pull", [round(one, 1) for one in taken["ctr"]], "s"),
    )


def _read_by_a_pod(node: LargeNode, artifact: Pushed, size: int) -> None:
    namespace = Namespace(node.rig)
    volume = {"/data": {"image": {"reference": artifact.reference}}}
    pod = namespace.run("reader", command="stat -c %s /data/weights.bin", volumes=volume)
    pod.wait("Succeeded")
    assert pod.logs() == f"{size}\n"
    pod.delete()
    namespace.delete()


def _drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def _ctr(rig: Rig, *argv: str) -> None:
    command = [str(binary("ctr")), "-a", str(rig.node.containerd_socket), "-n", "beside", *argv]
    subprocess.run(command, check=True, capture_output=True, timeout=900)


def test_one_cold_artifact_for_many_pods(node: LargeNode, full: bool) -> None:
    """A hundred pods at once that mount what is not there yet: one download, and all of them run (V6)."""
    count = 100 if full else 8
    artifact = node.rig.registry.push_artifact("many/one", {"f": b"shared" * 500_000})
    namespace = Namespace(node.rig)
    volume = {"/data": {"image": {"reference": artifact.reference}}}
    began = time.monotonic()
    for number in range(count):
        namespace.run(f"pod-{number}", command="cat /data/f | wc -c && sleep 100000", volumes=volume)
    _all_run(node.rig, namespace, count)
    log = (node.rig.logs / "registry.log").read_text()
    fetched = [line for line in log.splitlines() if '"GET /v2/many/one/blobs/' in line]
    figure("many pods and one cold artifact", count, "pods", round(time.monotonic() - began, 1), "s")
    figure("many pods and one cold artifact: blob requests", len(fetched))
    assert len(fetched) == len({line.split()[6] for line in fetched}) <= 2, fetched  # layer, empty config
    assert namespace.pod(f"pod-{count - 1}").logs() == "3000000\n"
    namespace.delete()
    _none_left(node.rig, namespace)


def test_many_artifacts_at_once(node: LargeNode, full: bool) -> None:
    """A pod for each of thirty artifacts, all created together."""
    count, size = (30, 16_000_000) if full else (6, 1_000_000)
    pushed = [
        node.rig.registry.push_artifact(f"many/each-{number}", {"f": os.urandom(size)}).reference
        for number in range(2 * count)
    ]
    client = node.agent.client()
    began = time.monotonic()
    with Watched(node.agent.pid) as watched, ThreadPoolExecutor(count) as pool:
        pulled = list(pool.map(client.pull, pushed[:count]))
    taken = time.monotonic() - began
    assert len(set(pulled)) == count
    figure(
        "different artifacts at once, by CRI calls",
        *(count, "artifacts of", size, "B", round(count / taken, 1), "per second"),
        *(round(count * size / taken / 1e6), "MB/s", watched.peak, "B of memory"),
    )
    assert watched.peak < _MEMORY
    namespace = Namespace(node.rig)
    began = time.monotonic()
    for number, reference in enumerate(pushed[count:]):
        volume = {"/data": {"image": {"reference": reference}}}
        namespace.run(f"pod-{number}", command="cat /data/f | wc -c && sleep 100000", volumes=volume)
    _all_run(node.rig, namespace, count)
    figure("different artifacts at once, by pods", count, "pods", round(time.monotonic() - began, 1), "s")
    assert {namespace.pod(f"pod-{number}").logs() for number in range(count)} == {f"{size}\n"}
    namespace.delete()
    _none_left(node.rig, namespace)
    for reference in pushed:
        client.remove(reference)


def _all_run(rig: Rig, namespace: Namespace, count: int) -> None:
    def ready() -> bool:
        pods = rig.api.list("Pod", namespace.name)
        states = [one["status"].get("containerStatuses", [{}])[0].get("ready", False) for one in pods]
        return states.count(True) == count

    until(f"{count} pods ready", ready, seconds=500, pause=0.5)


def _none_left(rig: Rig, namespace: Namespace) -> None:
    until("the pods gone", lambda: not rig.api.list("Pod", namespace.name), seconds=300, pause=0.5)


def test_a_disk_that_is_full_in_mid_pull(node: LargeNode) -> None:
    """The event says so, nothing of it stays, and with room again the same pod starts."""
    client = node.agent.client()
    before = _ours(node.rig)
    filler = node.disk.path / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, node.disk.free - 60_000_000)
    size = 100_000_000
    artifact = node.rig.registry.push_artifact("large/too", {"f": os.urandom(size)})
    namespace = Namespace(node.rig)
    volume = {"/data": {"image": {"reference": artifact.reference}}}
    pod = namespace.run("full", command="cat /data/f | wc -c", volumes=volume)
    event = pod.wait_event("Failed", contains="next: ")
    assert "ResourceExhausted" in event["message"], event["message"]
    free = node.disk.free
    assert free > 40_000_000, "the space of the failed pull is free again"
    assert _ours(node.rig) == before
    filler.unlink()
    pod.wait("Succeeded", seconds=120)
    assert pod.logs() == f"{size}\n"
    pod.delete()
    namespace.delete()
    client.remove(artifact.reference)
    assert _ours(node.rig) == before


def _ours(rig: Rig) -> set[str]:
    """Leases and unfinished snapshots that are our own; containerd's pulls have leases, too."""
    held = holdings(rig)
    return {name for name in held.leases | held.snapshots if name.startswith("unlade-")}

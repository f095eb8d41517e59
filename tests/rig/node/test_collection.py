"""A small disk, more content than it holds: the kubelet's own collection keeps it from filling (V6, R5).

containerd has a file system of its own. Pods that end bring artifacts and images, several times its size;
two pods stay: one whose container's image, one whose volume, must never go.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.cluster import Rig
from rig.images import tar
from rig.pods import Namespace
from tests.figures import figure
from tests.rig.conftest import MakeRig
from tests.rig.node.agent import Agent
from tests.rig.node.disk import Disk

_MB = 1_000_000
# The kubelet looks every ten seconds, and frees what is unused while less than this part is free. In those
# ten seconds less than the rest may come: a pod with three things each two seconds.
_FREE = 60
_DISK = 300 * _MB
_EACH = 6 * _MB
_PACE = 2.0
_CONFIG = {
    "evictionHard": {"imagefs.available": f"{_FREE}%", "nodefs.available": "1%", "memory.available": "50Mi"},
    "evictionPressureTransitionPeriod": "1s",
    "imageMinimumGCAge": "1s",
}
# Not evicted and not refused under pressure: the disk is what is to be kept from filling, not the pods away.
_CRITICAL = {"priorityClassName": "system-node-critical", "tolerations": [{"operator": "Exists"}]}


class Lowest:
    """Watches a disk: the least that was ever free."""

    def __init__(self, disk: Disk) -> None:
        self.free = disk.free
        self._disk = disk
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(0.1):
            self.free = min(self.free, self._disk.free)

    def end(self) -> int:
        """Stop watching; what was found."""
        self._end.set()
        self._thread.join()
        return self.free


@pytest.fixture
def agent(make_rig: MakeRig, tmp_path: Path) -> Iterator[tuple[Rig, Agent, Disk]]:
    rig = make_rig(kubelets=False, kubelet_config=_CONFIG)
    disk = Disk(rig, _DISK)
    made = Agent(rig, tmp_path)
    try:
        made.start()
        rig.start_kubelet(rig.node, image_service=made.socket)
        rig.wait_node(rig.node)
        yield rig, made, disk
    finally:
        made.close()


def test_the_disk_never_fills_and_nothing_in_use_goes(agent: tuple[Rig, Agent, Disk], full: bool) -> None:
    rig, service, disk = agent
    faulthandler.cancel_dump_traceback_later()  # every wait below has its own end
    namespace = Namespace(rig)
    content = os.urandom(10 * _MB)
    kept = rig.registry.push_artifact("kept/volume", {"f": content}).reference
    used = rig.registry.push_image(
        "kept/image", [tar({"bin/busybox": _busybox(), "bin/sh": "busybox", "f": b"7"})]
    )
    volume = namespace.run("volume", volumes={"/data": {"image": {"reference": kept}}}, spec=_CRITICAL)
    image = namespace.run(
        "image", image=used.reference, command=("/bin/busybox", "sleep", "1000000"), spec=_CRITICAL
    )
    for pod in (volume, image):
        pod.wait_ready()
    lowest, brought, number = Lowest(disk), 0, 0
    goal = disk.size * (5 if full else 1.05)
    try:
        while brought < goal:
            number += 1
            began = time.monotonic()
            _bring(rig, namespace, f"brings-{number}")
            brought += 3 * _EACH
            time.sleep(max(0.0, began + _PACE - time.monotonic()))
    finally:
        low = lowest.end()
    figure(
        "a disk smaller than what is pulled",
        *(disk.size, "B", brought, "B pulled", low, "B free at the least"),
        *(number, "pods that ended"),
    )
    assert low > 0.02 * disk.size
    assert not [line for line in service.lines() if line.get("code") == "no-space"]
    assert volume.exec("sha256sum", "/data/f").split()[0] == hashlib.sha256(content).hexdigest()
    assert image.exec("/bin/busybox", "cat", "/f") == "7"
    client = service.client()
    for reference in (kept, used.reference):
        assert client.status(reference) is not None
    again = namespace.run(
        "again",
        command="sha256sum /data/f",
        volumes={"/data": {"image": {"reference": kept, "pullPolicy": "Never"}}},
        spec=_CRITICAL,
    )
    again.wait("Succeeded")
    assert len(client.images()) < 3 * number, "much of what was brought is gone"


def _bring(rig: Rig, namespace: Namespace, name: str) -> None:
    """A pod that mounts two artifacts and an image that nobody had before, reads them, and ends."""
    volumes: dict[str, dict[str, object]] = {}
    for part in range(3):
        data = os.urandom(_EACH)
        if part < 2:
            pushed = rig.registry.push_artifact(f"{name}/{part}", {"f": data})
        else:
            pushed = rig.registry.push_image(f"{name}/{part}", [tar({"f": data})])
        volumes[f"/data/{part}"] = {"image": {"reference": pushed.reference}}
    # Its log goes with the container, which the kubelet may remove at once: success is what it says.
    script = f"[ $(cat /data/*/f | wc -c) = {3 * _EACH} ]"
    pod = namespace.run(name, command=script, volumes=volumes, spec=_CRITICAL)
    done = pod.wait("Succeeded", "Failed", seconds=120)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    pod.delete(wait=False)


def _busybox() -> bytes:
    return Path("/bin/busybox").read_bytes()

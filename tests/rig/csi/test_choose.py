"""The same content as a native `image:` volume and as a `csi:` volume: how long pods take to start with each.

The figures are those of docs/choose.md. Both services are processes of their own beside one kubelet. What
containers may do with each (run programs from it, write to it) is looked at, too.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rig.cluster import Rig
from rig.images import tar
from rig.kube import Json
from rig.oci import Pushed
from rig.pods import Namespace
from tests.figures import figure
from tests.rig.csi.agent import Agent as Driver
from tests.rig.csi.conftest import DEPLOY, inline
from tests.rig.node.agent import Agent as ImageService

ROUNDS = 5
Volume = Callable[[str], Json]


def native(reference: str) -> Json:
    return {"image": {"reference": reference, "pullPolicy": "IfNotPresent"}}


@pytest.fixture(scope="module")
def both(cluster: Rig, tmp_path_factory: pytest.TempPathFactory, full: bool) -> Iterator[Rig]:
    """The kubelet with our image service and our driver."""
    if not full:
        pytest.skip("measures; run with UNLADE_FULL=1")
    cluster.kubectl("apply", "-f", str(DEPLOY / "csidriver.yaml"))
    images = ImageService(cluster, tmp_path_factory.mktemp("images"))
    driver = Driver(cluster, tmp_path_factory.mktemp("driver"))
    images.start()
    cluster.restart_kubelet(cluster.node, image_service=images.socket)
    driver.start()
    yield cluster
    cluster.restart_kubelet(cluster.node, image_service=None)
    driver.close()
    images.close()


def _start(namespace: Namespace, name: str, volume: Json) -> float:
    """Seconds from the pod's creation until its container has read the volume."""
    began = time.monotonic()
    pod = namespace.run(name, command="ls /data", volumes={"/data": volume})
    pod.wait("Succeeded", seconds=300)
    took = time.monotonic() - began
    assert pod.logs()
    pod.delete(wait=False)
    return took


def test_start_times(both: Rig, namespace: Namespace, tmp_path: Path) -> None:
    large = tmp_path / "weights"
    large.write_bytes(os.urandom(1 << 20) * 500)
    kinds: dict[str, Callable[[str], Pushed]] = {
        "one small file": lambda name: both.registry.push_artifact(name, {"f": name.encode()}),
        "one file of 500 MiB": lambda name: both.registry.push_artifact(
            name, {"id": name.encode(), "f": large}
        ),
        "2,000 small files": lambda name: both.registry.push_artifact(
            name, {"many.tar": _tar(name)}, media_type="application/vnd.oci.image.layer.v1.tar"
        ),
    }
    # Nothing to compare with: the pod itself.
    _plain(namespace, ROUNDS)
    bare = statistics.median(_plain(namespace, number) for number in range(ROUNDS))
    figure("pod without content", bare, "s")
    print(f"\npod without content: {bare:.2f} s")
    for number, (what, make) in enumerate(kinds.items()):
        for way, volume in (("native", native), ("csi", inline)):
            cold, warm = [], []
            for turn in range(2 if "MiB" in what else ROUNDS):
                content = make(f"choose/{way}-{number}-{turn}")
                cold.append(_start(namespace, f"{way}-{number}-{turn}-cold", volume(content.reference)))
                warm.append(_start(namespace, f"{way}-{number}-{turn}-warm", volume(content.reference)))
            times = statistics.median(cold), statistics.median(warm)
            figure(f"pod with {what}, {way}", times[0], "s cold", times[1], "s warm")
            print(f"pod with {what}, {way}: {times[0]:.2f} s cold, {times[1]:.2f} s warm")


def _plain(namespace: Namespace, number: int) -> float:
    began = time.monotonic()
    pod = namespace.run(f"plain-{number}", command="true")
    pod.wait("Succeeded")
    pod.delete(wait=False)
    return time.monotonic() - began


def _tar(name: str) -> bytes:
    return tar({f"d{number % 40}/f{number}": f"{name} {number}".encode() * 20 for number in range(2000)})


def test_what_a_container_may_do(both: Rig, namespace: Namespace) -> None:
    """Both are read-only. Neither is `noexec` inside: the runtime binds it with flags of its own (V8)."""
    script = b"#!/bin/sh\necho ran\n"
    seen = {}
    content = both.registry.push_image("choose/tools", [_program(script)])
    for way, volume in (("native", native), ("csi", inline)):
        pod = namespace.run(
            f"may-{way}",
            command="/data/run.sh; touch /data/x; grep ' /data ' /proc/mounts | cut -d' ' -f4",
            volumes={"/data": volume(content.reference)},
        )
        pod.wait("Succeeded", "Failed")
        seen[way] = pod.logs()
    print(f"\n{seen}")
    for words in seen.values():
        assert "Read-only file system" in words
        assert words.startswith("ran\n")


def _program(script: bytes) -> bytes:
    return tar({"run.sh": script})

"""The agent killed at its durable steps under a real kubelet, the kubelet restarted, the machine restarted.

What the calls themselves leave after a kill at each of their points is tested without a kubelet
(`tests/unit/csi/test_crash.py`, `tests/unit/csi/writable/test_crash.py`: every point with UNLADE_FULL=1).
Here it is shown that a real kubelet comes to an end: a pod whose publish was killed starts, one whose
unpublish was killed goes, and nothing of either is left.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rig.cluster import Rig
from rig.kube import Json, until
from rig.pods import Namespace, Pod
from tests.rig.csi.agent import Agent
from tests.rig.csi.conftest import DEPLOY, inline
from unlade.kernel import failpoints
from unlade.mount.table import read_table

PUBLISH = (
    "store.lease.pinned",
    "tree.commit.renamed",
    "tree.commit.recorded",
    "store.image.recorded",
    "csi.publish.held",
    "csi.record.written",
    "mount.target.made",
    "mount.attach.attached",
    "csi.publish.mounted",
)
UNPUBLISH = (
    "mount.detach.detached",
    "mount.target.removed",
    "csi.unpublish.unmounted",
    "csi.record.unlinked",
    "csi.record.dropped",
    "csi.unpublish.released",
)
# CI takes one of each by seed, and none that restarts the kubelet as well: those are the odd ones.
CHOSEN = {
    points: points if os.environ.get("UNLADE_FULL") == "1" else random.Random(7).sample(points[::2], 1)
    for points in (PUBLISH, UNPUBLISH)
}


@pytest.fixture(scope="module")
def rig(cluster: Rig) -> Rig:
    """The shared cluster, with the driver's object."""
    cluster.kubectl("apply", "-f", str(DEPLOY / "csidriver.yaml"))
    return cluster


@pytest.fixture
def agent(rig: Rig, tmp_path: Path) -> Iterator[Agent]:
    made = Agent(rig, tmp_path)
    yield made
    made.close()


def _ours(rig: Rig) -> list[str]:
    pods = str(rig.node.kubelet_root / "pods")
    found = (os.fsdecode(entry.path) for entry in read_table())
    return [path for path in found if path.startswith(pods) and "kubernetes.io~csi" in path]


def _nothing_left(rig: Rig, agent: Agent) -> None:
    """No mount, record or lease; asked of the store after the driver has ended."""
    until("every mount is gone", lambda: not _ours(rig), seconds=150)
    volumes = agent.state / "csi" / "volumes"
    until("every record is gone", lambda: not os.listdir(volumes), seconds=150)
    assert agent.stop() == 0
    assert agent.held() == set()
    assert list((rig.node.kubelet_root / "pods").glob("*/volumes/kubernetes.io~csi/*/mount")) == []


def test_the_points_are_there() -> None:
    assert {*PUBLISH, *UNPUBLISH} <= set(failpoints.names())


@pytest.mark.parametrize("point", CHOSEN[PUBLISH])
def test_killed_while_a_kubelet_publishes(rig: Rig, agent: Agent, namespace: Namespace, point: str) -> None:
    # New content each time: what is here already passes fewer points.
    model = rig.registry.push_artifact(f"faults/{point}", {"f": point.encode()})
    agent.start(dies_at=point)
    volumes = {"/data": inline(model.reference)}
    pod = namespace.run("published", volumes=volumes, spec={"restartPolicy": "Always"})
    assert agent.wait() < 0, f"{point} was not reached"
    if PUBLISH.index(point) % 2:
        rig.restart_kubelet(rig.node)
    agent.start()
    pod.wait_ready(seconds=200)
    assert pod.exec("cat", "/data/f") == point
    pod.delete(wait=False)
    _nothing_left(rig, agent)


@pytest.mark.parametrize("point", CHOSEN[UNPUBLISH])
def test_killed_while_a_kubelet_unpublishes(rig: Rig, agent: Agent, namespace: Namespace, point: str) -> None:
    model = rig.registry.push_artifact("faults/model", {"f": b"model"})
    agent.start(dies_at=point)
    pod = namespace.run("unpublished", volumes={"/data": inline(model.reference)})
    pod.wait_ready()
    pod.delete(wait=False)
    assert agent.wait() < 0, f"{point} was not reached"
    if UNPUBLISH.index(point) % 2:
        rig.restart_kubelet(rig.node)
    agent.start()
    rig.api.gone("Pod", pod.name, namespace.name, seconds=200)
    _nothing_left(rig, agent)


def test_the_machine_restarts(rig: Rig, agent: Agent, namespace: Namespace) -> None:
    """All mounts and containers gone, records left; the tag has moved, the registry is away (V2, V6)."""
    one = rig.registry.push_artifact("faults/reboot", {"f": b"before"}, tag="v1")
    agent.start()
    volumes = {"/data": inline(one.reference), "/file": inline(one.reference, subPath="f")}
    pod = namespace.run("survivor", volumes=volumes, spec={"restartPolicy": "Always"})
    gone = namespace.run("deleted-meanwhile", volumes=volumes)
    for each in (pod, gone):
        each.wait_ready()
    rig.registry.push_artifact("faults/reboot", {"f": b"after"}, tag="v1")
    _power_off(rig, agent)
    rig.api.delete("Pod", gone.name, namespace.name, grace=0)
    rig.stop("registry")
    try:
        agent.start(registered=False)
        rig.start_kubelet(rig.node)
        rig.wait_node(rig.node)
        until("the container was started again", lambda: _restarts(pod) > 0, seconds=150)
        pod.wait_ready(seconds=150)
        assert pod.exec("cat", "/data/f", "/file") == "beforebefore"
    finally:
        rig.start("registry")
        until("the registry", rig.registry.ready)
    pod.delete(wait=False)
    _nothing_left(rig, agent)


def _restarts(pod: Pod) -> int:
    statuses: list[Json] = pod.read()["status"].get("containerStatuses", [])
    return sum(int(status["restartCount"]) for status in statuses)


def _power_off(rig: Rig, agent: Agent) -> None:
    """Kubelet, agent and containers end at once, and no mount of a pod's volume survives."""
    rig.stop(f"kubelet-{rig.node.name}", grace=0)
    agent.close()
    for line in rig.ctr(rig.node, "tasks", "ls", "-q").split():
        with suppress(Exception):  # a sandbox that ended with its container
            rig.ctr(rig.node, "tasks", "kill", "-s", "SIGKILL", "-a", line)
    for path in _ours(rig):
        subprocess.run(["umount", "-l", path], check=True)
    assert _ours(rig) == []

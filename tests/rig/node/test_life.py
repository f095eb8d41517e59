"""The service as a process: seen from outside, restarted, killed at every step (V6, V20, V21)."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from rig.cluster import USERS, Rig
from rig.kube import until
from rig.pods import Namespace
from tests.figures import figure
from tests.rig.node.agent import Agent
from tests.rig.node.holdings import holdings
from unlade.cri.api import images_pb2 as api
from unlade.kernel import failpoints

# Steps of a pull or a removal through the service; the others belong to content that artifacts do not make
# here (a tag that moves, one tuple of several).
STEPS = [
    "containerd.lease.created",
    "containerd.snapshot.prepared",
    "containerd.snapshot.listed",
    "containerd.snapshot.synced",
    "containerd.snapshot.committed",
    "containerd.pull.delivered",
    "containerd.record.config",
    "containerd.record.manifest",
    "containerd.record.id",
    "containerd.record.name",
    "containerd.lease.released",
    "containerd.remove.name",
    "containerd.remove.id",
]


@pytest.fixture
def agent(cluster: Rig, tmp_path: Path) -> Iterator[Agent]:
    made = Agent(cluster, tmp_path)
    yield made
    made.close()


def test_seen_from_outside(cluster: Rig, agent: Agent) -> None:
    artifact = cluster.private_registry.push_artifact("life/seen", {"f": b"x" * 5000})
    agent.start()
    client = agent.client()
    auth = api.AuthConfig(username="alice", password=USERS["alice"])
    client.pull(artifact.reference, auth=auth)
    client.pull(artifact.reference, auth=auth)
    assert agent.get("/healthz") == (200, "ok\n")
    assert agent.get("/readyz") == (200, "ok\n")
    _, numbers = agent.get("/metrics")
    assert 'unlade_node_pulls_total{result="artifact"} 1.0' in numbers
    assert 'unlade_node_pulls_total{result="cached"} 1.0' in numbers
    assert "unlade_node_fetched_bytes_total 5000.0" in numbers
    client.remove(artifact.reference)
    assert agent.stop() == 0
    assert [line["reference"] for line in agent.lines() if line["message"] == "pulled"] == [
        artifact.reference,
        artifact.reference,
    ]
    assert USERS["alice"] not in agent.log.read_text()


def test_killed_at_any_step_leaves_nothing(cluster: Rig, agent: Agent, full: bool) -> None:
    assert set(STEPS) <= set(failpoints.names())
    before = holdings(cluster)
    steps = STEPS if full else random.Random(5).sample(STEPS, 3)
    for number, step in enumerate(steps):
        name = cluster.registry.push_artifact(f"life/killed-{number}", {"f": step.encode() * 100}).reference
        agent.start(dies_at=step)
        client = agent.client()
        with pytest.raises(grpc.RpcError):
            client.remove(client.pull(name))
        assert agent.wait() == -signal.SIGKILL, step
        agent.start()
        client = agent.client()
        again = client.pull(name)
        assert client.status(name) is not None, step
        client.remove(again)
        left = holdings(cluster).beyond(before)
        assert left == {}, f"killed at {step}"
        assert agent.stop() == 0


def test_killed_and_not_asked_again(cluster: Rig, agent: Agent) -> None:
    """The next start alone tidies up; nobody pulls that artifact any more."""
    before = holdings(cluster)
    name = cluster.registry.push_artifact("life/orphan", {"f": b"orphan" * 100}).reference
    agent.start(dies_at="containerd.snapshot.synced")
    with pytest.raises(grpc.RpcError):
        agent.client().pull(name)
    agent.wait()
    assert holdings(cluster).beyond(before)
    agent.start()
    assert holdings(cluster).beyond(before) == {}
    agent.stop()


def test_restarts_under_the_kubelet(cluster: Rig, namespace: Namespace, agent: Agent, full: bool) -> None:
    """Killed, started again, stopped for good: pods that run go on, those to come start (V21)."""
    artifact = cluster.registry.push_artifact("life/shared", {"f": b"shared"})
    volume = {"/data": {"image": {"reference": artifact.reference}}}
    agent.start()
    cluster.restart_kubelet(cluster.node, image_service=agent.socket)
    try:
        count = 50 if full else 10  # a node of the rig has 64 addresses
        pods = [namespace.run(f"many-{number}", volumes=volume) for number in range(count)]
        for pod in pods:
            pod.wait_ready(seconds=180)
        log = (cluster.logs / "registry.log").read_text()
        fetched = [line for line in log.splitlines() if '"GET /v2/life/shared/blobs/' in line]
        figure("blob requests of one cold artifact", len(fetched), f"for {count} pods")
        assert len(fetched) <= 2, fetched  # the layer, and the empty config
        for pod in pods[1:]:
            pod.delete(wait=False)
        agent.stop(signal.SIGKILL)
        agent.start()
        assert pods[0].exec("cat", "/data/f") == "shared"
        later = namespace.run("later", command="cat /data/f", volumes=volume)
        later.wait("Succeeded")
        assert later.logs() == "shared"
    finally:
        cluster.restart_kubelet(cluster.node, image_service=None)
    agent.stop()
    assert pods[0].exec("cat", "/data/f") == "shared"
    without = namespace.run(
        "without", command="cat /data/f", volumes={"/data": {"image": {"reference": artifact.reference}}}
    )
    without.wait("Succeeded")
    assert without.logs() == "shared"
    pods[0].delete()
    agent.start()
    client = agent.client()
    client.remove(artifact.reference)
    until("the artifact gone", lambda: client.status(artifact.reference) is None)

"""The service as a process: seen from outside, restarted, killed (V6, V20, V21); see test_faults, too."""

from __future__ import annotations

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

"""What the agent does with the optional rights of deploy/csi: pods' own pull secrets, and events (V4, V15).

It runs under its own account, as an administrator grants it: one namespace is bound, the other is not.
"""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest

from rig.cluster import USERS, Rig
from rig.kube import Json, until
from rig.pods import Namespace
from tests.rig.csi.agent import Agent, publish
from tests.rig.csi.conftest import DEPLOY, inline

SYSTEM, ACCOUNT = "unlade-system", "unlade-csi"
RBAC = "rbac.authorization.k8s.io"
FILES = ("namespace.yaml", "csidriver.yaml", "rbac.yaml", "rbac-events.yaml", "rbac-pull-secrets.yaml")


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    """The address of a slow registry."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def agent(cluster: Rig, registry: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    for name in FILES:
        cluster.kubectl("apply", "-f", str(DEPLOY / name))
    kubeconfig = cluster.account_kubeconfig(SYSTEM, ACCOUNT)
    options = ("--events", "--pod-secrets", "--kubeconfig", str(kubeconfig), "--plain-http", registry)
    made = Agent(cluster, tmp_path_factory.mktemp("rights"), *options)
    made.start()
    yield made
    made.close()
    cluster.kubectl("delete", "-f", str(DEPLOY / "rbac-events.yaml"))


def _bind(namespace: Namespace) -> None:
    """The RoleBinding that rbac-pull-secrets.yaml shows in its comment."""
    namespace.create(
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "unlade-csi-pull-secrets"},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": "unlade-csi-pull-secrets"},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": SYSTEM}],
        }
    )


def _secret(namespace: Namespace, registry: str) -> None:
    encoded = base64.b64encode(f"alice:{USERS['alice']}".encode()).decode()
    document = json.dumps({"auths": {registry: {"auth": encoded}}}).encode()
    namespace.create(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "pull"},
            "type": "kubernetes.io/dockerconfigjson",
            "data": {".dockerconfigjson": base64.b64encode(document).decode()},
        }
    )


def test_pull_secrets_where_a_namespace_grants_them(cluster: Rig, agent: Agent, namespace: Namespace) -> None:
    artifact = cluster.private_registry.push_artifact("secret/rights", {"f": b"private"})
    public = cluster.registry.push_artifact("public/rights", {"f": b"public"})
    other = Namespace(cluster)
    try:
        for each in (namespace, other):
            _secret(each, cluster.private_registry.address)
        _bind(namespace)
        own = {"imagePullSecrets": [{"name": "pull"}]}
        volumes = {"/data": inline(artifact.reference)}
        pod = namespace.run("by-pod", command="cat /data/f", volumes=volumes, spec=own)
        pod.wait("Succeeded")
        assert pod.logs() == "private"
        cluster.api.patch("ServiceAccount", "default", own, namespace.name)
        pod = namespace.run("by-account", command="cat /data/f", volumes=volumes)
        pod.wait("Succeeded")
        assert pod.logs() == "private"
        refused = other.run("unbound", volumes=volumes, spec=own)
        refused.wait_event("FailedMount", contains=artifact.repository)
        # What needs no secret comes all the same.
        free = other.run("free", command="cat /data/f", volumes={"/data": inline(public.reference)}, spec=own)
        free.wait("Succeeded")
        assert free.logs() == "public"
        told = [line["message"] for line in agent.lines() if other.name in line["message"]]
        assert any("pull secrets of namespace" in message for message in told)
    finally:
        other.delete()


class _Slow(BaseHTTPRequestHandler):
    """A registry that answers when the caller has long gone: not found."""

    def do_GET(self) -> None:
        time.sleep(4)
        self.send_error(404)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Not on the tests' stderr."""


def test_a_failure_that_no_call_answers_is_an_event(
    cluster: Rig, agent: Agent, registry: str, namespace: Namespace
) -> None:
    pod = namespace.run("waiting", spec={"nodeName": "elsewhere"})
    uid = pod.read()["metadata"]["uid"]
    about = {"name": pod.name, "namespace": namespace.name, "uid": uid}
    told = {f"csi.storage.k8s.io/pod.{name}": value for name, value in about.items()}
    target = cluster.node.directory / "pods-of-rights" / "slow" / "mount"
    missing = f"{registry}/rights/slow:v1"
    with agent.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        publish(channel, target, 2.0, reference=missing, **told)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    def heard() -> list[Json]:
        return [event for event in pod.events() if event["source"].get("component") == "unlade-csi"]

    event = until("an event of the agent's", heard, seconds=60)[0]
    assert (event["type"], event["reason"]) == ("Warning", "FetchFailed")
    assert missing in event["message"]
    assert "next: " in event["message"]
    assert event["involvedObject"]["uid"] == uid

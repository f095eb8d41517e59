"""Credentials through to the end: right, wrong, expired, rotated, absent; and none of them in a log (V4, V5).

The service is a process of its own with its log at its most talkative. Registries: the rig's with TLS and
htpasswd, and one of the tests' own with token authentication, whose passwords change while it runs.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest

from rig.cluster import USERS, Rig
from rig.pods import Namespace, Pod
from tests.fakes.registry import FakeRegistry
from tests.fakes.tokens import TokenServer
from tests.rig.conftest import MakeRig
from tests.rig.containerd.test_artifacts import titled
from tests.rig.node.agent import Agent
from unlade.cri.api import images_pb2 as api

REFUSED = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.NOT_FOUND}
# What must never be seen in a log: as it is, and as it is sent.
SECRETS = {
    *USERS.values(),
    *("a-password-of-old", "a-password-of-new", "a-wrong-password", "an-identity-token", "a-dead-token"),
}


@pytest.fixture(scope="module")
def tokens(cluster: Rig) -> Iterator[TokenServer]:
    address = cluster.state.address(1)
    with TokenServer(
        users={"carol": "a-password-of-old"}, identity_tokens={"an-identity-token": "carol"}, address=address
    ) as server:
        yield server


@pytest.fixture(scope="module")
def rotating(cluster: Rig, tokens: TokenServer) -> Iterator[FakeRegistry]:
    with FakeRegistry(strict=False, tokens=tokens, address=cluster.state.address(1)) as registry:
        titled(registry, {"f": b"theirs"}, repo="secret/rotated")
        # containerd must reach it too: what the registry refuses to us is left to containerd's own ways.
        hosts = cluster.node.directory / "certs.d" / registry.host
        hosts.mkdir(parents=True)
        (hosts / "hosts.toml").write_text(f'server = "{registry.url}"\n[host."{registry.url}"]\n')
        yield registry


@pytest.fixture(scope="module")
def agent(cluster: Rig, tokens: TokenServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    made = Agent(
        cluster,
        tmp_path_factory.mktemp("credentials"),
        *("--plain-http", tokens.host, "--log-level", "debug"),
    )
    try:
        made.start()
        cluster.restart_kubelet(cluster.node, image_service=made.socket)
        yield made
        cluster.restart_kubelet(cluster.node, image_service=None)
    finally:
        made.close()


@pytest.fixture(autouse=True)
def unseen(agent: Agent) -> Iterator[None]:
    """No test leaves a secret in the log, in any of the forms in which it travels."""
    yield
    log = agent.log.read_text()
    issued = {secret for secret in SECRETS if secret in log}
    users = {**USERS, "carol": "a-password-of-old"}
    sent = {_basic(user, secret) for user in users for secret in SECRETS}
    assert issued | {text for text in sent if text in log} == set()


def _basic(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


def _secret(namespace: Namespace, name: str, host: str, user: str, password: str) -> dict[str, object]:
    config = {"auths": {host: {"auth": _basic(user, password)}}}
    data = base64.b64encode(json.dumps(config).encode()).decode()
    namespace.create(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
            "type": "kubernetes.io/dockerconfigjson",
            "data": {".dockerconfigjson": data},
        }
    )
    return {"imagePullSecrets": [{"name": name}]}


def _run(
    namespace: Namespace, name: str, reference: str, policy: str, spec: Mapping[str, object] | None = None
) -> Pod:
    volume = {"/data": {"image": {"reference": reference, "pullPolicy": policy}}}
    return namespace.run(name, command="cat /data/f", volumes=volume, spec=spec or {})


def test_a_pod_without_the_secret_is_refused_under_every_policy(
    cluster: Rig, namespace: Namespace, agent: Agent
) -> None:
    """What pod A pulled with its secret is on the node; pod B does not get it, however it asks."""
    reference = cluster.private_registry.push_artifact("secret/policies", {"f": b"private"}).reference
    allowed = _secret(namespace, "right", cluster.private_registry.address, "alice", USERS["alice"])
    wrong = _secret(namespace, "wrong", cluster.private_registry.address, "alice", "a-wrong-password")
    first = _run(namespace, "a", reference, "IfNotPresent", allowed)
    first.wait("Succeeded")
    assert first.logs() == "private"
    refused = []
    for policy, reason in (("Always", "Failed"), ("IfNotPresent", "Failed"), ("Never", "ErrImageNeverPull")):
        for who, spec in (("nobody", {}), ("wrong", wrong)):
            pod = _run(namespace, f"b-{policy.lower()}-{who}", reference, policy, spec)
            refused.append((pod, reason))
    for pod, reason in refused:
        pod.wait_event(reason, contains=reference)
        assert pod.read()["status"]["phase"] == "Pending"
        pod.delete(wait=False)
    for policy in ("Always", "Never"):
        again = _run(namespace, f"a-{policy.lower()}", reference, policy, allowed)
        again.wait("Succeeded")
        assert again.logs() == "private"


def test_rotated_and_expired(
    namespace: Namespace, agent: Agent, rotating: FakeRegistry, tokens: TokenServer
) -> None:
    """A password that was changed, tokens that are over, and an identity token that is not."""
    reference = f"{rotating.host}/secret/rotated:v1"
    client = agent.client()

    def refused(auth: api.AuthConfig) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            client.pull(reference, auth=auth)
        # containerd, asked last, says it in words.
        words = caught.value.details()
        assert caught.value.code() in REFUSED or "401" in words or "authoriz" in words, caught.value
        assert not [secret for secret in SECRETS if secret in caught.value.details()]

    old = api.AuthConfig(username="carol", password="a-password-of-old")
    new = api.AuthConfig(username="carol", password="a-password-of-new")
    pulled = client.pull(reference, auth=old)
    refused(new)
    # A token that the old password was good for is used while the registry takes it: minutes.
    tokens.users["carol"] = "a-password-of-new"
    tokens.grants.clear()
    refused(old)
    assert client.pull(reference, auth=new) == pulled
    assert client.pull(reference, auth=api.AuthConfig(identity_token="an-identity-token")) == pulled
    tokens.identity_tokens.clear()
    tokens.grants.clear()
    refused(api.AuthConfig(identity_token="an-identity-token"))
    alive = tokens.issue("carol", ["repository:secret/rotated:pull"])
    assert client.pull(reference, auth=api.AuthConfig(registry_token=alive)) == pulled
    tokens.grants.pop(alive)
    refused(api.AuthConfig(registry_token=alive))
    refused(api.AuthConfig(registry_token="a-dead-token"))
    assert alive not in agent.log.read_text()
    for token in tokens.grants:
        assert token not in agent.log.read_text()
    # The pod's secret is the old one; the kubelet tries again by itself once it is the new one.
    spec = _secret(namespace, "rotated", rotating.host, "carol", "a-password-of-old")
    pod = _run(namespace, "rotated", reference, "Always", spec)
    pod.wait_event("Failed", contains=reference)
    namespace.api.delete("Secret", "rotated", namespace.name)
    _secret(namespace, "rotated", rotating.host, "carol", "a-password-of-new")
    pod.wait("Succeeded", seconds=120)
    assert pod.logs() == "theirs"


def test_the_nodes_own_docker_configuration(cluster: Rig, agent: Agent) -> None:
    """Used for a pull that comes without a credential, and only then."""
    artifact = cluster.private_registry.push_artifact("secret/node", {"f": b"node"})
    home = agent.socket.parent / ".docker"
    home.mkdir()
    config = {"auths": {cluster.private_registry.address: {"auth": _basic("bob", USERS["bob"])}}}
    (home / "config.json").write_text(json.dumps(config))
    try:
        client = agent.client()
        client.pull(artifact.reference)
        wrong = api.AuthConfig(username="bob", password="a-wrong-password")
        with pytest.raises(grpc.RpcError, match="401"):
            client.pull(artifact.reference, auth=wrong)
        client.remove(artifact.reference)
    finally:
        shutil.rmtree(home)


def test_a_credential_provider_of_the_kubelet(make_rig: MakeRig, tmp_path: Path, full: bool) -> None:
    """A plug-in that the kubelet asks for credentials; the service gets them with the pull."""
    if not full:
        pytest.skip("a cluster of its own: in full runs")
    config, plugins = tmp_path / "providers.json", tmp_path / "plugins"
    plugins.mkdir()
    rig = make_rig(
        kubelets=False,
        flags={
            "kubelet": (
                f"--image-credential-provider-config={config}",
                f"--image-credential-provider-bin-dir={plugins}",
            )
        },
    )
    host = rig.private_registry.address
    answer = {
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "kind": "CredentialProviderResponse",
        "cacheKeyType": "Registry",
        "auth": {host: {"username": "bob", "password": USERS["bob"]}},
    }
    provider = {
        "name": "rig-provider",
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "matchImages": [host],
        "defaultCacheDuration": "1m",
    }
    config.write_text(
        json.dumps(
            {
                "apiVersion": "kubelet.config.k8s.io/v1",
                "kind": "CredentialProviderConfig",
                "providers": [provider],
            }
        )
    )
    plugin = plugins / "rig-provider"
    plugin.write_text(f"#!/bin/sh\ncat >/dev/null\ncat <<'END'\n{json.dumps(answer)}\nEND\n")
    plugin.chmod(0o755)
    service = Agent(rig, tmp_path)
    try:
        service.start()
        rig.start_kubelet(rig.node, image_service=service.socket)
        rig.wait_node(rig.node)
        artifact = rig.private_registry.push_artifact("secret/provided", {"f": b"provided"})
        pod = _run(Namespace(rig), "provided", artifact.reference, "Always")
        pod.wait("Succeeded")
        assert pod.logs() == "provided"
        assert USERS["bob"] not in service.log.read_text()
    finally:
        service.close()

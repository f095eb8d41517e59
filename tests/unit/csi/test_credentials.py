"""Whose credentials a volume is fetched with (V4), and that content on the node is not everybody's (V5)."""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.fakes.driver import Driver
from tests.fakes.registry import FakeRegistry
from tests.unit.csi.conftest import Put
from unlade.csi.credentials import NodeCredentials, from_secret
from unlade.csi.pods import Pod
from unlade.model import Reference
from unlade.registry import (
    Credential,
    CredentialSource,
    InvalidCredentials,
    KubeletProviderCredentials,
    StaticCredentials,
)

PASSWORD = "correct-horse-battery-staple"
TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"
CODE = grpc.StatusCode


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    with FakeRegistry(users={"alice": PASSWORD, "robot": "token-of-the-pod"}) as registry:
        yield registry


def docker_config(host: str, password: str = PASSWORD) -> str:
    auth = base64.b64encode(f"alice:{password}".encode()).decode()
    return json.dumps({"auths": {host: {"auth": auth}}})


def denied(driver: Driver, pod: str, reference: str, **more: str) -> str:
    with pytest.raises(grpc.RpcError) as error:
        driver.publish(pod, reference=reference, context=more)
    assert error.value.code() == CODE.PERMISSION_DENIED, error.value.details()
    return str(error.value.details())


@pytest.mark.root
@pytest.mark.parametrize("kind", [".dockerconfigjson", ".dockercfg", "username"])
def test_a_secret_per_namespace(
    driver: Driver, fake: FakeRegistry, put: Put, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A second namespace without the secret is refused although the content is on the node."""
    caplog.set_level(logging.DEBUG)
    put("team/private", "v1", {"file": b"secret content"})
    name = str(fake.reference("team/private", "v1"))
    secrets = {
        ".dockerconfigjson": {".dockerconfigjson": docker_config(fake.host)},
        ".dockercfg": {".dockercfg": json.dumps(json.loads(docker_config(fake.host))["auths"])},
        "username": {"username": "alice", "password": PASSWORD},
    }[kind]
    denied(driver, "early", name)
    mounted = driver.publish("ours", reference=name, secrets=secrets)
    assert (mounted / "file").read_bytes() == b"secret content"
    for policy in ("Always", "IfNotPresent", "Never"):
        assert "next:" in denied(driver, f"theirs-{policy}".lower(), name, pullPolicy=policy)
    # Knowing the digest is no right to it.
    pinned = f"{fake.host}/team/private@{fake.repository('team/private').tags['v1']}"
    denied(driver, "pinned", pinned)
    fake.clear_log()
    driver.publish("ours-again", reference=name, secrets=secrets)
    assert fake.requests == [], "the same credential was allowed a moment ago"
    with pytest.raises(grpc.RpcError):
        wrong = {".dockerconfigjson": docker_config(fake.host, "guess")}
        driver.publish("wrong", reference=name, secrets=wrong)
    assert len(driver.records()) == 2
    assert PASSWORD not in caplog.text
    for path in driver.config.state.rglob("*"):
        if path.is_file():
            assert PASSWORD.encode() not in path.read_bytes(), path


class SecretsOfPods:
    """Pull secrets of pods, as the API server would tell them."""

    def __init__(self, **known: CredentialSource) -> None:
        self._known = known

    def of_pod(self, pod: Pod) -> CredentialSource:
        return self._known.get(pod.name, StaticCredentials({}))


@pytest.mark.root
def test_pull_secrets_of_the_pod_and_the_node_s_own(driver: Driver, fake: FakeRegistry, put: Put) -> None:
    put("team/private", "v1", {"file": b"x"})
    name = str(fake.reference("team/private", "v1"))
    alice = StaticCredentials({fake.host: Credential("alice", PASSWORD)})
    driver.restart(credentials=NodeCredentials(pods=SecretsOfPods(ours=alice)))
    driver.publish("ours", reference=name)
    denied(driver, "theirs", name)
    driver.restart(credentials=NodeCredentials(node=alice))
    driver.publish("theirs", reference=name)


@pytest.mark.root
@pytest.mark.parametrize("where", ["context", "secrets"])
def test_the_pod_s_token_goes_to_the_kubelet_s_credential_provider(
    driver: Driver, fake: FakeRegistry, put: Put, tmp_path: Path, where: str
) -> None:
    plugin = tmp_path / "bin" / "exchange"
    plugin.parent.mkdir()
    # Trades the token in the request for a password that is the token.
    plugin.write_text(
        "#!/usr/bin/env python3\n"
        "import json, sys\n"
        "asked = json.load(sys.stdin)\n"
        "auth = {asked['image'].split('/')[0]:"
        " {'username': 'robot', 'password': asked['serviceAccountToken']}}\n"
        "print(json.dumps({'kind': 'CredentialProviderResponse', 'apiVersion': asked['apiVersion'],"
        " 'cacheKeyType': 'Registry', 'cacheDuration': '1h', 'auth': auth}))\n"
    )
    plugin.chmod(0o755)
    config = tmp_path / "providers.json"
    entry = {
        "name": "exchange",
        "matchImages": [fake.host],
        "apiVersion": "credentialprovider.kubelet.k8s.io/v1",
        "defaultCacheDuration": "1h",
        "tokenAttributes": {
            "serviceAccountTokenAudience": "registry",
            "cacheType": "Token",
            "requireServiceAccount": True,
        },
    }
    config.write_text(
        json.dumps(
            {
                "apiVersion": "kubelet.config.k8s.io/v1",
                "kind": "CredentialProviderConfig",
                "providers": [entry],
            }
        )
    )
    put("team/private", "v1", {"file": b"x"})
    name = str(fake.reference("team/private", "v1"))
    providers = KubeletProviderCredentials(str(config), str(plugin.parent))
    driver.restart(credentials=NodeCredentials(providers=providers))
    tokens = json.dumps({"registry": {"token": "token-of-the-pod", "expirationTimestamp": "2099-01-01"}})
    if where == "context":
        driver.publish("ours", reference=name, context={TOKENS: tokens})
    else:
        driver.publish("ours", reference=name, secrets={TOKENS: tokens})
    denied(driver, "without", name)
    other = json.dumps({"registry": {"token": "of-another-pod", "expirationTimestamp": "2099-01-01"}})
    denied(driver, "other", name, **{TOKENS: other})
    with pytest.raises(grpc.RpcError, match="not what a kubelet writes"):
        driver.publish("broken", reference=name, context={TOKENS: "token-of-the-pod"})


def test_secrets_that_are_no_credentials() -> None:
    one, two = Reference.parse("a.example/x"), Reference.parse("b.example/x")
    with pytest.raises(InvalidCredentials, match="passwort") as error:
        from_secret({"passwort": PASSWORD}, [one])
    assert PASSWORD not in str(error.value)
    with pytest.raises(InvalidCredentials, match="several"):
        from_secret({"username": "alice", "password": PASSWORD}, [one, two])
    with pytest.raises(InvalidCredentials, match="not a Docker"):
        from_secret({".dockerconfigjson": PASSWORD}, [one])
    source = from_secret({"username": "alice", "password": PASSWORD}, [one])
    assert source.lookup("a.example", "x") == [Credential("alice", PASSWORD)]
    assert source.lookup("b.example", "x") == []


def test_nothing_of_a_secret_is_in_a_repr() -> None:
    from unlade.csi.volumes import Publish
    from unlade.registry import ServiceAccount

    ask = Publish(volume_id="v", target="/t", attributes={}, secrets={"password": PASSWORD})
    assert PASSWORD not in repr(ask)
    assert PASSWORD not in repr(ServiceAccount("ns", "name", tokens={"aud": PASSWORD}))
    assert os.path.sep not in repr(Pod())

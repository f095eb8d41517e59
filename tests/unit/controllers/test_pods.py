"""Pull secrets of pods and events on them, as the node's driver asks for them (V4, V15)."""

import base64
import json
import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.fakes.kube_api import Answer, FakeKubeApi, Request, status, wait_for
from unlade.controllers.api import ApiError, ApiServer
from unlade.controllers.pods import COMPONENT, PodNotes, PodSecrets
from unlade.controllers.recorder import Recorder
from unlade.controllers.throttle import TokenBucket
from unlade.errors import InvalidInput


@dataclass(frozen=True)
class Pod:
    namespace: str = "ns"
    name: str = "web"
    uid: str = "uid-1"
    service_account: str = "runner"


def secret(password: str, *, kind: str = "kubernetes.io/dockerconfigjson") -> dict[str, Any]:
    document = {"auths": {"registry.example.com": {"username": "alice", "password": password}}}
    encoded = base64.b64encode(json.dumps(document).encode()).decode()
    return {"type": kind, "data": {".dockerconfigjson": encoded}}


class Cluster:
    """Objects by resource and name; what is asked for in vain is not found."""

    def __init__(self, api: FakeKubeApi, **objects: dict[str, Any]) -> None:
        self.objects = objects
        self.asked: list[str] = []
        api.fault = self.answer

    def answer(self, request: Request) -> Answer | None:
        place = "/".join(request.path.split("/")[-2:])
        self.asked.append(place)
        found = self.objects.get(place.replace("/", "_").replace("-", "_"))
        return Answer(200, found) if found is not None else status(404, "NotFound")


def pod(*secrets: str, uid: str = "uid-1") -> dict[str, Any]:
    return {"metadata": {"uid": uid}, "spec": {"imagePullSecrets": [{"name": name} for name in secrets]}}


def passwords(server: ApiServer, whose: Pod | None = None) -> list[str]:
    source = PodSecrets(server).of_pod(whose or Pod())
    return [one.password for one in source.lookup("registry.example.com", "team/app")]


def test_the_pods_secrets_in_order(api: FakeKubeApi, server: ApiServer) -> None:
    cluster = Cluster(api, pods_web=pod("one", "two"), secrets_one=secret("1"), secrets_two=secret("2"))
    assert passwords(server) == ["1", "2"]
    assert cluster.asked == ["pods/web", "secrets/one", "secrets/two"]


def test_the_accounts_secrets_where_the_pod_has_none(api: FakeKubeApi, server: ApiServer) -> None:
    account = {"imagePullSecrets": [{"name": "one"}]}
    Cluster(api, pods_web=pod(), serviceaccounts_runner=account, secrets_one=secret("1"))
    assert passwords(server) == ["1"]
    assert passwords(server, replace(Pod(), service_account="")) == []


def test_what_is_no_pull_secret_is_passed_over(api: FakeKubeApi, server: ApiServer) -> None:
    Cluster(
        api,
        pods_web=pod("missing", "opaque", "broken", "empty", "one"),
        secrets_opaque=secret("opaque", kind="Opaque"),
        secrets_broken={"type": "kubernetes.io/dockerconfigjson", "data": {".dockerconfigjson": "%%%"}},
        secrets_empty={"type": "kubernetes.io/dockercfg"},
        secrets_one=secret("1"),
    )
    assert passwords(server) == ["1"]


def test_a_pod_of_the_same_name_is_another(api: FakeKubeApi, server: ApiServer) -> None:
    Cluster(api, pods_web=pod("one", uid="uid-2"), secrets_one=secret("1"))
    with pytest.raises(InvalidInput, match="another one"):
        passwords(server)


def test_a_namespace_that_grants_nothing(
    api: FakeKubeApi, server: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    api.fault = lambda _request: status(403, "Forbidden", "no rights")
    secrets = PodSecrets(server)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not secrets.of_pod(Pod()).lookup("registry.example.com", "x")
    assert len(caplog.records) == 1
    assert "no rights" in caplog.text


def test_nobody_answers(api: FakeKubeApi, server: ApiServer) -> None:
    api.fault = lambda _request: status(503, "ServiceUnavailable")
    with pytest.raises(ApiError):
        passwords(server)


def test_events_of_both_kinds(api: FakeKubeApi, server: ApiServer) -> None:
    recorder = Recorder(server, COMPONENT, limit=TokenBucket(0, 1))
    recorder.start()
    notes = PodNotes(recorder)
    notes.tell(Pod(), reason="FetchFailed", message="m1", warning=True)
    notes.tell(Pod(), reason="Fetched", message="m2", warning=False)
    notes.tell(Pod(name=""), reason="Fetched", message="nobody", warning=False)

    def sent() -> list[tuple[str, str, str]]:
        posted = [request.body for request in api.requests if request.verb == "POST" and request.body]
        return [(body["type"], body["reason"], body["involvedObject"]["uid"]) for body in posted]

    wait_for(lambda: len(sent()) == 2)
    recorder.stop()
    assert sent() == [("Warning", "FetchFailed", "uid-1"), ("Normal", "Fetched", "uid-1")]

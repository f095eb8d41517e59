"""The ephemeral volume controller against a server that misbehaves (E1 to E5)."""

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.fakes.kube_api import Answer, Cut, FakeKubeApi, Request, status, wait_for
from unlade.controllers.api import ApiServer
from unlade.controllers.ephemeral import EphemeralVolumes, Pod, Volume, claim_body, keep_pod
from unlade.controllers.metrics import Metrics
from unlade.controllers.objects import PodManifest
from unlade.controllers.throttle import TokenBucket

CLAIMS = "persistentvolumeclaims"
SPEC = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}


def pod(name: str, *volumes: str, template: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    source = {"volumeClaimTemplate": template or {"metadata": {}, "spec": SPEC}}
    return {
        "metadata": {"name": name, "namespace": "ns", **metadata},
        "spec": {
            "volumes": [{"name": "config", "emptyDir": {}}]
            + [{"name": volume, "ephemeral": source} for volume in volumes]
        },
    }


class Running:
    def __init__(self, server: ApiServer, **options: Any) -> None:
        self.metrics = Metrics()
        settings: dict[str, Any] = {"limit": TokenBucket(0, 1), "workers": 4, "resync": 600.0, **options}
        self.controller = EphemeralVolumes(server, metrics=self.metrics, **settings)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.controller.run, args=(self.stop,), daemon=True)

    def start(self) -> "Running":
        self.thread.start()
        wait_for(lambda: self.controller.synced)
        return self

    def end(self) -> None:
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def running(server: ApiServer) -> Iterator[Running]:
    made = Running(server)
    yield made
    if made.thread.is_alive():
        made.end()


def claims(api: FakeKubeApi) -> list[str]:
    return list(api.all(CLAIMS))


def messages(api: FakeKubeApi) -> list[str]:
    return [event["message"] for event in api.all("events").values()]


def test_a_claim_per_volume_with_the_pod_as_controller(api: FakeKubeApi, running: Running) -> None:
    running.start()
    template = {"metadata": {"labels": {"l": "1"}, "annotations": {"a": "2"}}, "spec": SPEC}
    made = api.put("pods", pod("web", "data", "logs", template=template))
    wait_for(lambda: claims(api) == ["ns/web-data", "ns/web-logs"])
    claim = api.all(CLAIMS)["ns/web-data"]
    assert claim["spec"] == SPEC
    assert claim["metadata"]["labels"] == {"l": "1"}
    assert claim["metadata"]["annotations"] == {"a": "2"}
    assert claim["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": "web",
            "uid": made["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def test_pods_that_were_there_before_are_served_and_existing_claims_left(
    api: FakeKubeApi, running: Running
) -> None:
    one = api.put("pods", pod("one", "v"))
    api.put("pods", pod("two", "v"))
    owner = {"uid": one["metadata"]["uid"], "controller": True}
    api.put(CLAIMS, {"metadata": {"name": "one-v", "namespace": "ns", "ownerReferences": [owner]}})
    running.start()
    wait_for(lambda: len(claims(api)) == 2)
    assert api.count("POST", CLAIMS) == 1
    assert messages(api) == []


def test_pods_without_such_volumes_and_terminating_pods_get_nothing(
    api: FakeKubeApi, running: Running
) -> None:
    api.put("pods", pod("plain"))
    api.put("pods", pod("leaving", "v", deletionTimestamp="2026-01-01T00:00:00Z"))
    running.start()
    api.put("pods", pod("plain-too"))
    api.put("pods", pod("leaving-too", "v", deletionTimestamp="2026-01-01T00:00:00Z"))
    api.put("pods", pod("last", "v"))
    wait_for(lambda: claims(api) == ["ns/last-v"])
    assert sorted(running.controller.pods.keys()) == ["ns/last", "ns/leaving", "ns/leaving-too"]


def test_a_strangers_claim_is_left_alone_until_it_goes(api: FakeKubeApi, running: Running) -> None:
    api.put(CLAIMS, {"metadata": {"name": "web-v", "namespace": "ns"}, "spec": {"mine": True}})
    running.start()
    made = api.put("pods", pod("web", "v"))
    wait_for(lambda: len(messages(api)) == 1)
    assert messages(api) == [
        "ephemeral volume v: PVC ns/web-v was not created for pod ns/web (pod is not owner)"
    ]
    assert api.all(CLAIMS)["ns/web-v"]["spec"] == {"mine": True}
    wait_for(lambda: running.controller.queue.failing == 1)
    api.delete(CLAIMS, "ns", "web-v")
    wait_for(lambda: "ns/web-v" in claims(api))
    assert api.all(CLAIMS)["ns/web-v"]["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]
    wait_for(lambda: running.controller.queue.failing == 0)


def test_two_pods_whose_names_meet_in_one_claim(api: FakeKubeApi, running: Running) -> None:
    running.start()
    first = api.put("pods", pod("a-b", "c"))
    wait_for(lambda: claims(api) == ["ns/a-b-c"])
    second = api.put("pods", pod("a", "b-c"))
    wait_for(lambda: len(messages(api)) == 1)
    assert api.all(CLAIMS)["ns/a-b-c"]["metadata"]["ownerReferences"][0]["uid"] == first["metadata"]["uid"]
    api.delete("pods", "ns", "a-b")
    api.delete(CLAIMS, "ns", "a-b-c")

    def is_seconds() -> bool:
        for claim in api.all(CLAIMS).values():
            owner = claim["metadata"]["ownerReferences"][0]["uid"]
            if owner == second["metadata"]["uid"]:
                return True
            # Made before the end of the first pod was heard of: the garbage collector's part.
            api.delete(CLAIMS, "ns", "a-b-c")
        return False

    wait_for(is_seconds)


def test_a_claim_deleted_by_hand_comes_back(api: FakeKubeApi, running: Running) -> None:
    running.start()
    api.put("pods", pod("web-1-2", "data-x"))
    wait_for(lambda: "ns/web-1-2-data-x" in running.controller.claims.keys())  # noqa: SIM118
    api.delete(CLAIMS, "ns", "web-1-2-data-x")
    wait_for(lambda: claims(api) == ["ns/web-1-2-data-x"])
    assert api.count("POST", CLAIMS) == 2


def test_a_refusal_becomes_an_event_with_the_servers_words_and_is_retried(
    api: FakeKubeApi, running: Running
) -> None:
    refuse = [True]
    quota = status(403, "Forbidden", 'persistentvolumeclaims "web-v" is forbidden: exceeded quota: q')
    api.fault = lambda r: quota if r.verb == "POST" and CLAIMS in r.path and refuse[0] else None
    running.start()
    api.put("pods", pod("web", "v", "w"))
    wait_for(lambda: len(messages(api)) == 1)
    assert messages(api) == [
        'ephemeral volume v: create PVC web-v: persistentvolumeclaims "web-v" is forbidden: exceeded quota: q'
    ]
    refuse[0] = False
    wait_for(lambda: len(claims(api)) == 2)


def test_an_answer_that_was_lost_is_not_a_second_claim_nor_an_event(
    api: FakeKubeApi, running: Running
) -> None:
    lost: list[str] = []

    def lose_the_answer(request: Request) -> Answer | None:
        if request.verb == "POST" and CLAIMS in request.path and not lost:
            lost.append(request.path)
            assert request.body is not None
            request.body["metadata"]["namespace"] = "ns"
            api.put(CLAIMS, request.body)
            raise Cut
        if request.watch and CLAIMS in request.path:
            return status(503, "ServiceUnavailable")  # so that the cache stays behind
        return None

    api.fault = lose_the_answer
    running.start()
    api.put("pods", pod("web", "v"))
    wait_for(lambda: api.count("GET", f"{CLAIMS}/web-v") == 1)
    wait_for(lambda: running.controller.queue.failing == 0)
    assert claims(api) == ["ns/web-v"]
    assert messages(api) == []


def test_a_server_that_asks_for_patience_gets_it_without_an_event(api: FakeKubeApi, running: Running) -> None:
    left = [Answer(429, {"message": "later"}, {"Retry-After": "1"})]
    api.fault = lambda r: left.pop() if left and r.verb == "POST" and CLAIMS in r.path else None
    running.start()
    api.put("pods", pod("web", "v"))
    wait_for(lambda: claims(api) == ["ns/web-v"])
    first, second = [r.at for r in api.requests if r.verb == "POST" and CLAIMS in r.path]
    assert second - first >= 0.95
    assert messages(api) == []


def test_a_pod_made_again_unseen_gets_a_claim_of_its_own(api: FakeKubeApi, running: Running) -> None:
    running.start()
    api.put("pods", pod("web", "v"))
    wait_for(lambda: "ns/web-v" in running.controller.claims.keys())  # noqa: SIM118
    api.refuse()
    api.delete("pods", "ns", "web", silently=True)
    api.delete(CLAIMS, "ns", "web-v", silently=True)
    uid = api.put("pods", pod("web", "v"))["metadata"]["uid"]
    api.compact()

    def pods_first(request: Request) -> None:
        # the other order makes a claim for the pod that is gone, which the garbage collector takes away
        if request.verb == "GET" and CLAIMS in request.path and not request.watch:
            wait_for(lambda: getattr(running.controller.pods.get("ns/web"), "uid", "") == uid)

    api.fault = pods_first
    api.listen()
    wait_for(lambda: claims(api) == ["ns/web-v"])
    owner = api.all(CLAIMS)["ns/web-v"]["metadata"]["ownerReferences"][0]
    assert owner["uid"] == uid


def test_resync_finds_what_was_never_announced(api: FakeKubeApi, server: ApiServer) -> None:
    running = Running(server, resync=0.2)
    running.start()
    running.controller.pods.handlers.added = lambda _key, _pod: None
    api.put("pods", pod("web", "v"))
    wait_for(lambda: claims(api) == ["ns/web-v"])
    running.end()


def test_hundreds_of_pods_while_watches_are_cut(api: FakeKubeApi, running: Running) -> None:
    running.start()
    for number in range(300):
        api.put("pods", pod(f"p{number}", "v"))
        if number % 60 == 30:
            api.cut_watches()
        if number == 200:
            api.compact()
            api.cut_watches()
    wait_for(lambda: len(claims(api)) == 300, seconds=30)
    wait_for(lambda: len(running.controller.queue) == 0 and running.controller.queue.failing == 0)
    assert messages(api) == []
    for line in (
        'unlade_informer_kept{resource="pods"} 300.0',
        'unlade_ephemeral_claims_total{result="created"} 300.0',
    ):
        wait_for(lambda line=line: line in running.metrics.text().decode(), what=line)  # type: ignore[misc]


def test_writes_keep_to_the_limit(api: FakeKubeApi, server: ApiServer) -> None:
    running = Running(server, limit=TokenBucket(50, 5))
    for number in range(30):
        api.put("pods", pod(f"p{number}", "v"))
    running.start()
    wait_for(lambda: len(claims(api)) == 30)
    times = [r.at for r in api.requests if r.verb == "POST"]
    assert 0.45 <= times[-1] - times[0] < 2
    running.end()


def test_of_a_plain_pod_nothing_is_kept_and_of_others_no_view_of_the_page() -> None:
    def decode(item: dict[str, Any]) -> Pod | None:
        return keep_pod(msgspec.json.decode(msgspec.json.encode(item), type=PodManifest))

    assert decode(pod("plain")) is None
    assert decode({"metadata": {"name": "bare"}, "spec": {}}) is None
    assert decode({"metadata": {"name": "null"}, "spec": {"volumes": None}}) is None
    assert (
        decode({"metadata": {"name": "null"}, "spec": {"volumes": [{"name": "v", "ephemeral": None}]}})
        is None
    )
    kept = decode(pod("web", "v"))
    assert kept is not None
    assert isinstance(kept.volumes[0].source, bytes)


def test_fields_this_version_does_not_know_pass_through() -> None:
    source = b'{"volumeClaimTemplate":{"spec":{"fromTheFuture":{"x":[1,2]}}}}'
    body = claim_body(Pod("ns", "p", "u", "1", False, (Volume("v", source),)), Volume("v", source))
    assert body["spec"] == {"fromTheFuture": {"x": [1, 2]}}
    assert "labels" not in body["metadata"]

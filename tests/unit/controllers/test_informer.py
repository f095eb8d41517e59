"""The informer: pages, watch, bookmarks, and every way a stream can break (E5)."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.kube_api import Answer, Cut, FakeKubeApi, Request, status, wait_for
from unlade.controllers.api import ApiServer
from unlade.controllers.informer import Informer, Resource, lines
from unlade.controllers.objects import MetadataOnly, PodManifest

Seen = list[tuple[str, str]]


def pod(name: str, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns", **metadata},
        "spec": {"containers": [{"name": "c"}]},
    }


PODS: Resource[PodManifest, str] = Resource("pods", "/api/v1/pods", PodManifest, lambda p: p.metadata.uid)
CLAIMS: Resource[MetadataOnly, str] = Resource(
    "claims", "/api/v1/persistentvolumeclaims", MetadataOnly, lambda p: p.metadata.uid
)


class Watched:
    def __init__(self, informer: Informer[Any, str]) -> None:
        self.informer = informer
        self.seen: Seen = []
        informer.handlers.added = lambda key, _new: self.seen.append(("added", key))
        informer.handlers.updated = lambda key, _old, _new: self.seen.append(("updated", key))
        informer.handlers.deleted = lambda key, _old: self.seen.append(("deleted", key))

    def wait(self, *keys: str) -> None:
        wait_for(lambda: sorted(self.informer.keys()) == sorted(keys), what=f"{self.informer.keys()} {keys}")


@pytest.fixture
def pods(server: ApiServer) -> Iterator[Watched]:
    watched = Watched(Informer(server, PODS, page=2, silence=2.0))
    yield watched
    watched.informer.stop()
    assert not watched.informer.alive


def test_it_lists_in_pages_and_follows(api: FakeKubeApi, pods: Watched) -> None:
    for number in range(5):
        api.put("pods", pod(f"p{number}"))
    pods.informer.start()
    assert pods.informer.synced.wait(5)
    assert len(pods.informer) == 5
    assert pods.informer.counts.pages == 3
    assert [r.query.get("limit") for r in api.requests[:3]] == ["2", "2", "2"]
    api.put("pods", pod("p9"))
    api.put("pods", pod("p0"))
    api.delete("pods", "ns", "p1")
    pods.wait("ns/p0", "ns/p2", "ns/p3", "ns/p4", "ns/p9")
    assert pods.seen[5:] == [("added", "ns/p9"), ("updated", "ns/p0"), ("deleted", "ns/p1")]
    watch = next(r for r in api.requests if r.watch)
    assert watch.query["allowWatchBookmarks"] == "true"


def test_an_object_of_no_interest_is_not_kept(api: FakeKubeApi, server: ApiServer) -> None:
    only: Resource[PodManifest, str] = Resource(
        "pods", "/api/v1/pods", PodManifest, lambda p: p.metadata.uid if p.metadata.name == "kept" else None
    )
    informer = Informer(server, only)
    api.put("pods", pod("kept"))
    api.put("pods", pod("other"))
    informer.start()
    assert informer.synced.wait(5)
    api.put("pods", pod("another"))
    wait_for(lambda: informer.counts.events == 1)
    assert informer.keys() == ["ns/kept"]
    informer.stop()


def test_metadata_alone_is_asked_for_where_metadata_is_enough(api: FakeKubeApi, server: ApiServer) -> None:
    informer = Informer(server, CLAIMS)
    api.put("persistentvolumeclaims", {"metadata": {"name": "c", "namespace": "ns", "uid": "u"}, "spec": {}})
    informer.start()
    assert informer.synced.wait(5)
    wait_for(lambda: informer.counts.watches == 1)
    informer.stop()
    accepts = [r.accept for r in api.requests]
    assert "as=PartialObjectMetadataList" in accepts[0]
    assert "as=PartialObjectMetadata;" in accepts[1]
    assert informer.get("ns/c") == "u"


def test_a_cut_stream_resumes_without_a_list(api: FakeKubeApi, pods: Watched) -> None:
    pods.informer.start()
    assert pods.informer.synced.wait(5)
    for round_number in range(3):
        wait_for(lambda n=round_number: api.watches > n)  # type: ignore[misc]
        api.cut_watches()
        api.put("pods", pod(f"p{round_number}"))
    pods.wait("ns/p0", "ns/p1", "ns/p2")
    assert pods.informer.counts.lists == 1
    assert pods.seen == [("added", f"ns/p{n}") for n in range(3)]


def test_bookmarks_move_the_version_so_that_a_quiet_kind_need_not_list_again(
    api: FakeKubeApi, pods: Watched
) -> None:
    pods.informer.start()
    assert pods.informer.synced.wait(5)
    for number in range(5):
        api.put("events", {"metadata": {"name": f"e{number}", "namespace": "ns"}})
    current = int(
        api.put("events", {"metadata": {"name": "last", "namespace": "ns"}})["metadata"]["resourceVersion"]
    )
    bookmarks = pods.informer.counts.bookmarks
    wait_for(lambda: pods.informer.counts.bookmarks >= bookmarks + 2)
    watches = api.watches
    api.cut_watches()
    wait_for(lambda: api.watches > watches)
    assert int([r for r in api.requests if r.watch][-1].query["resourceVersion"]) >= current
    assert pods.informer.counts.lists == 1


def test_expired_history_as_an_event_lists_again_and_finds_what_vanished(
    api: FakeKubeApi, pods: Watched
) -> None:
    api.put("pods", pod("stays"))
    api.put("pods", pod("goes"))
    pods.informer.start()
    assert pods.informer.synced.wait(5)
    wait_for(lambda: api.watches == 1)
    api.delete("pods", "ns", "goes", silently=True)
    api.compact()
    api.cut_watches()
    pods.wait("ns/stays")
    assert pods.informer.counts.expired >= 1
    assert pods.informer.counts.lists == 2
    assert ("deleted", "ns/goes") in pods.seen


def test_expired_history_as_a_status_lists_again(api: FakeKubeApi, pods: Watched) -> None:
    pods.informer.start()
    assert pods.informer.synced.wait(5)
    wait_for(lambda: api.watches == 1)
    gone = [status(410, "Expired", "too old")]
    api.fault = lambda request: gone.pop() if request.watch and gone else None
    api.cut_watches()
    api.put("pods", pod("p"))
    pods.wait("ns/p")
    assert pods.informer.counts.expired == 1
    assert pods.informer.counts.lists == 2


def test_a_page_token_that_expires_starts_over_with_larger_pages(api: FakeKubeApi, pods: Watched) -> None:
    for number in range(7):
        api.put("pods", pod(f"p{number}"))

    def expire(request: Request) -> Answer | None:
        if "continue" in request.query and request.query["limit"] == "2":
            return status(410, "Expired", "continue parameter too old")
        return None

    api.fault = expire
    pods.informer.start()
    assert pods.informer.synced.wait(5)
    assert len(pods.informer) == 7
    assert [r.query["limit"] for r in api.requests if not r.watch] == ["2", "2", "8"]


def test_a_server_that_goes_away_and_comes_back(api: FakeKubeApi, pods: Watched) -> None:
    pods.informer.start()
    assert pods.informer.synced.wait(5)
    api.refuse()
    wait_for(lambda: pods.informer.counts.failures >= 2)
    api.put("pods", pod("meanwhile"))
    api.listen()
    pods.wait("ns/meanwhile")
    assert pods.informer.counts.lists == 1


@pytest.mark.parametrize(
    "answer",
    [
        status(429, "TooManyRequests"),
        status(500, "InternalError"),
        status(401, "Unauthorized"),
        Answer(502, b"<html>bad gateway</html>"),
        Answer(200, b"not json"),
    ],
    ids=["429", "500", "401", "html", "garbage"],
)
def test_a_failing_list_is_tried_until_it_works(api: FakeKubeApi, pods: Watched, answer: Answer) -> None:
    api.put("pods", pod("p"))
    left = [answer, answer]
    api.fault = lambda request: left.pop() if left and not request.watch else None
    pods.informer.start()
    pods.wait("ns/p")
    assert pods.informer.counts.failures == 2


def test_retry_after_is_kept(api: FakeKubeApi, pods: Watched) -> None:
    left = [Answer(429, {"message": "slow down"}, {"Retry-After": "1"})]
    api.fault = lambda request: left.pop() if left else None
    pods.informer.start()
    assert pods.informer.synced.wait(5)
    first, second = api.requests[:2]
    assert second.at - first.at >= 0.95


def test_a_silent_peer_is_left(api: FakeKubeApi, server: ApiServer) -> None:
    api.bookmark_every = 60.0
    informer = Informer(server, PODS, silence=0.3)
    informer.start()
    assert informer.synced.wait(5)
    wait_for(lambda: api.count("GET", watch=True) >= 2)
    informer.stop()
    assert informer.counts.lists == 1


def test_a_server_that_ends_every_watch_at_once_is_not_hammered(api: FakeKubeApi, pods: Watched) -> None:
    api.fault = lambda request: Answer(200, b"") if request.watch else None
    pods.informer.start()
    assert pods.informer.synced.wait(5)
    wait_for(lambda: api.count("GET", watch=True) >= 5, seconds=20)
    times = [r.at for r in api.requests if r.watch]
    assert times[4] - times[3] > 0.2


def test_a_cut_before_the_answer_is_a_failure_like_any_other(api: FakeKubeApi, pods: Watched) -> None:
    left = [1, 1]

    def cut(_request: Request) -> Answer | None:
        if left:
            left.pop()
            raise Cut
        return None

    api.fault = cut
    pods.informer.start()
    assert pods.informer.synced.wait(5)
    assert pods.informer.counts.failures == 2


def test_a_handler_that_raises_does_not_end_the_informer(api: FakeKubeApi, pods: Watched) -> None:
    calls: list[str] = []

    def fail_once(key: str, _new: str) -> None:
        calls.append(key)
        if len(calls) == 1:
            raise RuntimeError("a handler's own fault")

    pods.informer.handlers.added = fail_once
    pods.informer.start()
    assert pods.informer.synced.wait(5)
    api.put("pods", pod("p"))
    api.put("pods", pod("q"))
    wait_for(lambda: "ns/q" in calls)
    assert pods.informer.alive


def test_stop_ends_an_open_watch_at_once(api: FakeKubeApi, server: ApiServer) -> None:
    api.bookmark_every = 60.0
    informer = Informer(server, PODS)
    informer.start()
    wait_for(lambda: api.count("GET", watch=True) == 1)
    informer.stop(timeout=2.0)
    assert not informer.alive


def test_lines_survive_any_tearing() -> None:
    data = b'{"a":1}\n{"b":2}\n\n{"c":3}\n{"torn'
    for size in range(1, len(data) + 1):
        chunks = [data[at : at + size] for at in range(0, len(data), size)]
        assert list(lines(chunks)) == [b'{"a":1}', b'{"b":2}', b'{"c":3}']
    gc.collect()

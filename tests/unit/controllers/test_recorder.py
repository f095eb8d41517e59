"""Events: one object for one sentence, however often it is said."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.fakes.kube_api import Answer, FakeKubeApi, Request, status, wait_for
from unlade.controllers.api import ApiServer
from unlade.controllers.recorder import BURST, Recorder, Remembered, Subject
from unlade.controllers.throttle import TokenBucket

POD = Subject("Pod", "ns", "web", "uid-1", "77")


class Recorded:
    def __init__(self, server: ApiServer) -> None:
        self.results: Counter[str] = Counter()
        self.now = 1000.0
        self.recorder = Recorder(
            server,
            "tester",
            limit=TokenBucket(0, 1),
            count=lambda result: self.results.update([result]),
            clock=lambda: self.now,
        )
        self.recorder.start()

    def wait(self, **results: int) -> None:
        wait_for(lambda: self.results == Counter(results), what=f"{self.results} is not {results}")


@pytest.fixture
def recorded(server: ApiServer) -> Iterator[Recorded]:
    made = Recorded(server)
    yield made
    made.recorder.stop()


def test_an_event_names_its_object_and_source(api: FakeKubeApi, recorded: Recorded) -> None:
    recorded.recorder.warn(POD, "FailedBinding", "ephemeral volume scratch: no")
    recorded.wait(sent=1)
    (event,) = api.all("events").values()
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "ns",
        "name": "web",
        "uid": "uid-1",
        "resourceVersion": "77",
    }
    assert (event["type"], event["reason"], event["count"]) == ("Warning", "FailedBinding", 1)
    assert event["message"] == "ephemeral volume scratch: no"
    assert event["source"] == {"component": "tester"}
    assert event["firstTimestamp"] == event["lastTimestamp"]


def test_the_same_sentence_is_counted_not_repeated(api: FakeKubeApi, recorded: Recorded) -> None:
    for version in range(5):
        recorded.recorder.warn(Subject("Pod", "ns", "web", "uid-1", str(version)), "R", "same")
    recorded.wait(sent=5)
    (event,) = api.all("events").values()
    assert event["count"] == 5
    assert (api.count("POST", "events"), api.count("PATCH", "events")) == (1, 4)


def test_an_event_that_expired_is_said_anew(api: FakeKubeApi, recorded: Recorded) -> None:
    recorded.recorder.warn(POD, "R", "same")
    recorded.wait(sent=1)
    api.delete("events", "ns", next(iter(api.all("events"))).partition("/")[2])
    recorded.recorder.warn(POD, "R", "same")
    recorded.wait(sent=2)
    (event,) = api.all("events").values()
    assert event["count"] == 1


def test_many_sentences_become_one(api: FakeKubeApi, recorded: Recorded) -> None:
    for number in range(15):
        recorded.recorder.warn(POD, "R", f"sentence {number}")
    recorded.wait(sent=15)
    messages = [event["message"] for event in api.all("events").values()]
    assert len(messages) == 10
    assert messages.count("(combined from similar events): sentence 14") == 1


def test_one_object_has_a_burst_and_then_one_in_five_minutes(api: FakeKubeApi, recorded: Recorded) -> None:
    for _ in range(BURST + 10):
        recorded.recorder.warn(POD, "R", "same")
    recorded.wait(sent=BURST, filtered=10)
    recorded.now += 300.0
    recorded.recorder.warn(POD, "R", "same")
    recorded.recorder.warn(Subject("Pod", "ns", "other", "uid-2"), "R", "same")
    recorded.wait(sent=BURST + 2, filtered=10)
    assert len(api.all("events")) == 2


def test_a_refusal_is_not_retried(api: FakeKubeApi, recorded: Recorded) -> None:
    api.fault = lambda _request: status(403, "Forbidden", "namespace is being terminated")
    recorded.recorder.warn(POD, "R", "m")
    recorded.wait(refused=1)
    assert api.count("POST") == 1


def test_an_overloaded_server_gets_the_event_later(api: FakeKubeApi, recorded: Recorded) -> None:
    left = [status(503, "ServiceUnavailable"), status(429, "TooManyRequests")]

    def fault(_request: Request) -> Answer | None:
        return left.pop() if left else None

    api.fault = fault
    recorded.recorder.warn(POD, "R", "m")
    recorded.wait(sent=1)
    assert len(api.all("events")) == 1


def test_a_long_name_still_makes_a_valid_event_name(api: FakeKubeApi, recorded: Recorded) -> None:
    recorded.recorder.warn(Subject("Pod", "ns", "p" * 253, "uid"), "R", "m")
    recorded.wait(sent=1)
    (event,) = api.all("events").values()
    assert len(event["metadata"]["name"]) <= 253


def test_what_was_used_least_recently_is_forgotten() -> None:
    remembered: Remembered[str, list[str]] = Remembered(2)
    first = remembered.get("a", list)
    remembered.get("b", list)
    assert remembered.get("a", list) is first
    remembered.get("c", list)
    assert remembered.get("a", list) is first
    assert remembered.get("b", lambda: ["new"]) == ["new"]

"""Pulls as `unlade top` and the metrics see them: phases, bytes, rates, turns per registry (V18, V20)."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from typing import Any

import grpc
import pytest

from unlade.containerd import ArtifactImage, ContainerdUnavailable
from unlade.cri.api import images_pb2 as api
from unlade.cri.observed import HandlerCounts, Metrics
from unlade.cri.pulls import Pod, Pull, Pulls
from unlade.cri.server import PullQueue
from unlade.model import Digest
from unlade.transfer import ProgressEvent

ONE, TWO = Digest.of(b"one"), Digest.of(b"two")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def request(handler: str = "", pod: str = "web") -> bytes:
    metadata = api.PodSandboxMetadata(name=pod, namespace="team", uid="u-1")
    made: bytes = api.PullImageRequest(
        image=api.ImageSpec(image="registry.example.com/m:v1", runtime_handler=handler),
        sandbox_config=api.PodSandboxConfig(metadata=metadata),
    ).SerializeToString()
    return made


def event(kind: Any, digest: Digest, done: int, total: int) -> ProgressEvent:
    return ProgressEvent(kind, "registry.example.com/m:v1", digest, done, total)


def test_a_pull_from_call_to_end() -> None:
    clock = Clock()
    pull = Pull(7, request(), clock=clock)
    assert (pull.state().phase, pull.state().pod) == ("wait", Pod("team", "web", "u-1"))
    clock.now += 2
    pull.enter("resolve")
    for digest, size in ((ONE, 1000), (TWO, 3000)):
        pull(event("planned", digest, 0, size))
    state = pull.state()
    assert (state.phase, state.done, state.total, state.rate) == ("resolve", 0, 4000, None)
    assert (pull.content, state.seconds_left) == (False, None)
    clock.now += 1
    pull(event("start", ONE, 0, 1000))
    assert pull.content
    clock.now += 2
    pull(event("bytes", ONE, 1000, 1000))
    state = pull.state()
    assert (state.phase, state.done, state.rate, state.seconds_left) == ("fetch", 1000, 500.0, 6.0)
    pull(event("done", ONE, 1000, 1000))
    assert pull.state().phase == "fetch"
    clock.now += 4
    pull(event("done", TWO, 3000, 3000))
    assert (pull.state().phase, pull.state().done) == ("commit", 4000)
    clock.now += 0.5
    pull.enter("register")
    clock.now += 0.25
    assert pull.spent() == {"wait": 2, "resolve": 1, "fetch": 6, "commit": 0.5, "register": 0.25}


def test_the_rate_forgets_what_was_long_ago() -> None:
    clock = Clock()
    pull = Pull(1, request(), clock=clock)
    pull(event("start", ONE, 0, 10**6))
    for step in range(1, 21):
        clock.now += 1
        pull(event("bytes", ONE, 1000 * step, 10**6))
    assert pull.state().rate == 1000
    clock.now += 9
    rate = pull.state().rate
    assert rate is not None
    assert rate < 600  # it stalls, and that shows


def test_what_containerd_pulls_is_asked_of_containerd() -> None:
    clock = Clock()
    pull = Pull(1, request(), clock=clock)
    pull(event("planned", ONE, 0, 1000))
    pull(event("planned", TWO, 0, 3000))
    pull.enter("containerd")
    has = {ONE: 500}

    asked: list[set[Digest]] = []

    def ingested(digests: Collection[Digest]) -> dict[Digest, int]:
        asked.append(set(digests))
        return {digest: has[digest] for digest in digests if digest in has}

    assert pull.state().done is None
    assert pull.state(ingested).done == 500
    has |= {ONE: 1000, TWO: 1500}
    clock.now += 4
    state = pull.state(ingested)
    assert (state.done, state.rate, state.seconds_left) == (2500, 500.0, 3.0)

    def away(_digests: Collection[Digest]) -> dict[Digest, int]:
        raise ContainerdUnavailable("away")

    assert pull.state(away).done == 2500
    has[TWO] = 3000
    assert pull.state(ingested).done == 4000
    assert pull.state(ingested).seconds_left == 0
    # What is whole is not asked for again.
    assert asked == [{ONE, TWO}, {ONE, TWO}, {TWO}]


def test_metrics_of_a_pull_that_fails() -> None:
    metrics, clock = Metrics(), Clock()
    pulls = Pulls(metrics, clock=clock)
    with pytest.raises(RuntimeError), pulls.begin(request("vm")) as pull:
        assert [state.number for state in pulls.states()] == [1]
        pull.enter("resolve")
        clock.now += 0.02
        raise RuntimeError
    assert pulls.states() == []
    text = metrics.text().decode()
    assert 'unlade_node_pull_phase_seconds_count{handler="vm",phase="resolve"} 1.0' in text
    assert 'unlade_node_pull_phase_seconds_bucket{handler="vm",le="0.01",phase="resolve"} 0.0' in text


class Caller:
    """A caller that waits, until it is told to give up."""

    active = True

    def is_active(self) -> bool:
        return self.active

    def abort(self, code: grpc.StatusCode, words: str) -> None:
        raise RuntimeError(code.name)


def test_one_registry_does_not_take_every_turn() -> None:
    queue = PullQueue(3, 8, per_registry=1)
    caller: Any = Caller()
    entered, leave = threading.Event(), threading.Event()

    def second() -> None:
        with queue.turn(caller, "slow.example"):
            entered.set()
            leave.wait(10)

    with queue.turn(caller, "slow.example"):
        thread = threading.Thread(target=second)
        thread.start()
        with queue.turn(caller, "quick.example"):
            assert queue.running == 2
        assert not entered.wait(0.2)
        assert (queue.running, queue.waiting) == (1, 1)
    assert entered.wait(5)
    leave.set()
    thread.join(5)
    assert (queue.running, queue.waiting) == (0, 0)


def test_a_caller_that_gives_up_leaves_its_place() -> None:
    queue = PullQueue(2, 0, per_registry=1)
    gone: Any = Caller()
    gone.active = False
    here: Any = Caller()
    with queue.turn(here, "r"):
        with pytest.raises(RuntimeError, match="CANCELLED"), queue.turn(gone, "r"):
            pass
        assert queue.waiting == 0
        with (
            queue.turn(here, "s"),
            pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"),
            queue.turn(here, "t"),
        ):
            pass


def test_images_by_handler_are_counted_seldom() -> None:
    from unlade.containerd import ImageTuple

    clock, asked = Clock(), 0
    tuples = tuple(ImageTuple("r/m:v1", name, "") for name in ("runc", "vm"))
    image = ArtifactImage("sha256:" + "1" * 64, ONE, "oras", 1, 1, "", tuples, 0.0)

    def artifacts() -> list[ArtifactImage]:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise ContainerdUnavailable("away")
        return [image]

    metrics = Metrics()
    metrics.watch_handlers(["vm", "other"], HandlerCounts(artifacts, clock=clock))
    text = metrics.text().decode()
    assert 'unlade_node_handler_images{handler="vm"} 1.0' in text
    assert 'unlade_node_handler_images{handler="other"} 0.0' in text
    assert asked == 1
    clock.now += 60
    counts = HandlerCounts(artifacts, clock=clock)
    assert math.isnan(counts("vm"))
    assert counts("vm") == 1

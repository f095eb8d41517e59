"""With the image service in between, nothing that worked before behaves differently (issue: pass-through)."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from rig.cluster import Rig
from rig.images import tar
from rig.pods import Namespace
from tests.figures import figure
from tests.rig.node.agent import Agent
from tests.rig.node.client import Client
from tests.rig.node.footprint import cpu_seconds
from unlade.cri.api import images_pb2 as api
from unlade.cri.passthrough import IMAGE_SERVICE, connect


def test_answers_are_containerds_own(cluster: Rig, ours: Client, direct: Client) -> None:
    image = cluster.registry.push_image("node/one", [tar({"f": b"1"})]).reference
    assert ours.status(image) is None
    pulled = ours.pull(image)
    assert direct.status(image) == ours.status(image)
    assert ours.images() == direct.images()
    assert pulled in ours.images()
    ours.remove(image)
    assert direct.status(image) is None
    ours.remove(image)


def test_unknown_fields_pass_untouched(through: Path, cluster: Rig) -> None:
    unknown = b"\xfa\xff\x07\x05later"  # field 16383, length-delimited: no Kubernetes has it yet
    for name, path in (("ours", through), ("direct", cluster.node.containerd_socket)):
        channel = connect(str(path))
        method = channel.unary_unary(f"/{IMAGE_SERVICE}/ImageFsInfo")
        answer = method(unknown, timeout=10)
        assert b"overlayfs" in answer, name  # a field our file does not name


def test_streamed_lists_are_passed_on(ours: Client, direct: Client) -> None:
    def listed(client: Client) -> list[str]:
        method = client.channel.unary_stream(
            f"/{IMAGE_SERVICE}/StreamImages",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=api.StreamImagesResponse.FromString,
        )
        return sorted(
            image.id for answer in method(api.StreamImagesRequest(), timeout=10) for image in answer.images
        )

    def code(client: Client) -> grpc.StatusCode:
        try:
            listed(client)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    assert code(ours) == code(direct)
    if code(direct) == grpc.StatusCode.OK:
        assert listed(ours) == listed(direct) == direct.images()


def test_errors_keep_their_codes_and_words(cluster: Rig, ours: Client, direct: Client) -> None:
    missing = f"{cluster.registry.address}/none/such:1"
    told = []
    for client in (ours, direct):
        with pytest.raises(grpc.RpcError) as caught:
            client.pull(missing)
        told.append((caught.value.code(), caught.value.details()))
    assert told[0] == told[1]


@pytest.fixture
def silent(cluster: Rig) -> Iterator[str]:
    """A registry that accepts connections and never says a word, where the node can reach it."""
    with socket.create_server((cluster.state.address(1), 0), backlog=512) as listener:
        yield f"{cluster.state.address(1)}:{listener.getsockname()[1]}"


def test_deadlines_and_cancellation_travel(ours: Client, silent: str) -> None:
    request = api.PullImageRequest(image=api.ImageSpec(image=f"{silent}/none:1"))
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        ours.call("PullImage", request, api.PullImageResponse, seconds=1)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began < 5
    method = ours.channel.unary_unary(f"/{IMAGE_SERVICE}/PullImage")
    call = method.future(request.SerializeToString(), timeout=60)
    time.sleep(0.3)
    call.cancel()
    assert call.cancelled()


def test_a_hundred_pulls_never_delay_status(ours: Client, silent: str) -> None:
    """Pulls from a registry that never answers fill the queue; Status goes on."""
    ended: list[grpc.StatusCode] = []

    def pull(number: int) -> None:
        request = api.PullImageRequest(image=api.ImageSpec(image=f"{silent}/none/{number}:1"))
        try:
            ours.call("PullImage", request, api.PullImageResponse, seconds=6)
        except grpc.RpcError as error:
            ended.append(error.code())

    with ThreadPoolExecutor(100) as pool:
        for number in range(100):
            pool.submit(pull, number)
        time.sleep(1)
        taken = []
        for _ in range(50):
            began = time.monotonic()
            ours.status("none/such:1")
            taken.append(time.monotonic() - began)
        assert not ended, "the pulls were still in the queue"
    assert len(ended) == 100
    assert statistics.median(taken) < 0.1, taken


def test_containerd_restarts_under_it(cluster: Rig, ours: Client) -> None:
    before = ours.images()
    cluster.restart_containerd(cluster.node)
    assert ours.images() == before


def test_pods_run_through_it(cluster: Rig, namespace: Namespace, through: Path) -> None:
    image = cluster.registry.push_image("node/pod", [tar({"f": b"seen"})])
    cluster.restart_kubelet(cluster.node, image_service=through)
    try:
        volume = {"/data": {"image": {"reference": image.reference, "pullPolicy": "Always"}}}
        pod = namespace.run("through", command="cat /data/f", volumes=volume)
        pod.wait("Succeeded")
        assert pod.logs() == "seen"
    finally:
        cluster.restart_kubelet(cluster.node, image_service=None)


@pytest.fixture(scope="module")
def process(cluster: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """The service as a process of its own: in this one it would share our interpreter's lock."""
    agent = Agent(cluster, tmp_path_factory.mktemp("process"))
    try:
        agent.start()
        yield agent
    finally:
        agent.close()


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def test_added_time_per_status(cluster: Rig, process: Agent, direct: Client, full: bool) -> None:
    for number in range(300 if full else 30):
        direct.pull(
            cluster.registry.push_image(f"node/many-{number}", [tar({"f": str(number).encode()})]).reference
        )
    name = f"{cluster.registry.address}/node/many-1:1"
    ours = process.client()
    before = cpu_seconds(process.pid)
    for _ in range(1000):
        ours.status(name)
    spent = cpu_seconds(process.pid) - before  # of a thousand calls: as many milliseconds for one
    figure("CPU time of the service per ImageStatus", round(spent, 2), "ms")
    assert spent < 5.0
    calls: dict[str, Callable[[Client], object]] = {
        "ImageStatus": lambda client: client.status(name),
        "ListImages": lambda client: client.images(),
    }
    for call, ask in calls.items():
        taken: dict[str, list[float]] = {"ours": [], "direct": []}
        for _ in range(1000 if full else 100):
            for who, client in (("ours", ours), ("direct", direct)):
                taken[who].append(_timed(lambda: ask(client)))  # noqa: B023 - called at once
        p99 = {who: statistics.quantiles(times, n=100)[98] * 1000 for who, times in taken.items()}
        median = {who: statistics.median(times) * 1000 for who, times in taken.items()}
        figure(f"added to {call}, median", round(median["ours"] - median["direct"], 2), "ms")
        figure(f"added to {call} at p99", round(p99["ours"] - p99["direct"], 2), "ms")
        if full and call == "ImageStatus":
            assert p99["ours"] - p99["direct"] < 3.0, p99


def test_added_time_per_pull(cluster: Rig, process: Agent, direct: Client, full: bool) -> None:
    """An image of a hundred MB, pulled and removed in turn, through the service and by containerd alone."""
    if full:
        image, rounds = cluster.image("python"), 11
    else:
        image, rounds = (
            cluster.registry.push_image("node/pulled", [tar({"f": b"x" * 10_000_000})]).reference,
            3,
        )
    ours = process.client()
    taken: dict[str, list[float]] = {"ours": [], "direct": []}
    ids = set()
    for number in range(rounds):
        pair = [("ours", ours), ("direct", direct)]
        for who, client in pair if number % 2 else reversed(pair):
            taken[who].append(_timed(lambda: ids.add(client.pull(image))))  # noqa: B023 - called at once
            client.remove(image)
    assert len(ids) == 1
    median = {who: statistics.median(times) for who, times in taken.items()}
    ratio = median["ours"] / median["direct"]
    figure(
        "pulling an image, through us / directly", round(ratio, 3), round(median["direct"], 2), "s directly"
    )
    if full:
        assert ratio <= 1.05, taken

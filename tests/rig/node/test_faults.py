"""kill -9 of the service at every step, containerd killed, the registry away: retries work, nothing is left.

Driven by CRI calls, some of it by pods. Every durable step of pulls and removals of several formats is one
point at which the service dies; the next start tidies up, the same work then succeeds, and `ctr` shows what
it showed before. CI takes a sample by seed; UNLADE_FULL=1 takes all of them.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from rig.cluster import Rig
from rig.images import tar
from rig.kube import until
from rig.pods import Namespace
from tests.corpus import corpus
from tests.corpus.pushing import push
from tests.fakes.httpd import Request, Response
from tests.fakes.registry import FakeRegistry
from tests.figures import figure
from tests.rig.containerd.test_artifacts import titled
from tests.rig.node.agent import Agent, ArmedAgent
from tests.rig.node.artifacts import image_per_platform
from tests.rig.node.client import Client
from tests.rig.node.holdings import Holdings, holdings
from unlade.containerd import Artifacts, Containerd, Handler, Handlers
from unlade.kernel import failpoints
from unlade.model import Platform
from unlade.registry import Registry

# A raw file, several, archives that are merged, an archive of another compression, an index.
FORMATS = (
    *("oras-files", "oras-directory", "helm-chart", "modelpack-tar-zstd", "kitops-gzip"),
    *("ollama-model", "wasm-component", "flux-artifact", "index-single", "untitled-plain-tar"),
)
PARTS = 4  # tests that share the points, so that none takes minutes
LEAST = 220
# A handler whose snapshots are elsewhere: the same tree, made twice. One whose guests are other machines.
HANDLERS = ("--handler", "plain=linux/amd64,native", "--handler", "guest=linux/arm64,native")


@dataclass(frozen=True)
class Point:
    """The n-th durable step of some work, and what the step is called."""

    work: str
    number: int
    step: str


class Node:
    """The shared cluster's containerd with a service that can be armed."""

    def __init__(self, rig: Rig, agent: ArmedAgent, state: Path) -> None:
        self.rig = rig
        self.agent = agent
        self._state = state
        for artifact in corpus():
            if artifact.name in FORMATS:
                push(rig.registry.address, f"faults/{artifact.name}", artifact)
        self.works: dict[str, Callable[[Client], None]] = {name: self._format(name) for name in FORMATS}
        self.works["a tag that moves"] = self._moving
        self.works["an ordinary image"] = self._ordinary
        agent.start()
        self.before = self.held()

    def held(self) -> Holdings:
        """What containerd holds now."""
        return holdings(self.rig)

    def empty(self, about: object) -> None:
        """Nothing more is held than in the beginning; containerd collects its own pulls a moment later."""
        until(f"nothing left after {about}", lambda: not self.held().beyond(self.before), seconds=10)

    def damaged(self) -> list[str]:
        """What a check of every artifact's files finds wrong."""
        handlers = Handlers("runc", {"runc": Handler("runc", Platform.host())})
        with (
            Containerd(str(self.rig.node.containerd_socket), state=self._state) as containerd,
            Registry() as registry,
            Artifacts(containerd, registry, handlers) as artifacts,
        ):
            return [str(problem) for problem in artifacts.fsck()]

    def _format(self, name: str) -> Callable[[Client], None]:
        reference = f"{self.rig.registry.address}/faults/{name}:v1"

        def work(client: Client) -> None:
            pulled = client.pull(reference)
            assert client.pull(reference, handler="second") == pulled
            client.remove(reference, handler="second")
            if name == FORMATS[1]:
                client.pull(reference, handler="plain")
            assert client.status(reference) is not None
            client.remove(pulled)
            assert client.status(reference) is None

        return work

    def _moving(self, client: Client) -> None:
        ids = []
        for data in (b"first", b"second"):
            pushed = self.rig.registry.push_artifact("faults/moving", {"f": data})
            ids.append(client.pull(pushed.reference))
            found = client.status(pushed.reference)
            assert found is not None and found.id == ids[-1]
        assert ids[0] != ids[1]
        for one in ids:
            client.remove(one)

    def _ordinary(self, client: Client) -> None:
        """An image of two platforms, for three handlers, one of them with guests of the other platform."""
        name = f"{self.rig.registry.address}/faults/image:v1"
        push(self.rig.registry.address, "faults/image", image_per_platform())
        host, guest = client.pull(name), client.pull(name, handler="guest")
        assert host == client.pull(name, handler="second") != guest
        push(self.rig.registry.address, "faults/image", image_per_platform([tar({"moved": b"1"})]))
        moved = client.pull(name, handler="guest")
        assert moved not in (host, guest)
        client.remove(name, handler="second")
        for image in (moved, guest):
            client.remove(image, handler="guest")
            client.remove(image)
        client.remove(host)
        client.remove(name)


@pytest.fixture(scope="module")
def node(cluster: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    directory = tmp_path_factory.mktemp("faults")
    agent = ArmedAgent(cluster, directory, *HANDLERS)
    try:
        yield Node(cluster, agent, directory / "state")
    finally:
        agent.close()


@pytest.fixture(scope="module")
def points(node: Node) -> list[Point]:
    """Every durable step of all work, in order; made by doing it once."""
    found = []
    for name, work in node.works.items():
        node.agent.arm(0)
        work(node.agent.client())
        node.agent.arm(None)
        steps = node.agent.steps()
        found += [Point(name, number, step) for number, step in enumerate(steps, 1)]
        node.empty(name)
    ours = {name for name in failpoints.names() if name.startswith("containerd.")}
    assert ours - {point.step for point in found} == set(), "every step is in it"
    # Each step of each work once, then others by seed: the same step the second or the fifth time.
    chosen = list({(point.work, point.step): point for point in reversed(found)}.values())
    rest = [point for point in found if point not in chosen]
    chosen += random.Random(200).sample(rest, min(len(rest), max(0, LEAST - len(chosen))))
    random.Random(201).shuffle(chosen)
    figure("the service killed, by CRI calls", len(chosen), "of", len(found), "points")
    return chosen


@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_any_step(node: Node, points: list[Point], full: bool, part: int) -> None:
    mine = points[part::PARTS] if full else points[2 * part : 2 * part + 2]
    for point in mine:
        work = node.works[point.work]
        node.agent.arm(point.number)
        with pytest.raises(grpc.RpcError):
            work(node.agent.client())
        assert node.agent.wait() == -signal.SIGKILL, point
        # Threads do not pass their steps in one order: the n-th may be another than in the undisturbed run.
        node.agent.arm(None)
        node.agent.start()
        _tidy(node, point)
        work(node.agent.client())
        node.empty(point)


def _tidy(node: Node, point: Point) -> None:
    """After the next start, before anybody asks again: whole images may be there, and nothing else."""
    held = node.held()
    more = held.beyond(node.before)
    assert "leases" not in more, (point, more)
    assert not [name for name in held.snapshots if name.startswith("unlade-")], (point, more)
    if more:
        assert "images" in more, (point, more)
    assert node.damaged() == [], point


@pytest.fixture(scope="module")
def slow(cluster: Rig) -> Iterator[FakeRegistry]:
    """A registry of the tests' own, where the node can reach it."""
    with FakeRegistry(strict=False, address=cluster.state.address(1)) as registry:
        yield registry


@pytest.fixture(scope="module")
def pods(cluster: Rig, slow: FakeRegistry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ArmedAgent]:
    """The kubelet served by an agent that can be armed."""
    agent = ArmedAgent(cluster, tmp_path_factory.mktemp("pods"), "--plain-http", slow.host)
    try:
        agent.start()
        cluster.restart_kubelet(cluster.node, image_service=agent.socket)
        # What every node has, pause and busybox, is there before anything is counted.
        warm = Namespace(cluster)
        warm.run("warm", command="true").wait("Succeeded")
        warm.delete()
        yield agent
        cluster.restart_kubelet(cluster.node, image_service=None)
    finally:
        agent.close()


def test_killed_under_a_pod(cluster: Rig, namespace: Namespace, pods: ArmedAgent, full: bool) -> None:
    """The kubelet's own retry brings the pod up, whatever step the service died at."""
    before = holdings(cluster)
    pods.arm(0)
    first = cluster.registry.push_artifact("faults/pod", {"f": b"first"}).reference
    pods.client().remove(pods.client().pull(first))
    pods.arm(None)
    steps = pods.steps()
    last = next(number for number, step in enumerate(steps) if step == "containerd.lease.released")
    chosen = random.Random(9).sample(range(1, last + 2), 10 if full else 1)
    for number in chosen:
        content = f"killed at {number}"
        artifact = cluster.registry.push_artifact("faults/pod", {"f": content.encode()}, tag=str(number))
        pods.arm(number)
        volume = {"/data": {"image": {"reference": artifact.reference}}}
        pod = namespace.run(f"killed-{number}", command="cat /data/f", volumes=volume)
        assert pods.wait() == -signal.SIGKILL
        pods.arm(None)
        pods.start()
        pod.wait("Succeeded", seconds=90)
        assert pod.logs() == content
        pod.delete()
        pods.client().remove(artifact.reference)
    figure("the service killed under pods", len(chosen), "points")
    assert _ours(holdings(cluster).beyond(before)) == {}


def test_containerd_is_killed_in_mid_pull(
    cluster: Rig, namespace: Namespace, pods: ArmedAgent, slow: FakeRegistry, full: bool
) -> None:
    before = holdings(cluster)
    data = random.Random(7).randbytes(2_000_000)
    for number, grace in enumerate((0, 10) if full else (0,)):
        titled(slow, {"f": data}, tag=f"killed-{number}", repo="faults/slow")
        reference = f"{slow.host}/faults/slow:killed-{number}"
        half = threading.Event()
        slow.alter(_halting(half, data, 1.5))
        pod = namespace.run(
            f"slow-{number}",
            command="cat /data/f | wc -c",
            volumes={"/data": {"image": {"reference": reference}}},
        )
        assert half.wait(60)
        cluster.restart_containerd(cluster.node, grace=grace)
        slow.clear_faults()
        pod.wait("Succeeded", seconds=120)
        assert pod.logs() == "2000000\n"
        pod.delete()
        pods.client().remove(reference)
    assert _ours(holdings(cluster).beyond(before)) == {}


def test_the_registry_goes_away_and_comes_back(
    cluster: Rig, namespace: Namespace, pods: ArmedAgent, slow: FakeRegistry
) -> None:
    """Once in mid-pull, once before it was asked at all."""
    before = holdings(cluster)
    data = random.Random(8).randbytes(2_000_000)
    titled(slow, {"f": data}, tag="away", repo="faults/slow")
    half = threading.Event()
    slow.alter(_halting(half, data, 0.2))
    early = cluster.registry.push_artifact("faults/away", {"f": b"early"}).reference
    cluster.stop("registry", grace=0)
    command = "cat /data/f | wc -c"
    late = f"{slow.host}/faults/slow:away"
    made = {
        name: namespace.run(name, command=command, volumes={"/data": {"image": {"reference": reference}}})
        for name, reference in (("away", early), ("mid-pull", late))
    }
    assert half.wait(60)
    slow.clear_faults()
    slow.fault(lambda _: Response.drop())
    slow.drop_connections()
    made["away"].wait_event("Failed", contains=early)
    cluster.start("registry")
    slow.clear_faults()
    for name, length in (("away", 5), ("mid-pull", len(data))):
        made[name].wait("Succeeded", seconds=120)
        assert made[name].logs() == f"{length}\n"
        made[name].delete()
    for reference in (early, late):
        pods.client().remove(reference)
    assert _ours(holdings(cluster).beyond(before)) == {}


def test_a_pull_that_outlives_the_grace(cluster: Rig, slow: FakeRegistry, tmp_path: Path) -> None:
    """Ended with the service, without a word of error in its log; the next start tidies up after it."""
    data = random.Random(10).randbytes(2_000_000)
    titled(slow, {"f": data}, tag="grace", repo="faults/slow")
    reference = f"{slow.host}/faults/slow:grace"
    agent = Agent(cluster, tmp_path, "--plain-http", slow.host, "--grace", "0.2")
    half = threading.Event()
    slow.alter(_halting(half, data, 2))
    try:
        agent.start()
        with ThreadPoolExecutor(1) as pool:
            pulling = pool.submit(agent.client().pull, reference)
            assert half.wait(60)
            assert agent.stop() == 0
            with pytest.raises(grpc.RpcError):
                pulling.result()
        slow.clear_faults()
        agent.start()
        assert not [name for name in holdings(cluster).leases if name.startswith("unlade-")]
        agent.client().remove(agent.client().pull(reference))
        assert not [line for line in agent.lines() if line["level"] == "error"]
    finally:
        slow.clear_faults()
        agent.close()


def _halting(half: threading.Event, data: bytes, seconds: float) -> Callable[..., Response | None]:
    """Sends these bytes in two halves, the second one after a while."""

    def alter(_: Request, answer: Response) -> Response | None:
        if answer.status != 200 or answer.body != data:
            return None

        def parts() -> Iterator[bytes]:
            yield data[: len(data) // 2]
            half.set()
            time.sleep(seconds)
            yield data[len(data) // 2 :]

        return Response(200, answer.headers, parts(), length=len(data))

    return alter


def _ours(more: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without what belongs to the sandboxes and containers of pods that are not quite gone."""
    kept = {
        "leases": {name for name in more.get("leases", set()) if name.startswith("unlade-")},
        "snapshots": {
            name for name in more.get("snapshots", set()) if name.startswith(("unlade-", "sha256:"))
        },
        **{kind: names for kind, names in more.items() if kind in ("images", "content")},
    }
    return {kind: names for kind, names in kept.items() if names}

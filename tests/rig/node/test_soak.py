"""Days in minutes: pods in waves, images and artifacts mixed, the service restarted again and again (V21).

500 pods with UNLADE_FULL=1 and a restart every minute, every other one by SIGKILL; a wave or two in CI.
Afterwards mounts, leases, snapshots, content, records, lock files, descriptors and memory are what they were.
"""

from __future__ import annotations

import faulthandler
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from rig import machine
from rig.cluster import Rig
from rig.images import tar
from rig.kube import until
from rig.pods import Namespace
from tests.corpus import corpus
from tests.corpus.pushing import push
from tests.figures import figure
from tests.rig.conftest import MakeRig
from tests.rig.node.agent import Agent
from tests.rig.node.footprint import descriptors, memory
from tests.rig.node.holdings import Holdings, holdings
from unlade.planning import PlanOptions

# Threads that wait for calls come and go, each with a descriptor or two.
_SPARE_DESCRIPTORS = 12
_MEMORY = 150_000_000
# What an allocator keeps for later; a leak grows with every call.
_GROWTH = 15_000_000


class Lives:
    """Restarts the service at its times, and notes what each life held in the end."""

    def __init__(self, agent: Agent, seconds: float) -> None:
        self.ends: list[int] = []
        self._agent = agent
        self._seconds = seconds
        self._end = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _live(self) -> None:
        try:
            while not self._end.wait(self._seconds):
                self.ends.append(memory(self._agent.pid))
                by = signal.SIGKILL if len(self.ends) % 2 else signal.SIGTERM
                assert self._agent.stop(by) in (0, -by)
                self._agent.start()
        except BaseException as error:
            self._failed = error

    def stop(self) -> None:
        """No more restarts; raises what went wrong."""
        self._end.set()
        self._thread.join()
        if self._failed is not None:
            raise self._failed


@pytest.fixture
def node(make_rig: MakeRig, tmp_path: Path) -> Iterator[tuple[Rig, Agent]]:
    rig = make_rig(kubelets=False, kubelet_config={"imagePullCredentialsVerificationPolicy": "NeverVerify"})
    agent = Agent(rig, tmp_path)
    try:
        agent.start()
        rig.start_kubelet(rig.node, image_service=agent.socket)
        rig.wait_node(rig.node)
        yield rig, agent
    finally:
        agent.close()


def test_nothing_leaks(node: tuple[Rig, Agent], tmp_path: Path, full: bool) -> None:
    rig, agent = node
    faulthandler.cancel_dump_traceback_later()  # every wait below has its own end
    references = _content(rig)
    dice = random.Random(500)
    count, wave = (500, 20) if full else (16, 8)
    mounts = len(machine.mounts_below(rig.directory))
    _wave(rig, references, dice, 3)  # the node has now what every node has: pause, busybox
    _remove(agent, references)
    before = _held(rig)
    fresh = descriptors(agent.pid)
    began = time.monotonic()
    lives = Lives(agent, 60 if full else 12)
    try:
        for start in range(0, count, wave):
            _wave(rig, references, dice, min(wave, count - start))
            _remove(agent, dice.sample(references, len(references) // 2))
    finally:
        lives.stop()
    lives.ends.append(memory(agent.pid))
    figure("soak", count, "pods", round(time.monotonic() - began), "s", len(lives.ends), "lives")
    figure("soak: memory at the end of a life, at most", max(lives.ends), "B")
    assert max(lives.ends) < _MEMORY, lives.ends
    _one_life(agent, references, fresh, 20 if full else 3)
    _remove(agent, references)
    until("nothing more than before", lambda: not _held(rig).beyond(before), seconds=30)
    if full:  # the kubelet takes a minute for sandboxes of pods that are gone
        until(
            "no mounts left",
            lambda: len(machine.mounts_below(rig.directory)) <= mounts,
            seconds=200,
            pause=1,
        )
    assert not [line for line in agent.lines() if line.get("level") == "error"]
    agent.stop()
    agent.start()
    assert len(list((tmp_path / "state" / "owners").iterdir())) == 1


def _one_life(agent: Agent, references: list[str], fresh: int, rounds: int) -> None:
    """Without a restart: everything pulled and removed, again and again, takes no more than once."""
    client, held = agent.client(), []
    for _ in range(rounds):
        for reference in references:
            client.pull(reference)
            client.status(reference)
            client.remove(reference)
        held.append(memory(agent.pid))
    until("few descriptors", lambda: descriptors(agent.pid) <= fresh + _SPARE_DESCRIPTORS, seconds=30)
    figure("soak: one life", rounds * len(references), "pulls and removals", held[0], "B", held[-1], "B")
    figure("soak: descriptors", fresh, "fresh", descriptors(agent.pid), "in the end")
    assert held[-1] < held[0] + _GROWTH, held


def _content(rig: Rig) -> list[str]:
    """What the pods mount: artifacts of many formats, and images."""
    found = []
    for artifact in corpus():
        told = artifact.annotations or artifact.artifact_type or artifact.options != PlanOptions()
        if artifact.tree and artifact.platform == "linux/amd64" and artifact.family != "image" and not told:
            push(rig.registry.address, f"soak/{artifact.name}", artifact)
            found.append(f"{rig.registry.address}/soak/{artifact.name}:v1")
    random.Random(1).shuffle(found)
    images = [
        rig.registry.push_image(f"soak/image-{number}", [tar({f"f{number}": b"x" * 100_000})]).reference
        for number in range(6)
    ]
    return [*found[:14], *images]


def _wave(rig: Rig, references: list[str], dice: random.Random, count: int) -> None:
    """Pods that mount some of it, all at once; ends when they have succeeded and are gone."""
    namespace = Namespace(rig)
    for number in range(count):
        volumes = {
            f"/data/{position}": {"image": {"reference": reference}}
            for position, reference in enumerate(dice.sample(references, dice.choice((1, 1, 2, 4))))
        }
        script = 'for v in /data/*; do [ -n "$(ls $v)" ] || exit 1; done'
        namespace.run(f"pod-{number}", command=script, volumes=volumes)

    def done() -> bool:
        phases = [pod["status"].get("phase") for pod in rig.api.list("Pod", namespace.name)]
        assert "Failed" not in phases
        return phases.count("Succeeded") == count

    until(f"{count} pods succeeded", done, seconds=300, pause=0.3)
    namespace.delete()
    until("the pods gone", lambda: not rig.api.list("Pod", namespace.name), seconds=120, pause=0.3)


def _remove(agent: Agent, references: list[str]) -> None:
    """As the kubelet's collection does it, but now; the service may be restarted just then."""
    for reference in references:

        def removed(reference: str = reference) -> bool:
            with suppress(grpc.RpcError):
                agent.client().remove(reference)
                return True
            return False

        until(f"{reference} removed", removed, seconds=60)


def _held(rig: Rig) -> Holdings:
    """What containerd holds, but for what ends with the sandboxes and containers of pods: layers, leases."""
    held = holdings(rig)
    snapshots = {name for name in held.snapshots if name.startswith(("unlade-", "sha256:"))}
    leases = {name for name in held.leases if name.startswith("unlade-")}
    return replace(held, snapshots=frozenset(snapshots), leases=frozenset(leases))

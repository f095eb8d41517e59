"""kill -9 of the puller at every step, of containerd in mid-pull, a full disk: no leftovers, retries work.

Every failpoint counts once per time that the scenario reaches it. CI takes a sample by seed, each point of
the source at least once; UNLADE_FULL=1 takes all.
"""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from rig.machine import unmount_below
from tests.fakes.httpd import Request, Response
from tests.fakes.registry import FakeRegistry
from tests.rig.containerd.daemon import Daemon
from tests.rig.containerd.scenario import HANDLERS, REPO
from tests.rig.containerd.test_artifacts import left, nothing, titled
from unlade.containerd import ArtifactImage, Artifacts, Containerd, ContainerdUnavailable
from unlade.errors import UnladeError
from unlade.kernel import failpoints
from unlade.model import Descriptor
from unlade.model.mediatypes import ANNOTATION_TITLE, OCI_LAYER
from unlade.registry import Registry, RegistryConfig
from unlade.store import NoSpace

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[3]
T = TypeVar("T")


@pytest.fixture(scope="module")
def host() -> Iterator[FakeRegistry]:
    """A registry with an artifact of one file, and one of a file and an archive, which must be merged."""
    with FakeRegistry(strict=False) as registry:
        titled(registry, {"weights.bin": b"w" * 300_000}, tag="one", repo=REPO)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            entry = tarfile.TarInfo("docs/readme.txt")
            entry.size = 5
            tar.addfile(entry, io.BytesIO(b"hello"))
        layers = []
        for data, facts in (
            (b"m" * 1000, {ANNOTATION_TITLE: "model.bin"}),
            (out.getvalue(), {ANNOTATION_TITLE: "docs", "io.deis.oras.content.unpack": "true"}),
        ):
            blob = registry.put_blob(REPO, data)
            layers.append(
                Descriptor(media_type=OCI_LAYER, digest=blob.digest, size=blob.size, annotations=facts)
            )
        registry.put_artifact(REPO, "merged", layers, "application/vnd.example.model")
        yield registry


@dataclass(frozen=True)
class Ended:
    """How a run of the scenario ended, and what it and those before it said on stderr."""

    returncode: int
    stdout: str
    stderr: str


class Runs:
    """Runs of the scenario in one namespace: children of one process that has imported everything."""

    def __init__(self, daemon: Daemon, namespace: str, state: Path, host: str) -> None:
        self._log = state.parent / "scenario.log"
        environment = {name: value for name, value in os.environ.items() if name != failpoints.VARIABLE}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.rig.containerd.scenario"),
                    *(daemon.address, namespace, str(state), host),
                ],
                env={**environment, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
            )

    def __call__(self, what: str = "work") -> Ended:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        told: list[str] = []
        for line in self._process.stdout:
            if line.startswith("ended "):
                return Ended(int(line.split()[1]), "".join(told), self._log.read_text()[-2000:])
            told.append(line)
        raise AssertionError(self._log.read_text())

    def close(self) -> None:
        """No more runs."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@pytest.fixture
def runs(daemon: Daemon, connection: Containerd, host: FakeRegistry) -> Iterator[Runs]:
    made = Runs(daemon, connection.namespace, connection.state, host.host)
    yield made
    made.close()


def test_killed_anywhere_nothing_is_left_and_the_retry_succeeds(
    runs: Runs, daemon: Daemon, connection: Containerd, full: bool
) -> None:
    traced = runs("trace")
    assert traced.returncode == 0, traced.stderr
    assert left(daemon, connection) == nothing()
    seen: Counter[str] = Counter()
    points = []
    for name in traced.stdout.split():
        seen[name] += 1
        points.append(f"{name}:{seen[name]}")
    ours = {name for name in failpoints.names() if name.startswith("containerd.")}
    assert ours - seen.keys() == set(), "the scenario passes every failpoint"
    if not full:
        once = [f"{name}:{random.Random(name).randint(1, seen[name])}" for name in sorted(ours)]
        points = [point for point in points if point in once]
    before = daemon.directories()
    for point in points:
        killed = runs(point)
        assert killed.returncode == -signal.SIGKILL, f"{point}: {killed.stderr}"
        recovered = runs("recover")
        assert recovered.returncode == 0, f"recover after {point}: {recovered.stderr}"
        held = left(daemon, connection)
        assert held["leases"] == [], point
        # Whole images of pulls that were done may be there; nothing else.
        with_tree = {line.split()[0] for line in held["overlayfs"] + held["native"]}
        assert not [name for name in with_tree if name.startswith("unlade-")], point
        if not held["images"]:
            assert held == nothing(), point
            assert daemon.directories() == before, point
        again = runs()
        assert again.returncode == 0, f"retry after {point}: {again.stderr}"
        assert left(daemon, connection) == nothing(), point
        assert daemon.directories() == before, point


def test_containerd_is_killed_in_mid_pull(
    daemon: Daemon, connection: Containerd, host: FakeRegistry, full: bool
) -> None:
    """The pull waits for it to come back: its lease and its snapshot are in containerd's database."""
    data = random.Random(7).randbytes(2_000_000)
    titled(host, {"slow.bin": data}, tag="slow", repo=REPO)
    for kill in (True, False) if full else (True,):
        half = threading.Event()
        with (
            Registry(RegistryConfig(plain_http=frozenset({host.host}))) as registry,
            Artifacts(connection, registry, HANDLERS, jobs=1) as artifacts,
            ThreadPoolExecutor(1) as pool,
        ):
            host.alter(partial(_dripping, half, len(data)))
            try:
                pulling = pool.submit(artifacts.pull, f"{host.host}/{REPO}:slow")
                assert half.wait(20)
                daemon.restart(kill=kill)
                image = pulling.result(timeout=60)
            finally:
                host.clear_faults()
            assert isinstance(image, ArtifactImage) and image.size == len(data)
            assert artifacts.find(image.id) == image
            assert artifacts.remove(image.id)
        assert left(daemon, connection) == nothing()


def _dripping(half: threading.Event, size: int, _: Request, answer: Response) -> Response | None:
    """The blob of this size in two halves, the second one after a while."""
    body = answer.body
    if answer.status != 200 or not isinstance(body, bytes) or len(body) != size:
        return None

    def parts() -> Iterator[bytes]:
        yield body[: size // 2]
        half.set()
        time.sleep(1.5)
        yield body[size // 2 :]

    return Response(200, answer.headers, parts(), length=size)


def test_containerd_that_stays_away_is_a_typed_error(tmp_path: Path) -> None:
    with (
        Containerd(str(tmp_path / "none.sock"), state=tmp_path / "state", patience=0.5) as away,
        pytest.raises(ContainerdUnavailable) as caught,
    ):
        away.version()
    assert caught.value.retryable and caught.value.next_step


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Daemon]:
    """A containerd on a file system of 64 MB."""
    image, base = tmp_path / "disk", Path(tempfile.mkdtemp(prefix="ctd-"))
    with image.open("wb") as disk:
        disk.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(base)], check=True)
    try:
        running = Daemon(base)
        try:
            yield running
        finally:
            running.close()
    finally:
        unmount_below(base)
        base.rmdir()


def test_a_full_disk(small: Daemon, host: FakeRegistry, tmp_path: Path) -> None:
    titled(host, {"large.bin": bytes(90 << 20)}, tag="large", repo=REPO)
    with (
        Containerd(small.address, state=tmp_path / "state") as connection,
        Registry(RegistryConfig(plain_http=frozenset({host.host}))) as registry,
        Artifacts(connection, registry, HANDLERS, jobs=1) as artifacts,
    ):
        with pytest.raises(NoSpace) as caught:
            artifacts.pull(f"{host.host}/{REPO}:large")
        assert caught.value.next_step
        assert left(small, connection) == nothing()
        assert small.directories() == set(), "the space is free again"
        image = artifacts.pull(f"{host.host}/{REPO}:one")
        assert isinstance(image, ArtifactImage) and image.size == 300_000


def test_containerd_is_restarted_again_and_again(
    daemon: Daemon, connection: Containerd, host: FakeRegistry, full: bool
) -> None:
    """Whatever call is under way when containerd goes: pulls and removals end well, and nothing is left.

    By SIGTERM: killed while it makes a snapshot, containerd itself may be unable to make another.
    """
    count = 60 if full else 12
    for number in range(count):
        titled(host, {"part.bin": bytes([number]) * 50_000}, tag=f"many-{number}", repo=REPO)
    stop = threading.Event()

    def restarter() -> int:
        restarts = 0
        chance = random.Random(11)
        while not stop.wait(chance.uniform(0.1, 0.6)):
            daemon.restart()
            restarts += 1
        return restarts

    with (
        Registry(RegistryConfig(plain_http=frozenset({host.host}))) as registry,
        Artifacts(connection, registry, HANDLERS, jobs=1) as artifacts,
        ThreadPoolExecutor(5) as pool,
    ):

        def live(number: int) -> None:
            reference = f"{host.host}/{REPO}:many-{number}"
            assert retried(lambda: artifacts.pull(reference)) is not None
            assert retried(lambda: artifacts.pull(reference, handler="plain")) is not None
            assert retried(lambda: artifacts.find(reference)) is not None
            retried(lambda: artifacts.remove(reference))
            assert retried(lambda: artifacts.find(reference)) is None

        restarting = pool.submit(restarter)
        try:
            list(pool.map(live, range(count)))
        finally:
            stop.set()
        assert restarting.result(timeout=60) > 2
        artifacts.recover()
        artifacts.collect()
    assert left(daemon, connection) == nothing()


def retried(work: Callable[[], T]) -> T:
    """As the kubelet does it: again, while the error says that it may pass."""
    for _ in range(20):
        try:
            return work()
        except UnladeError as error:
            if not error.retryable:
                raise
    return work()

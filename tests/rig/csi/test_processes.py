"""The driver as processes that a node runs: alone, and in one process with the image service."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import urllib3

from tests.fakes.driver import Driver
from tests.fakes.registry import FakeRegistry
from tests.rig.containerd.daemon import Daemon
from unlade.model.mediatypes import ANNOTATION_TITLE

ROOT = Path(__file__).parents[3]


@pytest.fixture
def base() -> Iterator[Path]:
    # A short path: sockets' names are limited to some hundred characters.
    with tempfile.TemporaryDirectory(prefix="csi-", ignore_cleanup_errors=True) as short:
        yield Path(short)


@pytest.fixture
def registry() -> Iterator[FakeRegistry]:
    with FakeRegistry() as fake:
        blob = fake.put_blob("team/site", b"hello", "application/octet-stream", {ANNOTATION_TITLE: "file"})
        fake.put_artifact("team/site", "v1", [blob], "application/vnd.example.content.v1")
        yield fake


@contextmanager
def running(base: Path, *arguments: str) -> Iterator[str]:
    """`unlade node …` until SIGTERM, which it must obey with 0; where its numbers and probes are."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "HOME": str(base), "PYTHONPATH": str(ROOT / "src")}
    with (base / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "unlade", "node", *arguments, "--listen", listen, "--grace", "5"],
            stderr=log,
            env=environment,
        )
    try:
        end = time.monotonic() + 60
        while probe(listen, "readyz") != 200:
            assert process.poll() is None, (base / "log").read_text()
            assert time.monotonic() < end, (base / "log").read_text()
            time.sleep(0.05)
        yield listen
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, (base / "log").read_text()
    finally:
        process.kill()
        process.wait()


def probe(listen: str, what: str) -> int:
    try:
        return urllib3.request("GET", f"http://{listen}/{what}", timeout=5.0, retries=False).status
    except urllib3.exceptions.HTTPError:
        return 0


def lives(kubelet: Driver, registry: FakeRegistry, listen: str) -> None:
    """A volume comes, is read, counted, and goes."""
    kubelet.connect()
    assert kubelet.info().name == "oci.unlade.dev"
    assert kubelet.call("Node", "NodeGetInfo").node_id == "node-1"
    mounted = kubelet.publish("web", reference=str(registry.reference("team/site", "v1")))
    assert (mounted / "file").read_bytes() == b"hello"
    numbers = urllib3.request("GET", f"http://{listen}/metrics", timeout=5.0).data.decode()
    assert 'unlade_csi_publishes_total{result="fetched"} 1.0' in numbers
    kubelet.unpublish("web")
    assert kubelet.records() == []


@pytest.mark.parametrize("store", ["directory", "containerd"])
def test_the_driver_alone(
    base: Path, registry: FakeRegistry, request: pytest.FixtureRequest, store: str
) -> None:
    kubelet = Driver(base, registry)
    config = kubelet.config
    options = [
        *("--socket", config.socket, "--registration-socket", config.registration),
        *("--state", str(config.state), "--node-name", "node-1", "--plain-http", registry.host),
    ]
    if store == "containerd":
        daemon: Daemon = request.getfixturevalue("daemon")
        options += ["--containerd-socket", daemon.address, "--containerd-state", str(base / "locks")]
    try:
        with running(base, "csi", *options) as listen:
            lives(kubelet, registry, listen)
            mounted = kubelet.publish("stays", reference=str(registry.reference("team/site", "v1")))
        # The agent is gone and its volumes are not; the next one knows them.
        assert (mounted / "file").read_bytes() == b"hello"
        with running(base, "csi", *options):
            kubelet.connect()
            kubelet.unpublish("stays")
            assert kubelet.records() == []
        # Nothing is in a directory of the driver's own where containerd has it.
        trees = config.state / "store" / ".unlade" / "trees"
        assert len(list(trees.iterdir())) == (1 if store == "directory" else 0)
    finally:
        kubelet.stop()
        kubelet.lose_mounts()


def test_the_driver_and_the_image_service_in_one_process(base: Path, registry: FakeRegistry) -> None:
    daemon = Daemon(base)
    kubelet = Driver(base, registry)
    config = kubelet.config
    options = [
        *("--socket", str(base / "image.sock"), "--containerd", daemon.address, "--state", str(base / "run")),
        *("--csi", "--csi-socket", config.socket, "--csi-registration-socket", config.registration),
        *("--csi-state", str(config.state), "--node-name", "node-1", "--plain-http", registry.host),
    ]
    try:
        with running(base, "serve", *options) as listen:
            lives(kubelet, registry, listen)
            numbers = urllib3.request("GET", f"http://{listen}/metrics", timeout=5.0).data.decode()
            assert "unlade_node_pulls_in_flight" in numbers
    finally:
        kubelet.stop()
        kubelet.lose_mounts()
        daemon.close()

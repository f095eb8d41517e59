"""`unlade images | rmi | gc | fsck | inspect | pull` on a real containerd, beside a service (R4, R7)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rig.images import tar
from tests.corpus.pushing import push
from tests.rig.containerd.conftest import Node
from tests.rig.containerd.test_artifacts import left, nothing
from tests.rig.node.artifacts import image_per_platform, per_platform
from tests.rig.node.client import Client
from unlade.cli.root import main
from unlade.cri.api import images_pb2 as api

pytestmark = pytest.mark.root


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The program in this process, told about containerd by its environment."""
    monkeypatch.setenv("UNLADE_CONTAINERD", node.daemon.address)
    monkeypatch.setenv("UNLADE_CONTAINERD_STATE", str(node.connection.state))
    monkeypatch.setenv("UNLADE_PLAIN_HTTP", node.host)

    def command(*argv: str) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(argv))
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, out, err)

    return command


def told(run: Run, *argv: str) -> Any:
    done = run(*argv, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_tuples_are_told_and_bytes_counted_once(node: Node, run: Run) -> None:
    """What the kubelet lists once by ID is shown for each handler; the sizes are the CRI's."""
    shared = tar({"shared": b"s" * 50_000})
    push(node.host, "cli/image", image_per_platform([shared]))
    push(node.host, "cli/tree", per_platform())
    image, tree = f"{node.host}/cli/image:v1", f"{node.host}/cli/tree:v1"
    for name in (image, tree):
        for handler in ("runc", "twin", "guest"):
            done = run("pull", "--runtime-handler", handler, name)
            assert done.returncode == 0, done.stderr
            assert done.stdout.startswith(f"{name.rpartition(':')[0]}@sha256:")
    listed = told(run, "images")
    shown = {(one["reference"], one["handler"]): one for one in listed["images"]}
    assert shown.keys() == {
        (name, handler) for name in (image, tree) for handler in ("runc", "twin", "guest")
    }
    for name in (image, tree):
        assert shown[name, "runc"]["id"] == shown[name, "twin"]["id"] != shown[name, "guest"]["id"]
        assert shown[name, "runc"]["platform"] == "linux/amd64"
        assert shown[name, "guest"]["platform"] == "linux/arm64"
        assert shown[name, "runc"]["ownBytes"] == 0, "another handler needs all of it"
    assert shown[image, "guest"]["sharedBytes"] == len(shared), "the layer that both entries have"
    answer = node.client.call("ListImages", api.ListImagesRequest(), api.ListImagesResponse)
    sizes = {one.id: one.size for one in answer.images}
    assert {one["id"]: one["bytes"] for one in listed["images"]} == sizes
    assert listed["totalBytes"] == sum(sizes.values()) - len(shared)
    table = run("images", "--runtime-handler", "guest").stdout.splitlines()
    assert len(table) == 3
    assert all(" guest " in line for line in table[1:])
    assert run("images", "--runtime-handler", "gone").returncode == 3
    inspected = told(run, "inspect", "--store", "containerd", image, "--runtime-handler", "guest")["images"]
    assert [one["handler"] for one in inspected] == ["guest"]
    assert [part["kind"] for part in inspected[0]["components"]] == ["manifest", "config", "layer", "layer"]
    assert run("inspect", "--store", "containerd", "--raw", image).returncode == 2
    assert run("inspect", "--runtime-handler", "guest", image).returncode == 2
    at_the_registry = told(run, "inspect", image)
    assert len(at_the_registry["manifest"]["manifests"]) == 2, "the environment alone does not decide here"
    assert run("fsck").returncode == 0
    dry = run("rmi", "--dry-run", image)
    assert dry.returncode == 0
    assert told(run, "images") == listed
    assert run("rmi", "--runtime-handler", "twin", image, tree).returncode == 0
    assert run("rmi", "--runtime-handler", "guest", image).returncode == 0
    kept = {(one["reference"], one["handler"]) for one in told(run, "images")["images"]}
    assert kept == {(image, "runc"), (tree, "runc"), (tree, "guest")}
    assert node.client.status(image, handler="twin") is None
    assert node.client.status(image, handler="runc") is not None
    assert run("rmi", "--runtime-handler", "twin", image).returncode == 9
    assert run("rmi", image, tree).returncode == 0
    assert told(run, "images") == {"images": [], "totalBytes": 0}
    assert left(node.daemon, node.connection) == nothing()


def test_a_tag_that_containerd_moved_alone(node: Node, run: Run) -> None:
    """The kubelet's view decides: the old image is shown by its digests."""
    name = f"{node.host}/cli/moved:v1"
    push(node.host, "cli/moved", image_per_platform([tar({"f": b"old"})]))
    old = node.client.pull(name)
    push(node.host, "cli/moved", image_per_platform([tar({"f": b"new"})]))
    new = Client(node.daemon.address).pull(name)
    shown = {one["id"]: one for one in told(run, "images")["images"]}
    assert shown[new]["references"][0] == name
    assert shown[new]["handler"] == ""
    assert name not in shown[old]["references"]
    assert shown[old]["handler"] == "runc"
    assert run("rmi", old, new).returncode == 0
    assert left(node.daemon, node.connection) == nothing()


def test_damage_is_found_and_repaired(node: Node, run: Run) -> None:
    push(node.host, "cli/rot", image_per_platform([tar({"f": b"x" * 1000})]))
    name = f"{node.host}/cli/rot:v1"
    node.client.pull(name)
    layer = next(
        part
        for part in told(run, "inspect", "--store", "containerd", name)["images"][0]["components"]
        if part["kind"] == "layer"
    )
    blobs = Path(node.daemon.base) / "root" / "io.containerd.content.v1.content" / "blobs" / "sha256"
    (blobs / layer["digest"].partition(":")[2]).write_bytes(b"y" * layer["size"])
    done = run("fsck", "-o", "json")
    assert done.returncode == 1
    [problem] = json.loads(done.stdout)["problems"]
    assert (problem["kind"], problem["repaired"]) == ("image-damaged", False)
    assert layer["digest"] in problem["detail"]
    assert run("fsck", "--repair").returncode == 1
    assert node.client.status(name) is None
    assert run("fsck").returncode == 0
    assert left(node.daemon, node.connection) == nothing()


def test_what_a_dead_process_left_is_collected(node: Node, run: Run) -> None:
    """`gc` ends its leases and no image; the service's own work goes on."""
    push(node.host, "cli/kept", per_platform())
    node.client.pull(f"{node.host}/cli/kept:v1")
    before = left(node.daemon, node.connection)
    script = (
        "import os, sys; from pathlib import Path; from unlade.containerd import Containerd, leases\n"
        "lease = leases.lease(Containerd(sys.argv[1], state=Path(sys.argv[2])), 'left'); lease.__enter__()\n"
        "os._exit(0)"
    )
    where = [node.daemon.address, str(node.connection.state)]
    subprocess.run([sys.executable, "-c", script, *where], check=True)
    assert len(left(node.daemon, node.connection)["leases"]) == 1
    assert told(run, "gc", "--dry-run")["leases"] == 1
    assert len(left(node.daemon, node.connection)["leases"]) == 1
    assert told(run, "gc")["leases"] == 1
    assert left(node.daemon, node.connection) == before
    assert run("gc", "--keep-recent", "5").returncode == 2
    assert run("rmi", f"{node.host}/cli/kept:v1").returncode == 0
    assert left(node.daemon, node.connection) == nothing()


def test_a_guests_image_that_containerd_removed_alone(node: Node, run: Run) -> None:
    """The index it came from is still there for the host, and would keep its blobs."""
    push(node.host, "cli/alone", image_per_platform([tar({"f": b"x"})]))
    name = f"{node.host}/cli/alone:v1"
    node.client.pull(name)
    before = left(node.daemon, node.connection)
    guest = node.client.pull(name, handler="guest")
    Client(node.daemon.address).remove(guest)
    assert left(node.daemon, node.connection) != before
    assert told(run, "gc", "--dry-run")["images"] == 1
    assert told(run, "gc")["images"] == 1
    assert left(node.daemon, node.connection) == before
    assert told(run, "gc")["images"] == 0
    assert run("rmi", name).returncode == 0
    assert left(node.daemon, node.connection) == nothing()


def test_containerd_is_no_directory(run: Run, tmp_path: Path) -> None:
    assert run("--store", "containerd", "mount", "r.example/a:1", str(tmp_path)).returncode == 3
    listed = run("images", "--store", str(tmp_path / "dir"), "-o", "json")
    assert json.loads(listed.stdout) == {"images": [], "totalBytes": 0}
    gone = run("images", "--containerd", str(tmp_path / "gone.sock"))
    assert gone.returncode == 9
    assert "next: " in gone.stderr

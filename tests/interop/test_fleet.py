"""A fleet in small, for real: nodes that pull at once through a pull-through cache found by `hosts.toml`.

Every node is a process with a store and a network namespace of its own, behind a link that a token bucket
holds to a rate; origin and mirror are distribution registries in namespaces too, and the origin's link is
the narrowest. 20 nodes with UNLADE_FULL=1, a few in CI. docs/scale.md has the figures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.registry import Serving, serving
from tests.figures import figure
from tests.interop.network import Host, network
from unlade.library import push

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

FULL = bool(os.environ.get("UNLADE_FULL"))
NODES = 20 if FULL else 5
SIZE = (64 << 20) if FULL else (8 << 20)
FILES = 2
NODE_MEGABITS, MIRROR_MEGABITS, ORIGIN_MEGABITS = 200, 2000, 100


@dataclass(frozen=True)
class Fleet:
    """The registries and the nodes of one test."""

    origin: Serving
    mirror: Serving
    nodes: list[Host]
    work: Path

    def pull(self, chosen: list[Host], *, mirrored: bool = True) -> float:
        """The model and the package on each of these nodes, all at once; seconds until the last has them."""
        began = time.monotonic()
        running = []
        for node in chosen:
            place = self.work / node.namespace
            place.mkdir()
            certs = place / "certs" / self.origin.host
            certs.mkdir(parents=True)
            mirror = (
                f'[host."http://{self.mirror.host}"]\ncapabilities = ["pull", "resolve"]\n'
                if mirrored
                else ""
            )
            (certs / "hosts.toml").write_text(f'server = "http://{self.origin.host}"\n{mirror}')
            script = " && ".join(
                f"{unlade()} --certs-dir {place}/certs pull -q --store {place}/store"
                f" {self.origin.host}/{name} {place}/{name.partition(':')[0]}"
                for name in ("model:v1", "package:v1")
            )
            running.append(subprocess.Popen(node.command("bash", "-c", script), stderr=subprocess.PIPE))
        for process in running:
            _, said = process.communicate(timeout=300)
            assert process.returncode == 0, said.decode()
        return time.monotonic() - began

    def forget(self) -> None:
        """Remove what the nodes have."""
        for node in self.nodes:
            shutil.rmtree(self.work / node.namespace, ignore_errors=True)

    def sent(self) -> Counter[str]:
        """How often the origin sent each blob, by digest."""
        gets = [one for one in self.origin.requests(r"/blobs/sha256:") if one.startswith("GET ")]
        return Counter(re.sub(".*/", "", one) for one in gets)


def unlade() -> str:
    return str(Path(sys.executable).with_name("unlade"))


@contextmanager
def fleet(tmp_path: Path, content: Path, number: int) -> Iterator[Fleet]:
    rates = {"origin": ORIGIN_MEGABITS, "mirror": MIRROR_MEGABITS}
    rates |= {f"n{node}": NODE_MEGABITS for node in range(number)}
    with ExitStack() as stack:
        hosts = stack.enter_context(network(rates))
        at = hosts["origin"]
        origin = stack.enter_context(
            serving(content, tmp_path / "origin", address=at.address, namespace=at.namespace)
        )
        at = hosts["mirror"]
        mirror = stack.enter_context(
            serving(
                tmp_path / "cached",
                tmp_path / "mirror",
                address=at.address,
                namespace=at.namespace,
                proxy=f"http://{origin.host}",
            )
        )
        nodes = [host for name, host in hosts.items() if name.startswith("n")]
        work = tmp_path / "nodes"
        work.mkdir()
        yield Fleet(origin, mirror, nodes, work)


@pytest.fixture
def content(tmp_path: Path) -> Path:
    """A registry's storage with a model of two files and a package."""
    storage = tmp_path / "content"
    source = tmp_path / "source"
    source.mkdir()
    files = [source / f"weights-{number}.bin" for number in range(FILES)]
    for file in files:
        file.write_bytes(os.urandom(SIZE // FILES))
    (source / "package").mkdir()
    (source / "package" / "app.yaml").write_text("kind: App\n")
    with serving(storage, tmp_path / "filling") as registry:
        push(files, f"{registry.host}/model:v1", plain_http=[registry.host])
        push(source / "package", f"{registry.host}/package:v1", plain_http=[registry.host])
    return storage


def test_the_origin_sends_each_blob_once(tmp_path: Path, content: Path) -> None:
    """One node first, then all others at once: everything but the first pull comes from the mirror."""
    with fleet(tmp_path, content, NODES) as there:
        first = there.pull(there.nodes[:1])
        before = len(there.origin.requests())
        others = there.pull(there.nodes[1:])
        sent = there.sent()
        assert len(sent) >= FILES + 1
        assert set(sent.values()) == {1}, sent
        weights = {(node / "model" / "weights-0.bin").read_bytes() for node in there.work.iterdir()}
        assert len(weights) == 1
        later = len(there.origin.requests()) - before
        figure(
            "fleet, mirrored", NODES, "nodes", SIZE >> 20, "MB", round(first, 1), "s first",
            round(others, 1), "s others", sum(sent.values()), "blobs sent by the origin",
            round(later / (NODES - 1) / 2, 2), "requests to the origin per further pull",
        )  # fmt: skip


def test_without_a_mirror_the_origin_sends_everything_to_everybody(tmp_path: Path, content: Path) -> None:
    with fleet(tmp_path, content, NODES) as there:
        seconds = there.pull(there.nodes, mirrored=False)
        # A small archive is looked at before it is fetched: twice for some, once at least.
        assert min(there.sent().values()) == NODES
        figure("fleet, origin alone", NODES, "nodes", SIZE >> 20, "MB", round(seconds, 1), "s")
        there.forget()
        # All at once through a cold mirror: it keeps the first copy and passes the other requests on.
        before = there.sent()
        cold = there.pull(there.nodes)
        copies = max((there.sent() - before).values())
        assert 1 <= copies <= NODES
        figure("fleet, cold mirror", NODES, "nodes", round(cold, 1), "s", copies, "copies from the origin")

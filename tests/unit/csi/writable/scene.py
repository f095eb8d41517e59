"""A node with a fake registry, a store and writable volumes; and what such a node must never leave behind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.driver import collect_contained, contained_trees
from tests.fakes.registry import FakeRegistry
from tests.unit.csi.crash_scenario import held, in_containerd
from unlade.csi.holding import Holder
from unlade.csi.writable import StoreSeeds, Writable
from unlade.delivery import Engine, PullPolicy
from unlade.model.mediatypes import ANNOTATION_TITLE
from unlade.mount import read_table
from unlade.registry import Registry, RegistryConfig, StaticCredentials
from unlade.store import DirStore, collect, remove_image

MIB = 1 << 20
MODEL = {"config.json": b'{"model": true}', "weights.bin": b"w" * (3 * MIB)}


@dataclass
class Node:
    """The parts of one node's state; `parameters` name the model in its registry."""

    base: Path
    store: DirStore
    holder: Holder
    writable: Writable
    parameters: Mapping[str, str]

    contained: str = ""

    def collect(self) -> None:
        """Forget every image and collect garbage: what is left is what volumes hold."""
        if self.contained:
            settings = in_containerd(self.base, self.contained)
            collect_contained(settings)
        for record in self.store.images.all():
            remove_image(self.store, record.reference, record.handler)
        collect(self.store, mounted=[])

    def trees(self) -> set[str]:
        """What content there is."""
        if not self.contained:
            return set(os.listdir(self.store.layout.trees))
        settings = in_containerd(self.base, self.contained)
        with settings.connect() as containerd:
            return contained_trees(containerd, settings.snapshotter)

    def target(self, name: str) -> str:
        """A place to publish at, whose parent exists."""
        parent = self.base / "pods" / name
        parent.mkdir(parents=True, exist_ok=True)
        return str(parent / "mount")


@contextmanager
def node(
    base: Path, host: str, *, forced_pull: PullPolicy | None = None, contained: str = ""
) -> Iterator[Node]:
    """A node's state as one process has it; may be entered again over what an earlier one left.

    `contained` is `SOCKET,NAMESPACE` of a containerd that has the content.
    """
    config = RegistryConfig(plain_http=frozenset({host}))
    with (
        Registry(config, StaticCredentials({})) as registry,
        DirStore(base / "store") as store,
        held(base, store, contained) as holder,
        Engine(registry, store, trees=holder.trees, jobs=2) as engine,
    ):
        seeds = StoreSeeds(engine, holder, forced_pull=forced_pull)
        writable = Writable(base / "csi" / "writable", seeds, keep_free=0.0)
        yield Node(base, store, holder, writable, {"reference": f"{host}/models/tiny:v1"}, contained)


def put_model(fake: FakeRegistry, files: Mapping[str, bytes] = MODEL) -> None:
    """The model in the registry, a file a layer."""
    blobs = [
        fake.put_blob("models/tiny", data, "application/octet-stream", {ANNOTATION_TITLE: name})
        for name, data in files.items()
    ]
    fake.put_artifact("models/tiny", "v1", blobs, "application/vnd.example.model.v1")


def mounts_below(base: Path) -> list[str]:
    """Every mount whose mount point or loop file is below a directory."""
    here = os.fsencode(os.path.realpath(base))
    return [os.fsdecode(entry.path) for entry in read_table() if entry.path.startswith(here)]


def loops_of(base: Path) -> list[str]:
    """Every loop device over a file below a directory."""
    found = []
    for device in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            file = device.read_text().strip()
        except OSError:
            continue
        if file.startswith(os.path.realpath(base)):
            found.append(file)
    return found

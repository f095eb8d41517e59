"""kill -9 at every durable step of pull, push, mount, unmount, rmi and gc.

After each kill `fsck` finds nothing, what is mounted is readable, a directory or a tag is whole or as it was
before, no worker is left; then the same command succeeds, and a collection leaves nothing behind. CI takes 20
points by seed, UNLADE_FULL=1 takes every point of every command once, and then pairs of them (the retry is
killed, too) up to 1,000 runs. `tests/unit/store/test_crash.py` does the same to the store's own calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.fakes.registry import FakeRegistry
from tests.figures import figure
from tests.unit.delivery.conftest import ARTIFACT, tar
from unlade.kernel import failpoints
from unlade.model import Descriptor
from unlade.model.mediatypes import ANNOTATION_TITLE, OCI_LAYER

pytestmark = [pytest.mark.root, pytest.mark.slow]

FULL = bool(os.environ.get("UNLADE_FULL"))
ROOT = Path(__file__).parents[3]
RUNS = 1000 if FULL else 20
PARTS = 20 if FULL else 1  # because a single test may take ten minutes at most


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    """An image of six layers, one that shares four of them, a bystander that shares one, and an artifact."""
    with FakeRegistry() as registry:
        layers: list[dict[str, bytes | None]] = [
            {f"d{number}/": None, f"d{number}/f": b"%d" % number * 20_000, f"only{number}": b"x"}
            for number in range(6)
        ]
        changed = [*layers[:4], {"d4/": None, "d4/new": b"changed"}, {"d5/": None, ".wh.only0": b""}]
        put(registry, "app", "v1", layers)
        put(registry, "app", "v2", changed)
        put(registry, "by", "v1", [layers[0], {"by/": None, "by/stander": b"untouched" * 5000}])
        image = put(registry, "index", None, layers[2:])
        platform = {"os": "linux", "architecture": "amd64"}
        document = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json"}
        registry.put_manifest(
            "index", "v1", {**document, "manifests": [image.to_json() | {"platform": platform}]}
        )
        files = {"weights": b"w" * 300_000, "config/settings": b"{}"}
        blobs = [
            registry.put_blob("model", data, "application/octet-stream", {ANNOTATION_TITLE: name})
            for name, data in files.items()
        ]
        packed = registry.put_blob("model", tar({"docs/": None, "docs/readme": b"hello"}))
        unpacked = {ANNOTATION_TITLE: "docs", "io.deis.oras.content.unpack": "true"}
        blobs.append(
            Descriptor(media_type=OCI_LAYER, digest=packed.digest, size=packed.size, annotations=unpacked)
        )
        registry.put_artifact("model", "v1", blobs, ARTIFACT)
        yield registry


def put(
    registry: FakeRegistry, name: str, tag: str | None, layers: list[dict[str, bytes | None]]
) -> Descriptor:
    """An image of uncompressed layers."""
    archives = [tar(files) for files in layers]
    blobs = [registry.put_blob(name, data, OCI_LAYER) for data in archives]
    rootfs = {"type": "layers", "diff_ids": [str(blob.digest) for blob in blobs]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()
    return registry.put_image(name, tag, blobs, config)


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: a kill leaves the same there, and a loaded disk is spared."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(prefix="unlade-killed-", dir="/dev/shm") as place:
        yield Path(place)


@pytest.mark.parametrize("part", range(PARTS))
def test_killed_anywhere_all_is_sound_and_the_retry_succeeds(
    fake: FakeRegistry, work: Path, part: int
) -> None:
    slice_ = [str(part), str(PARTS)]
    done = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.killed.runs", fake.host, str(work), "20", str(RUNS), *slice_],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout is not None
    with done:
        found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout]
    assert done.returncode == 0
    told, *runs = found
    assert [one for one in runs if one["wrong"]] == []
    assert len(runs) == RUNS // PARTS
    killed = [one for one in runs if one["killed"]]
    # Threads do not pass the points in one order: a rare ordinal is not reached by every run.
    assert len(killed) >= len(runs) * 0.95
    assert len(told["points"]) >= 200, "distinct points that the commands pass"
    kinds = {point.partition(":")[0] for point in told["points"]}
    assert not {name for name in failpoints.names() if name.startswith(("deliver.", "transfer."))} - kinds
    points = {point for one in killed for point in one["points"]}
    figure("kill -9", len(killed), "kills", len(points), "distinct points", told["pairs"], "in all scenes")

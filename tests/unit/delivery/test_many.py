"""Many at once: one download per blob whoever asks, and memory that does not grow with content."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.httpd import Request as Asked
from tests.fakes.httpd import Response
from tests.fakes.registry import FakeRegistry
from tests.figures import figure
from tests.unit.delivery.conftest import ARTIFACT, PutImage
from unlade.delivery import AsTree, Directory, Engine, InStore, Request
from unlade.model import Digest
from unlade.model.mediatypes import ANNOTATION_TITLE
from unlade.registry import Registry

FULL = bool(os.environ.get("UNLADE_FULL"))


@pytest.mark.parametrize("destination", [AsTree(), InStore()])
def test_100_deliveries_of_one_cold_reference_cause_one_download(
    engine: Engine, fake: FakeRegistry, put_image: PutImage, destination: AsTree | InStore
) -> None:
    put_image("img", "v1", *[{f"f{n}": os.urandom(50_000)} for n in range(4)])
    ref = fake.reference("img", "v1")
    ready = threading.Barrier(100)

    def one(_number: int) -> str | None:
        ready.wait()
        return engine.deliver(Request(references=(ref,), destination=destination)).path

    with ThreadPoolExecutor(100) as pool:
        paths = set(pool.map(one, range(100)))
    assert len(paths) == 1
    fetched = [request.path for request in fake.seen("GET", "/blobs/")]
    assert len(fetched) == len(set(fetched)) == 5, "four layers and the config, once each"


def test_two_processes_share_one_download(fake: FakeRegistry, put_files: PutImage, tmp_path: Path) -> None:
    put_files("model", "v1", {"f": random.Random(1).randbytes(8 << 20)})
    script = (
        "import sys\n"
        "from unlade.delivery import *\nfrom unlade.model import Reference\nfrom unlade.registry import *\n"
        "from unlade.store import DirStore\n"
        "host, ref, path = sys.argv[1:]\n"
        "registry = Registry(RegistryConfig(plain_http=frozenset({host})), StaticCredentials({}))\n"
        "with DirStore(path) as store, Engine(registry, store) as engine:\n"
        "    engine.deliver(Request(references=(Reference.parse(ref),), destination=AsTree()))\n"
    )
    ref = str(fake.reference("model", "v1"))
    arguments = [sys.executable, "-c", script, fake.host, ref, str(tmp_path / "shared")]
    running = [subprocess.Popen(arguments) for _ in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len(fake.seen("GET", "/blobs/")) == 1


class Cuts:
    """Ends each answer for the blob after a random number of bytes, so many times."""

    def __init__(self, seed: int, count: int, size: int) -> None:
        self._random = random.Random(seed)
        self.left = count
        self._size = size

    def __call__(self, request: Asked, response: Response) -> Response | None:
        if "/blobs/" not in request.path or self.left <= 0:
            return None
        self.left -= 1
        response.cut_after = self._random.randrange(300_000, self._size // 12)
        return response


def test_a_blob_cut_at_20_random_points_arrives_whole(
    client: Registry, fake: FakeRegistry, tmp_path: Path
) -> None:
    size = (1 << 30) if FULL else (64 << 20)
    source = tmp_path / "blob"
    hasher = hashlib.sha256()
    generator = random.Random(7)
    with source.open("wb") as out:
        for _ in range(size >> 20):
            chunk = generator.randbytes(1 << 20)
            hasher.update(chunk)
            out.write(chunk)
    blob = fake.put_blob_file("model", str(source), Digest("sha256", hasher.hexdigest()))
    titled = blob.to_json() | {"annotations": {ANNOTATION_TITLE: "weights"}}
    fake.put_manifest(
        "model",
        "v1",
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": ARTIFACT,
            "config": fake.put_blob("model", b"{}", "application/vnd.oci.empty.v1+json").to_json(),
            "layers": [titled],
        },
    )
    cuts = Cuts(20, 20, size)
    fake.alter(cuts)
    with Engine(client) as engine:
        engine.deliver(
            Request(references=(fake.reference("model", "v1"),), destination=Directory(str(tmp_path / "out")))
        )
    assert cuts.left == 0
    with (tmp_path / "out" / "weights").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == hasher.hexdigest()
    sent = sum(request.sent for request in fake.seen("GET", "/blobs/"))
    figure("cut at 20 points", size >> 20, "MB blob", (sent - size) >> 10, "KiB fetched twice")
    assert sent <= size + 20 * (1 << 20), "no byte twice beyond one chunk per cut"


def measured(script: str, *arguments: str) -> tuple[int, int]:
    """Run a script in a process of its own; peak RSS in bytes of it and of the largest of its children."""
    tail = (
        "\nimport resource\nfrom tests.figures import peak_memory\n"
        "own = peak_memory() >> 10\n"
        "below = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "print(own * 1024, below * 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script + tail, *arguments], check=True, capture_output=True, text=True
    )
    own, below = done.stdout.split()
    return int(own), int(below)


PULL = (
    "import sys\n"
    "from unlade.delivery import *\nfrom unlade.model import Reference\nfrom unlade.registry import *\n"
    "host, ref, path = sys.argv[1:]\n"
    "registry = Registry(RegistryConfig(plain_http=frozenset({host})), StaticCredentials({}))\n"
    "with Engine(registry) as engine:\n"
    "    engine.deliver(Request(references=(Reference.parse(ref),), destination=Directory(path)))\n"
)


def test_memory_of_a_large_blob(fake: FakeRegistry, tmp_path: Path) -> None:
    size = (4 << 30) if FULL else (512 << 20)
    source = tmp_path / "sparse"
    with source.open("wb") as out:
        out.truncate(size)
    with source.open("rb") as file:
        digest = Digest("sha256", hashlib.file_digest(file, "sha256").hexdigest())
    blob = fake.put_blob_file("model", str(source), digest)
    fake.put_manifest(
        "model",
        "v1",
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "artifactType": ARTIFACT,
            "config": fake.put_blob("model", b"{}", "application/vnd.oci.empty.v1+json").to_json(),
            "layers": [blob.to_json() | {"annotations": {ANNOTATION_TITLE: "weights"}}],
        },
    )
    ref = str(fake.reference("model", "v1"))
    own, below = measured(PULL, fake.host, ref, str(tmp_path / "out"))
    assert os.stat(tmp_path / "out" / "weights").st_size == size
    figure("peak memory of a raw blob", size >> 20, "MB blob", (own + below) >> 20, "MB RSS")
    assert own + below < 200 << 20, f"{(own + below) >> 20} MB"


def test_memory_of_many_files(fake: FakeRegistry, put_image: PutImage, tmp_path: Path) -> None:
    count = 50_000 if FULL else 10_000
    per_layer = count // 2
    layers = [
        {f"d{layer}/{n // 500}/file-with-a-name-{n}": b"x" * (n % 50) for n in range(per_layer)}
        for layer in range(2)
    ]
    put_image("img", "v1", *layers)
    ref = str(fake.reference("img", "v1"))
    own, below = measured(PULL, fake.host, ref, str(tmp_path / "out"))
    assert sum(len(files) for _, _, files in os.walk(tmp_path / "out")) == count
    figure("peak memory of an image", count, "files", (own + 2 * below) >> 20, "MB RSS, all processes")
    # RUSAGE_CHILDREN tells the largest child; two workers ran.
    assert own + 2 * below < 300 << 20, f"{own >> 20} MB and {below >> 20} MB in each worker"


def test_peak_is_measured_at_all() -> None:
    own, _ = measured("data = bytearray(300 << 20)\n")
    assert own > 300 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0

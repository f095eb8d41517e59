"""What is delivered in the works: made here, from seeds, and pushed to the run's own registry.

The image is a software tree as people ship it: many small text files, some large binaries, links. Its text
compresses about as well as source code does, because it is drawn from a small vocabulary.
"""

from __future__ import annotations

import io
import json
import random
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unlade.model import Deadline, Descriptor, Digest, Reference
from unlade.model.mediatypes import OCI_CONFIG, OCI_LAYER_GZIP, OCI_MANIFEST
from unlade.pack.compress import compress
from unlade.registry import Registry

MTIME = 1_700_000_000


@dataclass(frozen=True)
class Shape:
    """How much of what an image holds."""

    layers: int
    files: int
    text_bytes: int
    binary_bytes: int


def words(rng: random.Random) -> list[bytes]:
    """A vocabulary: text drawn from it compresses to about a quarter, as source code does."""
    return [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz_", k=rng.randrange(2, 12))) for _ in range(3000)]


def layer(shape: Shape, number: int) -> bytes:
    """One layer of an image as a tar archive."""
    rng = random.Random(f"layer {number}")
    vocabulary = words(random.Random("words"))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for directory in range(max(1, shape.files // shape.layers // 40)):
            entry = tarfile.TarInfo(f"opt/l{number}/d{directory}")
            entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, 0o755, MTIME
            archive.addfile(entry)
        for index in range(shape.files // shape.layers):
            size = int(rng.paretovariate(1.3) * shape.text_bytes / shape.files / 4)
            data = b" ".join(rng.choices(vocabulary, k=max(1, min(size, 4 << 20) // 7)))
            entry = tarfile.TarInfo(f"opt/l{number}/d{index // 40}/file-{index}.py")
            entry.size, entry.mode, entry.mtime = len(data), 0o644, MTIME
            archive.addfile(entry, io.BytesIO(data))
        for index in range(4):
            # Half noise, half zeros in runs: machine code is about that dense.
            size = shape.binary_bytes // shape.layers // 4
            data = b"".join(rng.randbytes(4096) + bytes(8192) for _ in range(size // 12288))
            entry = tarfile.TarInfo(f"opt/l{number}/lib-{index}.so")
            entry.size, entry.mode, entry.mtime = len(data), 0o755, MTIME
            archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def push_image(registry: Registry, reference: Reference, shape: Shape) -> int:
    """Make and push an image; returns its unpacked bytes."""
    deadline = Deadline.never()
    layers, diffs, unpacked = [], [], 0
    for number in range(shape.layers):
        tar = layer(shape, number)
        unpacked += len(tar)
        diffs.append(str(Digest.of(tar)))
        blob = b"".join(compress(_chunks(tar), "gzip"))
        layers.append(_upload(registry, reference, blob, OCI_LAYER_GZIP))
    config = json.dumps(
        {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diffs}}
    ).encode()
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": _upload(registry, reference, config, OCI_CONFIG).to_json(),
        "layers": [one.to_json() for one in layers],
    }
    raw = json.dumps(document).encode()
    registry.put_manifest(reference, raw, OCI_MANIFEST, tag=reference.tag, deadline=deadline)
    return unpacked


def make_blob(path: Path, size: int) -> None:
    """A file that does not compress, as weights do not."""
    subprocess.run(
        f"openssl enc -aes-128-ctr -pass pass:x -nosalt </dev/zero 2>/dev/null | head -c {size} > '{path}'",
        shell=True,
        check=True,
    )


def make_bundle(directory: Path, files: int, total: int) -> None:
    """Many small files."""
    vocabulary = words(random.Random("words"))
    rng = random.Random("bundle")
    for index in range(files):
        place = directory / f"d{index // 50}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"f{index}.yaml").write_bytes(b" ".join(rng.choices(vocabulary, k=total // files // 7)))


def _chunks(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), 1 << 20):
        yield data[start : start + (1 << 20)]


def _upload(registry: Registry, reference: Reference, data: bytes, media_type: str) -> Descriptor:
    digest = Digest.of(data)
    deadline = Deadline.never()
    registry.upload_blob(
        reference, digest, len(data), lambda offset: io.BytesIO(data[offset:]), deadline=deadline
    )
    return Descriptor(media_type=media_type, digest=digest, size=len(data))

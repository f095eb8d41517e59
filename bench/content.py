"""What is delivered in the works: made here, from fixed starts, and kept in the cache between runs.

The image is a software tree as people ship it: many small text files, some large binaries. Its text
compresses about as well as source code does, because it is drawn from a small vocabulary; its binaries about
as well as machine code, half noise and half zeros. Everything is pushed once into the storage directory of a
registry (`UNLADE_CACHE/bench/content-VERSION`), which each run serves anew.
"""

from __future__ import annotations

import fcntl
import io
import json
import random
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rig.engines import cache
from unlade.library import connect, push
from unlade.model import Deadline, Descriptor, Digest, Manifest, Reference
from unlade.model.mediatypes import OCI_CONFIG, OCI_LAYER_GZIP, OCI_MANIFEST
from unlade.pack.compress import compress
from unlade.registry import Registry
from unlade.transfer import Fetcher

MTIME: Final = 1_700_000_000
VERSION: Final = 1  # raised whenever something below makes other bytes than before


@dataclass(frozen=True)
class Shape:
    """How much of what an image holds."""

    layers: int
    files: int
    text_bytes: int
    binary_bytes: int

    def divided(self, by: int) -> Shape:
        """The same in small."""
        return Shape(self.layers, self.files // by, self.text_bytes // by, self.binary_bytes // by)


def storage() -> Path:
    """The registry storage that this version of the content is in."""
    return cache() / "bench" / f"content-{VERSION}"


@contextmanager
def _once(name: str) -> Iterator[bool]:
    """Whether `name` has yet to be made; it counts as made when the block ends well."""
    made = storage() / "made"
    made.mkdir(parents=True, exist_ok=True)
    with (made / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = not (made / name).exists()
        yield missing
        if missing:
            (made / name).touch()


def image(host: str, name: str, shape: Shape) -> str:
    """An image of a software tree; returns its reference."""
    reference = f"{host}/bench/{name}:1"
    with _once(name) as missing, connect(plain_http=[host]) as registry:
        if missing:
            layers = [_packed(registry, Reference.parse(reference), shape, n) for n in range(shape.layers)]
            _put_image(registry, Reference.parse(reference), layers)
    return reference


def changed(host: str, name: str, shape: Shape, number: int) -> str:
    """The image of that name with one layer replaced by another; the rest is the same blobs."""
    base, reference = Reference.parse(image(host, name, shape)), f"{host}/bench/{name}-changed:1"
    with _once(f"{name}-changed") as missing, connect(plain_http=[host]) as registry:
        if missing:
            target = Reference.parse(reference)
            manifest = registry.resolve(base, deadline=Deadline.never()).document
            assert isinstance(manifest, Manifest)
            never = Deadline.never()
            config = Fetcher(registry).read(base, manifest.config, limit=1 << 20, deadline=never)
            diffs = json.loads(config)["rootfs"]["diff_ids"]
            for layer_ in manifest.layers:
                registry.mount_blob(target, layer_.digest, source=base, deadline=Deadline.never())
            layers = list(zip(manifest.layers, diffs, strict=True))
            layers[number] = _packed(registry, target, shape, number, other=True)
            _put_image(registry, target, layers)
    return reference


def blob(host: str, name: str, size: int) -> tuple[str, Digest]:
    """An artifact with one file that does not compress, as weights do not."""
    reference = f"{host}/bench/{name}:1"
    with _once(name) as missing:
        if missing:
            with tempfile.TemporaryDirectory(dir=storage()) as scratch:
                source = Path(scratch) / "weights.bin"
                noise = "openssl enc -aes-128-ctr -pass pass:x -nosalt </dev/zero 2>/dev/null"
                subprocess.run(f"{noise} | head -c {size} > '{source}'", shell=True, check=True)
                pushed = push(source, reference, plain_http=[host])
            (storage() / f"{name}.digest").write_text(str(pushed.layers[0].digest))
    return reference, Digest.parse((storage() / f"{name}.digest").read_text())


def bundle(host: str, files: int, total: int) -> str:
    """Many small files in one layer."""
    reference = f"{host}/bench/bundle:1"
    _push_tree("bundle", host, [reference], lambda place, _: make_bundle(place, "bundle", files, total))
    return reference


def tiny(host: str, count: int) -> list[str]:
    """Packages of three small files each, one tag a package."""
    name = f"tiny-{count}"
    references = [f"{host}/bench/{name}:{number}" for number in range(count)]
    _push_tree(name, host, references, lambda place, number: make_bundle(place, f"tiny {number}", 3, 4096))
    return references


def _push_tree(name: str, host: str, references: list[str], make: Callable[[Path, int], None]) -> None:
    with _once(name) as missing:
        if not missing:
            return
        with connect(plain_http=[host]) as registry:
            for number, reference in enumerate(references):
                with tempfile.TemporaryDirectory() as scratch:
                    make(Path(scratch), number)
                    push(scratch, reference, registry=registry)


def make_bundle(directory: Path, seed: str, files: int, total: int) -> None:
    """Files of text, fifty to a directory."""
    vocabulary = words(random.Random("words"))
    rng = random.Random(seed)
    for index in range(files):
        place = directory / f"d{index // 50}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"f{index}.yaml").write_bytes(b" ".join(rng.choices(vocabulary, k=total // files // 8)))


def words(rng: random.Random) -> list[bytes]:
    """A vocabulary: text drawn from it compresses to about a third, as source code does."""
    return [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz_", k=rng.randrange(2, 12))) for _ in range(3000)]


def layer(shape: Shape, number: int, *, other: bool = False) -> bytes:
    """One layer of an image as a tar archive."""
    rng = random.Random(f"layer {number} {other}")
    vocabulary = words(random.Random("words"))
    # Text is cut out of one long page of it: drawing 900 MB word by word would take minutes.
    page = b" ".join(rng.choices(vocabulary, k=600_000))
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("opt", f"opt/l{number}"):
            _add(archive, name, None)
        count = shape.files // shape.layers
        for directory in range(-(-count // 40)):
            _add(archive, f"opt/l{number}/d{directory}", None)
        for index in range(count):
            size = min(int(rng.paretovariate(1.3) * shape.text_bytes / shape.files / 4), len(page) // 2)
            start = rng.randrange(len(page) - size)
            _add(archive, f"opt/l{number}/d{index // 40}/file-{index}.py", page[start : start + size])
        for index in range(4):
            size = shape.binary_bytes // shape.layers // 4
            data = b"".join(rng.randbytes(4096) + bytes(8192) for _ in range(size // 12288))
            _add(archive, f"opt/l{number}/lib-{index}.so", data, 0o755)
    return out.getvalue()


def _packed(
    registry: Registry, reference: Reference, shape: Shape, number: int, *, other: bool = False
) -> tuple[Descriptor, str]:
    """A layer, made, compressed and uploaded: its descriptor and diff ID."""
    tar = layer(shape, number, other=other)
    compressed = b"".join(compress(_chunks(tar), "gzip"))
    return _upload(registry, reference, compressed, OCI_LAYER_GZIP), str(Digest.of(tar))


def _put_image(registry: Registry, reference: Reference, layers: list[tuple[Descriptor, str]]) -> None:
    rootfs = {"type": "layers", "diff_ids": [diff for _, diff in layers]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs}).encode()
    document = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": _upload(registry, reference, config, OCI_CONFIG).to_json(),
        "layers": [one.to_json() for one, _ in layers],
    }
    raw = json.dumps(document).encode()
    registry.put_manifest(reference, raw, OCI_MANIFEST, tag=reference.tag, deadline=Deadline.never())


def forget() -> None:
    """Remove what earlier versions of this file left in the cache."""
    for old in (cache() / "bench").glob("content-*"):
        if old != storage():
            shutil.rmtree(old, ignore_errors=True)


def _add(archive: tarfile.TarFile, name: str, data: bytes | None, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.mtime = mode, MTIME
    if data is None:
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(entry)
    else:
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))


def _chunks(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), 1 << 20):
        yield data[start : start + (1 << 20)]


def _upload(registry: Registry, reference: Reference, data: bytes, media_type: str) -> Descriptor:
    digest = Digest.of(data)
    registry.upload_blob(
        reference, digest, len(data), lambda offset: io.BytesIO(data[offset:]), deadline=Deadline.never()
    )
    return Descriptor(media_type=media_type, digest=digest, size=len(data))

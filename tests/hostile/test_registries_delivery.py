"""Hostile registries, seen from the outside: a delivery that is lied to leaves nothing behind, anywhere.

The parts before this one test the client; here the whole way is walked, to a directory and into a store, and
what counts is the end: the right class of error, no destination, no content and no tree in the store, and no
credential at a stranger.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.httpd import Request as Asked
from tests.fakes.httpd import Response
from tests.fakes.scene import REPO, Scene
from unlade.delivery import AsTree, Destination, Directory, Engine, InStore, Request
from unlade.errors import IntegrityError, InvalidInput, RegistryError, UnladeError
from unlade.model import Descriptor, Digest, Reference
from unlade.model.mediatypes import OCI_INDEX, OCI_LAYER, OCI_MANIFEST
from unlade.registry import NotFound, WrongContent
from unlade.store import DirStore

SECRET = b"the content that must not arrive\n" * 1000
PLATFORM = {"os": "linux", "architecture": "amd64"}


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene() as stage:
        layer = stage.registry.put_blob(REPO, archive({"file": SECRET}), OCI_LAYER)
        stage.image = stage.registry.put_image(REPO, "v1", [layer])
        stage.layer = layer
        yield stage


def archive(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def put_index(scene: Scene, tag: str | None, entries: list[Descriptor]) -> Descriptor:
    document: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [{**entry.to_json(), "platform": PLATFORM} for entry in entries],
    }
    return scene.registry.put_manifest(REPO, tag, document)


def bodies(part: str, change: Callable[[bytes], bytes | Iterator[bytes]]) -> Callable[[Scene], Reference]:
    """A scene in which the bodies of matching GETs are changed."""

    def stage(scene: Scene) -> Reference:
        def alter(asked: Asked, response: Response) -> Response | None:
            wanted = {"layer": str(scene.layer.digest), "manifest": "/manifests/"}.get(part, "")
            if asked.method == "GET" and wanted in asked.path and response.status in (200, 206):
                assert isinstance(response.body, bytes)
                return Response(200, response.headers, change(response.body))
            return None

        scene.registry.alter(alter)
        return scene.ref

    return stage


def nested(scene: Scene) -> Reference:
    """Twenty indexes, each in the next."""
    inner = scene.image
    for _ in range(20):
        inner = put_index(scene, None, [inner])
    put_index(scene, "deep", [inner])
    return scene.registry.reference(REPO, "deep")


def circle(scene: Scene) -> Reference:
    """An index that leads to itself, as far as a server can pretend that a digest does."""
    top = put_index(scene, "circle", [scene.image])
    raw = scene.registry.repository(REPO).manifests[str(top.digest)][1]
    scene.registry.alter(
        lambda q, r: (
            Response(200, {"Content-Type": OCI_INDEX}, raw)
            if r.status == 200 and "/manifests/sha256:" in q.path
            else None
        )
    )
    return scene.registry.reference(REPO, "circle")


def wide(scene: Scene) -> Reference:
    """More entries than anybody needs, none of them there."""
    absent = [
        Descriptor(media_type=OCI_MANIFEST, digest=Digest.of(b"%d" % n), size=100) for n in range(10_001)
    ]
    put_index(scene, "wide", absent)
    return scene.registry.reference(REPO, "wide")


def missing_layer(scene: Scene) -> Reference:
    del scene.registry.repository(REPO).blobs[str(scene.layer.digest)]
    return scene.ref


def lying_size(size: int) -> Callable[[Scene], Reference]:
    def stage(scene: Scene) -> Reference:
        lie = Descriptor(media_type=OCI_LAYER, digest=scene.layer.digest, size=size)
        scene.registry.put_image(REPO, "lie", [lie])
        return scene.registry.reference(REPO, "lie")

    return stage


def dies(scene: Scene) -> Reference:
    """The registry is gone after half of the layer."""

    def cut(asked: Asked, response: Response) -> Response | None:
        if str(scene.layer.digest) not in asked.path or response.status not in (200, 206):
            return None
        scene.registry.fault(lambda q: Response.drop())
        return Response(response.status, response.headers, response.body, cut_after=scene.layer.size // 2)

    scene.registry.alter(cut, times=1)
    return scene.ref


CASES: dict[str, tuple[Callable[[Scene], Reference], type[UnladeError]]] = {
    "a layer of other bytes": (bodies("layer", lambda b: bytes(len(b))), IntegrityError),
    "a layer with one bit flipped": (
        bodies("layer", lambda b: b[:700] + bytes([b[700] ^ 1]) + b[701:]),
        IntegrityError,
    ),
    "a layer that is another archive": (bodies("layer", lambda b: archive({"evil": SECRET})), IntegrityError),
    "a short layer": (bodies("layer", lambda b: b[:-512]), IntegrityError),
    "a short layer, chunked": (bodies("layer", lambda b: iter([b[:-512]])), IntegrityError),
    "a long layer": (bodies("layer", lambda b: b + bytes(512)), IntegrityError),
    "a long layer, chunked": (bodies("layer", lambda b: iter([b, bytes(512)])), IntegrityError),
    "an empty layer": (bodies("layer", lambda b: b""), IntegrityError),
    "a manifest of other bytes": (bodies("manifest", lambda b: b + b" "), WrongContent),
    "indexes nested twenty deep": (nested, InvalidInput),
    "an index that leads to itself": (circle, IntegrityError),
    "an index of ten thousand and one": (wide, InvalidInput),
    "a layer that is not there": (missing_layer, NotFound),
    "a layer said to be smaller": (lying_size(1000), UnladeError),
    "a layer said to be a terabyte": (lying_size(1 << 40), UnladeError),
    "a registry that dies": (dies, RegistryError),
}
DESTINATIONS = ["directory", "tree", "store"]


@pytest.mark.parametrize("variant", CASES)
@pytest.mark.parametrize("kind", DESTINATIONS)
def test_nothing_is_left_of_a_delivery_that_was_lied_to(
    scene: Scene, tmp_path: Path, variant: str, kind: str
) -> None:
    stage, error = CASES[variant]
    ref = stage(scene)
    target = tmp_path / "out" / "delivered"
    target.parent.mkdir()
    destinations: dict[str, Destination] = {
        "directory": Directory(str(target)),
        "tree": AsTree(),
        "store": InStore(),
    }
    with DirStore(str(tmp_path / "store")) as store, Engine(scene.client(), store) as engine:
        with pytest.raises(error):
            engine.deliver(
                Request(references=(ref,), destination=destinations[kind]), deadline=scene.deadline()
            )
        assert store.stat(scene.layer.digest) is None
        assert store.images.all() == []
    assert os.listdir(target.parent) == []
    trees = tmp_path / "store" / ".unlade" / "trees"
    assert not trees.exists() or not [name for name in os.listdir(trees) if not name.startswith(".")]
    assert SECRET not in _everything(tmp_path / "out")
    scene.assert_no_leak()
    scene.assert_calm(60)


def _everything(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())


def test_a_tag_that_moves_in_the_middle_changes_nothing(scene: Scene, tmp_path: Path) -> None:
    """The new image is tagged as soon as the old manifest has been asked for."""

    def move(asked: Asked, response: Response) -> None:
        if asked.path.endswith("/manifests/v1") and response.status == 200:
            other = scene.registry.put_blob(REPO, archive({"file": b"moved"}), OCI_LAYER)
            scene.registry.put_image(REPO, "v1", [other])

    scene.registry.alter(move)
    target = tmp_path / "out"
    with Engine(scene.client(), None) as engine:
        done = engine.deliver(
            Request(references=(scene.ref,), destination=Directory(str(target))), deadline=scene.deadline()
        )
    assert (target / "file").read_bytes() == SECRET
    assert done.resolved[0].digest == scene.image.digest
    assert len([q for q in scene.registry.seen("GET", "/manifests/") if q.status == 200]) == 1


def test_what_a_registry_says_is_shown_escaped(scene: Scene, tmp_path: Path) -> None:
    text = json.dumps({"errors": [{"code": "DENIED", "message": "\x1b[31mred"}]}).encode()
    scene.registry.fault(lambda q: Response(403, body=text) if "/blobs/" in q.path else None)
    with Engine(scene.client(), None) as engine, pytest.raises(RegistryError) as caught:
        engine.deliver(
            Request(references=(scene.ref,), destination=Directory(str(tmp_path / "out"))),
            deadline=scene.deadline(),
        )
    assert str(caught.value).isprintable()

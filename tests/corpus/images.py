"""OCI and Docker images, as buildkit, crane and ORAS push them: layers stacked, whiteouts applied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.corpus.archives import Entry, d, f, gzip, h, s, tar, zstd
from tests.corpus.artifact import CREATED, Artifact, Kit, Node, directory, file, link
from unlade.model import Digest
from unlade.model.mediatypes import (
    ANNOTATION_CREATED,
    ANNOTATION_TITLE,
    DOCKER_CONFIG,
    DOCKER_MANIFEST,
    OCI_CONFIG,
    OCI_LAYER,
    OCI_LAYER_GZIP,
    OCI_LAYER_ZSTD,
    OCI_MANIFEST,
)

DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
DOCKER_LAYER_GZIP = "application/vnd.docker.image.rootfs.diff.tar.gzip"
Layer = tuple[str, Callable[[bytes], bytes], Sequence[Entry]]


def plain(data: bytes) -> bytes:
    """No compression."""
    return data


def image_config(tars: Iterable[bytes], architecture: str = "amd64") -> dict[str, Any]:
    """The config a builder writes; diff IDs are of the uncompressed tars."""
    return {
        "architecture": architecture,
        "config": {"Cmd": ["/bin/app"], "Env": ["PATH=/bin"]},
        "created": CREATED,
        "history": [{"created": CREATED, "created_by": "COPY / / # buildkit"}],
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [str(Digest.of(data)) for data in tars]},
    }


def add_image(kit: Kit, layers: Sequence[Layer], *, docker: bool = False, architecture: str = "amd64") -> Any:
    """An image of these layers in `kit`."""
    tars = [tar(entries) for _, _, entries in layers]
    config = kit.json(DOCKER_CONFIG if docker else OCI_CONFIG, image_config(tars, architecture))
    blobs = [kit.blob(kind, pack(data)) for (kind, pack, _), data in zip(layers, tars, strict=True)]
    for blob in blobs:
        if "foreign" in blob["mediaType"]:
            # Registries demand an address; pushed with the blob, nobody should ever use it (CVE-2020-15157).
            blob["urls"] = ["https://layers.example.invalid/base.tar.gz"]
    return kit.manifest(config, blobs, media_type=DOCKER_MANIFEST if docker else OCI_MANIFEST)


BASE = [
    d("etc/"),
    f("etc/app.conf", "one\n", 0o640),
    d("bin/"),
    f("bin/app", "#!app\n", 0o755),
    s("bin/sh", "app"),
]
UPPER = [d("etc/"), f("etc/app.conf", "two\n", 0o600), f("etc/extra", "new\n"), h("bin/app2", "bin/app")]
BASE_TREE = {
    "etc/app.conf": file("one\n", 0o640),
    "bin/app": file("#!app\n", 0o755),
    "bin/sh": link("app"),
}


def artifacts() -> list[Artifact]:
    """Every compression and both vendors' types."""
    made = []
    kinds: list[tuple[str, Layer, bool]] = [
        ("oci-gzip", (OCI_LAYER_GZIP, gzip, BASE), False),
        ("oci-zstd", (OCI_LAYER_ZSTD, zstd, BASE), False),
        ("oci-plain", (OCI_LAYER, plain, BASE), False),
        ("docker-gzip", (DOCKER_LAYER_GZIP, gzip, BASE), True),
        ("docker-plain", (DOCKER_LAYER, plain, BASE), True),
        (
            "nondistributable",
            ("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip", gzip, BASE),
            False,
        ),
        ("docker-foreign", ("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", gzip, BASE), True),
    ]
    for name, layer, docker in kinds:
        kit = Kit()
        add_image(kit, [layer], docker=docker)
        made.append(kit.done(f"image-{name}", "image", BASE_TREE))
    made += [_stack(), _whiteouts(), _opaque(), _titled(), _empty(), _mislabelled()]
    return made


def _stack() -> Artifact:
    kit = Kit()
    upper = [*UPPER[:3]]
    add_image(kit, [(OCI_LAYER_GZIP, gzip, BASE), (OCI_LAYER_ZSTD, zstd, upper), (OCI_LAYER, plain, [])])
    return kit.done(
        "image-stack",
        "image",
        BASE_TREE | {"etc/app.conf": file("two\n", 0o600), "etc/extra": file("new\n", 0o644)},
    )


def _whiteouts() -> Artifact:
    kit = Kit()
    upper = [f("etc/.wh.app.conf"), f(".wh.bin"), f("etc/kept", "kept\n")]
    add_image(kit, [(OCI_LAYER_GZIP, gzip, BASE), (OCI_LAYER_GZIP, gzip, upper)])
    return kit.done("image-whiteouts", "image", {"etc/kept": file("kept\n", 0o644)})


def _opaque() -> Artifact:
    kit = Kit()
    upper = [d("etc/", 0o750), f("etc/.wh..wh..opq"), f("etc/only", "only\n")]
    add_image(kit, [(OCI_LAYER_GZIP, gzip, BASE), (OCI_LAYER_GZIP, gzip, upper)])
    tree: dict[str, Node] = {path: node for path, node in BASE_TREE.items() if path.startswith("bin")}
    return kit.done(
        "image-opaque", "image", tree | {"etc": directory(0o750), "etc/only": file("only\n", 0o644)}
    )


def _titled() -> Artifact:
    """The enhancement's own example: `oras push --config …:image.config` with titled tars, unpacked."""
    kit = Kit()
    config = kit.blob(OCI_CONFIG, b'{\n  "architecture": "amd64",\n  "os": "linux"\n}\n')
    layers = [
        kit.blob(
            OCI_LAYER_GZIP,
            gzip(tar([d("dir/"), f("dir/file", "layer0\n")])),
            {ANNOTATION_TITLE: "layer0.tar"},
        ),
        kit.blob(OCI_LAYER_GZIP, gzip(tar([f("file", "layer1\n")])), {ANNOTATION_TITLE: "layer1.tar"}),
    ]
    kit.manifest(config, layers, annotations={ANNOTATION_CREATED: CREATED})
    return kit.done("image-titled", "image", {"dir/file": file("layer0\n"), "file": file("layer1\n")})


def _empty() -> Artifact:
    kit = Kit()
    add_image(kit, [])
    return kit.done("image-empty", "image", {})


def _mislabelled() -> Artifact:
    """A layer whose type says gzip and whose bytes are zstd, and the reverse: bytes decide."""
    kit = Kit()
    add_image(kit, [(OCI_LAYER_GZIP, zstd, BASE), (OCI_LAYER_ZSTD, gzip, UPPER[:3])])
    return kit.done(
        "image-mislabelled-compression",
        "image",
        BASE_TREE | {"etc/app.conf": file("two\n", 0o600), "etc/extra": file("new\n", 0o644)},
    )

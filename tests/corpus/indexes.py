"""Indexes: by platform, with attestations, nested, and of artifacts without platforms."""

from __future__ import annotations

from typing import Any

from tests.corpus.archives import f, gzip
from tests.corpus.artifact import Artifact, Kit, file
from tests.corpus.images import DOCKER_LAYER_GZIP, add_image
from unlade.model.mediatypes import ANNOTATION_TITLE, DOCKER_INDEX, OCI_CONFIG, OCI_INDEX, OCI_LAYER_GZIP
from unlade.planning import Ambiguous, NoMatch

_TYPE = "application/vnd.example.dataset.v1"


def artifacts() -> list[Artifact]:
    """Each kind, and what cannot be chosen."""
    return [
        _by_platform("index-oci", OCI_INDEX),
        _by_platform("index-docker-list", DOCKER_INDEX),
        _by_platform("index-arm64", OCI_INDEX, platform="linux/arm64"),
        _by_platform("index-no-match", OCI_INDEX, platform="linux/s390x"),
        _attested(),
        _nested(),
        _of_artifacts("index-by-type", artifact_type=_TYPE),
        _of_artifacts("index-by-annotation", annotations={"quantization": "q8"}),
        _of_artifacts("index-ambiguous"),
        _of_artifacts("index-silent", artifact_type=_TYPE, silent=True),
        _only_one(),
    ]


def _per_architecture(kit: Kit, docker: bool) -> list[dict[str, Any]]:
    entries = []
    for architecture in ("arm64", "amd64"):
        layer = (DOCKER_LAYER_GZIP if docker else OCI_LAYER_GZIP, gzip, [f("arch", f"{architecture}\n")])
        document = add_image(kit, [layer], docker=docker, architecture=architecture)
        entries.append(document.descriptor(platform={"architecture": architecture, "os": "linux"}))
    return entries


def _by_platform(name: str, media_type: str, platform: str = "linux/amd64") -> Artifact:
    kit = Kit()
    kit.index(_per_architecture(kit, media_type == DOCKER_INDEX), media_type=media_type)
    architecture = platform.partition("/")[2]
    if architecture == "s390x":
        return kit.done(name, "image", error=NoMatch, platform=platform)
    return kit.done(name, "image", {"arch": file(f"{architecture}\n")}, platform=platform)


def _attestation(kit: Kit, subject: dict[str, Any]) -> dict[str, Any]:
    """What buildkit adds for provenance: an image config, in-toto layers, platform unknown."""
    config = kit.json(
        OCI_CONFIG, {"architecture": "unknown", "os": "unknown", "config": {}, "rootfs": {"type": "layers"}}
    )
    statement = kit.json("application/vnd.in-toto+json", {"_type": "https://in-toto.io/Statement/v0.1"})
    statement["annotations"] = {"in-toto.io/predicate-type": "https://slsa.dev/provenance/v0.2"}
    document = kit.manifest(config, [statement])
    return document.descriptor(
        annotations={
            "vnd.docker.reference.digest": subject["digest"],
            "vnd.docker.reference.type": "attestation-manifest",
        },
        platform={"architecture": "unknown", "os": "unknown"},
    )


def _attested() -> Artifact:
    kit = Kit()
    entries = _per_architecture(kit, docker=False)
    kit.index([_attestation(kit, entries[0]), *entries])
    return kit.done("index-attested", "image", {"arch": file("amd64\n")})


def _nested() -> Artifact:
    kit = Kit()
    inner = kit.index(_per_architecture(kit, docker=False))
    kit.index([inner.descriptor()])
    return kit.done("index-nested", "image", {"arch": file("amd64\n")})


def _of_artifacts(
    name: str,
    *,
    artifact_type: str | None = None,
    annotations: dict[str, str] | None = None,
    silent: bool = False,
) -> Artifact:
    """`silent`: as `oras manifest index create` writes it, without types or annotations."""
    kit = Kit()
    entries = []
    for kind, quantization in (
        (_TYPE, "none"),
        ("application/vnd.example.model.v1", "q4"),
        ("application/vnd.example.model.v1", "q8"),
    ):
        layer = kit.blob(
            "application/octet-stream", f"{kind} {quantization}\n".encode(), {ANNOTATION_TITLE: "content.bin"}
        )
        document = kit.manifest(kit.empty(), [layer], artifact_type=kind)
        said: dict[str, Any] = {"artifactType": kind, "annotations": {"quantization": quantization}}
        entries.append(document.descriptor(**({} if silent else said)))
    kit.index(entries)
    if not artifact_type and not annotations:
        return kit.done(name, "generic", error=Ambiguous)
    expected = f"{_TYPE} none\n" if artifact_type else "application/vnd.example.model.v1 q8\n"
    return kit.done(
        name,
        "generic",
        {"content.bin": file(expected)},
        artifact_type=artifact_type,
        annotations=annotations or {},
    )


def _only_one() -> Artifact:
    """An index with a single entry that names no platform."""
    kit = Kit()
    layer = kit.blob("text/plain", b"one\n", {ANNOTATION_TITLE: "one.txt"})
    kit.index([kit.manifest(kit.empty(), [layer], artifact_type=_TYPE).descriptor()])
    return kit.done("index-single", "generic", {"one.txt": file("one\n")})

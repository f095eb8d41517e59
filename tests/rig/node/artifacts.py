"""Artifacts and images that only tests of the node need."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from rig.images import tar
from tests.corpus.artifact import Artifact, Kit, file
from unlade.model.mediatypes import OCI_CONFIG, OCI_INDEX, OCI_LAYER


def per_platform() -> Artifact:
    """An index with an artifact for each of two architectures: a file `arch` that names it."""
    kit = Kit()
    entries = []
    for architecture in ("amd64", "arm64"):
        layer = kit.blob(
            "application/octet-stream", architecture.encode(), {"org.opencontainers.image.title": "arch"}
        )
        document = kit.manifest(kit.empty(), [layer], artifact_type="application/vnd.unlade.test.v1")
        entries.append(document.descriptor(platform={"architecture": architecture, "os": "linux"}))
    kit.index(entries, media_type=OCI_INDEX)
    return kit.done("per-platform", "oras", {"arch": file("amd64")})


def image_per_platform(
    base: Sequence[bytes] = (),
    platforms: Sequence[dict[str, Any]] = (
        {"architecture": "amd64", "os": "linux"},
        {"architecture": "arm64", "os": "linux"},
    ),
) -> Artifact:
    """An index of ordinary images: the layers they share, then a file `arch` that names the architecture."""
    kit = Kit()
    entries = []
    for platform in platforms:
        named = tar({"arch": platform.get("variant", platform["architecture"]).encode()})
        entries.append(_image(kit, [*base, named], platform, OCI_LAYER).descriptor(platform=platform))
    kit.index(entries, media_type=OCI_INDEX)
    return kit.done("image-per-platform", "image", {"arch": file("amd64")})


def plugin_image(media_type: str) -> Artifact:
    """An image whose only layer is of a type that a plug-in of containerd's understands."""
    kit = Kit()
    platform = {"architecture": "amd64", "os": "linux"}
    _image(kit, [b"unreadable without a key"], platform, media_type)
    return kit.done("plugin-image", "image", None)


def _image(kit: Kit, layers: Sequence[bytes], platform: dict[str, Any], media_type: str) -> Any:
    diffs = ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
    config = kit.json(OCI_CONFIG, {**platform, "config": {}, "rootfs": {"type": "layers", "diff_ids": diffs}})
    return kit.manifest(config, [kit.blob(media_type, layer) for layer in layers])

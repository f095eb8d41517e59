"""Artifacts that only tests of the node need."""

from __future__ import annotations

from tests.corpus.artifact import Artifact, Kit, file
from unlade.model.mediatypes import OCI_INDEX


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

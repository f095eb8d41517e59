"""What `flux push artifact` writes: one gzipped tar, or one file as a static layer."""

from __future__ import annotations

from typing import Any

from tests.corpus.archives import d, f, gzip, tar
from tests.corpus.artifact import CREATED, Artifact, Kit, Node, file
from unlade.model import Digest
from unlade.model.mediatypes import ANNOTATION_CREATED

CONFIG = "application/vnd.cncf.flux.config.v1+json"
CONTENT = "application/vnd.cncf.flux.content.v1"
_ANNOTATIONS = {
    ANNOTATION_CREATED: CREATED,
    "org.opencontainers.image.revision": "main@sha1:450796ddb2ab6724ee1cc32a4be56da032d1cca0",
    "org.opencontainers.image.source": "https://git.example/app.git",
}


def _push(name: str, media_type: str, data: bytes, diff: bytes, tree: dict[str, Node]) -> Artifact:
    kit = Kit()
    layer = kit.blob(media_type, data)
    config: dict[str, Any] = {
        "architecture": "",
        "created": CREATED,
        "history": [{"created": "0001-01-01T00:00:00Z"}],
        "os": "",
        "rootfs": {"type": "layers", "diff_ids": [str(Digest.of(diff))]},
        "config": {},
    }
    kit.manifest(kit.json(CONFIG, config), [layer], annotations=_ANNOTATIONS)
    return kit.done(name, "flux", tree)


def artifacts() -> list[Artifact]:
    """The tarball and both kinds of static layer."""
    # The walk starts at the directory itself, so the first entry is ".", without a slash.
    packed = tar(
        [
            d("."),
            d("base"),
            f("base/kustomization.yaml", "resources: [app.yaml]\n"),
            f("base/app.yaml", "kind: Deployment\n"),
            f("README.md", "deploy\n"),
        ]
    )
    tree = {
        "base/kustomization.yaml": file("resources: [app.yaml]\n", 0o644),
        "base/app.yaml": file("kind: Deployment\n", 0o644),
        "README.md": file("deploy\n", 0o644),
    }
    static = b"kind: ConfigMap\n"
    return [
        _push("flux-artifact", f"{CONTENT}.tar+gzip", gzip(packed), packed, tree),
        _push("flux-static", f"{CONTENT}.yaml", static, static, {"content.yaml": file(static)}),
        _push("flux-static-bare", CONTENT, static, static, {"content": file(static)}),
    ]

"""Other tools' artifacts, which no family of ours knows: titles, untitled tars, and what has neither."""

from __future__ import annotations

from typing import Any

from tests.corpus.archives import d, f, gzip, tar, zstd
from tests.corpus.artifact import Artifact, Kit, Tree, file
from tests.corpus.images import image_config
from unlade.errors import NothingProduced
from unlade.model.mediatypes import ANNOTATION_TITLE, OCI_CONFIG, OCI_LAYER_GZIP
from unlade.planning import PlanOptions, UnplacedLayers

_TREE_TAR = tar([d("templates"), f("templates/config.cue", "cue\n"), f("values.cue", "values\n")])
_TREE: Tree = {"templates/config.cue": file("cue\n", 0o644), "values.cue": file("values\n", 0o644)}


def _push(
    name: str,
    config_type: str,
    *layers: tuple[str, bytes, str | None],
    artifact_type: str | None = None,
    family: str = "generic",
    config: object = None,
    **fields: Any,
) -> Artifact:
    kit = Kit()
    made = [
        kit.blob(media_type, data, {ANNOTATION_TITLE: title} if title else None)
        for media_type, data, title in layers
    ]
    kit.manifest(kit.json(config_type, config or {}), made, artifact_type=artifact_type)
    return kit.done(name, family, **fields)


def artifacts() -> list[Artifact]:
    """A tour of registries."""
    timoni = "application/vnd.timoni.content.v1.tar+gzip"
    packed = gzip(_TREE_TAR)
    zeros = bytes(4096)
    return [
        _push("timoni-module", "application/vnd.timoni.config.v1+json", (timoni, packed, None), tree=_TREE),
        _push(
            "untitled-plain-tar",
            "application/vnd.example.config.v1+json",
            ("application/octet-stream", _TREE_TAR, None),
            tree=_TREE,
        ),
        _push(
            "untitled-zstd-tar",
            "application/vnd.example.config.v1+json",
            ("application/octet-stream", zstd(_TREE_TAR), None),
            tree=_TREE,
        ),
        _push(
            "argocd-manifests",
            "application/vnd.oci.empty.v1+json",
            (OCI_LAYER_GZIP, packed, None),
            artifact_type="application/vnd.example.manifests.v1",
            tree=_TREE,
        ),
        # Open Policy Agent: an image config and an image layer, so it is an image, whatever its title.
        _push(
            "opa-bundle",
            OCI_CONFIG,
            (OCI_LAYER_GZIP, packed, "bundle.tar.gz"),
            family="image",
            config=image_config([_TREE_TAR]),
            tree=_TREE,
        ),
        _push(
            "falco-rules",
            "application/vnd.cncf.falco.rulesfile.config.v1+json",
            ("application/vnd.cncf.falco.rulesfile.layer.v1+tar.gz", packed, "rules.tar.gz"),
            tree={"rules.tar.gz": file(packed)},
        ),
        _push(
            "devcontainer-feature",
            "application/vnd.devcontainers",
            ("application/vnd.devcontainers.layer.v1+tar", _TREE_TAR, "devcontainer-feature-go.tgz"),
            tree={"devcontainer-feature-go.tgz": file(_TREE_TAR)},
        ),
        _push(
            "opentofu-module",
            "application/vnd.oci.empty.v1+json",
            ("archive/zip", b"PK\x03\x04rest", None),
            artifact_type="application/vnd.opentofu.modulepkg",
            error=NothingProduced,
        ),
        _push(
            "bicep-module",
            "application/vnd.ms.bicep.module.config.v1+json",
            ("application/vnd.ms.bicep.module.layer.v1+json", b'{"$schema":""}', None),
            error=NothingProduced,
        ),
        _push(
            "bicep-module-kept",
            "application/vnd.ms.bicep.module.config.v1+json",
            ("application/vnd.ms.bicep.module.layer.v1+json", b'{"$schema":""}', None),
            tree={"layer-000.json": file('{"$schema":""}')},
            options=PlanOptions(unpack="never"),
        ),
        _push(
            "half-titled",
            "application/vnd.example.config.v1+json",
            ("text/plain", b"one\n", "one.txt"),
            ("text/plain", b"two\n", None),
            error=UnplacedLayers,
        ),
        _push(
            "half-titled-named",
            "application/vnd.example.config.v1+json",
            ("text/plain", b"one\n", "one.txt"),
            ("text/plain", b"two\n", None),
            tree={"one.txt": file("one\n"), "two.txt": file("two\n")},
            options=PlanOptions(as_file=("two.txt",)),
        ),
        _push(
            "untitled-zeros",
            "application/vnd.example.config.v1+json",
            ("application/octet-stream", zeros, None),
            error=NothingProduced,
        ),
        _push(
            "layers-of-tars",
            "application/vnd.example.config.v1+json",
            (timoni, packed, None),
            (timoni, gzip(tar([f("values.cue", "later\n")])), None),
            tree={**_TREE, "values.cue": file("later\n")},
        ),
        _push("no-layers", "application/vnd.example.config.v1+json", error=NothingProduced),
    ]

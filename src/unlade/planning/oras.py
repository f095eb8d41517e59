"""ORAS: files at their titles, packed directories unpacked.

`oras push` titles each file with its path and packs a directory as a gzipped tar with the annotation
`io.deis.oras.content.unpack: "true"`. The annotation is asked first for every artifact, whatever its
family (rule 2): it is the only word of the publisher that says "this is a directory". Where ORAS clients
disagree (the Python one goes by the media type and writes no annotation), the annotation decides (rule 5).

Inside the tar, Go's client repeats the whole title before each name, the Python one its last part, and
hand-made ones nothing; the first entry tells which. `oras push REF .` gives the title `.`, which is the
root of the tree and is accepted for a packed directory only.
"""

from __future__ import annotations

from typing import Final

from unlade.model import Descriptor, DiffID, Digest, InvalidDigest, Manifest
from unlade.planning.view import Placement, View

NAME = "oras"
UNPACK: Final = "io.deis.oras.content.unpack"
CONTENT_DIGEST: Final = "io.deis.oras.content.digest"
UNKNOWN_ARTIFACT: Final = "application/vnd.unknown.artifact.v1"
UNKNOWN_CONFIG: Final = "application/vnd.unknown.config.v1+json"


def recognise(manifest: Manifest) -> bool:
    """ORAS's default types, or a packed directory among the layers."""
    return (
        manifest.artifact_type == UNKNOWN_ARTIFACT
        or manifest.config.media_type == UNKNOWN_CONFIG
        or any(UNPACK in layer.annotations for layer in manifest.layers)
    )


def packed_directory(layer: Descriptor) -> bool | None:
    """What the unpack annotation says; None when it is absent or says neither."""
    return {"true": True, "false": False}.get(layer.annotations.get(UNPACK, "").lower())


def annotated(view: View, index: int) -> Placement | None:
    """The annotation's own rule, asked before any family's."""
    layer = view.layer(index)
    says = packed_directory(layer)
    title = layer.title or None
    if says is None or (not says and title is None):
        return None
    if not says:
        return Placement(rule="annotation: unpack is false, a file at its title", name=title)
    packed = "" if title in (None, ".") else str(title)
    rule = "annotation: a packed directory, unpacked"
    return Placement(
        rule=rule, name=title, archive=True, certain=True, packed=packed, diff_id=_content_digest(layer)
    )


def place(view: View, index: int) -> Placement | None:
    """Titles and untitled layers follow the general rules."""
    del view, index
    return None


def _content_digest(layer: Descriptor) -> DiffID | None:
    """The digest of the uncompressed tar, where it is one we can check; `oras pull` ignores any other too."""
    try:
        digest = Digest.parse(layer.annotations.get(CONTENT_DIGEST, ""))
    except InvalidDigest:
        return None
    return DiffID(digest) if digest.algorithm == "sha256" else None


def prefix(packed: str, first: str) -> str:
    """Where to unpack a packed directory whose first entry is `first`, so that it fills `packed`."""
    first = first.removeprefix("./").rstrip("/")
    parent, _, base = packed.rpartition("/")
    if first == packed or first.startswith(f"{packed}/"):
        return ""
    if parent and (first == base or first.startswith(f"{base}/")):
        return parent
    return packed

"""Anything else: titled layers become files, untitled tars are unpacked, the rest is an error.

The last rules for every artifact, whatever its family. A titled layer is a file, as `oras pull` gives it,
even where its type says tar. An untitled one is unpacked when its bytes are a tar; otherwise there is
nothing to call it, and the caller must name it (`--as-file`) or ask for stable names (`--unpack never`).
"""

from __future__ import annotations

from unlade.model import Manifest, mediatypes
from unlade.planning import modelpack
from unlade.planning.view import Placement, View

NAME = "generic"


def recognise(manifest: Manifest) -> bool:
    """Everything."""
    del manifest
    return True


def place(view: View, index: int) -> Placement:
    """By title, else by bytes."""
    layer = view.layer(index)
    if layer.title:
        return Placement(rule="title: a file at its title", name=layer.title)
    if layer.media_type == mediatypes.OCI_EMPTY:
        return Placement(rule="empty: the empty descriptor stands for no content", skip=True)
    # Some publishers know only model-spec's annotation; it names what is no archive.
    named = modelpack.filepath(layer)
    return Placement(rule="untitled: its bytes are a tar, unpacked", archive=True, name=named)


def stable_name(index: int, media_type: str) -> str:
    """The name of layer `index` when every layer must be a file: `layer-000` and what its type suggests."""
    base, _, suffix = media_type.partition("+")
    if suffix == "json" or base.endswith("/json"):
        return f"layer-{index:03d}.json"
    if base.endswith((".tar", ".tar.gzip", ".tar.zstd", "/tar", "/x-tar")):
        packing = suffix or base.rpartition(".")[2]
        return f"layer-{index:03d}.tar{ {'gzip': '.gz', 'zstd': '.zst'}.get(packing, '') }"
    return f"layer-{index:03d}"

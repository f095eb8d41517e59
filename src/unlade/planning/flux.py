"""Flux: the tree that `flux push artifact` packed.

One gzipped tar with entries relative to the pushed directory. Flux can also push a single file ("static"
layers) under `application/vnd.cncf.flux.content.v1[.EXT]`; it stores no name, so the file is called
`content` with that extension.
"""

from __future__ import annotations

import re
from typing import Final

from unlade.model import Manifest
from unlade.planning.view import Placement, View

NAME = "flux"
CONFIG: Final = "application/vnd.cncf.flux.config.v1+json"
CONTENT: Final = "application/vnd.cncf.flux.content.v1.tar+gzip"
_STATIC: Final = re.compile(r"application/vnd\.cncf\.flux\.content\.v1(?:\.([A-Za-z0-9]{1,32}))?", re.ASCII)


def recognise(manifest: Manifest) -> bool:
    """Flux's config type."""
    return manifest.config.media_type == CONFIG


def place(view: View, index: int) -> Placement | None:
    """The tarball is unpacked; a static layer is a file."""
    layer = view.layer(index)
    if layer.media_type == CONTENT:
        return Placement(
            rule="flux: content, unpacked", name=layer.title or "content.tgz", archive=True, certain=True
        )
    if static := _STATIC.fullmatch(layer.media_type):
        extension = f".{static[1]}" if static[1] else ""
        return Placement(rule="flux: a static layer, a file", name=layer.title or f"content{extension}")
    return None

"""kpt packages: one tar layer with a Kptfile at its root.

No media type says "kpt": a package pushed as an image is an image (rule 1), one pushed as an artifact is an
untitled tar, and both give the package. What is here recognises the second by its first bytes, so that the
plan can call it by its name.
"""

from __future__ import annotations

from unlade.model import Manifest
from unlade.planning.view import Placement, View

NAME = "kpt"
_KPTFILE = ("Kptfile", "./Kptfile")


def recognise(manifest: Manifest) -> bool:
    """Never by types alone: see `is_package`."""
    del manifest
    return False


def is_package(view: View) -> bool:
    """Whether the only layer is untitled and shows a Kptfile at its root. Looks at bytes already fetched."""
    layers = view.manifest.layers
    if len(layers) != 1 or layers[0].title:
        return False
    archive = view.archive(layers[0])
    return archive is not None and any(name in _KPTFILE for name in archive.names)


def place(view: View, index: int) -> Placement | None:
    """The package, unpacked."""
    if view.layer(index).title:
        return None
    return Placement(rule="kpt: the package, unpacked", archive=True, certain=True)

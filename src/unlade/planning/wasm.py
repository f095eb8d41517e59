"""WebAssembly: the module file (CNCF Wasm artifact format; `wkg`, older `wasm-to-oci`).

`wkg` titles the layer with the package's name; where there is no title the file is `module.wasm`.
"""

from __future__ import annotations

from typing import Final

from unlade.model import Descriptor, Manifest
from unlade.planning.view import Placement, View, numbered

NAME = "wasm"
CONFIGS: Final = frozenset({"application/vnd.wasm.config.v0+json", "application/vnd.wasm.config.v1+json"})
MODULES: Final = frozenset({"application/wasm", "application/vnd.wasm.content.layer.v1+wasm"})


def recognise(manifest: Manifest) -> bool:
    """A Wasm config, or a Wasm layer beside any other config."""
    return manifest.config.media_type in CONFIGS or any(
        layer.media_type in MODULES for layer in manifest.layers
    )


def place(view: View, index: int) -> Placement | None:
    """A module is a file at its title, or `module.wasm`."""
    layer = view.layer(index)
    if layer.media_type not in MODULES:
        return None
    if layer.title:
        return Placement(rule="wasm: a module at its title", name=layer.title)
    position, count = view.position(index, _untitled)
    return Placement(
        rule="wasm: a module without a title, under a stable name",
        name=numbered("module", ".wasm", position, count),
    )


def _untitled(layer: Descriptor) -> str | None:
    return "module" if layer.media_type in MODULES and not layer.title else None

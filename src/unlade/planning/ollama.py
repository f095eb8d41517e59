"""Ollama models: files under stable names.

Layers are `application/vnd.ollama.image.KIND` beside Docker's image config. Most have no names, so the kind
names the file: `model.gguf`, `template.txt`, `params.json` … (the table below). Several layers of a kind
(licences, shards) are numbered in the order of the manifest. Models kept as tensors give each layer a field
`name` of Ollama's own, which is then its path. A kind that Ollama adds later is a file of that name.
"""

from __future__ import annotations

import re
from typing import Final

from unlade.model import Descriptor, Manifest
from unlade.planning.view import Placement, View, numbered

NAME = "ollama"
_LAYER: Final = re.compile(r"application/vnd\.ollama\.image\.([a-z][a-z0-9_-]{0,62})", re.ASCII)
_EXTENSIONS: Final = {
    "model": ".gguf",
    "projector": ".gguf",
    "adapter": ".gguf",
    "draft": ".gguf",
    "template": ".txt",
    "prompt": ".txt",
    "system": ".txt",
    "license": ".txt",
    "params": ".json",
    "messages": ".json",
    "json": ".json",
    "tensor": ".safetensors",
}


def recognise(manifest: Manifest) -> bool:
    """Any of Ollama's layer types: the config is Docker's and says nothing."""
    return any(_LAYER.fullmatch(layer.media_type) for layer in manifest.layers)


def place(view: View, index: int) -> Placement | None:
    """A file named after its kind."""
    layer = view.layer(index)
    kind = _LAYER.fullmatch(layer.media_type)
    if not kind:
        return None
    if named := layer.title or layer.name:
        return Placement(rule=f"ollama: a {kind[1]} layer, at its name", name=named)
    name = numbered(kind[1], _EXTENSIONS.get(kind[1], ""), *view.position(index, _unnamed))
    return Placement(rule=f"ollama: a {kind[1]} layer, under a stable name", name=name)


def _unnamed(layer: Descriptor) -> str | None:
    return None if layer.title or layer.name else layer.media_type

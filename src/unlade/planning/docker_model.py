"""Docker Model Runner (`docker model package`): files, under a stable name where none is given.

Configs `v0.1` and `v0.2`. Today's tool annotates each layer with `org.cncf.model.filepath`; older ones
name nothing, and then the names that the tool's own runtime bundle uses apply: `model.gguf`,
`model-00001-of-00002.safetensors`, `model.mmproj`, `template.jinja` and so on. A type that Docker adds later
is a file of that name. The two tar types are unpacked at the root; the filepath of such a layer names the
tar, not what is in it.
"""

from __future__ import annotations

import re
from typing import Final

from unlade.model import Descriptor, Manifest
from unlade.planning import modelpack
from unlade.planning.view import Placement, View, numbered

NAME = "docker-model"
_CONFIG: Final = re.compile(r"application/vnd\.docker\.ai\.model\.config\.v0\.[0-9]{1,3}\+json", re.ASCII)
_PREFIX: Final = "application/vnd.docker.ai."
_FILE: Final = re.compile(r"application/vnd\.docker\.ai\.([a-z0-9][a-z0-9._-]{0,62})", re.ASCII)
_ARCHIVES: Final = frozenset({f"{_PREFIX}vllm.config.tar", f"{_PREFIX}dir.tar"})
# Type below the prefix: stem and extension of the stable name.
_STABLE: Final = {
    "gguf.v3": ("model", ".gguf"),
    "safetensors": ("model", ".safetensors"),
    "dduf": ("model", ".dduf"),
    "mmproj": ("model", ".mmproj"),
    "chat.template.jinja": ("template", ".jinja"),
    "license": ("LICENSE", ""),
    "model.file": ("file", ""),
}


def recognise(manifest: Manifest) -> bool:
    """Docker's model config types."""
    return bool(_CONFIG.fullmatch(manifest.config.media_type))


def place(view: View, index: int) -> Placement | None:
    """Tar types are unpacked; every other type of the family is a file."""
    layer = view.layer(index)
    if layer.media_type in _ARCHIVES:
        name = modelpack.filepath(layer) or layer.title or None
        return Placement(rule="docker-model: an archive, unpacked", name=name, archive=True)
    kind = _FILE.fullmatch(layer.media_type)
    if not kind:
        return None
    stable = _STABLE.get(kind[1], (kind[1], ""))
    metadata = modelpack.file_metadata(layer)
    name = modelpack.filepath(layer) or layer.title
    rule = "docker-model: a file at its filepath"
    if not name:
        name = numbered(*stable, *view.position(index, _unnamed))
        rule = "docker-model: a file without a name, under a stable one"
    return Placement(rule=rule, name=name, mode=metadata.mode, mtime_ns=metadata.mtime_ns)


def _unnamed(layer: Descriptor) -> str | None:
    return None if modelpack.filepath(layer) or layer.title else layer.media_type

"""Directories and files into layers and manifests, deterministically: the way back of `unpack`.

`pack_tree` and `pack_file` make layers; `push` (in `publish`) makes the manifest and sends all of it.
"""

from unlade.pack.compress import Compression
from unlade.pack.layer import Layer, pack_file, pack_tree
from unlade.pack.listing import PackPolicy, SourceChanged, UnpackableSource

__all__ = [
    "Compression",
    "Layer",
    "PackPolicy",
    "SourceChanged",
    "UnpackableSource",
    "pack_file",
    "pack_tree",
]

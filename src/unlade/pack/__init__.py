"""Directories and files into layers and manifests, deterministically: the way back of `unpack`.

`pack_tree` and `pack_file` make layers; `push` (in `publish`) makes the manifest and sends all of it.
"""

from typing import TYPE_CHECKING

from unlade.lazy import lazily

if TYPE_CHECKING:
    from unlade.pack.compress import Compression
    from unlade.pack.layer import Layer, pack_file, pack_tree
    from unlade.pack.listing import PackPolicy, SourceChanged, UnpackableSource
    from unlade.pack.publish import ARTIFACT_TYPE, Pushed, PushOptions, build_manifest, push
    from unlade.pack.tar import write_tar
else:
    __getattr__ = lazily(
        __name__,
        {
            "compress": "Compression",
            "layer": "Layer pack_file pack_tree",
            "listing": "PackPolicy SourceChanged UnpackableSource",
            "publish": "ARTIFACT_TYPE Pushed PushOptions build_manifest push",
            "tar": "write_tar",
        },
    )

__all__ = [
    "ARTIFACT_TYPE",
    "Compression",
    "Layer",
    "PackPolicy",
    "PushOptions",
    "Pushed",
    "SourceChanged",
    "UnpackableSource",
    "build_manifest",
    "pack_file",
    "pack_tree",
    "push",
    "write_tar",
]

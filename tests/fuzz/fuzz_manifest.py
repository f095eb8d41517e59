"""Manifests and indexes: decoded within limits, or a typed error; what was decoded holds its invariants."""

from __future__ import annotations

import json
from typing import Final

from unlade.errors import UnladeError
from unlade.model import Descriptor, Index, Manifest, decode_manifest, mediatypes

_DIGEST: Final = "sha256:" + "ab" * 32
_BLOB: Final = {"mediaType": "application/octet-stream", "digest": _DIGEST, "size": 3}
CORPUS: Final = [
    json.dumps(document).encode()
    for document in (
        {
            "schemaVersion": 2,
            "mediaType": mediatypes.OCI_MANIFEST,
            "artifactType": "application/x",
            "config": {**_BLOB, "data": "e30="},
            "layers": [
                {**_BLOB, "annotations": {"org.opencontainers.image.title": "../x"}, "urls": ["https://a/b"]}
            ],
            "subject": _BLOB,
            "annotations": {"a": "b"},
        },
        {
            "schemaVersion": 2,
            "mediaType": mediatypes.OCI_INDEX,
            "manifests": [{**_BLOB, "platform": {"os": "linux", "architecture": "arm64", "variant": "v8"}}],
        },
        {"schemaVersion": 2, "manifests": [], "layers": []},
        {"schemaVersion": 1, "fsLayers": []},
        {"schemaVersion": 2, "config": _BLOB, "layers": [_BLOB] * 3},
    )
]
_TYPES: Final = (
    None,
    "text/plain",
    mediatypes.OCI_MANIFEST,
    mediatypes.OCI_INDEX,
    "application/json; charset=utf-8",
)


def one_input(data: bytes) -> None:
    """Decode it under every kind of Content-Type."""
    for content_type in _TYPES:
        try:
            document = decode_manifest(data, content_type=content_type)
        except UnladeError as error:
            assert str(error)
            continue
        if isinstance(document, Index):
            parts = list(document.manifests)
        else:
            assert isinstance(document, Manifest)
            parts = [document.config, *document.layers, *([document.subject] if document.subject else [])]
        for part in parts:
            assert isinstance(part, Descriptor)
            assert part.size >= 0
            assert part.digest.algorithm in ("sha256", "sha512")

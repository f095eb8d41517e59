"""Images (rule 1): an image config and only image layer types. Every layer is a tar; titles are ignored.

This is the only family whose layers carry whiteouts. The test is strict on purpose: a cosign signature has
an image config and JSON layers, an Ollama model has Docker's config and its own layer types, and both are
artifacts. An image without layers is an image, and stays an empty directory.
"""

from __future__ import annotations

from unlade.model import Manifest, mediatypes

NAME = "image"


def recognise(manifest: Manifest) -> bool:
    """An image config, and image layer types only."""
    return manifest.config.media_type in mediatypes.IMAGE_CONFIGS and all(
        layer.media_type in mediatypes.IMAGE_LAYERS for layer in manifest.layers
    )

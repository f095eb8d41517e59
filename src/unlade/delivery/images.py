"""What an image's config says about its layers: their diff IDs (image-spec, "rootfs").

The config is hostile like everything else: capped, decoded strictly, and its list must be as long as the
manifest's, or a layer would go unchecked. A config without any list is allowed: `oras push --config` writes
one with architecture and os alone, and the layers' own digests still hold.
"""

from __future__ import annotations

import msgspec

from unlade.model import DiffID, Digest, InvalidManifest, Manifest


class _RootFS(msgspec.Struct):
    diff_ids: list[str] | None = None
    type: str = ""


class _Config(msgspec.Struct):
    rootfs: _RootFS | None = None


_decode = msgspec.json.Decoder(_Config).decode


def diff_ids(config: bytes, manifest: Manifest) -> list[DiffID | None]:
    """One diff ID per layer, or None for each where the config has no list; raises InvalidManifest."""
    try:
        rootfs = _decode(config).rootfs
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidManifest(
            f"the image's config {manifest.config.digest} cannot be decoded: {error}",
            next_step="push the image again with a current tool",
        ) from error
    if rootfs is None or rootfs.diff_ids is None:
        return [None] * len(manifest.layers)
    listed = rootfs.diff_ids
    if len(listed) != len(manifest.layers):
        raise InvalidManifest(
            f"the image's config names {len(listed)} layers, its manifest {len(manifest.layers)}",
            next_step="the image is damaged; push it again",
        )
    return [DiffID(Digest.parse(text)) for text in listed]

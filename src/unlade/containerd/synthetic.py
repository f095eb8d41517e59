"""The image that stands for a tree: a config and a manifest that containerd takes for an ordinary image's.

Its only layer's diff ID is the name of the tree's snapshot, so containerd finds the layer unpacked and never
asks for its blob, which does not exist. The layer's stated size is the tree's: that is what the kubelet
adds up. The config embeds the tree's key, so an image ID (the config's digest) names exactly one tree; it
holds nothing else that could differ between two references to one content. The platform is the host's,
because containerd compares it with its own: a directory of files runs on no other.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from unlade.containerd import labels
from unlade.model import Descriptor, DiffID, Digest, Platform, mediatypes


@dataclass(frozen=True, slots=True)
class SyntheticImage:
    """The bytes of a config and a manifest, with their descriptors."""

    config: Descriptor
    config_bytes: bytes
    manifest: Descriptor
    manifest_bytes: bytes

    @property
    def id(self) -> str:
        """The image ID, as the CRI has it."""
        return str(self.config.digest)


def synthesize(tree: Digest, diff: DiffID, *, size: int, host: Platform) -> SyntheticImage:
    """The image of a tree; the same arguments give the same bytes."""
    platform = {"architecture": host.architecture, "os": host.os}
    if host.variant:
        platform["variant"] = host.variant
    config_bytes = _canonical(
        {
            **platform,
            "config": {"Labels": {labels.TREE: str(tree)}},
            "rootfs": {"type": "layers", "diff_ids": [str(diff)]},
        }
    )
    config = _describe(mediatypes.OCI_CONFIG, config_bytes)
    manifest_bytes = _canonical(
        {
            "schemaVersion": 2,
            "mediaType": mediatypes.OCI_MANIFEST,
            "config": config.to_json(),
            "layers": [{"mediaType": mediatypes.OCI_LAYER, "digest": str(diff), "size": size}],
        }
    )
    return SyntheticImage(
        config, config_bytes, _describe(mediatypes.OCI_MANIFEST, manifest_bytes), manifest_bytes
    )


def _describe(media_type: str, data: bytes) -> Descriptor:
    return Descriptor(media_type=media_type, digest=Digest.of(data), size=len(data))


def _canonical(document: dict[str, object]) -> bytes:
    return msgspec.json.encode(document, order="deterministic")

"""What containerd pulled by itself: a container image, or an artifact that it took for one.

containerd records whatever has a manifest as an image, and mounts an artifact as an empty directory. Its
CRI does not tell the two apart, its content store does: the manifest is there.
"""

from __future__ import annotations

from collections.abc import Iterator

from unlade.containerd import ContainerdStore
from unlade.containerd.ordinary import manifest_is_image
from unlade.cri.api import images_pb2 as api
from unlade.errors import InvalidInput
from unlade.model import Digest, Index, Manifest, decode_manifest
from unlade.store import NotInStore


def is_image(store: ContainerdStore, image: api.Image) -> bool:
    """Whether an image of containerd's is one; so is what has no manifest to look at (imported by hand)."""
    for name in image.repo_digests:
        for manifest in _manifests(store, Digest.parse(name.rpartition("@")[2])):
            if str(manifest.config.digest) == image.id:
                return manifest_is_image(manifest)
    return True


def _manifests(store: ContainerdStore, digest: Digest) -> Iterator[Manifest]:
    """A manifest, or those of an index that containerd has."""
    try:
        found = decode_manifest(store.read(digest), content_type=None)
    except (NotInStore, InvalidInput):
        return
    if isinstance(found, Manifest):
        yield found
    elif isinstance(found, Index):
        for entry in found.manifests:
            yield from _manifests(store, entry.digest)

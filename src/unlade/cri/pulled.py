"""What containerd pulled by itself: a container image, or an artifact that it took for one.

containerd records whatever has a manifest as an image, and mounts an artifact as an empty directory. Its
CRI does not tell the two apart, its content store does: the manifest is there.
"""

from __future__ import annotations

from collections.abc import Iterator

from unlade.containerd import ContainerdStore
from unlade.cri.api import images_pb2 as api
from unlade.errors import InvalidInput
from unlade.model import Digest, Index, Manifest, decode_manifest
from unlade.planning import image as image_family
from unlade.store import NotInStore


def is_image(store: ContainerdStore, image: api.Image) -> bool:
    """Whether the manifest behind an image of containerd's is a container image's."""
    return any(
        str(manifest.config.digest) == image.id and image_family.recognise(manifest)
        for name in image.repo_digests
        for manifest in _manifests(store, Digest.parse(name.rpartition("@")[2]))
    )


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

"""containerd's image records: names that lead to a manifest, with labels.

A record is a root of containerd's garbage collection and what the CRI plugin shows to the kubelet. Writing
is by label, never the whole map, because the CRI plugin keeps labels of its own on the same records.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from google.protobuf.empty_pb2 import Empty

from unlade.containerd import labels
from unlade.containerd.api import images_pb2, types_pb2
from unlade.containerd.connection import Containerd, Method
from unlade.containerd.errors import Exists, Missing
from unlade.model import Descriptor

_IMAGES: Final = "/containerd.services.images.v1.Images"
_GET: Final = Method(f"{_IMAGES}/Get", images_pb2.GetImageRequest, images_pb2.GetImageResponse)
_LIST: Final = Method(f"{_IMAGES}/List", images_pb2.ListImagesRequest, images_pb2.ListImagesResponse)
_CREATE: Final = Method(f"{_IMAGES}/Create", images_pb2.CreateImageRequest, images_pb2.CreateImageResponse)
_UPDATE: Final = Method(f"{_IMAGES}/Update", images_pb2.UpdateImageRequest, images_pb2.UpdateImageResponse)
_DELETE: Final = Method(f"{_IMAGES}/Delete", images_pb2.DeleteImageRequest, Empty)


@dataclass(frozen=True, slots=True)
class Row:
    """One record: its name, the digest of the manifest it leads to, its labels."""

    name: str
    target: str
    labels: dict[str, str]
    created: float


class ImageRecords:
    """The image records of one namespace; thread-safe."""

    def __init__(self, containerd: Containerd) -> None:
        self._containerd = containerd

    def get(self, name: str) -> Row | None:
        """A record by its exact name."""
        try:
            request = images_pb2.GetImageRequest(name=name)
            return _row(self._containerd.call(_GET, request, f"look for the image {name}").image)
        except Missing:
            return None

    def all(self) -> list[Row]:
        """Every record of the namespace, others' too."""
        return self._list()

    def with_label(self, label: str, value: str | None = None) -> list[Row]:
        """The records that have a label, or have it with this value."""
        return self._list(f'labels."{label}"' if value is None else f'labels."{label}"=="{value}"')

    def with_any(self, some: Iterable[str]) -> list[Row]:
        """The records that have one of these labels at least."""
        return self._list(*(f'labels."{label}"' for label in some))

    def _list(self, *filters: str) -> list[Row]:
        """Records that fit one of the filters; all of them without any."""
        request = images_pb2.ListImagesRequest(filters=filters)
        return [_row(image) for image in self._containerd.call(_LIST, request, "list images").images]

    def put(self, name: str, target: Descriptor, facts: dict[str, str]) -> None:
        """Create a record, or set its target and these labels; others' labels stay. Idempotent."""
        facts = {labels.CRI_MANAGED: labels.CRI_MANAGED_VALUE, **facts}
        image = images_pb2.Image(
            name=name,
            labels=facts,
            target=types_pb2.Descriptor(
                media_type=target.media_type, digest=str(target.digest), size=target.size
            ),
        )
        what = f"record the image {name}"
        try:
            self._containerd.call(_CREATE, images_pb2.CreateImageRequest(image=image), what)
        except Exists:
            request = images_pb2.UpdateImageRequest(image=image)
            request.update_mask.paths.extend(["target", *(f"labels.{key}" for key in facts)])
            self._containerd.call(_UPDATE, request, what)

    def label(self, name: str, changes: dict[str, str]) -> Row | None:
        """Set labels; an empty value removes the label. The record then, or None when it is gone."""
        # The mask leaves the target as it is; containerd 2.4 dies of a message without one.
        image = images_pb2.Image(name=name, labels=changes, target=types_pb2.Descriptor())
        request = images_pb2.UpdateImageRequest(image=image)
        request.update_mask.paths.extend(f"labels.{key}" for key in changes)
        try:
            return _row(self._containerd.call(_UPDATE, request, f"label the image {name}").image)
        except Missing:
            return None

    def delete(self, name: str, *, sync: bool = False) -> bool:
        """Remove a record; `sync` waits for a collection. False when it was not there."""
        request = images_pb2.DeleteImageRequest(name=name, sync=sync)
        try:
            self._containerd.call(_DELETE, request, f"remove the image {name}")
        except Missing:
            return False
        return True


def _row(image: images_pb2.Image) -> Row:
    created = image.created_at.ToNanoseconds() / 1e9
    return Row(image.name, image.target.digest, dict(image.labels), created)

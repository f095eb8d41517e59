"""What is read of Kubernetes objects, and nothing else.

A pod on the wire is four to twenty kilobytes; what a controller needs of it is a few hundred bytes. These
structs name those fields, msgspec skips the rest without building it, and what is kept in a cache is
smaller again. Field names and meanings: the Kubernetes API reference, core/v1 and meta/v1.

Decoders are made when their module is imported: msgspec publishes a type's description before it is whole,
and two threads that meet a type for the first time together can crash the process.

`msgspec.Raw` values are views of the page they were decoded from: whoever keeps one copies it, or the
whole page stays in memory with it.
"""

from typing import Generic, Protocol, TypeVar

import msgspec


class OwnerReference(msgspec.Struct):
    """The part of an owner reference that says who controls an object."""

    uid: str
    controller: bool | None = None


class ObjectMeta(msgspec.Struct, rename="camel"):
    """The part of an object's metadata that caches and controllers use."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    owner_references: list[OwnerReference] | None = None

    @property
    def key(self) -> str:
        """`namespace/name`, or the bare name of an object outside namespaces."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    @property
    def controller_uid(self) -> str:
        """The UID of the controlling owner; empty when nothing controls the object."""
        for owner in self.owner_references or ():
            if owner.controller:
                return owner.uid
        return ""


class Manifest(Protocol):
    """Anything decoded from a list or a watch: it has metadata."""

    @property
    def metadata(self) -> ObjectMeta: ...


class MetadataOnly(msgspec.Struct):
    """An object of which only the metadata was asked for (PartialObjectMetadata)."""

    metadata: ObjectMeta


class VolumeManifest(msgspec.Struct):
    """One volume of a pod: its name, and its ephemeral source as it came."""

    name: str
    ephemeral: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class PodSpec(msgspec.Struct):
    """The volumes of a pod."""

    volumes: list[VolumeManifest] | None = None


class PodManifest(msgspec.Struct):
    """A pod as far as ephemeral volumes are concerned."""

    metadata: ObjectMeta
    spec: PodSpec


class StatusCause(msgspec.Struct):
    """One cause inside a Status."""

    reason: str = ""


class StatusDetails(msgspec.Struct, rename="camel"):
    """The machine-readable half of a Status."""

    causes: list[StatusCause] | None = None
    retry_after_seconds: int = 0


class Status(msgspec.Struct):
    """The API server's own account of a failure."""

    code: int = 0
    reason: str = ""
    message: str = ""
    details: StatusDetails | None = None


class ListMeta(msgspec.Struct, rename="camel"):
    """Where a page of a list stands."""

    resource_version: str = ""
    continue_token: str = msgspec.field(name="continue", default="")


M = TypeVar("M")


class Page(msgspec.Struct, Generic[M]):
    """One page of a list."""

    metadata: ListMeta
    items: list[M] | None = None


class WatchEvent(msgspec.Struct):
    """One line of a watch; the object is decoded once its type is known."""

    type: str
    object: msgspec.Raw


STATUS = msgspec.json.Decoder(Status)
METADATA = msgspec.json.Decoder(MetadataOnly)
WATCH_EVENT = msgspec.json.Decoder(WatchEvent)

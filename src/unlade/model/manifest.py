"""Manifests and indexes, decoded strictly and within limits (image-spec 1.1).

Every byte here came from a registry and is hostile until checked: size before decoding, counts before
use, digests by the strict grammar, `manifests` and `layers` never together (CVE-2021-41190), the media
type in the document equal to the one the registry announced. Unknown fields are ignored, as the
specification demands. The raw bytes are what a digest names: they are kept by the caller, never re-encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from unlade.errors import InvalidInput, UnladeError
from unlade.model import mediatypes
from unlade.model.digest import Digest
from unlade.model.platform import Platform

# The distribution project's own limit; registries refuse larger ones.
MAX_MANIFEST_BYTES: Final = 4 << 20
# Overlay stacks end at 500 layers and ORAS artifacts at a few thousand files; 4 MiB of JSON could hold more.
MAX_LAYERS: Final = 10_000
MAX_INDEX_ENTRIES: Final = 10_000
# 8 EiB is the largest file offset; anything above half of it is a lie that would overflow a sum.
MAX_BLOB_BYTES: Final = 1 << 50
_EMPTY: Final[Mapping[str, str]] = MappingProxyType({})


class InvalidManifest(InvalidInput):
    """A document that is not a manifest or index we accept."""

    code = "invalid-manifest"


class Descriptor(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What a piece of content is: type, digest and exact size."""

    media_type: str
    digest: Digest
    size: int
    annotations: Mapping[str, str] = _EMPTY
    artifact_type: str = ""
    platform: Platform | None = None
    urls: tuple[str, ...] = ()
    data: bytes | None = None
    # Not OCI: Ollama's manifests name tensors so. As hostile as a title.
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.size <= MAX_BLOB_BYTES:
            raise InvalidManifest(f"descriptor of {self.digest} has an impossible size of {self.size}")

    @property
    def title(self) -> str | None:
        """The file name an artifact's author gave, not yet checked: treat it as hostile."""
        return self.annotations.get(mediatypes.ANNOTATION_TITLE)

    def to_json(self) -> dict[str, Any]:
        """The descriptor as OCI JSON."""
        out: dict[str, Any] = {
            "mediaType": self.media_type,
            "digest": str(self.digest),
            "size": self.size,
        }
        if self.artifact_type:
            out["artifactType"] = self.artifact_type
        if self.annotations:
            out["annotations"] = dict(self.annotations)
        if self.platform:
            out["platform"] = platform_to_json(self.platform)
        return out


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """An image or artifact manifest."""

    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]
    subject: Descriptor | None = None
    artifact_type: str = ""
    annotations: Mapping[str, str] = _EMPTY

    @property
    def effective_artifact_type(self) -> str:
        """artifactType, or the config's media type where there is none (image-spec, "artifactType")."""
        return self.artifact_type or self.config.media_type


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """An image index: one of several manifests is meant."""

    media_type: str
    manifests: tuple[Descriptor, ...]
    subject: Descriptor | None = None
    artifact_type: str = ""
    annotations: Mapping[str, str] = _EMPTY


class _WirePlatform(msgspec.Struct, frozen=True):
    os: str = ""
    architecture: str = ""
    variant: str = ""
    os_version: str = msgspec.field(default="", name="os.version")
    os_features: list[str] | None = msgspec.field(default=None, name="os.features")


class _WireDescriptor(msgspec.Struct, frozen=True, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    annotations: dict[str, str] | None = None
    artifact_type: str | None = None
    platform: _WirePlatform | None = None
    urls: list[str] | None = None
    data: bytes | None = None
    name: str | None = None


class _WireDocument(msgspec.Struct, frozen=True, rename="camel"):
    schema_version: int = 0
    media_type: str = ""
    config: _WireDescriptor | None = None
    layers: list[_WireDescriptor] | None = None
    manifests: list[_WireDescriptor] | None = None
    subject: _WireDescriptor | None = None
    artifact_type: str | None = None
    annotations: dict[str, str] | None = None
    # Presence is all that counts: Docker's schema 1 has these instead of layers.
    fs_layers: msgspec.Raw | None = None
    signatures: msgspec.Raw | None = None


_decode = msgspec.json.Decoder(_WireDocument, strict=True).decode


def decode_manifest(raw: bytes, *, content_type: str | None = None) -> Manifest | Index:
    """Decode a manifest or index; raises InvalidManifest.

    `content_type` is what the registry announced; a document that names another type is refused.
    """
    if len(raw) > MAX_MANIFEST_BYTES:
        raise InvalidManifest(f"manifest of {len(raw)} bytes is larger than {MAX_MANIFEST_BYTES}")
    try:
        wire = _decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidManifest(
            f"manifest cannot be decoded: {error}", next_step="check that the reference names an OCI object"
        ) from error
    try:
        return _build(wire, content_type)
    except InvalidManifest:
        raise
    except UnladeError as error:
        raise InvalidManifest(f"manifest is invalid: {error}", next_step=error.next_step) from error


def _build(wire: _WireDocument, content_type: str | None) -> Manifest | Index:
    if wire.schema_version == 1 or wire.fs_layers is not None:
        raise InvalidManifest(
            "Docker schema 1 manifests are not supported",
            next_step="push the image again with a current tool",
        )
    if wire.schema_version != 2:
        raise InvalidManifest(f"schemaVersion is {wire.schema_version}, not 2")
    if wire.manifests is not None and (wire.layers is not None or wire.config is not None):
        raise InvalidManifest("a document with both manifests and layers is ambiguous (CVE-2021-41190)")
    media_type = _agreed_type(wire, content_type)
    annotations = MappingProxyType(wire.annotations) if wire.annotations else _EMPTY
    subject = _descriptor(wire.subject) if wire.subject else None
    if media_type in mediatypes.INDEXES:
        if wire.manifests is None:
            raise InvalidManifest("an index without manifests")
        if len(wire.manifests) > MAX_INDEX_ENTRIES:
            raise InvalidManifest(
                f"an index with {len(wire.manifests)} entries; the limit is {MAX_INDEX_ENTRIES}"
            )
        return Index(
            media_type=media_type,
            manifests=tuple(_descriptor(entry) for entry in wire.manifests),
            subject=subject,
            artifact_type=wire.artifact_type or "",
            annotations=annotations,
        )
    if wire.config is None or wire.layers is None:
        raise InvalidManifest("a manifest without config or layers")
    if len(wire.layers) > MAX_LAYERS:
        raise InvalidManifest(f"a manifest with {len(wire.layers)} layers; the limit is {MAX_LAYERS}")
    return Manifest(
        media_type=media_type,
        config=_descriptor(wire.config),
        layers=tuple(_descriptor(layer) for layer in wire.layers),
        subject=subject,
        artifact_type=wire.artifact_type or "",
        annotations=annotations,
    )


def _agreed_type(wire: _WireDocument, content_type: str | None) -> str:
    shape = mediatypes.OCI_INDEX if wire.manifests is not None else mediatypes.OCI_MANIFEST
    announced = (content_type or "").partition(";")[0].strip().lower()
    known = mediatypes.MANIFESTS | mediatypes.INDEXES
    if wire.media_type and wire.media_type not in known:
        raise InvalidManifest(f"media type {wire.media_type[:140]!r} is neither a manifest nor an index")
    # Some registries (Ollama's) announce text/plain or plain JSON; only a contradiction is refused.
    if announced in known and wire.media_type and announced != wire.media_type:
        raise InvalidManifest(f"the registry announced {announced}, the document says {wire.media_type}")
    media_type = wire.media_type or (announced if announced in known else shape)
    if (media_type in mediatypes.INDEXES) != (shape == mediatypes.OCI_INDEX):
        raise InvalidManifest(f"a document of type {media_type} has the wrong shape")
    return media_type


def _descriptor(wire: _WireDescriptor) -> Descriptor:
    digest = Digest.parse(wire.digest)
    data = wire.data
    if data is not None and (len(data) != wire.size or not digest.matches(_hash(digest, data))):
        # Embedded data that is not the content it stands for would bypass the digest check.
        raise InvalidManifest(f"embedded data of {digest} does not match its descriptor")
    return Descriptor(
        media_type=wire.media_type,
        digest=digest,
        size=wire.size,
        annotations=MappingProxyType(wire.annotations) if wire.annotations else _EMPTY,
        artifact_type=wire.artifact_type or "",
        platform=_platform(wire.platform) if wire.platform else None,
        urls=tuple(wire.urls or ()),
        data=data,
        name=wire.name or "",
    )


def _hash(digest: Digest, data: bytes) -> Any:
    hasher = digest.hasher()
    hasher.update(data)
    return hasher


def _platform(wire: _WirePlatform) -> Platform:
    return Platform(wire.os, wire.architecture, wire.variant, wire.os_version, tuple(wire.os_features or ()))


def platform_to_json(platform: Platform) -> dict[str, Any]:
    """The platform as OCI JSON."""
    out: dict[str, Any] = {"architecture": platform.architecture, "os": platform.os}
    if platform.variant:
        out["variant"] = platform.variant
    if platform.os_version:
        out["os.version"] = platform.os_version
    if platform.os_features:
        out["os.features"] = list(platform.os_features)
    return out

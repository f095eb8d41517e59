"""Publishing: directories and files become one manifest in a registry, and its digest comes back.

Three shapes, chosen so that the tools people have can read each:

- one directory: an artifact with one packed layer, titled `.` and marked to be unpacked, which is what
  `oras push REF .` makes: `unlade pull` and `oras pull` give back exactly the directory's content;
- files, or several sources: an artifact with one layer each, titled by its path as `oras push` titles them;
  files are sent as they are, never packed;
- one directory as an image (`image=True`): one layer and a real image config, so that crane, skopeo, umoci,
  containerd and Kubernetes' own image volumes give the same tree.

Everything that decides a digest comes from the content and the options: no clock, no host name, no user.
Called by `unlade.push`, the command line and packages.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from unlade.errors import InvalidInput, NothingProduced
from unlade.model import Deadline, Descriptor, Digest, Platform, Reference, mediatypes, platform_to_json
from unlade.model.paths import check_relative
from unlade.pack.compress import Compression
from unlade.pack.layer import (
    ANNOTATION_CONTENT_DIGEST,
    ANNOTATION_UNPACK,
    OCTET_STREAM,
    Layer,
    pack_file,
    pack_tree,
)
from unlade.pack.listing import PackPolicy
from unlade.transfer.progress import Progress, silent
from unlade.transfer.push import DEFAULT_JOBS, Blob, BytesBlob, Sent, push_blobs, push_manifest

if TYPE_CHECKING:
    from unlade.registry import Registry

ARTIFACT_TYPE: Final = "application/vnd.unlade.content.v1"
# A data image runs nowhere, yet its config must name a platform. A constant one: the digest must not depend
# on the machine that pushed, and runtimes accept a lone manifest of any platform.
IMAGE_PLATFORM: Final = Platform("linux", "amd64")


@dataclass(frozen=True, kw_only=True, slots=True)
class PushOptions:
    """How content is packed and described; the defaults suit a directory of anything."""

    image: bool = False
    artifact_type: str = ARTIFACT_TYPE
    annotations: Mapping[str, str] = field(default_factory=dict)
    compression: Compression = "gzip"
    level: int | None = None
    keep_modes: bool = False
    platform: Platform = IMAGE_PLATFORM
    subject: Reference | None = None
    """What the pushed object refers to (distribution-spec, "referrers"); it needs no tag then."""
    jobs: int = DEFAULT_JOBS


@dataclass(frozen=True, slots=True)
class Pushed:
    """What was (or, dry, would be) published: by digest, with its manifest, layers and traffic."""

    reference: Reference
    manifest: Descriptor
    layers: tuple[Descriptor, ...]
    sent: Sent
    raw: bytes


def push(
    sources: Sequence[str | os.PathLike[str]],
    reference: Reference,
    *,
    registry: Registry,
    options: PushOptions | None = None,
    dry_run: bool = False,
    deadline: Deadline | None = None,
    progress: Progress = silent,
    on_packed: Callable[[int], None] | None = None,
) -> Pushed:
    """Publish sources under a reference; idempotent, and deterministic for equal content and options.

    A source may be `FILE:MEDIA-TYPE`. A reference with a digest must be what the content gives, else
    nothing is sent. `dry_run` packs and names the result but sends nothing. Raises UnpackableSource,
    SourceChanged, NothingProduced, RegistryError.
    """
    options = options or PushOptions()
    deadline = deadline or Deadline.never()
    if not sources:
        raise InvalidInput("nothing to push", next_step="name a directory or files before the reference")
    with ExitStack() as stack:
        packer = _Packer(options, deadline, on_packed)
        layers = [stack.enter_context(layer) for layer in packer.layers(sources)]
        subject = _subject(registry, options.subject, deadline)
        config = _config(options, layers)
        raw = build_manifest(
            config,
            [layer.descriptor for layer in layers],
            artifact_type="" if options.image else options.artifact_type,
            subject=subject,
            annotations=_annotations(options.annotations),
        )
        digest = Digest.of(raw)
        if reference.digest is not None and reference.digest != digest:
            raise InvalidInput(
                f"the content gives {digest}, not {reference.digest}; nothing was sent",
                next_step="name the digest above, or leave it out",
            )
        target = _target(reference, options)
        descriptor = Descriptor(media_type=mediatypes.OCI_MANIFEST, digest=digest, size=len(raw))
        sent = Sent()
        if not dry_run:
            blobs: list[Blob] = [config, *layers]
            sent = push_blobs(
                registry, target, blobs, jobs=options.jobs, deadline=deadline, progress=progress
            )
            push_manifest(registry, target, raw, mediatypes.OCI_MANIFEST, deadline=deadline)
        return Pushed(
            target.with_digest(digest),
            descriptor,
            tuple(layer.descriptor for layer in layers),
            sent,
            raw,
        )


def build_manifest(
    config: Blob,
    layers: Sequence[Descriptor],
    *,
    artifact_type: str = "",
    subject: Descriptor | None = None,
    annotations: Mapping[str, str] | None = None,
) -> bytes:
    """An OCI manifest as bytes: the same for the same arguments, so that its digest is too."""
    described = config.descriptor.to_json()
    if config.descriptor.media_type == mediatypes.OCI_EMPTY:
        # Two bytes inline save every puller a request (image-spec, "empty descriptor").
        described["data"] = base64.b64encode(mediatypes.EMPTY_JSON).decode()
    document: dict[str, Any] = {"schemaVersion": 2, "mediaType": mediatypes.OCI_MANIFEST}
    if artifact_type:
        document["artifactType"] = artifact_type
    document["config"] = described
    document["layers"] = [_sorted_annotations(layer.to_json()) for layer in layers]
    if subject is not None:
        document["subject"] = subject.to_json()
    if annotations:
        document["annotations"] = dict(sorted(annotations.items()))
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def source_date_epoch() -> int | None:
    """SOURCE_DATE_EPOCH of reproducible builds, when it is set; raises InvalidInput when it is no number."""
    value = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not value:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 11:
        raise InvalidInput(
            f"SOURCE_DATE_EPOCH is {value[:40]!r}", next_step="set it to seconds since 1970, or unset it"
        )
    return int(value)


class _Packer:
    def __init__(
        self, options: PushOptions, deadline: Deadline, on_packed: Callable[[int], None] | None
    ) -> None:
        self._options = options
        self._deadline = deadline
        self._on_packed = on_packed
        self._mtime = source_date_epoch() or 0
        self._titles: set[str] = set()

    def layers(self, sources: Sequence[str | os.PathLike[str]]) -> list[Layer]:
        """One layer per source; what was made before a failure is closed."""
        paths = [os.fspath(source) for source in sources]
        if self._options.image:
            if len(paths) != 1 or not os.path.isdir(paths[0]):
                raise InvalidInput(
                    "an image is made from exactly one directory",
                    next_step="put the files into one directory, or push an artifact (without --image)",
                )
            return [self._image_layer(paths[0])]
        with ExitStack() as stack:
            made = []
            for path in paths:
                whole = len(paths) == 1
                layer = self._directory(path, whole=whole) if os.path.isdir(path) else self._file(path)
                made.append(stack.enter_context(layer))
            stack.pop_all()
            return made

    def _image_layer(self, path: str) -> Layer:
        policy = PackPolicy(
            mtime=self._mtime,
            keep_modes=self._options.keep_modes,
            hard_links=True,
            contained_links=False,
            refuse_whiteouts=True,
        )
        return self._tree(path, policy, None)

    def _directory(self, path: str, *, whole: bool) -> Layer:
        title = "." if whole else self._title(path)
        prefix = b"" if title == "." else os.fsencode(title)
        policy = PackPolicy(prefix=prefix, mtime=self._mtime, keep_modes=self._options.keep_modes)
        layer = self._tree(path, policy, title)
        if not layer.entries:
            layer.close()
            raise NothingProduced(
                f"{path} is empty: nothing could be made of it when pulled",
                next_step="put something into it, or push an empty image with --image",
            )
        return layer

    def _tree(self, path: str, policy: PackPolicy, title: str | None) -> Layer:
        layer = pack_tree(
            path,
            policy=policy,
            compression=self._options.compression,
            level=self._options.level,
            deadline=self._deadline,
            on_bytes=self._on_packed,
        )
        if title is not None:
            layer.annotate(
                {
                    mediatypes.ANNOTATION_TITLE: title,
                    ANNOTATION_UNPACK: "true",
                    ANNOTATION_CONTENT_DIGEST: str(layer.diff_id),
                }
            )
        return layer

    def _file(self, source: str) -> Layer:
        path, media_type = source, OCTET_STREAM
        if not os.path.exists(path) and ":" in source:
            path, _, media_type = source.rpartition(":")
            _check_media_type(media_type)
        return pack_file(
            path,
            media_type=media_type,
            annotations={mediatypes.ANNOTATION_TITLE: self._title(path)},
            deadline=self._deadline,
            on_bytes=self._on_packed,
        )

    def _title(self, path: str) -> str:
        """The path as it was given, as ORAS titles it; where that leads out, its last part."""
        clean = os.path.normpath(path)
        if os.path.isabs(clean) or clean == ".." or clean.startswith("../"):
            clean = os.path.basename(os.path.realpath(clean))
        if clean != ".":
            check_relative(clean)
        if clean in self._titles:
            raise InvalidInput(
                f"two sources would both be called {clean}",
                next_step="push them from a directory in which their paths differ",
            )
        self._titles.add(clean)
        return clean


def _target(reference: Reference, options: PushOptions) -> Reference:
    if reference.tag is None and reference.digest is None and options.subject is None:
        return Reference(reference.registry, reference.repository, reference.tag_or_latest)
    return Reference(reference.registry, reference.repository, reference.tag)


def _subject(registry: Registry, reference: Reference | None, deadline: Deadline) -> Descriptor | None:
    if reference is None:
        return None
    found = registry.resolve(reference, deadline=deadline).descriptor
    return Descriptor(media_type=found.media_type, digest=found.digest, size=found.size)


def _config(options: PushOptions, layers: Sequence[Layer]) -> Blob:
    if not options.image:
        return BytesBlob(mediatypes.EMPTY_JSON, mediatypes.OCI_EMPTY)
    document: dict[str, Any] = {}
    epoch = source_date_epoch()
    if epoch is not None:
        document["created"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))
    document |= platform_to_json(options.platform)
    document["config"] = {}
    document["rootfs"] = {"type": "layers", "diff_ids": [str(layer.diff_id) for layer in layers]}
    return BytesBlob(json.dumps(document, separators=(",", ":")).encode(), mediatypes.OCI_CONFIG)


def _annotations(given: Mapping[str, str]) -> dict[str, str]:
    annotations = dict(given)
    epoch = source_date_epoch()
    if epoch is not None:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))
        annotations.setdefault(mediatypes.ANNOTATION_CREATED, created)
    return annotations


def _sorted_annotations(descriptor: dict[str, Any]) -> dict[str, Any]:
    if "annotations" in descriptor:
        descriptor["annotations"] = dict(sorted(descriptor["annotations"].items()))
    return descriptor


def _check_media_type(text: str) -> None:
    kind, slash, rest = text.partition("/")
    if not (kind and slash and rest and text.isascii() and text.isprintable() and " " not in text):
        raise InvalidInput(f"{text[:80]!r} is not a media type", next_step="write FILE:TYPE/SUBTYPE")

"""Copying: a manifest, or a whole index, from one place to another without unpacking anything.

Both ends are registries or OCI image layouts in any combination. The invariant is the push's: nothing is
named before all it needs is there. So blobs go first, then manifests from the leaves up, then what refers
to them, and the tag last: whoever resolves the tag finds the signatures too. Bytes are never re-encoded,
so digests are equal; within one registry blobs are mounted, not sent, and what the target has is skipped.

Called by the command line, `unlade.copy` and packages (distribution-spec 1.1).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

from unlade.errors import IntegrityError, InvalidInput
from unlade.model import Deadline, Descriptor, Digest, Index, Manifest, Platform, Reference, decode_manifest
from unlade.transfer.fetch import Fetcher
from unlade.transfer.progress import Progress, silent
from unlade.transfer.push import DEFAULT_JOBS, Blob, Sent, VerifiedReader, push_blobs

if TYPE_CHECKING:
    from unlade.registry import Registry

# Indexes of indexes exist (two levels); deeper ones are made to exhaust whoever follows them.
MAX_DEPTH: Final = 8
# As many as one index may have; a graph of more is an attack or a mirror of a whole registry.
MAX_MANIFESTS: Final = 10_000
# Manifests are held until they are put, in order; real graphs need a few hundred kilobytes.
MAX_MANIFEST_TOTAL: Final = 64 << 20
_BUFFER: Final = 1 << 20


class TooManyManifests(InvalidInput):
    """A graph that is deeper or wider than anything real."""

    code = "too-many-manifests"


class WrongReferrer(IntegrityError):
    """Something listed as a referrer does not refer to the subject."""

    code = "wrong-referrer"


class End(Protocol):
    """One end of a copy: a repository, or an image layout."""

    def root(self, *, deadline: Deadline) -> tuple[Descriptor, bytes]:
        """What the name means now, resolved once."""

    def manifest(self, descriptor: Descriptor, *, deadline: Deadline) -> bytes:
        """A manifest's bytes, verified."""

    def blob(self, descriptor: Descriptor, *, deadline: Deadline, progress: Progress) -> Blob:
        """A blob that can be read from any offset; verified when read whole."""

    def referrers(self, subject: Digest, *, deadline: Deadline) -> Sequence[Descriptor]:
        """What claims to refer to the subject; the caller checks each."""

    def put_blobs(
        self, blobs: Iterable[Blob], *, origin: End, jobs: int, deadline: Deadline, progress: Progress
    ) -> Sent:
        """Take in every blob that is not there."""

    def put_manifest(self, raw: bytes, descriptor: Descriptor, *, named: bool, deadline: Deadline) -> None:
        """Take in a manifest, under this end's name or by its digest only."""

    def called(self, origin: End, digest: Digest) -> End:
        """This end with the name that a copy from `origin` gets here, checked against the digest."""

    def describe(self, digest: Digest) -> str:
        """How a person names the result here."""


@dataclass(frozen=True, slots=True)
class Copied:
    """What was (or, dry, would be) copied, and what that moved."""

    name: str
    manifest: Descriptor
    manifests: int
    referrers: int
    sent: Sent


def copy(
    source: End,
    target: End,
    *,
    platform: Platform | None = None,
    referrers: bool = False,
    jobs: int = DEFAULT_JOBS,
    dry_run: bool = False,
    deadline: Deadline | None = None,
    progress: Progress = silent,
) -> Copied:
    """Copy what `source` names; idempotent. An index is copied whole, or as its child for `platform`.

    With `referrers`, everything that refers to a copied manifest goes with it, checked first.
    """
    deadline = deadline or Deadline.never()
    descriptor, raw = source.root(deadline=deadline)
    if platform is not None:
        descriptor, raw = _select(source, descriptor, raw, platform, deadline)
    target = target.called(source, descriptor.digest)
    graph = _Graph(source, deadline)
    root = graph.add(descriptor, raw, 0)
    own = len(graph.nodes)
    if referrers:
        graph.add_referrers()
    # Children come before parents in `nodes`; the root is put last, under its name.
    others = [node for node in graph.nodes if node is not root]
    sent = Sent()
    if not dry_run:
        blobs = [
            source.blob(blob, deadline=deadline, progress=progress)
            for node in graph.nodes
            for blob in node.blobs
        ]
        sent = target.put_blobs(blobs, origin=source, jobs=jobs, deadline=deadline, progress=progress)
        for node in others:
            deadline.check()
            target.put_manifest(node.raw, node.descriptor, named=False, deadline=deadline)
        target.put_manifest(root.raw, root.descriptor, named=True, deadline=deadline)
    return Copied(target.describe(descriptor.digest), descriptor, own, len(graph.nodes) - own, sent)


@dataclass(frozen=True, slots=True)
class _Node:
    descriptor: Descriptor
    raw: bytes
    blobs: tuple[Descriptor, ...]


@dataclass(slots=True)
class _Graph:
    """Manifests to copy, children before parents."""

    source: End
    deadline: Deadline
    nodes: list[_Node] = field(default_factory=list)
    held: int = 0
    _seen: dict[Digest, _Node | None] = field(default_factory=dict)

    def add(self, descriptor: Descriptor, raw: bytes, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise TooManyManifests(
                f"indexes are nested more than {MAX_DEPTH} deep",
                next_step="copy one platform with --platform",
            )
        self.held += len(raw)
        if self.held > MAX_MANIFEST_TOTAL:
            raise TooManyManifests(
                f"the manifests alone are larger than {MAX_MANIFEST_TOTAL} bytes",
                next_step="copy one platform with --platform",
            )
        self._seen[descriptor.digest] = None
        document = decode_manifest(raw, content_type=descriptor.media_type)
        blobs: tuple[Descriptor, ...] = ()
        if isinstance(document, Index):
            for child in document.manifests:
                if child.digest not in self._seen:
                    self.deadline.check()
                    self.add(child, self.source.manifest(child, deadline=self.deadline), depth + 1)
        else:
            blobs = _blobs(document)
        if len(self.nodes) >= MAX_MANIFESTS:
            raise TooManyManifests(
                f"more than {MAX_MANIFESTS} manifests", next_step="copy one platform with --platform"
            )
        node = _Node(descriptor, raw, blobs)
        self._seen[descriptor.digest] = node
        self.nodes.append(node)
        return node

    def add_referrers(self) -> None:
        """Referrers of every node, and theirs in turn: `nodes` grows while it is walked."""
        position = 0
        while position < len(self.nodes):
            subject = self.nodes[position].descriptor.digest
            position += 1
            for referrer in self.source.referrers(subject, deadline=self.deadline):
                if referrer.digest in self._seen:
                    continue
                self.deadline.check()
                raw = self.source.manifest(referrer, deadline=self.deadline)
                named = decode_manifest(raw, content_type=referrer.media_type).subject
                if named is None or named.digest != subject:
                    raise WrongReferrer(
                        f"{referrer.digest} is listed as a referrer of {subject} but does not refer to it",
                        next_step="the registry's referrers list is wrong; copy without --referrers",
                    )
                self.add(referrer, raw, 0)


def _blobs(manifest: Manifest) -> tuple[Descriptor, ...]:
    # Foreign layers live at URLs of their own (CVE-2020-15157) and are not the registry's to give.
    return (manifest.config, *(layer for layer in manifest.layers if not layer.urls))


def _select(
    source: End, descriptor: Descriptor, raw: bytes, platform: Platform, deadline: Deadline
) -> tuple[Descriptor, bytes]:
    for _ in range(MAX_DEPTH):
        document = decode_manifest(raw, content_type=descriptor.media_type)
        if isinstance(document, Manifest):
            return descriptor, raw
        best = platform.match(entry.platform for entry in document.manifests)
        if best is None:
            offered = {str(entry.platform) for entry in document.manifests if entry.platform is not None}
            names = ", ".join(sorted(offered)) or "nothing with a platform"
            raise InvalidInput(
                f"{descriptor.digest} has nothing for {platform}", next_step=f"it offers: {names}"
            )
        descriptor = document.manifests[best]
        raw = source.manifest(descriptor, deadline=deadline)
    raise TooManyManifests(f"indexes are nested more than {MAX_DEPTH} deep")


class RegistryEnd:
    """A repository at a registry."""

    def __init__(self, registry: Registry, reference: Reference) -> None:
        self.registry = registry
        self.reference = reference
        self._fetcher = Fetcher(registry)

    def root(self, *, deadline: Deadline) -> tuple[Descriptor, bytes]:
        """One GET of the tag or digest."""
        found = self.registry.resolve(self.reference, deadline=deadline)
        return found.descriptor, found.raw

    def manifest(self, descriptor: Descriptor, *, deadline: Deadline) -> bytes:
        """By digest, verified by the client."""
        return self.registry.manifest(self.reference, descriptor, deadline=deadline)

    def blob(self, descriptor: Descriptor, *, deadline: Deadline, progress: Progress) -> Blob:
        """Streamed from the registry when it is read."""
        return _RemoteBlob(self._fetcher, self.reference, descriptor, deadline, progress)

    def referrers(self, subject: Digest, *, deadline: Deadline) -> Sequence[Descriptor]:
        """The referrers API, or its tag fallback."""
        return self.registry.referrers(self.reference, subject, artifact_type=None, deadline=deadline)

    def put_blobs(
        self, blobs: Iterable[Blob], *, origin: End, jobs: int, deadline: Deadline, progress: Progress
    ) -> Sent:
        """Skip what is there, mount what another repository of this registry has, send the rest."""
        mount_from = [origin.reference] if isinstance(origin, RegistryEnd) else []
        return push_blobs(
            self.registry,
            self.reference,
            blobs,
            mount_from=mount_from,
            jobs=jobs,
            deadline=deadline,
            progress=progress,
        )

    def put_manifest(self, raw: bytes, descriptor: Descriptor, *, named: bool, deadline: Deadline) -> None:
        """Under the tag, or by digest."""
        tag = self.reference.tag if named else None
        self.registry.put_manifest(self.reference, raw, descriptor.media_type, tag=tag, deadline=deadline)

    def called(self, origin: End, digest: Digest) -> RegistryEnd:
        """The tag asked for, else the source's own, else `latest`; a digest must be the copied one."""
        mine = self.reference
        if mine.digest is not None and mine.digest != digest:
            raise InvalidInput(
                f"the source is {digest}, not {mine.digest}; nothing was copied",
                next_step="name the source's digest, or none",
            )
        tag = mine.tag
        if tag is None and mine.digest is None:
            by_digest = isinstance(origin, RegistryEnd) and origin.reference.digest is not None
            inherited = origin.reference.tag if isinstance(origin, RegistryEnd) else None
            # A source named by digest alone stays without a tag: no name was asked for.
            tag = inherited if by_digest else inherited or mine.tag_or_latest
        return RegistryEnd(self.registry, Reference(mine.registry, mine.repository, tag))

    def describe(self, digest: Digest) -> str:
        """`registry/repository@digest`."""
        return str(self.reference.with_digest(digest))


class _RemoteBlob:
    """A blob at a registry, opened again from where a reader stopped."""

    def __init__(
        self,
        fetcher: Fetcher,
        reference: Reference,
        descriptor: Descriptor,
        deadline: Deadline,
        progress: Progress,
    ) -> None:
        self.descriptor = descriptor
        self._fetcher = fetcher
        self._reference = reference
        self._deadline = deadline
        self._progress = progress

    def open(self, offset: int = 0, /) -> BinaryIO:
        """A stream, verified when it is read from the start."""
        if self.descriptor.data is not None:
            return io.BytesIO(self.descriptor.data[offset:])
        stack = ExitStack()
        source = stack.enter_context(
            self._fetcher.open(
                self._reference,
                self.descriptor,
                offset=offset,
                deadline=self._deadline,
                progress=self._progress,
            )
        )
        return io.BufferedReader(VerifiedReader(source, self.descriptor, stack, offset=offset), _BUFFER)

"""From a reference to the one manifest that is meant.

The tag is resolved once; from then on only digests are asked for, so a tag that moves meanwhile changes
nothing. An index is followed to the entry that suits the platform (V11), a referrer to the newest one of
its type whose subject really is what was asked about (V12). The pull policy decides whether the store's
record may answer instead of the registry (V2), and `reauthorize` whether these credentials must first
show that they could pull it (V5).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from unlade.delivery.request import GRANT_SECONDS, PullPolicy, Request, Resolved
from unlade.errors import RegistryError
from unlade.model import (
    MAX_MANIFEST_BYTES,
    Deadline,
    Descriptor,
    Digest,
    Index,
    Manifest,
    Platform,
    Reference,
    decode_manifest,
    mediatypes,
)
from unlade.planning import about, descend
from unlade.registry import Registry
from unlade.store.failure import NotInStore

if TYPE_CHECKING:
    from unlade.store import DirStore

# Referrers of one subject that are looked at before giving up; signatures number in the tens.
_MAX_REFERRERS: Final = 100


class NotPresent(RegistryError):
    """The policy is never to pull, and the content is not in the store."""

    code = "not-present"


class NoReferrer(RegistryError):
    """Nothing of that type refers to the reference."""

    code = "no-referrer"


@dataclass(frozen=True, slots=True)
class Found:
    """One reference, resolved: everything needed to plan and to fetch it."""

    reference: Reference
    manifest: Manifest
    descriptor: Descriptor
    raw: bytes
    index: Descriptor | None
    index_raw: bytes | None
    platform: Platform | None
    local: bool
    # What planning had to look at: layers' first bytes, not verified yet, and whole configs, which are.
    heads: dict[Digest, bytes] = field(default_factory=dict, compare=False, repr=False)
    configs: dict[Digest, bytes] = field(default_factory=dict, compare=False, repr=False)
    # Layers so small that looking at them fetched all of them; verified.
    whole: dict[Digest, bytes] = field(default_factory=dict, compare=False, repr=False)

    @property
    def resolved(self) -> Resolved:
        """What the caller is told."""
        index = self.index.digest if self.index else None
        return Resolved(self.reference, self.descriptor.digest, index, self.platform)


class Sources:
    """Resolves references for one request after another; thread-safe, without state of its own."""

    def __init__(self, registry: Registry, store: DirStore | None) -> None:
        self._registry = registry
        self._store = store

    def find(self, reference: Reference, request: Request, *, deadline: Deadline) -> Found:
        """The manifest that is meant; raises RegistryError, NotPresent, NoReferrer or InvalidManifest."""
        policy = request.pull or default_policy(reference)
        platform = request.platform or Platform.host()
        if not request.referrer and policy != "always":
            found = self._from_store(reference, request, platform)
            if found is not None:
                if request.reauthorize:
                    self._authorize(found, deadline)
                return found
        if policy == "never":
            raise NotPresent(
                f"{reference} is not in the store and the pull policy is never",
                next_step=f"`unlade pull {reference}` fetches it, or change the policy",
            )
        found = self._from_registry(reference, request, platform, deadline)
        if request.referrer:
            found = self._referrer(found, request, platform, deadline)
        self._grant(found)
        return found

    def _from_registry(
        self, reference: Reference, request: Request, platform: Platform, deadline: Deadline
    ) -> Found:
        answer = self._registry.resolve(reference, deadline=deadline)
        document = decode_manifest(answer.raw, content_type=answer.content_type)
        return self._descend(reference, request, answer.descriptor, answer.raw, document, platform, deadline)

    def _descend(
        self,
        reference: Reference,
        request: Request,
        descriptor: Descriptor,
        raw: bytes,
        document: Manifest | Index,
        platform: Platform,
        deadline: Deadline,
    ) -> Found:
        read: list[bytes] = []

        def fetch(entry: Descriptor) -> Manifest | Index:
            read.append(self._registry.manifest(reference, entry, deadline=deadline))
            return decode_manifest(read[-1], content_type=entry.media_type or None)

        with about(str(reference), descriptor.digest):
            chosen = descend(
                document,
                platform,
                fetch,
                artifact_type=request.artifact_type or None,
                annotations=request.annotations,
            )
        if not chosen.through:
            return Found(reference, chosen.manifest, descriptor, raw, None, None, None, local=False)
        suited = next((entry.platform for entry in reversed(chosen.through) if entry.platform), None)
        return Found(
            reference, chosen.manifest, chosen.through[-1], read[-1], descriptor, raw, suited, local=False
        )

    def _from_store(self, reference: Reference, request: Request, platform: Platform) -> Found | None:
        if self._store is None:
            return None
        record = self._store.images.get(str(reference), request.handler)
        if record is None or (record.platform is not None and platform.score(record.platform) is None):
            return None
        try:
            raw = self._read(record.manifest.digest)
            index_raw = self._read(record.index.digest) if record.index else None
        except NotInStore:
            return None
        document = decode_manifest(raw)
        if not isinstance(document, Manifest):
            return None
        return Found(
            reference, document, record.manifest, raw, record.index, index_raw, record.platform, local=True
        )

    def _read(self, digest: Digest) -> bytes:
        assert self._store is not None
        with self._store.open(digest) as blob:
            return blob.read(MAX_MANIFEST_BYTES)

    def _referrer(self, subject: Found, request: Request, platform: Platform, deadline: Deadline) -> Found:
        # People sign and describe either the index or the platform's manifest: both are the subject.
        where = request.referrer_from or subject.reference
        subjects = [subject.index.digest] if subject.index else []
        subjects.append(subject.descriptor.digest)
        for digest in subjects:
            candidates = self._registry.referrers(
                where, digest, artifact_type=request.referrer, deadline=deadline
            )
            # RFC 3339 times of one offset sort as text; those without a time come last.
            newest_first = sorted(
                candidates[:_MAX_REFERRERS],
                key=lambda entry: entry.annotations.get(mediatypes.ANNOTATION_CREATED, ""),
                reverse=True,
            )
            for entry in newest_first:
                raw = self._registry.manifest(where, entry, deadline=deadline)
                document = decode_manifest(raw, content_type=entry.media_type or None)
                if document.subject is None or document.subject.digest != digest:
                    continue  # the registry's list is only a claim; the manifest says what it refers to
                if isinstance(document, Manifest) and document.effective_artifact_type != request.referrer:
                    continue
                pinned = where.with_digest(entry.digest)
                return self._descend(pinned, request, entry, raw, document, platform, deadline)
        raise NoReferrer(
            f"nothing of type {request.referrer} refers to {subject.reference}",
            next_step=f"`unlade inspect --referrers {subject.reference}` lists what does",
        )

    def _authorize(self, found: Found, deadline: Deadline) -> None:
        assert self._store is not None
        digest = found.descriptor.digest
        fingerprint = self._registry.fingerprint(found.reference)
        if self._store.grants.allows(found.reference.name, digest, fingerprint):
            return
        self._registry.authorize(found.reference, digest, deadline=deadline)
        self._grant(found)

    def _grant(self, found: Found) -> None:
        if self._store is not None:
            self._store.grants.remember(
                found.reference.name,
                found.descriptor.digest,
                self._registry.fingerprint(found.reference),
                ttl=GRANT_SECONDS,
            )


def default_policy(reference: Reference) -> PullPolicy:
    """V2: always for `latest` or no tag, else only when missing."""
    if reference.digest is None and reference.tag_or_latest == "latest":
        return "always"
    return "missing"

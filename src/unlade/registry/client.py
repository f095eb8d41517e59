"""The registry client (distribution-spec 1.1): resolve, fetch, push, list; what every other room calls.

Owns the meaning of requests and answers; how they travel is `session`'s business, which host they go to is
`routes`'. Invariants: a tag is resolved by one GET whose bytes are hashed here, so what is delivered is
what was named even while the tag moves; a manifest leaves this room only when its digest matches; blobs
leave unverified but of the right length (`transfer` hashes them). URLs inside manifests (foreign layers,
CVE-2020-15157) are never followed. One client per process: it is thread-safe and keeps its connections.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self

import msgspec

from unlade.errors import InvalidInput
from unlade.model import (
    MAX_MANIFEST_BYTES,
    Deadline,
    Descriptor,
    Digest,
    Index,
    Manifest,
    Reference,
    decode_manifest,
)
from unlade.registry import blobs
from unlade.registry.blobs import BlobStream
from unlade.registry.calls import ACCEPT_MANIFESTS, WRITE, Calls
from unlade.registry.config import RegistryConfig
from unlade.registry.credentials import Credential, CredentialSource, NoCredentials
from unlade.registry.errors import BadResponse, NotFound, WrongContent
from unlade.registry.hosts import PULL, RESOLVE, Host
from unlade.registry.origins import Url
from unlade.registry.paging import pages
from unlade.registry.referrers import Referrers, describe
from unlade.registry.routes import Routes
from unlade.registry.session import Session
from unlade.registry.transport import Document
from unlade.registry.uploads import Source, Uploads

# A registry that ignores paging sends every tag at once; 100,000 of them are about 2 MB.
_MAX_TAGS_BODY: Final = 16 << 20
_TAGS_PAGE: Final = 1000
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)


class Resolved(msgspec.Struct, frozen=True):
    """What a reference names: its descriptor, the exact bytes, and what they decode to."""

    descriptor: Descriptor
    raw: bytes
    content_type: str | None
    document: Manifest | Index


class _Tags(msgspec.Struct):
    tags: list[str] | None = None


_TAGS = msgspec.json.Decoder(_Tags)


class Registry:
    """A thread-safe client with pooled connections; a context manager."""

    def __init__(
        self, config: RegistryConfig | None = None, credentials: CredentialSource | None = None
    ) -> None:
        self._config = config or RegistryConfig()
        self._routes = Routes(self._config)
        self._act_as(Session(self._config, credentials or NoCredentials()))

    def with_credentials(self, credentials: CredentialSource) -> Registry:
        """This client for somebody else; it shares the connections, so only the original is closed."""
        other = copy.copy(self)
        other._act_as(self._session.acting_for(credentials))
        return other

    def _act_as(self, session: Session) -> None:
        self._session = session
        self._calls = Calls(session)
        self._uploads = Uploads(session, self._routes)
        self._referrers = Referrers(self._calls, self._routes)

    def close(self) -> None:
        """Close idle connections."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Pulling.

    def resolve(self, ref: Reference, *, deadline: Deadline) -> Resolved:
        """What a reference names now, by one GET; the digest is checked when the reference has one.

        Raises NotFound, Unauthorized and other RegistryErrors, WrongContent, InvalidManifest.
        """
        purpose = f"resolve {ref}"

        def ask(host: Host, attempts: int | None) -> Resolved:
            page = self._calls.manifest(host, ref, ref.wanted, purpose, deadline, attempts)
            raw, content_type = page.raw, page.headers.get("Content-Type")
            digest = ref.digest or _announced_digest(page.headers.get("Docker-Content-Digest"), raw, purpose)
            _verify(digest, raw, purpose)
            document = decode_manifest(raw, content_type=content_type)
            descriptor = Descriptor(media_type=document.media_type, digest=digest, size=len(raw))
            return Resolved(descriptor, raw, content_type, document)

        return self._routes.first_of(ref.registry, PULL if ref.digest else RESOLVE, ask)

    def manifest(self, ref: Reference, descriptor: Descriptor, *, deadline: Deadline) -> bytes:
        """The manifest that a descriptor names, whole and verified; raises WrongContent where it is not."""
        purpose = f"pull {ref.name}@{descriptor.digest}"
        if descriptor.data is not None:
            return descriptor.data  # verified when the descriptor was decoded
        if descriptor.size > MAX_MANIFEST_BYTES:
            raise WrongContent(
                f"{purpose}: its descriptor claims {descriptor.size} bytes, a manifest has at most "
                f"{MAX_MANIFEST_BYTES}"
            )

        def ask(host: Host, attempts: int | None) -> bytes:
            raw = self._calls.manifest(host, ref, str(descriptor.digest), purpose, deadline, attempts).raw
            if len(raw) != descriptor.size:
                raise WrongContent(f"{purpose}: {len(raw)} bytes where {descriptor.size} were promised")
            _verify(descriptor.digest, raw, purpose)
            return raw

        return self._routes.first_of(ref.registry, PULL, ask)

    def blob(
        self,
        ref: Reference,
        descriptor: Descriptor,
        *,
        offset: int = 0,
        end: int | None = None,
        deadline: Deadline,
    ) -> BlobStream:
        """A blob's bytes from `offset` up to `end`, not verified; the caller closes the stream.

        `stream.offset` is 0 when the server ignored the range. Raises RegistryError before the first byte,
        the stream's errors after it.
        """
        stop = descriptor.size if end is None else end
        if not 0 <= offset <= stop <= descriptor.size:
            raise InvalidInput(f"bytes {offset}-{stop} are outside a blob of {descriptor.size} bytes")
        purpose = f"pull {ref.name}@{descriptor.digest}"

        def ask(host: Host, attempts: int | None) -> BlobStream:
            headers = blobs.range_header(descriptor, offset, stop)
            answer = self._calls.send(
                host,
                "GET",
                ref,
                f"blobs/{descriptor.digest}",
                purpose,
                deadline,
                attempts=attempts,
                expect=frozenset({200, 206}),
                headers=headers,
            )
            return blobs.accept(answer, descriptor, offset, stop, purpose)

        return self._routes.first_of(ref.registry, PULL, ask)

    def distrust(self, ref: Reference) -> None:
        """Content of this registry was wrong by its digest: pass over its mirrors for a while."""
        for host in self._routes.hosts(ref.registry):
            if host.mirror:
                self._routes.shun(host)

    def head_blob(self, ref: Reference, digest: Digest, *, deadline: Deadline) -> int | None:
        """The size of a blob in the repository (0 where the registry does not say), None when it is not
        there.
        """
        try:
            answer = self._calls.send(
                self._routes.writer(ref.registry),
                "HEAD",
                ref,
                f"blobs/{digest}",
                f"look for {ref.name}@{digest}",
                deadline,
                actions=WRITE,
            )
        except NotFound:
            return None
        answer.discard()
        length = answer.headers.get("Content-Length", "")
        return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0

    def authorize(self, ref: Reference, digest: Digest, *, deadline: Deadline) -> None:
        """Whether these credentials may pull a manifest, by a HEAD; raises Unauthorized or NotFound (V5)."""
        purpose = f"authorise {ref.name}@{digest}"

        def ask(host: Host, attempts: int | None) -> None:
            path = f"manifests/{digest}"
            self._calls.send(
                host, "HEAD", ref, path, purpose, deadline, attempts=attempts, headers=dict(ACCEPT_MANIFESTS)
            ).discard()

        self._routes.first_of(ref.registry, PULL, ask)

    def fingerprint(self, ref: Reference) -> str:
        """A hash of the credentials that would be used, to remember grants by (V5)."""
        hasher = hashlib.sha256()
        # Sorted: the session moves the one that worked to the front, which changes nothing here.
        for one in sorted(
            one.fingerprint() for one in self._session.candidates(ref.registry, ref.repository)
        ):
            hasher.update(one.encode())
        return hasher.hexdigest()

    def tags(self, ref: Reference, *, deadline: Deadline) -> Iterator[str]:
        """Every tag of a repository, page by page; raises TooManyPages for a list without an end."""
        purpose = f"list the tags of {ref.name}"
        host = self._routes.hosts(ref.registry)[-1]

        def fetch(url: Url) -> Document:
            return self._calls.read(host, ref, url, purpose, deadline, limit=_MAX_TAGS_BODY)

        first = host.url(f"{ref.repository}/tags/list?n={_TAGS_PAGE}")
        for page in pages(first, fetch, purpose):
            try:
                listed = _TAGS.decode(page.raw).tags or []
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise BadResponse(f"{purpose}: the list cannot be read") from error
            for tag in listed:
                if not _TAG.fullmatch(tag):
                    raise BadResponse(f"{purpose}: {tag[:140]!r} is not a tag")
                yield tag

    # Pushing.

    def mount_blob(self, ref: Reference, digest: Digest, *, source: Reference, deadline: Deadline) -> bool:
        """Share a blob of another repository of this registry; False when it must be sent instead."""
        return self._uploads.mount(ref, digest, source, deadline)

    def upload_blob(
        self,
        ref: Reference,
        digest: Digest,
        size: int,
        source: Source,
        *,
        chunk_size: int | None = None,
        deadline: Deadline,
        on_sent: Callable[[int], None] = lambda _position: None,
    ) -> None:
        """Send a blob, in one piece or in chunks; `source(offset)` opens it there. Idempotent.

        `on_sent` gets the position reached, which goes back when something is sent again.
        """
        self._uploads.upload(
            ref, digest, size, source, chunk_size=chunk_size, deadline=deadline, on_sent=on_sent
        )

    def put_manifest(
        self, ref: Reference, raw: bytes, media_type: str, *, tag: str | None, deadline: Deadline
    ) -> Digest:
        """Store a manifest under a tag (or its digest alone) and return its digest.

        Where it has a subject and the registry does not keep referrers, the tag schema's list is kept here.
        """
        document = decode_manifest(raw, content_type=media_type)
        digest = Digest.of(raw)
        host = self._routes.writer(ref.registry)
        answer = self._calls.put(host, ref, raw, media_type, tag or str(digest), digest, deadline)
        if document.subject is not None and answer.headers.get("OCI-Subject") is None:
            entry = describe(document, raw, digest)
            self._referrers.change(ref, document.subject.digest, entry, add=True, deadline=deadline)
        return digest

    def delete_manifest(self, ref: Reference, digest: Digest, *, deadline: Deadline) -> None:
        """Delete a manifest by digest, and its entry in a tag schema's list; raises NotFound."""
        pinned = ref.with_digest(digest)
        resolved = self.resolve(pinned, deadline=deadline)
        host = self._routes.writer(ref.registry)
        self._calls.send(
            host,
            "DELETE",
            ref,
            f"manifests/{digest}",
            f"delete {pinned}",
            deadline,
            actions=("pull", "delete"),
            expect=frozenset({200, 202}),
        ).discard()
        subject = resolved.document.subject
        if subject is not None and not self._referrers.kept_by(ref, subject.digest, deadline):
            entry = describe(resolved.document, resolved.raw, digest)
            self._referrers.change(ref, subject.digest, entry, add=False, deadline=deadline)

    # Referrers.

    def referrers(
        self, ref: Reference, subject: Digest, *, artifact_type: str | None = None, deadline: Deadline
    ) -> list[Descriptor]:
        """What claims to refer to a manifest, by the API or else by the tag schema.

        Whoever uses one fetches its manifest and calls `check_subject`.
        """
        return self._referrers.find(ref, subject, artifact_type, deadline)

    # Logging in.

    def check_login(self, registry: str, credential: Credential, *, deadline: Deadline) -> None:
        """Whether a registry accepts a credential, by a GET of its root; raises Unauthorized."""
        host = self._routes.hosts(registry)[-1]
        self._session.ping(host, credential, purpose=f"log in to {registry}", deadline=deadline)


def _announced_digest(announced: str | None, raw: bytes, purpose: str) -> Digest:
    """The digest of a manifest found by tag: the registry's own if it states one (checked next), else
    sha256.
    """
    if announced is None:
        return Digest.of(raw)
    try:
        return Digest.parse(announced)
    except InvalidInput as error:
        raise BadResponse(f"{purpose}: the registry names the digest {announced[:140]!r}") from error


def _verify(digest: Digest, raw: bytes, purpose: str) -> None:
    hasher = digest.hasher()
    hasher.update(raw)
    if not digest.matches(hasher):
        raise WrongContent(
            f"{purpose}: the registry sent {digest.algorithm}:{hasher.hexdigest()}, not {digest}",
            next_step="the registry or a cache in front of it is wrong; try another mirror",
        )

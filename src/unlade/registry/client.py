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
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self
from urllib.parse import quote

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
from unlade.model.mediatypes import ACCEPT, OCI_INDEX
from unlade.registry import blobs, referrers
from unlade.registry.auth import Scope
from unlade.registry.blobs import BlobStream
from unlade.registry.config import RegistryConfig
from unlade.registry.credentials import Credential, CredentialSource, NoCredentials
from unlade.registry.errors import BadResponse, HTTPFailure, NotFound, WrongContent
from unlade.registry.hosts import PULL, RESOLVE, Host
from unlade.registry.origins import Url
from unlade.registry.paging import pages
from unlade.registry.retry import retrying
from unlade.registry.routes import Routes
from unlade.registry.session import Session
from unlade.registry.transport import Answer, Document
from unlade.registry.uploads import Source, Uploads

_ACCEPT_MANIFESTS: Final = {"Accept": ", ".join(ACCEPT)}
_OK: Final = frozenset({200})
_READ: Final = ("pull",)
_WRITE: Final = ("pull", "push")
# A registry that ignores paging sends every tag at once; 100,000 of them are about 2 MB.
_MAX_TAGS_BODY: Final = 16 << 20
_TAGS_PAGE: Final = 1000
_TAG: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What a reference names: its descriptor, the exact bytes, and what they decode to."""

    descriptor: Descriptor
    raw: bytes
    content_type: str | None
    document: Manifest | Index


class _Tags(msgspec.Struct):
    tags: list[str] | None = None


class Registry:
    """A thread-safe client with pooled connections; a context manager."""

    def __init__(
        self, config: RegistryConfig | None = None, credentials: CredentialSource | None = None
    ) -> None:
        self._config = config or RegistryConfig()
        self._session = Session(self._config, credentials or NoCredentials())
        self._routes = Routes(self._config)
        self._uploads = Uploads(self._session, self._routes)
        # Referrers pushed at once from here must not overwrite one another's entry in a tag schema's list.
        self._lists = threading.Lock()

    def with_credentials(self, credentials: CredentialSource) -> Registry:
        """This client for somebody else; it shares the connections, so only the original is closed."""
        other = copy.copy(self)
        other._session = self._session.acting_for(credentials)
        other._uploads = Uploads(other._session, self._routes)
        return other

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
            page = self._get_manifest(host, ref, ref.wanted, purpose, deadline, attempts)
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
            raw = self._get_manifest(host, ref, str(descriptor.digest), purpose, deadline, attempts).raw
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
            answer = self._send(
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
            answer = self._send(
                self._routes.writer(ref.registry),
                "HEAD",
                ref,
                f"blobs/{digest}",
                f"look for {ref.name}@{digest}",
                deadline,
                actions=_WRITE,
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
            self._send(
                host, "HEAD", ref, path, purpose, deadline, attempts=attempts, headers=dict(_ACCEPT_MANIFESTS)
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
            return self._read(host, ref, url, purpose, deadline, limit=_MAX_TAGS_BODY)

        first = host.url(f"{ref.repository}/tags/list?n={_TAGS_PAGE}")
        for page in pages(first, fetch, purpose):
            try:
                listed = msgspec.json.decode(page.raw, type=_Tags).tags or []
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
        answer = self._put(ref, raw, media_type, tag or str(digest), digest, deadline)
        if document.subject is not None and answer.headers.get("OCI-Subject") is None:
            entry = referrers.describe(document, raw, digest)
            self._change_list(ref, document.subject.digest, entry, add=True, deadline=deadline)
        return digest

    def delete_manifest(self, ref: Reference, digest: Digest, *, deadline: Deadline) -> None:
        """Delete a manifest by digest, and its entry in a tag schema's list; raises NotFound."""
        pinned = ref.with_digest(digest)
        resolved = self.resolve(pinned, deadline=deadline)
        host = self._routes.writer(ref.registry)
        self._send(
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
        if subject is not None and not self._keeps_referrers(ref, subject.digest, deadline):
            entry = referrers.describe(resolved.document, resolved.raw, digest)
            self._change_list(ref, subject.digest, entry, add=False, deadline=deadline)

    # Referrers.

    def referrers(
        self, ref: Reference, subject: Digest, *, artifact_type: str | None = None, deadline: Deadline
    ) -> list[Descriptor]:
        """What claims to refer to a manifest: by the API, else by the tag schema. Claims: see
        check_subject.
        """
        purpose = f"list the referrers of {ref.name}@{subject}"

        def ask(host: Host, attempts: int | None) -> list[Descriptor]:
            found: dict[Digest, Descriptor] = {}
            path = f"{ref.repository}/referrers/{subject}"
            if artifact_type is not None:
                path += f"?artifactType={quote(artifact_type, safe='')}"
            try:
                for page in pages(
                    host.url(path),
                    lambda url: self._read(host, ref, url, purpose, deadline, attempts=attempts),
                    purpose,
                ):
                    if not referrers.is_index(page):
                        return self._listed_by_tag(host, ref, subject, artifact_type, purpose, deadline)
                    referrers.collect(found, referrers.read_index(page, purpose), artifact_type, purpose)
            except HTTPFailure as error:
                if error.status not in (400, 404, 405):
                    raise
                return self._listed_by_tag(host, ref, subject, artifact_type, purpose, deadline)
            return list(found.values())

        return self._routes.first_of(ref.registry, RESOLVE, ask)

    def _keeps_referrers(self, ref: Reference, subject: Digest, deadline: Deadline) -> bool:
        host = self._routes.writer(ref.registry)
        try:
            path, purpose = f"referrers/{subject}", f"ask {host.origin} for referrers"
            return referrers.is_index(self._read(host, ref, path, purpose, deadline))
        except HTTPFailure as error:
            if error.status in (400, 404, 405):
                return False
            raise

    def _listed_by_tag(
        self,
        host: Host,
        ref: Reference,
        subject: Digest,
        artifact_type: str | None,
        purpose: str,
        deadline: Deadline,
    ) -> list[Descriptor]:
        """The tag schema's list; empty where there is none."""
        tag = referrers.fallback_tag(subject)
        try:
            page = self._get_manifest(host, ref, tag, purpose, deadline, None)
        except NotFound:
            return []
        found: dict[Digest, Descriptor] = {}
        referrers.collect(found, referrers.read_index(page, purpose), artifact_type, purpose)
        return list(found.values())

    def _change_list(
        self, ref: Reference, subject: Digest, entry: Descriptor, *, add: bool, deadline: Deadline
    ) -> None:
        host = self._routes.writer(ref.registry)
        purpose = f"keep the list of referrers of {ref.name}@{subject}"
        with self._lists:
            for _ in range(referrers.RACES):
                entries = self._listed_by_tag(host, ref, subject, None, purpose, deadline)
                if any(one.digest == entry.digest for one in entries) == add:
                    return
                kept = [one for one in entries if one.digest != entry.digest]
                raw = referrers.encode_index([*kept, entry] if add else kept)
                self._put(ref, raw, OCI_INDEX, referrers.fallback_tag(subject), Digest.of(raw), deadline)
        raise referrers.ListNotKept(f"{purpose}: other writers kept changing it", next_step="push again")

    # Logging in.

    def check_login(self, registry: str, credential: Credential, *, deadline: Deadline) -> None:
        """Whether a registry accepts a credential (a GET of its root, with nothing else); raises
        Unauthorized.
        """
        host = self._routes.hosts(registry)[-1]
        self._session.ping(host, credential, purpose=f"log in to {registry}", deadline=deadline)

    # One request.

    def _put(
        self, ref: Reference, raw: bytes, media_type: str, target: str, digest: Digest, deadline: Deadline
    ) -> Answer:
        purpose = f"push {ref.name}@{digest}" if ":" in target else f"push {ref.name}:{target}"
        host = self._routes.writer(ref.registry)
        answer = self._send(
            host,
            "PUT",
            ref,
            f"manifests/{target}",
            purpose,
            deadline,
            actions=_WRITE,
            expect=frozenset({200, 201, 202}),
            headers={"Content-Type": media_type},
            body=raw,
        )
        answer.discard()
        stored = answer.headers.get("Docker-Content-Digest")
        if stored is not None and stored != str(digest) and stored.startswith(f"{digest.algorithm}:"):
            raise WrongContent(f"{purpose}: the registry stored it as {stored[:140]!r}, not {digest}")
        return answer

    def _get_manifest(
        self,
        host: Host,
        ref: Reference,
        wanted: str,
        purpose: str,
        deadline: Deadline,
        attempts: int | None,
    ) -> Document:
        path, headers = f"manifests/{wanted}", dict(_ACCEPT_MANIFESTS)
        return self._read(host, ref, path, purpose, deadline, attempts=attempts, headers=headers)

    def _read(
        self,
        host: Host,
        ref: Reference,
        what: str | Url,
        purpose: str,
        deadline: Deadline,
        *,
        attempts: int | None = None,
        headers: dict[str, str] | None = None,
        limit: int = MAX_MANIFEST_BYTES,
    ) -> Document:
        """A whole body within a cap; one that breaks on the way is asked for again."""

        def once() -> Document:
            with self._send(host, "GET", ref, what, purpose, deadline, attempts=1, headers=headers) as answer:
                return Document(answer.read(limit), answer.headers)

        tries = attempts or self._config.attempts
        return retrying(once, config=self._config, attempts=tries, deadline=deadline)

    def _send(
        self,
        host: Host,
        method: str,
        ref: Reference,
        what: str | Url,
        purpose: str,
        deadline: Deadline,
        *,
        attempts: int | None = None,
        actions: tuple[str, ...] = _READ,
        expect: frozenset[int] = _OK,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """`what` is a path below the repository, or the URL of a further page."""
        url = host.url(f"{ref.repository}/{what}") if isinstance(what, str) else what
        if host.mirror:
            # How a mirror of several registries knows which one is meant (containerd's convention).
            separator = "&" if "?" in url.target else "?"
            url = Url(url.origin, f"{url.target}{separator}ns={quote(ref.registry, safe='')}")
        return self._session.send(
            host,
            method,
            url,
            purpose=purpose,
            scope=Scope(ref.repository, actions),
            expect=expect,
            deadline=deadline,
            headers=headers,
            body=body,
            attempts=attempts,
        )


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

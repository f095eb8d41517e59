"""Referrers: what points at a manifest (distribution-spec 1.1, "Listing Referrers"), API or tag schema.

A registry without the API keeps the list as an index under the tag `sha256-<hex>`, which clients maintain:
`keep` adds to it after a push, `drop` removes after a delete. That is read, change, write without a lock on
the server's side, so it is read again afterwards and repeated when another writer won. A listing is a
claim: whoever uses a referrer fetches its manifest and calls `check_subject`.
"""

from __future__ import annotations

import json
import threading
from typing import Any, Final
from urllib.parse import quote

from unlade.errors import RegistryError, UnladeError
from unlade.model import Deadline, Descriptor, Digest, Index, Manifest, Reference, decode_manifest
from unlade.model.mediatypes import OCI_INDEX
from unlade.registry.calls import Calls
from unlade.registry.errors import BadResponse, HTTPFailure, NotFound, TooManyPages, WrongSubject
from unlade.registry.hosts import RESOLVE, Host
from unlade.registry.origins import Url
from unlade.registry.paging import pages
from unlade.registry.routes import Routes
from unlade.registry.transport import Document

# Signatures, SBOMs and attestations of one image count in tens; a flood is an attack on whoever lists.
MAX_REFERRERS: Final = 5000
# Writers that disturb one another are few; this many lost races in a row means something else is wrong.
RACES: Final = 5


def fallback_tag(subject: Digest) -> str:
    """The tag of the tag schema: parts cut to what a tag may hold."""
    return f"{subject.algorithm[:32]}-{subject.hex[:64]}"


def check_subject(
    document: Manifest | Index, descriptor: Descriptor, subject: Digest, *, artifact_type: str | None = None
) -> None:
    """Raise WrongSubject unless a referrer's own manifest names the subject and the type it was listed
    with.
    """
    if document.subject is None or document.subject.digest != subject:
        raise WrongSubject(
            f"{descriptor.digest} was listed as a referrer of {subject} but does not refer to it",
            next_step="do not trust this listing; report it to the registry's operator",
        )
    real = document.effective_artifact_type if isinstance(document, Manifest) else document.artifact_type
    for claimed in (artifact_type, descriptor.artifact_type):
        if claimed and claimed != real:
            raise WrongSubject(
                f"{descriptor.digest} was listed as {claimed[:140]} but is {real[:140] or 'untyped'}",
                next_step="do not trust this listing; report it to the registry's operator",
            )


def read_index(page: Document, purpose: str) -> Index:
    """The index that a registry sent; raises BadResponse."""
    try:
        document = decode_manifest(page.raw, content_type=page.media_type)
    except UnladeError as error:
        raise BadResponse(f"{purpose}: the list of referrers cannot be read: {error}") from error
    if not isinstance(document, Index):
        raise BadResponse(f"{purpose}: the list of referrers is not an index")
    return document


def is_index(page: Document) -> bool:
    """Whether a page claims to be one: some registries answer unknown routes with text for people."""
    return page.media_type == OCI_INDEX


def collect(found: dict[Digest, Descriptor], index: Index, artifact_type: str | None, purpose: str) -> None:
    """Add an index's entries of one type (all when None), without repeats; raises TooManyPages."""
    for entry in index.manifests:
        if artifact_type is None or entry.artifact_type == artifact_type:
            found.setdefault(entry.digest, entry)
    if len(found) > MAX_REFERRERS:
        raise TooManyPages(
            f"{purpose}: more than {MAX_REFERRERS} referrers",
            next_step="ask for one artifact type, or clean up the repository",
        )


def describe(document: Manifest | Index, raw: bytes, digest: Digest) -> Descriptor:
    """A referrer as an entry of the list: type and annotations come from its manifest (the specification)."""
    artifact_type = (
        document.effective_artifact_type if isinstance(document, Manifest) else document.artifact_type
    )
    return Descriptor(
        media_type=document.media_type,
        digest=digest,
        size=len(raw),
        artifact_type=artifact_type,
        annotations=document.annotations,
    )


def encode_index(entries: list[Descriptor]) -> bytes:
    """The tag schema's document."""
    document: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [entry.to_json() for entry in entries],
    }
    return json.dumps(document, separators=(",", ":")).encode()


class ListNotKept(RegistryError):
    """Other writers kept overwriting the list of referrers."""

    code = "referrers-not-kept"
    retryable = True


class Referrers:
    """Lists of referrers, read and kept; thread-safe."""

    def __init__(self, calls: Calls, routes: Routes) -> None:
        self._calls = calls
        self._routes = routes
        # Referrers pushed at once from here must not overwrite one another's entry in a list.
        self._lock = threading.Lock()

    def find(
        self, ref: Reference, subject: Digest, artifact_type: str | None, deadline: Deadline
    ) -> list[Descriptor]:
        """What claims to refer to a manifest. Nothing at a mirror proves nothing: the next host is asked."""
        purpose = f"list the referrers of {ref.name}@{subject}"

        def ask(host: Host, attempts: int | None) -> list[Descriptor]:
            found = self._listed_by_api(host, ref, subject, artifact_type, purpose, deadline, attempts)
            if found is None:
                found = self._listed_by_tag(host, ref, subject, artifact_type, purpose, deadline)
            if not found and host.mirror:
                raise NotFound(f"{purpose}: none at {host.origin}", status=404)
            return found

        return self._routes.first_of(ref.registry, RESOLVE, ask)

    def _listed_by_api(
        self,
        host: Host,
        ref: Reference,
        subject: Digest,
        artifact_type: str | None,
        purpose: str,
        deadline: Deadline,
        attempts: int | None,
    ) -> list[Descriptor] | None:
        """The API's list; None where the registry has no such API."""
        found: dict[Digest, Descriptor] = {}
        path = f"{ref.repository}/referrers/{subject}"
        if artifact_type is not None:
            path += f"?artifactType={quote(artifact_type, safe='')}"

        def fetch(url: Url) -> Document:
            return self._calls.read(host, ref, url, purpose, deadline, attempts=attempts)

        try:
            for page in pages(host.url(path), fetch, purpose):
                if not is_index(page):
                    return None
                collect(found, read_index(page, purpose), artifact_type, purpose)
        except HTTPFailure as error:
            if error.status not in (400, 404, 405):
                raise
            return None
        return list(found.values())

    def kept_by(self, ref: Reference, subject: Digest, deadline: Deadline) -> bool:
        """Whether the registry keeps referrers by itself."""
        host = self._routes.writer(ref.registry)
        purpose = f"ask {host.origin} for referrers"
        return self._listed_by_api(host, ref, subject, None, purpose, deadline, None) is not None

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
        tag = fallback_tag(subject)
        try:
            page = self._calls.manifest(host, ref, tag, purpose, deadline)
        except NotFound:
            return []
        found: dict[Digest, Descriptor] = {}
        collect(found, read_index(page, purpose), artifact_type, purpose)
        return list(found.values())

    def change(
        self, ref: Reference, subject: Digest, entry: Descriptor, *, add: bool, deadline: Deadline
    ) -> None:
        """Add an entry to the tag schema's list, or take it out; idempotent. Raises ListNotKept."""
        host = self._routes.writer(ref.registry)
        tag, purpose = fallback_tag(subject), f"keep the list of referrers of {ref.name}@{subject}"
        with self._lock:
            for _ in range(RACES):
                entries = self._listed_by_tag(host, ref, subject, None, purpose, deadline)
                if any(one.digest == entry.digest for one in entries) == add:
                    return
                kept = [one for one in entries if one.digest != entry.digest]
                raw = encode_index([*kept, entry] if add else kept)
                self._calls.put(host, ref, raw, OCI_INDEX, tag, Digest.of(raw), deadline)
        raise ListNotKept(f"{purpose}: other writers kept changing it", next_step="push again")

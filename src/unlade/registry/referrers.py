"""Referrers: what points at a manifest (distribution-spec 1.1, "Listing Referrers"), API or tag schema.

A registry without the API keeps the list as an index under the tag `sha256-<hex>`, which clients maintain:
`keep` adds to it after a push, `drop` removes after a delete. That is read, change, write without a lock on
the server's side, so it is read again afterwards and repeated when another writer won. A listing is a
claim: whoever uses a referrer fetches its manifest and calls `check_subject`.
"""

from __future__ import annotations

import json
from typing import Any, Final

from unlade.errors import RegistryError, UnladeError
from unlade.model import Descriptor, Digest, Index, Manifest, decode_manifest
from unlade.model.mediatypes import OCI_INDEX
from unlade.registry.errors import BadResponse, TooManyPages, WrongSubject
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

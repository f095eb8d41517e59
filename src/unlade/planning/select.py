"""Which manifest of an index is meant (V11): by platform, or by artifact type or annotation.

Attestations that buildkit stores beside images (`vnd.docker.reference.type`, platform unknown/unknown) are
never chosen. Among the rest, the caller's artifact type and annotations narrow the field, then the platform
decides; an entry without a platform is taken only when it is the only one left. There is no guessing: two
entries that fit equally well are an error that says how to tell them apart. Indexes may hold indexes, to a
small depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from unlade.errors import InvalidInput
from unlade.model import Descriptor, Digest, Index, Manifest, Platform

# Real ones nest once (an index of per-variant indexes); deeper is somebody playing.
MAX_INDEX_DEPTH: Final = 4
ATTESTATION: Final = "vnd.docker.reference.type"
_SHOWN: Final = 20
# Manifests read to learn what an index does not say: enough for variants of one thing, too few to hurt.
_MAX_ASKED: Final = 32


class NoMatch(InvalidInput):
    """No entry of an index suits; the message lists what there is."""

    code = "no-matching-manifest"


class Ambiguous(InvalidInput):
    """Several entries of an index suit equally well."""

    code = "ambiguous-index"


class IndexTooDeep(InvalidInput):
    """Indexes within indexes beyond the limit, or in a circle."""

    code = "index-too-deep"


class Chosen(msgspec.Struct, frozen=True):
    """A manifest, and the descriptors from the index's entry down to it; empty when there was no index."""

    manifest: Manifest
    through: tuple[Descriptor, ...]


def select(
    index: Index,
    platform: Platform,
    *,
    artifact_type: str | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Descriptor:
    """The entry that is meant; raises NoMatch or Ambiguous."""
    entries = [entry for entry in index.manifests if not is_attestation(entry)]
    if artifact_type:
        entries = [entry for entry in entries if entry.artifact_type == artifact_type]
    for key, value in (annotations or {}).items():
        entries = [entry for entry in entries if entry.annotations.get(key) == value]
    best = platform.match(entry.platform for entry in entries)
    if best is not None:
        return entries[best]
    portable = _distinct([entry for entry in entries if entry.platform is None])
    if len(portable) == 1:
        return portable[0]
    if portable:
        raise Ambiguous(
            f"{len(portable)} entries of the index suit: {_listing(portable)}",
            next_step="tell them apart with --artifact-type TYPE or --annotation KEY=VALUE, or name a digest",
        )
    raise NoMatch(
        f"no entry of the index is for {platform}"
        + (f" with artifact type {artifact_type!r}" if artifact_type else "")
        + "".join(f" and {key}={value}" for key, value in (annotations or {}).items())
        + f"; it has {_listing(index.manifests)}",
        next_step="choose another with --platform OS/ARCH, --artifact-type or --annotation, or name a digest",
    )


def descend(
    document: Manifest | Index,
    platform: Platform,
    read: Callable[[Descriptor], Manifest | Index],
    *,
    artifact_type: str | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Chosen:
    """Follow indexes down to a manifest; `read` gives the document of a descriptor.

    The caller's artifact type and annotations are asked of the top index only: below it, the platform
    decides. Many tools write neither into the index; where no entry answers, the manifests themselves are
    asked. Raises NoMatch, Ambiguous or IndexTooDeep.
    """
    through: list[Descriptor] = []
    while isinstance(document, Index):
        if len(through) == MAX_INDEX_DEPTH:
            raise IndexTooDeep(
                f"indexes are nested more than {MAX_INDEX_DEPTH} deep",
                next_step="name the manifest by digest",
            )
        if through or not (artifact_type or annotations):
            entry = select(document, platform)
        else:
            entry = _select_top(document, platform, read, artifact_type, annotations)
        through.append(entry)
        document = read(entry)
    return Chosen(document, tuple(through))


def _select_top(
    index: Index,
    platform: Platform,
    read: Callable[[Descriptor], Manifest | Index],
    artifact_type: str | None,
    annotations: Mapping[str, str] | None,
) -> Descriptor:
    try:
        return select(index, platform, artifact_type=artifact_type, annotations=annotations)
    except NoMatch:
        entries = _distinct([entry for entry in index.manifests if not is_attestation(entry)])
        if len(entries) > _MAX_ASKED:
            raise
        asked = {entry.digest: _described_by(entry, read(entry)) for entry in entries}
    fuller = msgspec.structs.replace(index, manifests=tuple(asked.values()))
    chosen = select(fuller, platform, artifact_type=artifact_type, annotations=annotations)
    return next(entry for entry in entries if entry.digest == chosen.digest)


def _described_by(entry: Descriptor, document: Manifest | Index) -> Descriptor:
    """An entry with what its own document says, where the index says nothing."""
    named = document.effective_artifact_type if isinstance(document, Manifest) else document.artifact_type
    return msgspec.structs.replace(
        entry,
        artifact_type=entry.artifact_type or named,
        annotations={**document.annotations, **entry.annotations},
    )


def is_attestation(entry: Descriptor) -> bool:
    """Whether an entry describes another one instead of being content."""
    if ATTESTATION in entry.annotations:
        return True
    return entry.platform is not None and (entry.platform.os, entry.platform.architecture) == (
        "unknown",
        "unknown",
    )


def _distinct(entries: Sequence[Descriptor]) -> list[Descriptor]:
    seen: dict[Digest, Descriptor] = {}
    for entry in entries:
        seen.setdefault(entry.digest, entry)
    return list(seen.values())


def _listing(entries: Sequence[Descriptor]) -> str:
    shown = ", ".join(_describe(entry) for entry in entries[:_SHOWN]) or "no entries"
    return shown + (f", and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else "")


def _describe(entry: Descriptor) -> str:
    if is_attestation(entry):
        return f"an attestation ({str(entry.digest)[:19]})"
    facts = [str(entry.platform)] if entry.platform else []
    facts += [entry.artifact_type] if entry.artifact_type else []
    facts += [f"{key}={value}" for key, value in list(entry.annotations.items())[:3]]
    # The publisher's words reach a terminal escaped and shortened.
    facts = [ascii(fact[:80])[1:-1] for fact in facts]
    return f"{' '.join(facts) or 'an entry without platform'} ({str(entry.digest)[:19]})"

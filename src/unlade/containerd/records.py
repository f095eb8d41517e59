"""What is recorded about an artifact, and how it stands in labels: data alone, no calls.

One record by ID (the digest of the synthetic config) is the database's row: its labels hold the tree's key
and one entry per tuple (reference, handler, options) that leads to it. So a tuple appears and disappears by
one change of one record, the same bytes for two handlers are one image with two tuples (R1, design decision
3), and whoever removes the record by ID, be it containerd's own CRI plugin, removes all that is known of it.

Records by name (tag, digest) exist for containerd: its CRI plugin resolves names by them. They belong to
the default handler without options alone, since a name can lead to one image only; another handler's or
another pod's options must never change what the name means to everybody else.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from unlade.containerd import labels
from unlade.containerd.images import Row
from unlade.model import Digest, Reference

_HASH_DIGITS: Final = 32


class ImageTuple(msgspec.Struct, frozen=True, omit_defaults=True):
    """One (reference, handler, options) that leads to an image, and what it was when it was pulled.

    `snapshotters` hold the tree for it; `manifest` and `index` are the registry's digests; `source` is the
    repository that the content came from, where that is another than the reference's (a referrer's); `at`
    is when this was recorded.
    """

    reference: str
    handler: str
    options: str = ""
    snapshotters: tuple[str, ...] = ("overlayfs",)
    manifest: str = ""
    index: str = ""
    platform: str = ""
    at: float = 0.0
    source: str = ""

    @property
    def label(self) -> str:
        """The label that holds it: the same for the same reference, handler and options."""
        return tuple_label(self.reference, self.handler, self.options)

    def same_as(self, other: ImageTuple) -> bool:
        """Whether both say the same, apart from when."""
        return msgspec.structs.replace(self, at=0.0) == msgspec.structs.replace(other, at=0.0)


_decode: Final = msgspec.json.Decoder(ImageTuple).decode


@dataclass(frozen=True, slots=True)
class ArtifactImage:
    """An artifact as containerd holds it: one image ID, one tree, every tuple that leads there.

    `size` is the content's; `cached` says, after a pull, that nothing had to be made.
    """

    id: str
    tree: Digest
    family: str
    size: int
    entries: int
    target: str
    tuples: tuple[ImageTuple, ...]
    created: float
    cached: bool = field(default=False, compare=False)

    @property
    def repo_tags(self) -> tuple[str, ...]:
        """The tagged names that lead to it."""
        return _distinct(one.reference for one in self.tuples if "@" not in one.reference)

    @property
    def repo_digests(self) -> tuple[str, ...]:
        """The pinned names that lead to it."""
        return _distinct(one.reference for one in self.tuples if "@" in one.reference)

    @property
    def handlers(self) -> frozenset[str]:
        """The handlers it was pulled for."""
        return frozenset(one.handler for one in self.tuples)

    @property
    def snapshotters(self) -> frozenset[str]:
        """Where its tree is needed."""
        return frozenset(name for one in self.tuples for name in one.snapshotters)

    @property
    def origins(self) -> frozenset[str]:
        """Where its bytes came from: who may read one of these may have the content (V5)."""
        return frozenset(one.source or one.reference for one in self.tuples)

    @property
    def references(self) -> frozenset[str]:
        """Every name that leads to it, for whatever handler."""
        return frozenset(one.reference for one in self.tuples)


def stamped(tuples: Iterable[ImageTuple]) -> list[ImageTuple]:
    """The tuples, as of now."""
    now = time.time()
    return [msgspec.structs.replace(one, at=now) for one in tuples]


def tuple_label(reference: str, handler: str, options: str) -> str:
    """The label of a tuple. Hashed: references are longer than is pleasant in a label's name."""
    text = f"{reference}\n{handler}\n{options}".encode()
    return labels.TUPLE + hashlib.sha256(text).hexdigest()[:_HASH_DIGITS]


def encode(tuples: Iterable[ImageTuple]) -> dict[str, str]:
    """Tuples as labels."""
    return {one.label: msgspec.json.encode(one).decode() for one in tuples}


def decode(row: Row) -> ArtifactImage | None:
    """The artifact that a record by ID describes; None when it is not one of ours.

    A tuple that cannot be read (written by a later version, or by hand) is left out, not an error: the
    others still hold, and a pull writes it anew.
    """
    tree = row.labels.get(labels.TREE)
    if tree is None or not is_id(row.name):
        return None
    return ArtifactImage(
        id=row.name,
        tree=Digest.parse(tree),
        family=row.labels.get(labels.FAMILY, ""),
        size=int(row.labels.get(labels.SIZE, "0")),
        entries=int(row.labels.get(labels.ENTRIES, "0")),
        target=row.target,
        tuples=tuples_of(row),
        created=row.created,
    )


def tuples_of(row: Row) -> tuple[ImageTuple, ...]:
    """The tuples that a record's labels hold, sorted; one that cannot be read is left out."""
    tuples = []
    for label, text in row.labels.items():
        if not label.startswith(labels.TUPLE):
            continue
        try:
            one = _decode(text)
        except msgspec.DecodeError:
            continue
        if one.label == label:
            tuples.append(one)
    return tuple(sorted(tuples, key=lambda one: (one.reference, one.handler, one.options)))


def is_id(text: str) -> bool:
    """Whether a name is an image ID: a bare sha256 digest."""
    head, _, digits = text.partition(":")
    return head == "sha256" and len(digits) == 64 and all(digit in "0123456789abcdef" for digit in digits)


def record_name(reference: Reference) -> str:
    """A reference as containerd's CRI plugin names its record: the tag is dropped where a digest decides."""
    if reference.digest is not None:
        return f"{reference.name}@{reference.digest}"
    return f"{reference.name}:{reference.tag_or_latest}"


def pinned_names(reference: Reference, *digests: Digest | None) -> list[str]:
    """The names by digest under which the same content is known: index and platform's child (V11)."""
    return [f"{reference.name}@{digest}" for digest in digests if digest is not None]


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))

"""What a reference becomes: the plan and its steps, as data (V16).

A `Plan` says for each layer what happens to it, where the result lands and which rule decided so. It is
made by `make_plan`, shown by `unlade plan`, and carried out by `deliver`; it does no I/O and never changes.
Its canonical bytes hold exactly what decides the resulting tree (layer digests, actions, paths, modes,
times, the subset) and nothing else (no reference, tag, annotation order or media type), so that the digest
of them is the tree's key: two references to one content share a tree, and one pod's options never change
another's (design record "identity").
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from unlade.errors import InvalidInput
from unlade.model import Descriptor, DiffID, Digest

# Part of every tree key: raise it when the same manifest and options would give another tree.
RULES_VERSION: Final = 1

Action = Literal["layer", "untar", "file", "skip"]
Kind = Literal["image", "artifact"]
Unpack = Literal["auto", "always", "never"]
_UNPACK: Final = ("auto", "always", "never")


class PlanOptions(msgspec.Struct, frozen=True):
    """What the caller decides otherwise than the rules would.

    `only` are globs of paths to keep (see `subset`). `as_file` names layers that have no name: `NAME` for
    the next such layer, `INDEX=NAME` for the layer of that number. `family` applies one family's rules
    without asking whether the manifest looks like it.
    """

    unpack: Unpack = "auto"
    only: tuple[str, ...] = ()
    as_file: tuple[str, ...] = ()
    family: str | None = None

    def __post_init__(self) -> None:
        if self.unpack not in _UNPACK:
            raise InvalidInput(
                f"unpack cannot be {self.unpack!r}", next_step=f"use one of {', '.join(_UNPACK)}"
            )


class PlannedFile(msgspec.Struct, frozen=True):
    """A file known before its archive is opened, because the manifest describes it."""

    path: str
    size: int | None
    mode: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to one layer.

    `layer`: an image layer, unpacked over the ones below with whiteouts. `untar`: an archive unpacked into
    `path` (the root when empty), whiteout names being plain data. `file`: the blob's bytes, unchanged, at
    `path`. `skip`: not fetched at all. `diff_id`, where the publisher states it, is what an archive must be
    once inflated. `content` is set where the bytes are already known (a rendered
    Kitfile): then nothing is fetched and `layer` describes those bytes.
    """

    index: int
    layer: Descriptor
    action: Action
    path: str
    rule: str
    mode: int | None = None
    mtime_ns: int | None = None
    files: tuple[PlannedFile, ...] | None = None
    diff_id: DiffID | None = None
    content: bytes | None = field(default=None, repr=False)
    source: int = 0


class Source(msgspec.Struct, frozen=True):
    """One reference that takes part: its manifest, and what kind of thing it is.

    Steps of different sources are fetched from their own repositories, and the whiteouts of one source
    never hide files of another.
    """

    reference: str
    family: str
    kind: Kind
    manifest: Descriptor
    config: Descriptor
    only: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class FileRow(msgspec.Struct, frozen=True):
    """One line of `unlade plan`: a path ending in `/` is an archive whose names are not known yet."""

    path: str
    size: int | None
    layer: Digest
    rule: str
    reference: str


class Plan(msgspec.Struct, frozen=True):
    """Sources in order, and their steps in the order in which they take effect."""

    sources: tuple[Source, ...]
    steps: tuple[Step, ...]

    @property
    def reference(self) -> str:
        """The reference, or the several, separated by spaces."""
        return " ".join(source.reference for source in self.sources)

    @property
    def family(self) -> str:
        """The family that was recognised, or the several, joined by `+`."""
        return "+".join(dict.fromkeys(source.family for source in self.sources))

    @property
    def kind(self) -> Kind:
        """`image` when every source is an image."""
        return "image" if all(source.kind == "image" for source in self.sources) else "artifact"

    @property
    def manifest(self) -> Descriptor:
        """The first source's manifest; merged plans have one per source."""
        return self.sources[0].manifest

    @property
    def config(self) -> Descriptor:
        """The first source's config."""
        return self.sources[0].config

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know beside the table."""
        return tuple(note for source in self.sources for note in source.notes)

    def active(self) -> tuple[Step, ...]:
        """The steps that produce something, in order."""
        return tuple(step for step in self.steps if step.action != "skip")

    def fetch_size(self) -> int:
        """The bytes to fetch when nothing is present: each digest once."""
        return sum({s.layer.digest: s.layer.size for s in self.active() if s.content is None}.values())

    def files(self) -> Iterator[FileRow]:
        """Each file, its size, its layer and the rule that puts it there."""
        for step in self.active():
            reference = self.sources[step.source].reference
            if step.action == "file":
                yield FileRow(step.path, step.layer.size, step.layer.digest, step.rule, reference)
            elif step.files is not None:
                for known in step.files:
                    yield FileRow(known.path, known.size, step.layer.digest, step.rule, reference)
            else:
                inside = f"{step.path}/" if step.path else "./"
                yield FileRow(inside, None, step.layer.digest, step.rule, reference)

    def canonical(self) -> bytes:
        """Deterministic bytes of everything that decides the tree, and of nothing else."""
        return _dumps(self._deciding())

    def key(self, policy: Mapping[str, object] | None = None) -> Digest:
        """The tree's key: the plan and the policy (ownership, unpack rules …) it is carried out under."""
        return Digest.of(_dumps({"plan": self._deciding(), "policy": dict(policy or {})}))

    def _deciding(self) -> dict[str, object]:
        active = self.active()
        # A subset is decided already for files; it still matters while archives are to be filtered.
        archived = {step.source for step in active if step.action != "file"}
        return {
            "rules": RULES_VERSION,
            "only": {
                str(i): sorted(set(s.only)) for i, s in enumerate(self.sources) if s.only and i in archived
            },
            "steps": [
                [step.source, step.action, str(step.layer.digest), step.path, step.mode, step.mtime_ns]
                for step in active
            ],
        }


def _dumps(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")

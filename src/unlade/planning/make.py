"""From a manifest to a plan: the rules that decide, in their order.

1. An image config and only image layers: an image. Anything else is an artifact.
2. For an artifact's layer: the caller's word, the unpack annotation, the family's own types, the title, the
   bytes. Nothing is unpacked that does not look like a tar.
3. Of two files with one path the higher layer wins, and the lower is not even fetched.
4. Every title and filepath is relative and canonical, or the whole artifact is refused.

`make_plan` fetches nothing itself: the config and the first bytes of a layer come from the callables it is
given, and are asked for only where a rule needs them. An artifact that would give an empty directory is an
error that lists its layers (V14); an empty image is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import msgspec

from unlade.errors import InvalidInput
from unlade.model import Descriptor, Manifest
from unlade.model.paths import check_relative
from unlade.planning import families, generic, image, kitops, kpt, modelpack, oras, subset
from unlade.planning.errors import (
    HOW_TO_DECIDE,
    NotATar,
    PathConflict,
    Unplaced,
    UnplacedLayers,
    about,
    listing,
    nothing_produced,
)
from unlade.planning.plan import Plan, PlanOptions, Source, Step
from unlade.planning.view import Family, Placement, View

_CALLER_NAMED: Final = "caller: a file of this name"
_OTHER_SUBSET: Final = "see the paths with `unlade plan`, then change --only"


def make_plan(
    manifest: Manifest,
    descriptor: Descriptor,
    *,
    reference: str = "",
    options: PlanOptions | None = None,
    one_of_several: bool = False,
    read_config: Callable[[], bytes],
    peek: Callable[[Descriptor, int], bytes],
) -> Plan:
    """What the manifest becomes. `peek` is called from several threads.

    A subset that leaves nothing is an error, unless the plan is `one_of_several` that are merged. Raises
    NothingProduced, UnplacedLayers, NotATar, PathConflict, UnsafeTitle, or InvalidInput for options that do
    not fit; errors of `read_config` and `peek` pass through.
    """
    options = options or PlanOptions()
    subset.check(options.only)
    by_types = options.family is None and options.unpack != "never" and image.recognise(manifest)
    if by_types or options.family == image.NAME:
        return _image(manifest, descriptor, reference, options)
    view = View(manifest, read_config, peek, keep=options.unpack == "never")
    with about(reference, descriptor.digest):
        return _Artifact(view, reference, descriptor, options, one_of_several).plan()


def merge_plans(plans: Sequence[Plan]) -> Plan:
    """Several references as one directory, in the order given: the later file of one path wins (V17).

    Raises PathConflict where one reference has a file and another a directory of that name, NothingProduced
    where a subset leaves nothing of any of them.
    """
    if not plans:
        raise InvalidInput("there is nothing to merge", next_step="name at least one reference")
    if not any(plan.active() or plan.kind == "image" for plan in plans):
        unwanted = [_reported(step) for plan in plans for step in plan.steps]
        raise nothing_produced(" ".join(plan.reference for plan in plans), unwanted, next_step=_OTHER_SUBSET)
    sources: list[Source] = []
    steps: list[_Rooted] = []
    for plan in plans:
        steps += [_Rooted(replace(step, source=step.source + len(sources))) for step in plan.steps]
        sources += plan.sources
    return Plan(tuple(sources), _settled(steps))


def _image(manifest: Manifest, descriptor: Descriptor, reference: str, options: PlanOptions) -> Plan:
    if options.as_file:
        raise InvalidInput(
            "the layers of an image have no names", next_step="use --as-file with --unpack never"
        )
    rule = "image: a layer of an image, unpacked with whiteouts"
    source = Source(reference, image.NAME, "image", descriptor, manifest.config, options.only)
    return Plan(
        (source,), tuple(Step(i, layer, "layer", "", rule) for i, layer in enumerate(manifest.layers))
    )


class _Rooted(msgspec.Struct, frozen=True):
    """A step, and the directory its archive is known to fill."""

    step: Step
    root: str = ""


class _Artifact:
    """One artifact on its way to a plan; lives for one call of make_plan."""

    def __init__(
        self,
        view: View,
        reference: str,
        descriptor: Descriptor,
        options: PlanOptions,
        one_of_several: bool,
    ) -> None:
        self.view = view
        self.reference = reference
        self.descriptor = descriptor
        self.options = options
        self.one_of_several = one_of_several
        self.unplaced: list[Unplaced] = []
        self.by_index, self.spare_names = _as_file(options.as_file, len(view.manifest.layers))

    def plan(self) -> Plan:
        layers = self.view.manifest.layers
        for index, layer in enumerate(layers):
            with about(f"layer {index}", layer.digest):
                _check_names(layer)
        family = families.by_name(self.options.family) if self.options.family else self._recognise()
        steps: list[_Rooted] = []
        notes: list[str] = []
        if family.NAME == kitops.NAME:
            if kitfile := kitops.kitfile(self.view):
                steps.append(_Rooted(kitfile))
            if parent := kitops.parent(self.view):
                notes.append(f"the model is in another kit, {parent[:255]!a}: put that reference first")
        placements = [self._place(family, index) for index in range(len(layers))]
        self.view.look_at(layer for layer, p in zip(layers, placements, strict=True) if self._bytes_matter(p))
        steps += filter(None, (self._step(index, placement) for index, placement in enumerate(placements)))
        if self.spare_names:
            raise InvalidInput(
                f"--as-file {self.spare_names[0]!r} is left over: every layer already has a place",
                next_step="write INDEX=NAME to rename the layer of that number",
            )
        self._refuse_unplaced(steps)
        source = Source(
            self.reference,
            family.NAME,
            "artifact",
            self.descriptor,
            self.view.manifest.config,
            self.options.only,
            tuple(notes),
        )
        return Plan((source,), _settled(self._selected(steps)))

    def _what(self) -> str:
        return f"{self.reference or 'this artifact'} ({self.descriptor.digest})"

    def _recognise(self) -> Family:
        family = families.recognise(self.view.manifest)
        # Only when its bytes will be looked at anyway may a package be told from any other tar.
        if family.NAME == generic.NAME and not self.view.keep and kpt.is_package(self.view):
            return families.by_name(kpt.NAME)
        return family

    def _place(self, family: Family, index: int) -> Placement:
        """Rule 2, as far as no bytes are needed."""
        if index in self.by_index:
            return Placement(rule=_CALLER_NAMED, name=self.by_index[index], named=True)
        return (
            oras.annotated(self.view, index)
            or family.place(self.view, index)
            or generic.place(self.view, index)
        )

    def _bytes_matter(self, placement: Placement) -> bool:
        if self.view.keep or placement.named or placement.skip:
            return False
        return placement.archive or self.options.unpack == "always"

    def _step(self, index: int, placement: Placement) -> _Rooted | None:
        layer = self.view.layer(index)
        if placement.named:
            return _file(index, layer, placement)
        if self.view.keep:
            return self._kept(index, layer, placement)
        if placement.skip:
            return _Rooted(Step(index, layer, "skip", "", placement.rule))
        if placement.archive:
            return self._unpacked(index, layer, placement)
        if self.options.unpack == "always" and self._is_archive(layer):
            return _Rooted(Step(index, layer, "untar", "", "caller: every archive is unpacked"))
        return self._named(index, layer, placement, "it has no name")

    def _kept(self, index: int, layer: Descriptor, placement: Placement) -> _Rooted | None:
        """Under `unpack: never`: a file, whatever it is."""
        if placement.skip and placement.name is None:
            return _Rooted(Step(index, layer, "skip", "", placement.rule))
        name = layer.title or placement.name
        if name is None or name == ".":
            if self.spare_names:
                return self._named(index, layer, msgspec.structs.replace(placement, name=None), "")
            name = generic.stable_name(index, layer.media_type)
        return _file(
            index,
            layer,
            msgspec.structs.replace(placement, rule="caller: nothing is unpacked, a file", name=name),
        )

    def _unpacked(self, index: int, layer: Descriptor, placement: Placement) -> _Rooted | None:
        if self._is_archive(layer):
            prefix = check_relative(placement.prefix) if placement.prefix else ""
            if placement.packed:
                prefix = self._packed_prefix(layer, placement.packed)
            # A packed file's mode and time are in the archive itself.
            step = Step(
                index,
                layer,
                "untar",
                prefix,
                placement.rule,
                files=placement.files,
                diff_id=placement.diff_id,
            )
            return _Rooted(step, placement.packed)
        if placement.certain:
            lie = Unplaced(index, layer, f"its bytes are no tar, against the rule “{placement.rule}”")
            raise NotATar(str(lie), next_step="take it as a file with --unpack never, or ask the publisher")
        family = placement.rule.partition(":")[0]
        file = msgspec.structs.replace(
            placement, rule=f"{family}: its bytes are no tar; a file at its filepath"
        )
        return self._named(index, layer, file, "it has no name and its bytes are no tar")

    def _packed_prefix(self, layer: Descriptor, packed: str) -> str:
        archive = self.view.archive(layer)
        return oras.prefix(packed, archive.names[0] if archive and archive.names else "")

    def _named(self, index: int, layer: Descriptor, placement: Placement, reason: str) -> _Rooted | None:
        if placement.name is None and self.spare_names:
            placement = Placement(rule=_CALLER_NAMED, name=self.spare_names.pop(0))
        if placement.name is None:
            self.unplaced.append(Unplaced(index, layer, reason))
            return None
        return _file(index, layer, placement)

    def _is_archive(self, layer: Descriptor) -> bool:
        archive = self.view.archive(layer)
        # Zeros are a tar of nothing only where the type agrees; any file may begin with zeros.
        return archive is not None and (not archive.empty or "tar" in layer.media_type)

    def _refuse_unplaced(self, steps: Sequence[_Rooted]) -> None:
        if all(rooted.step.action == "skip" for rooted in steps):
            skipped = [_reported(rooted.step) for rooted in steps]
            raise nothing_produced(self._what(), sorted(self.unplaced + skipped, key=lambda u: u.index))
        if self.unplaced:
            raise UnplacedLayers(
                f"some layers of {self._what()} have no place: {listing(self.unplaced)}",
                next_step=HOW_TO_DECIDE,
            )

    def _selected(self, steps: Sequence[_Rooted]) -> Sequence[_Rooted]:
        only = self.options.only
        if not only:
            return steps
        selected = [
            rooted
            if _wanted(rooted.step, only)
            else _Rooted(_skipped(rooted.step, "caller: not in the subset"))
            for rooted in steps
        ]
        if not self.one_of_several and all(rooted.step.action == "skip" for rooted in selected):
            raise nothing_produced(
                self._what(),
                [_reported(rooted.step) for rooted in selected],
                next_step=_OTHER_SUBSET,
            )
        return selected


def _reported(step: Step) -> Unplaced:
    return Unplaced(step.index, step.layer, step.rule)


def _wanted(step: Step, only: Sequence[str]) -> bool:
    if step.action == "skip":
        return True
    if step.action == "file":
        return subset.matches(only, step.path)
    return step.files is None or any(subset.matches(only, known.path) for known in step.files)


def _skipped(step: Step, rule: str) -> Step:
    return replace(step, action="skip", rule=rule, files=None)


def _file(index: int, layer: Descriptor, placement: Placement) -> _Rooted:
    assert placement.name is not None
    path = check_relative(placement.name)
    return _Rooted(
        Step(index, layer, "file", path, placement.rule, mode=placement.mode, mtime_ns=placement.mtime_ns)
    )


def _check_names(layer: Descriptor) -> None:
    """Rule 4, for every name an artifact carries, used or not."""
    title = layer.title
    # The root of a packed directory is the one `.` that `oras push` writes.
    if title and not (title == "." and oras.packed_directory(layer)):
        check_relative(title)
    for name in (layer.name, *(layer.annotations.get(key) for key in modelpack.FILEPATHS)):
        if name:
            check_relative(name)


def _as_file(names: Iterable[str], layers: int) -> tuple[dict[int, str], list[str]]:
    by_index: dict[int, str] = {}
    spare: list[str] = []
    for name in names:
        number, equals, rest = name.partition("=")
        if not (equals and number.isascii() and number.isdigit()):
            spare.append(check_relative(name))
            continue
        # Longer than any layer number, and than what int() should be given.
        if len(number) > 9 or int(number) >= layers:
            raise InvalidInput(
                f"--as-file {name[:140]!r}: there is no such layer",
                next_step=f"the artifact has {layers} layers, from 0",
            )
        by_index[int(number)] = check_relative(rest)
    return by_index, spare


def _settled(steps: Sequence[_Rooted]) -> tuple[Step, ...]:
    """Rule 3: shadowed files become skips, and a path that is both file and directory is refused."""
    winner: dict[str, _Rooted] = {}
    directories: set[str] = set()
    for rooted in steps:
        step = rooted.step
        if step.action == "file":
            winner[step.path] = rooted
        elif step.action == "untar":
            # Ending in "/", a directory sorts right after a file of its name.
            directories |= {f"{path}/" for path in (step.path, rooted.root) if path}
    # With the separator first of all characters, whatever is below a path comes right after it.
    ordered = sorted({*winner, *directories}, key=lambda path: path.replace("/", "\0"))
    for path, following in pairwise(ordered):
        if following.startswith(f"{path}/"):
            raise PathConflict(
                f"{path!r} is a file and, for {following!r}, a directory",
                next_step="take one of the two with --only, or ask the publisher",
            )
    return tuple(_shadowed(rooted, winner) for rooted in steps)


def _shadowed(rooted: _Rooted, winner: dict[str, _Rooted]) -> Step:
    step = rooted.step
    if step.action != "file" or winner[step.path] is rooted:
        return step
    above = winner[step.path].step
    where = f"layer {above.index}" if above.source == step.source else f"reference {above.source + 1}"
    return _skipped(step, f"duplicate: {where} has the same path and wins")

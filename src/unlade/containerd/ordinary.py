"""Ordinary images by runtime handler: containerd pulls them, and here stands whom they were pulled for.

The row is the record that containerd's CRI plugin keeps by image ID; each (reference, handler) is a label on
it, as for artifacts (`records`). A name can lead to one image only, so tags belong to the default handler;
for any other, containerd is asked for the digest of the entry that suits the handler's guests (R3), which has
an ID of its own wherever the entry is another. Names by that digest mean the same to everybody and stay while
a tuple needs them. Blobs and snapshots are shared as containerd shares them: by reference from what is left.

An image without any tuple came without us (before the service, or by hand) and belongs to all handlers of the
host's platform. Changes are made under the lock that `ledger` uses; reading needs none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

from unlade.containerd import labels, leases, records
from unlade.containerd.connection import Containerd
from unlade.containerd.content import ContainerdStore
from unlade.containerd.errors import ContainerdError, Missing
from unlade.containerd.handlers import Handler
from unlade.containerd.images import ImageRecords, Row
from unlade.containerd.ledger import RECORDS_LOCK
from unlade.containerd.records import ImageTuple
from unlade.containerd.unpacking import LAYERS, Unpacker
from unlade.errors import InvalidInput
from unlade.kernel import failpoints
from unlade.model import Deadline, Digest, Manifest, Platform, Reference, decode_manifest, mediatypes
from unlade.store import NotInStore

# Layers of other systems are for those systems' own tools.
_UNPACKABLE: Final = "linux"


@dataclass(frozen=True, slots=True)
class OrdinaryImage:
    """A reference that is an ordinary image, resolved for a handler: what containerd is asked to pull.

    Without a manifest and config where only containerd could resolve it.
    """

    reference: Reference
    handler: Handler
    manifest: Digest | None = None
    config: Digest | None = None
    index: Digest | None = None
    platform: str = ""

    @property
    def name(self) -> str:
        """The one entry that is meant, by its digest; the reference where that is not known."""
        return f"{self.reference.name}@{self.manifest}" if self.manifest else str(self.reference)

    @property
    def foreign(self) -> bool:
        """Whether the handler's guests are others than the host, so that containerd cannot choose."""
        return self.handler.platform.normalised() != Platform.host()


@dataclass(frozen=True, slots=True)
class HeldImage:
    """An ordinary image of containerd's, and the tuples that lead to it; none when it came without us."""

    id: str
    target: str
    tuples: tuple[ImageTuple, ...]
    created: float

    @property
    def handlers(self) -> frozenset[str]:
        """The handlers it was pulled for."""
        return frozenset(one.handler for one in self.tuples)


class OrdinaryImages:
    """The ordinary images of one containerd; thread-safe. `default` is the handler that names belong to."""

    def __init__(self, containerd: Containerd, default: str) -> None:
        self._containerd = containerd
        self._default = default
        self._content = ContainerdStore(containerd)
        self._images = ImageRecords(containerd)
        self._unpacker = Unpacker(containerd)

    # Reading.

    def get(self, image_id: str) -> HeldImage | None:
        """An image by ID; None when there is none, or it is one of our artifacts."""
        row = self._images.get(image_id)
        return _held(row) if row is not None else None

    def find(self, name: str, handler: str) -> HeldImage | None:
        """The image that a reference leads to for a handler."""
        label = records.tuple_label(records.record_name(Reference.parse(name)), handler, "")
        found = [held for row in self._images.with_label(label) if (held := _held(row))]
        # Two for the moment in which a tag moves, or after a crash just then: the newer one is right.
        return max(found, key=lambda one: _at(one, label), default=None)

    def named(self, name: str) -> HeldImage | None:
        """An image that this reference leads to for some handler, whichever."""
        wanted = records.record_name(Reference.parse(name))
        leading = (one for one in self.recorded() if any(t.reference == wanted for t in one.tuples))
        return next(leading, None)

    def recorded(self) -> Sequence[HeldImage]:
        """Every image with tuples, by ID."""
        found = (_held(row) for row in self._images.with_label(labels.ORDINARY))
        return sorted((one for one in found if one is not None), key=lambda one: one.id)

    # Writing.

    def record(self, image_id: str, made: OrdinaryImage, *, deadline: Deadline) -> HeldImage:
        """Note that containerd pulled this for a handler; unpacks it where containerd would not have.

        Idempotent. A tuple that led to another image leads to this one afterwards.
        """
        manifest = made.manifest if image_id == str(made.config) else None
        if manifest and made.foreign and made.handler.platform.os == _UNPACKABLE:
            self._unpacker.unpack(manifest, made.handler.snapshotter, deadline=deadline)
        tuples = _tuples(made, manifest)
        with self._locked():
            held = self.get(image_id)
            before = {one.label: one for one in held.tuples} if held else {}
            new = [one for one in tuples if one.label not in before or not one.same_as(before[one.label])]
            if new:
                row = self._images.label(image_id, {labels.ORDINARY: "1", **records.encode(new)})
                held = _held(row) if row is not None else None
                failpoints.reach("containerd.ordinary.recorded")
            if manifest and made.foreign:
                if made.index:
                    self._content.label(manifest, {labels.ENTRY_OF: str(made.index)})
                self._unkeep(image_id, made.handler.snapshotter, before.values())
            moved = {one.label: "" for one in new}
            for row in self._images.with_any(moved) if moved else ():
                if row.name != image_id:
                    # The tag was moved: the tuple leads elsewhere now.
                    self._images.label(row.name, {key: "" for key in moved if key in row.labels})
                    failpoints.reach("containerd.ordinary.moved")
        if held is None:
            raise ContainerdError(
                f"{made.reference} was removed while it was pulled", next_step="pull it again", retryable=True
            )
        return held

    def remove(self, image_id: str, handler: str, names: Collection[str]) -> list[str] | None:
        """Remove a handler's tuples; with the last one, the image and its `names`. Idempotent.

        The records that are gone; None when the handler has no tuple there. An image without any is
        removed whole. What nothing needs any more is gone when this returns.
        """
        with self._locked():
            held = self.get(image_id)
            if held is None:
                return None
            gone = [one for one in held.tuples if one.handler == handler]
            left = [one for one in held.tuples if one.handler != handler]
            if held.tuples and not gone:
                return None
            kept = {one.reference for one in left if self._keeps_name(one)}
            leading = {one.reference for one in gone}
            doomed = [name for name in names if not left or (name in leading and name not in kept)]
            for name in doomed:
                self._images.delete(name)
                failpoints.reach("containerd.ordinary.unnamed")
            if not left:
                self._let_go(held)
                self._images.delete(image_id, sync=True)
                failpoints.reach("containerd.ordinary.removed")
                return [*doomed, image_id]
            self._images.label(image_id, {one.label: "" for one in gone})
            failpoints.reach("containerd.ordinary.released")
            self._release_snapshots(image_id, gone, left)
            return doomed

    def removed(self, held: HeldImage) -> None:
        """containerd removed this image by itself: have it collected, whatever index it came from."""
        with self._locked():
            if self.get(held.id) is None and self._let_go(held):
                leases.collect(self._containerd)

    def settle(self, *, dry_run: bool = False) -> list[str]:
        """Let go of guests' entries whose image is gone: removed while nobody was there to do it.

        The manifests that nothing keeps any more; containerd's next collection takes them.
        """
        with self._locked():
            loose = []
            for info in list(self._content.with_label(labels.ENTRY_OF)):
                manifest, index = Digest.parse(info.digest), info.labels[labels.ENTRY_OF]
                if self._images.get(self._config(manifest)) is not None:
                    continue
                if dry_run or self._take_off(index, info.digest):
                    loose.append(info.digest)
            return sorted(loose)

    def _let_go(self, held: HeldImage) -> bool:
        """Take an image's entries off the indexes they came from: those may stay for another platform."""
        entries = {(one.index, one.manifest) for one in held.tuples if one.index}
        taken = [self._take_off(index, manifest) for index, manifest in entries]
        return any(taken)

    def _take_off(self, index: str, manifest: str) -> bool:
        """Have an index keep one entry less; False when it did not keep it.

        containerd has an index keep all of its entries that are there, wanted or not; it writes those
        marks anew with each pull.
        """
        info = self._content.info(Digest.parse(index))
        marks = [key for key, value in info.labels.items() if value == manifest] if info else []
        if not marks:
            return False
        try:
            self._content.label(Digest.parse(index), dict.fromkeys(marks, ""))
        except Missing:
            return False  # collected meanwhile
        return True

    def _config(self, manifest: Digest) -> str:
        """The ID of the image that a manifest is of; empty when it cannot be read."""
        try:
            document = decode_manifest(self._content.read(manifest), content_type=None)
        except (NotInStore, InvalidInput):
            return ""
        return str(document.config.digest) if isinstance(document, Manifest) else ""

    def _locked(self) -> AbstractContextManager[None]:
        return self._containerd.locks.hold(RECORDS_LOCK)

    def _keeps_name(self, one: ImageTuple) -> bool:
        pinned = bool(one.manifest) and one.reference.endswith(f"@{one.manifest}")
        return one.handler == self._default or pinned

    def _unkeep(self, image_id: str, snapshotter: str, others: Iterable[ImageTuple]) -> None:
        """Have snapshots collected that containerd made for its host, and no handler's guests look at."""
        info = self._content.info(Digest.parse(image_id))
        needed = {f"{labels.GC_SNAPSHOT}.{name}" for one in others for name in one.snapshotters}
        needed.add(f"{labels.GC_SNAPSHOT}.{snapshotter}")
        kept = [key for key in info.labels if key.startswith(f"{labels.GC_SNAPSHOT}.")] if info else []
        if unneeded := set(kept) - needed:
            with contextlib.suppress(Missing):
                self._content.label(Digest.parse(image_id), dict.fromkeys(unneeded, ""))

    def _release_snapshots(
        self, image_id: str, gone: Sequence[ImageTuple], left: Sequence[ImageTuple]
    ) -> None:
        needed = {name for one in left for name in one.snapshotters}
        unneeded = {name for one in gone for name in one.snapshotters} - needed
        if not unneeded:
            return
        try:
            changes = {f"{labels.GC_SNAPSHOT}.{name}": "" for name in unneeded}
            self._content.label(Digest.parse(image_id), changes)
        except Missing:
            return  # removed by somebody else meanwhile
        leases.collect(self._containerd)


def manifest_is_image(manifest: Manifest) -> bool:
    """An image's config, and at least one layer that containerd unpacks, or none at all.

    Milder than the planner: layers that only a plug-in of containerd's understands, encrypted ones or
    those of lazy snapshotters, are containerd's business.
    """
    layers = [layer.media_type for layer in manifest.layers]
    return manifest.config.media_type in mediatypes.IMAGE_CONFIGS and (
        not layers or any(layer.startswith(LAYERS) for layer in layers)
    )


def only_image_layers(manifest: Manifest) -> bool:
    """An image's config and nothing but layers of images, those of plug-ins included: surely an image."""
    return manifest.config.media_type in mediatypes.IMAGE_CONFIGS and all(
        layer.media_type.startswith(LAYERS) for layer in manifest.layers
    )


def _tuples(made: OrdinaryImage, manifest: Digest | None) -> Sequence[ImageTuple]:
    names = [records.record_name(made.reference)]
    names += records.pinned_names(made.reference, manifest, made.index if manifest else None)
    return records.stamped(
        ImageTuple(
            reference=name,
            handler=made.handler.name,
            snapshotters=(made.handler.snapshotter,),
            manifest=str(manifest) if manifest else "",
            index=str(made.index) if manifest and made.index else "",
            platform=made.platform,
        )
        for name in dict.fromkeys(names)
    )


def _held(row: Row) -> HeldImage | None:
    if labels.TREE in row.labels or not records.is_id(row.name):
        return None
    return HeldImage(row.name, row.target, records.tuples_of(row), row.created)


def _at(image: HeldImage, label: str) -> float:
    return max((one.at for one in image.tuples if one.label == label), default=0.0)

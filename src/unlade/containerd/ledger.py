"""The records of artifacts in containerd: written, read back, removed, put in order after a crash.

The record by ID comes first and makes the artifact exist; names follow (see `records` for which tuples have
names). Removing goes the other way. So after a crash an artifact may lack names, and is then not whole; it
never has names without a record, unless somebody removed that one by hand. `settle` removes what is not
whole, and takes back names that lead elsewhere by now. Changes are made under a lock that all processes with
the same state directory share, a few calls at a time; reading needs none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Final

from unlade.containerd import labels, leases, records
from unlade.containerd.connection import Containerd
from unlade.containerd.content import ContainerdStore
from unlade.containerd.errors import Missing
from unlade.containerd.images import ImageRecords, Row
from unlade.containerd.naming import diff_id, snapshot_name
from unlade.containerd.records import ArtifactImage, ImageTuple
from unlade.containerd.synthetic import SyntheticImage, synthesize
from unlade.delivery import Delivered
from unlade.errors import StoreError
from unlade.kernel import failpoints
from unlade.model import Digest, Platform
from unlade.store import Lease

# Whoever changes tuples, of artifacts or of ordinary images, holds this.
RECORDS_LOCK: Final = "records"


class RemovedMeanwhile(StoreError):
    """A record that was just written is gone: somebody removes images."""

    code = "removed-meanwhile"
    retryable = True


class Ledger:
    """The artifacts that containerd's records describe; thread-safe.

    `default` is the handler that names belong to.
    """

    def __init__(self, containerd: Containerd, default: str) -> None:
        self._containerd = containerd
        self._default = default
        self._content = ContainerdStore(containerd)
        self._images = ImageRecords(containerd)
        self._host = Platform.host()

    # Reading.

    def by_id(self, image_id: str) -> ArtifactImage | None:
        """The artifact of this image ID; None when there is none of ours."""
        row = self._images.get(image_id)
        return records.decode(row) if row is not None else None

    def by_tree(self, tree: Digest) -> ArtifactImage | None:
        """The artifact that stands for a tree; None when no record keeps it."""
        # Its size is no part of its ID.
        return self.by_id(self._image_of(tree, 0).id)

    def by_tuple(self, name: str, handler: str, options: str) -> ArtifactImage | None:
        """The artifact that a reference leads to for this handler and these options."""
        label = records.tuple_label(name, handler, options)
        found = [records.decode(row) for row in self._images.with_label(label)]
        # Two for the moment in which a tag moves, or after a crash just then: the newer one is right.
        image = max((one for one in found if one is not None), key=lambda one: _at(one, label), default=None)
        if image is not None and handler == self._default and not options:
            # containerd may have moved the name to an ordinary image while we were away.
            row = self._images.get(name)
            if row is None or row.target != image.target:
                return None
        return image

    def all(self) -> list[ArtifactImage]:
        """Every artifact, by ID."""
        found = (records.decode(row) for row in self._images.with_label(labels.TREE))
        return sorted((image for image in found if image is not None), key=lambda image: image.id)

    def is_complete(self, image: ArtifactImage, tuples: Sequence[ImageTuple]) -> bool:
        """Whether all these tuples lead to the image already, with their names."""
        known = {one.label: one for one in image.tuples}
        return all(
            one.label in known
            and one.same_as(known[one.label])
            and (not self._has_name(one) or self._names_it(one.reference, image.id, image.target))
            for one in tuples
        )

    # Writing.

    def write(
        self,
        done: Delivered,
        tuples: Sequence[ImageTuple],
        *,
        snapshotters: Sequence[str],
        lease: Lease,
    ) -> ArtifactImage:
        """Record the image of a delivered tree and what leads to it; its snapshots are held by the lease.

        Idempotent. A tuple that led to another image leads to this one afterwards.
        """
        assert done.tree is not None
        made = self._image_of(done.tree, done.size)
        snapshots = dict.fromkeys(snapshotters, snapshot_name(self._containerd, done.tree))
        facts = {
            labels.TREE: str(done.tree),
            labels.FAMILY: done.plan.family,
            labels.SIZE: str(done.size),
            labels.ENTRIES: str(done.entries),
        }
        with self._locked():
            self._put_content(made, snapshots, lease)
            self._put_id(made, tuples, facts)
            for one in tuples:
                if self._has_name(one) and not self._names_it(
                    one.reference, made.id, str(made.manifest.digest)
                ):
                    self._images.put(one.reference, made.manifest, {labels.IMAGE: made.id})
                    failpoints.reach("containerd.record.name")
            image = self.by_id(made.id)
        if image is None:
            raise RemovedMeanwhile(
                f"the record of {tuples[0].reference} was removed while it was made",
                next_step="pull it again",
            )
        return image

    def remove(self, image_id: str, handler: str | None) -> bool:
        """Remove a handler's tuples, or all of them; with the last one, the image. False: nothing to do."""
        with self._locked():
            image = self.by_id(image_id)
            if image is None:
                return False
            gone = [one for one in image.tuples if handler is None or one.handler == handler]
            if handler is not None and not gone:
                return False
            self._remove(image, gone)
            return True

    def settle(self, *, dry_run: bool = False) -> tuple[list[str], list[str]]:
        """Remove what a crash left half done; the IDs of images and the names that were removed."""
        with self._locked():
            names = {row.name: row for row in self._images.with_label(labels.IMAGE)}
            images = self.all()
            newest = _newest(images)
            dropped, kept = [], {}
            for image in images:
                whole = tuple(
                    one
                    for one in image.tuples
                    if newest[one.label] == image.id and self._is_whole(one, image, names)
                )
                if not whole:
                    if not dry_run:
                        self._remove(image, image.tuples)
                    dropped.append(image.id)
                    continue
                stale = {one.label: "" for one in image.tuples if one not in whole}
                if stale and not dry_run:
                    self._images.label(image.id, stale)
                kept[image.id] = replace(image, tuples=whole)
            loose = [name for name, row in names.items() if self._is_loose(row, kept)]
            if not dry_run:
                loose = [name for name in loose if self._drop(names[name])]
        return dropped, sorted(loose)

    def _locked(self) -> AbstractContextManager[None]:
        return self._containerd.locks.hold(RECORDS_LOCK)

    def _image_of(self, tree: Digest, size: int) -> SyntheticImage:
        return synthesize(tree, diff_id(self._containerd.salt(), tree), size=size, host=self._host)

    def _put_content(self, made: SyntheticImage, snapshots: Mapping[str, str], lease: Lease) -> None:
        keeps = {f"{labels.GC_SNAPSHOT}.{snapshotter}": name for snapshotter, name in snapshots.items()}
        self._content.put(made.config, made.config_bytes, lease=lease, extra_labels=keeps)
        failpoints.reach("containerd.record.config")
        self._content.put(made.manifest, made.manifest_bytes, lease=lease)
        failpoints.reach("containerd.record.manifest")

    def _put_id(self, made: SyntheticImage, tuples: Sequence[ImageTuple], facts: Mapping[str, str]) -> None:
        known = self.by_id(made.id)
        before = {one.label: one for one in known.tuples} if known else {}
        new = [one for one in tuples if one.label not in before or not one.same_as(before[one.label])]
        if known is not None and not new and known.target == str(made.manifest.digest):
            return
        self._images.put(made.id, made.manifest, {**facts, **records.encode(new)})
        failpoints.reach("containerd.record.id")
        for one in new:
            # The tag was moved: the tuple leads elsewhere now. The old image keeps its names by digest.
            for row in self._images.with_label(one.label):
                if row.name != made.id:
                    self._images.label(row.name, {one.label: ""})
                    failpoints.reach("containerd.record.moved")

    def _names_it(self, name: str, image_id: str, target: str) -> bool:
        row = self._images.get(name)
        return row is not None and row.target == target and row.labels.get(labels.IMAGE) == image_id

    # Removing and settling.

    def _remove(self, image: ArtifactImage, gone: Sequence[ImageTuple]) -> None:
        left = [one for one in image.tuples if one not in gone]
        named = {one.reference for one in left if self._has_name(one)}
        for row in self._images.with_label(labels.IMAGE, image.id):
            if row.name not in named:
                self._take_back(row, row.target == image.target)
                failpoints.reach("containerd.remove.name")
        if not left:
            self._images.delete(image.id, sync=True)
            failpoints.reach("containerd.remove.id")
            return
        self._images.label(image.id, {one.label: "" for one in gone})
        failpoints.reach("containerd.remove.tuples")
        unneeded = image.snapshotters - {name for one in left for name in one.snapshotters}
        if unneeded:
            try:
                self._content.label(
                    Digest.parse(image.id), {f"{labels.GC_SNAPSHOT}.{name}": "" for name in unneeded}
                )
            except Missing:
                return  # removed by somebody else meanwhile
            leases.collect(self._containerd)

    def _take_back(self, row: Row, ours: bool) -> bool:
        """Remove a name that leads to our image; from one that containerd moved elsewhere, only our mark."""
        if ours:
            return self._images.delete(row.name)
        self._images.label(row.name, {labels.IMAGE: ""})
        return True

    def _has_name(self, one: ImageTuple) -> bool:
        return one.handler == self._default and not one.options

    def _is_whole(self, one: ImageTuple, image: ArtifactImage, names: Mapping[str, Row]) -> bool:
        if not self._has_name(one):
            return True
        row = names.get(one.reference)
        return row is not None and row.target == image.target

    def _is_loose(self, row: Row, kept: Mapping[str, ArtifactImage]) -> bool:
        image = kept.get(row.labels[labels.IMAGE])
        named = {one.reference for one in image.tuples if self._has_name(one)} if image else set()
        return image is None or row.target != image.target or row.name not in named

    def _drop(self, row: Row) -> bool:
        info = self._content.info(Digest.parse(row.target))
        # A manifest that keeps this config alive is the synthetic one; one that is gone leads nowhere.
        return self._take_back(row, info is None or row.labels[labels.IMAGE] in info.labels.values())


def _at(image: ArtifactImage, label: str) -> float:
    return max((one.at for one in image.tuples if one.label == label), default=0.0)


def _newest(images: Sequence[ArtifactImage]) -> dict[str, str]:
    """The image that each tuple's label leads to, the newer one where two claim it."""
    newest: dict[str, tuple[float, str]] = {}
    for image in images:
        for one in image.tuples:
            newest[one.label] = max(newest.get(one.label, (-1.0, "")), (one.at, image.id))
    return {label: image_id for label, (_, image_id) in newest.items()}

"""Artifacts on a node: pulled into containerd so that a stock kubelet mounts them, found again, removed.

`pull` asks the one use case for a tree (delivery), kept as a snapshot under a lease; then writes a synthetic
config and manifest that name the snapshot, and the records that lead there: by ID first, which makes the
artifact exist, then by name. Each step may be the last one before a crash: what is not yet under a record
is under a lease that `recover` ends, and a record without its names is not whole and is removed there.
Everything that is known is read back from containerd; nothing is kept in this process.

Records are changed under a lock that all processes with the same state directory share, a few calls at a
time. Cost: a hit is one request to the registry (with the caller's credentials, V5) and about eight calls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, Self

from unlade.containerd import labels, leases, records
from unlade.containerd.connection import Containerd
from unlade.containerd.content import ContainerdStore
from unlade.containerd.errors import Missing
from unlade.containerd.handlers import Handler, Handlers, PullOptions
from unlade.containerd.images import ImageRecords, Row
from unlade.containerd.naming import diff_id
from unlade.containerd.records import ArtifactImage, ImageTuple
from unlade.containerd.snapshots import ContainerdTrees
from unlade.containerd.synthetic import SyntheticImage, synthesize
from unlade.delivery import AsTree, Delivered, Engine, Request
from unlade.errors import StoreError
from unlade.kernel import failpoints
from unlade.model import Deadline, Digest, Platform, Reference
from unlade.registry import CredentialSource, Registry
from unlade.store import Lease, Problem
from unlade.transfer import Progress, silent

_RECORDS_LOCK: Final = "records"


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `recover` removed: leases of dead processes, images and names that were not whole."""

    leases: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


class Artifacts:
    """The artifacts of one containerd; thread-safe. A context manager, or call `close`.

    The connection and the registry client belong to the caller.
    """

    def __init__(
        self,
        containerd: Containerd,
        registry: Registry,
        handlers: Handlers,
        *,
        jobs: int | None = None,
        connections: int = 1,
    ) -> None:
        self.containerd = containerd
        self.handlers = handlers
        self._registry = registry
        self._content = ContainerdStore(containerd)
        self._images = ImageRecords(containerd)
        self._host = Platform.host()
        self._trees = {name: ContainerdTrees(containerd, name) for name in handlers.snapshotters()}
        if jobs is None:
            self._engine = Engine(registry, connections=connections)
        else:
            self._engine = Engine(registry, jobs=jobs, connections=connections)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; idempotent."""
        self._engine.close()

    def pull(
        self,
        reference: Reference | str,
        *,
        handler: str = "",
        credentials: CredentialSource | None = None,
        options: PullOptions | None = None,
        deadline: Deadline | None = None,
        progress: Progress = silent,
    ) -> ArtifactImage | None:
        """Make an artifact mountable; None when it is an ordinary image, which is containerd's to pull.

        The registry is asked with these credentials even when the content is here (V5). Raises what
        `Engine.deliver` raises, and UnknownHandler. Nothing of a failed pull is left.
        """
        options = options or PullOptions()
        deadline = deadline or Deadline.never()
        wanted = reference if isinstance(reference, Reference) else Reference.parse(reference)
        target = self.handlers.resolve(handler)
        registry = self._registry.with_credentials(credentials) if credentials else self._registry
        trees = self._trees[target.snapshotter]
        engine = self._engine.using(registry=registry, trees=trees)
        request = _request(wanted, target, options)
        plan, found = engine.plan(request, deadline=deadline)
        if plan.kind == "image" and options.plain:
            return None
        purpose = f"pull {wanted}"
        with leases.lease(self.containerd, purpose, snapshotter=target.snapshotter) as lease:
            request = replace(request, destination=AsTree(lease))
            done = engine.carry_out(plan, found, request, deadline=deadline, progress=progress)
            failpoints.reach("containerd.pull.delivered")
            return self._record(wanted, target, options, done, trees, lease)

    def find(
        self, name_or_id: str, *, handler: str | None = None, options: PullOptions | None = None
    ) -> ArtifactImage | None:
        """The artifact that a name (with handler and options) or an image ID leads to; None: not ours.

        Without a handler, a name is looked up for the default one and an ID for any.
        """
        if records.is_id(name_or_id):
            row = self._images.get(name_or_id)
            image = records.decode(row) if row is not None else None
            if image is None or (handler is not None and self._name(handler) not in image.handlers):
                return None
            return image
        name = records.record_name(Reference.parse(name_or_id))
        target = self.handlers.resolve(handler or "")
        fingerprint = (options or PullOptions()).fingerprint()
        image = self._by_tuple(records.tuple_label(name, target.name, fingerprint))
        if image is not None and target.name == self.handlers.default and not fingerprint:
            # containerd may have moved the name to an ordinary image while we were away.
            row = self._images.get(name)
            if row is None or row.target != image.target:
                return None
        return image

    def list(self) -> Sequence[ArtifactImage]:
        """Every artifact, one per image ID, by ID: adding up their sizes counts no byte twice."""
        found = (records.decode(row) for row in self._images.with_label(labels.TREE))
        return sorted((image for image in found if image is not None), key=lambda image: image.id)

    def remove(self, name_or_id: str, *, handler: str | None = None) -> bool:
        """Remove the image that a name or ID leads to, as the CRI's RemoveImage does; False: not ours.

        With a handler, its tuples alone (R4): the image stays while another tuple leads to it. What
        nothing needs any more is gone when this returns. Idempotent.
        """
        with self.containerd.locks.hold(_RECORDS_LOCK):
            image = self._removable(name_or_id, handler)
            if image is None:
                return False
            gone = [one for one in image.tuples if handler is None or one.handler == self._name(handler)]
            if handler is not None and not gone:
                return False
            self._remove(image, gone)
            return True

    def recover(self) -> Recovered:
        """Remove what dead processes left: leases, and images and names that are not whole. Idempotent."""
        with self.containerd.locks.hold(_RECORDS_LOCK):
            ended = leases.end_dead(self.containerd)
            names = {row.name: row for row in self._images.with_label(labels.IMAGE)}
            dropped = []
            kept: dict[str, ArtifactImage] = {}
            newest = self._newest_tuples()
            for image in self.list():
                whole = [
                    one for one in image.tuples
                    if newest[one.label] == image.id and self._is_whole(one, image, names)
                ]  # fmt: skip
                if not whole:
                    self._remove(image, list(image.tuples))
                    dropped.append(image.id)
                    continue
                stale = {one.label: "" for one in image.tuples if one not in whole}
                if stale:
                    self._images.label(image.id, stale)
                kept[image.id] = replace(image, tuples=tuple(whole))
            loose = [row for row in names.values() if self._drop_if_loose(row, kept)]
        if ended or dropped or loose:
            self.collect()
        return Recovered(tuple(ended), tuple(dropped), tuple(sorted(row.name for row in loose)))

    def fsck(self, *, repair: bool = False, deadline: Deadline | None = None) -> Sequence[Problem]:
        """Every artifact's tree against the file list that was written with it.

        With `repair`, damaged artifacts are removed: pulling them again brings them back. One that a pod
        has mounted stays on the disk as it is until the pod ends.
        """
        problems = []
        for image in self.list():
            for name in sorted(image.snapshotters & self._trees.keys()):
                wrong = self._trees[name].check(image.tree, deadline=deadline or Deadline.never())
                if wrong is None or self.find(image.id) is None:
                    continue  # removed while we looked: gone is not damaged
                repaired = repair and self.remove(image.id)
                step = "pull it again" if repaired else "remove it and pull it again"
                shown = ", ".join(image.repo_tags or image.repo_digests or (image.id,))
                problems.append(Problem("tree-damaged", shown, f"{wrong}; {step}", repaired))
                break
        return problems

    def collect(self) -> None:
        """Have containerd collect garbage now, and wait for it."""
        leases.collect(self.containerd)

    # Recording.

    def _record(
        self,
        reference: Reference,
        handler: Handler,
        options: PullOptions,
        done: Delivered,
        trees: ContainerdTrees,
        lease: Lease,
    ) -> ArtifactImage:
        assert done.tree is not None
        made = synthesize(
            done.tree, diff_id(self.containerd.salt(), done.tree), size=done.size, host=self._host
        )
        tuples = _tuples(reference, handler, options, done)
        with self.containerd.locks.hold(_RECORDS_LOCK):
            row = self._images.get(made.id)
            known = records.decode(row) if row is not None else None
            self._put_content(made, trees, done.tree, lease)
            self._put_id(made, known, tuples, done)
            if handler.name == self.handlers.default and options.plain:
                for one in tuples:
                    self._put_name(one.reference, made)
            row = self._images.get(made.id)
        image = records.decode(row) if row is not None else None
        if image is None:
            raise StoreError(
                f"the record of {reference} was removed while it was made", next_step="pull it again"
            )
        return replace(image, cached=done.cached)

    def _put_content(self, made: SyntheticImage, trees: ContainerdTrees, tree: Digest, lease: Lease) -> None:
        keeps = {f"{labels.GC_SNAPSHOT}.{trees.snapshotter}": trees.name(tree)}
        self._content.put(made.config, made.config_bytes, lease=lease, extra_labels=keeps)
        failpoints.reach("containerd.record.config")
        self._content.put(made.manifest, made.manifest_bytes, lease=lease)
        failpoints.reach("containerd.record.manifest")

    def _put_id(
        self, made: SyntheticImage, known: ArtifactImage | None, tuples: Sequence[ImageTuple], done: Delivered
    ) -> None:
        before = {one.label: one for one in known.tuples} if known else {}
        new = [one for one in tuples if one.label not in before or not one.same_as(before[one.label])]
        if known is not None and not new and known.target == str(made.manifest.digest):
            return
        facts = {
            labels.TREE: str(done.tree),
            labels.FAMILY: done.plan.family,
            labels.SIZE: str(done.size),
            labels.ENTRIES: str(done.entries),
        }
        self._images.put(made.id, made.manifest, {**facts, **records.encode(new)})
        failpoints.reach("containerd.record.id")
        for one in new:
            # The tag was moved: the tuple leads elsewhere now. The old image keeps its names by digest.
            for row in self._images.with_label(one.label):
                if row.name != made.id:
                    self._images.label(row.name, {one.label: ""})
                    failpoints.reach("containerd.record.moved")

    def _put_name(self, name: str, made: SyntheticImage) -> None:
        row = self._images.get(name)
        if row and row.target == str(made.manifest.digest) and row.labels.get(labels.IMAGE) == made.id:
            return
        self._images.put(name, made.manifest, {labels.IMAGE: made.id})
        failpoints.reach("containerd.record.name")

    # Finding.

    def _by_tuple(self, label: str) -> ArtifactImage | None:
        found = [records.decode(row) for row in self._images.with_label(label)]
        images = [image for image in found if image is not None]
        # Two for the moment in which a tag moves, or after a crash just then: the newer one is right.
        return max(images, key=lambda image: _at(image, label), default=None)

    def _removable(self, name_or_id: str, handler: str | None) -> ArtifactImage | None:
        if records.is_id(name_or_id):
            return self.find(name_or_id)
        found = self.find(name_or_id, handler=handler)
        if found is not None or handler is not None:
            return found
        name = records.record_name(Reference.parse(name_or_id))
        # No tuple of the default handler: any other that goes by this name.
        return next((image for image in self.list() if name in {one.reference for one in image.tuples}), None)

    def _name(self, handler: str) -> str:
        return self.handlers.resolve(handler).name

    # Removing.

    def _remove(self, image: ArtifactImage, gone: Sequence[ImageTuple]) -> None:
        left = [one for one in image.tuples if one not in gone]
        named = {one.reference for one in left if self._has_name(one)}
        for row in self._images.with_label(labels.IMAGE, image.id):
            if row.name not in named:
                self._drop_name(row, image)
                failpoints.reach("containerd.remove.name")
        if not left:
            self._images.delete(image.id, sync=True)
            failpoints.reach("containerd.remove.id")
            return
        self._images.label(image.id, {one.label: "" for one in gone})
        failpoints.reach("containerd.remove.tuples")
        unneeded = image.snapshotters - {one.snapshotter for one in left}
        if unneeded:
            try:
                self._content.label(
                    Digest.parse(image.id), {f"{labels.GC_SNAPSHOT}.{name}": "" for name in unneeded}
                )
            except Missing:
                return  # removed by somebody else meanwhile
            self.collect()

    def _drop_name(self, row: Row, image: ArtifactImage) -> None:
        if row.target == image.target:
            self._images.delete(row.name)
        else:
            # containerd moved the name to an ordinary image: that one stays.
            self._images.label(row.name, {labels.IMAGE: ""})

    # Recovering.

    def _has_name(self, one: ImageTuple) -> bool:
        return one.handler == self.handlers.default and not one.options

    def _is_whole(self, one: ImageTuple, image: ArtifactImage, names: dict[str, Row]) -> bool:
        if not self._has_name(one):
            return True
        row = names.get(one.reference)
        return row is not None and row.target == image.target

    def _newest_tuples(self) -> dict[str, str]:
        """The image that each tuple's label leads to, the newer one where two claim it."""
        newest: dict[str, tuple[float, str]] = {}
        for image in self.list():
            for one in image.tuples:
                newest[one.label] = max(newest.get(one.label, (-1.0, "")), (one.at, image.id))
        return {label: image_id for label, (_, image_id) in newest.items()}

    def _drop_if_loose(self, row: Row, kept: dict[str, ArtifactImage]) -> bool:
        """Remove a name that leads to none of our images as it should, or only our mark from it."""
        image_id = row.labels[labels.IMAGE]
        image = kept.get(image_id)
        named = {one.reference for one in image.tuples if self._has_name(one)} if image else set()
        if image is not None and row.target == image.target and row.name in named:
            return False
        if self._leads_to(row, image_id):
            return self._images.delete(row.name)
        self._images.label(row.name, {labels.IMAGE: ""})
        return True

    def _leads_to(self, row: Row, image_id: str) -> bool:
        """Whether a record's manifest is the synthetic one of this image, or is gone."""
        info = self._content.info(Digest.parse(row.target))
        return info is None or image_id in info.labels.values()


def _at(image: ArtifactImage, label: str) -> float:
    return max((one.at for one in image.tuples if one.label == label), default=0.0)


def _request(reference: Reference, handler: Handler, options: PullOptions) -> Request:
    return Request(
        references=(reference,),
        destination=AsTree(),
        platform=handler.platform,
        handler=handler.name,
        pull="always",
        unpack=options.unpack,
        only=options.only,
        as_file=options.as_file,
        family=options.family,
        referrer=options.referrer,
        artifact_type=options.artifact_type,
        annotations=options.annotations,
    )


def _tuples(
    reference: Reference, handler: Handler, options: PullOptions, done: Delivered
) -> list[ImageTuple]:
    """What a pull establishes: the reference as given, and the same content by its digests."""
    resolved = done.resolved[0]
    names = [records.record_name(reference)]
    if not options.referrer:
        names += records.pinned_names(reference, resolved.digest, resolved.index)
    return [
        ImageTuple(
            reference=name,
            handler=handler.name,
            options=options.fingerprint(),
            snapshotter=handler.snapshotter,
            manifest=str(resolved.digest),
            index=str(resolved.index) if resolved.index else "",
            platform=str(resolved.platform) if resolved.platform else "",
            at=time.time(),
        )
        for name in dict.fromkeys(names)
    ]

"""Artifacts on a node: pulled into containerd so that a stock kubelet mounts them, found again, removed.

`pull` asks the one use case for a tree (delivery), kept as a snapshot under a lease, then records a synthetic
image that leads to it (`ledger`). Each step may be the last one before a crash: what is not yet under a
record is under a lease that `recover` ends. Everything that is known is read back from containerd; nothing is
kept in this process. Pulls of one tree are made one after another, so that a hundred pods cause one download
and ninety-nine looks.

Cost: a pull that finds everything there is one request to the registry, made with the caller's credentials
(V5), and about five calls that read. A tree that came from another repository is given out only after this
one served its bytes too. Memory does not grow with content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import msgspec

from unlade.containerd import leases, records
from unlade.containerd.connection import Containerd
from unlade.containerd.handlers import Handler, Handlers, PullOptions
from unlade.containerd.ledger import Ledger
from unlade.containerd.ordinary import OrdinaryImage, manifest_is_image, only_image_layers
from unlade.containerd.records import ArtifactImage, ImageTuple
from unlade.containerd.snapshots import ContainerdTrees
from unlade.delivery import AsTree, Engine, Found, Request
from unlade.errors import InvalidInput
from unlade.kernel import failpoints
from unlade.model import Deadline, Descriptor, Digest, Reference
from unlade.planning import Plan
from unlade.registry import CredentialSource, Registry
from unlade.store import Problem
from unlade.transfer import Progress, ProgressEvent, silent


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `recover` removed: leases of dead processes, images and names that were not whole."""

    leases: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Pull:
    """One pull that is known to be of an artifact: what is wanted, where, and what it was resolved to."""

    engine: Engine
    request: Request
    plan: Plan
    found: Sequence[Found]
    tree: Digest
    tuples: Sequence[ImageTuple]
    deadline: Deadline
    progress: Progress


class Artifacts:
    """The artifacts of one containerd; thread-safe. A context manager, or call `close`.

    `everywhere` puts each tree into the snapshotters of all handlers of its platform: for kubelets that do
    not say which handler they pull for (the gate RuntimeClassInImageCriApi is off) on nodes whose handlers
    have snapshotters of their own. The connection and the registry client belong to the caller.
    """

    def __init__(
        self,
        containerd: Containerd,
        registry: Registry,
        handlers: Handlers,
        *,
        jobs: int | None = None,
        connections: int = 1,
        everywhere: bool = False,
    ) -> None:
        self.containerd = containerd
        self.handlers = handlers
        self._everywhere = everywhere
        self._registry = registry
        self._ledger = Ledger(containerd, handlers.default)
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
    ) -> ArtifactImage | OrdinaryImage:
        """Make an artifact mountable; an ordinary image is only resolved: it is containerd's to pull.

        The registry is asked with these credentials even when the content is here (V5). Raises what
        `Engine.deliver` raises, and UnknownHandler. Nothing of a failed pull is left.
        """
        options = options or PullOptions()
        deadline = deadline or Deadline.never()
        wanted = reference if isinstance(reference, Reference) else Reference.parse(reference)
        target = self.handlers.resolve(handler)
        registry = self._registry.with_credentials(credentials) if credentials else self._registry
        places = self._places(target)
        engine = self._engine.using(registry=registry, trees=self._trees[target.snapshotter])
        request = _request(wanted, target, options)
        found = engine.find(request, deadline=deadline)
        plan = _plan(engine, request, found, plain=options.plain, deadline=deadline)
        layers: Sequence[Descriptor] = found[0].manifest.layers
        if plan is not None:
            layers = [step.layer for step in plan.active() if step.content is None]
        for layer in {one.digest: one for one in layers}.values():
            progress(ProgressEvent("planned", str(wanted), layer.digest, 0, layer.size))
        if plan is None:
            return _ordinary(found[0], target)
        tree = engine.tree_key(plan)
        tuples = _tuples(wanted, target, places, options, found[0])
        one = _Pull(engine, request, plan, found, tree, tuples, deadline, progress)
        with self.containerd.locks.hold(f"pull-{tree.hex}", deadline=deadline):
            image = self._ledger.by_tree(tree)
            present = [self._trees[name].find(tree) is not None for name in places]
            if any(present):
                self._prove(one, image)
            if image is not None and all(present) and self._ledger.is_complete(image, tuples):
                return replace(image, cached=True)
            return self._make(one, places)

    def find(
        self, name_or_id: str, *, handler: str | None = None, options: PullOptions | None = None
    ) -> ArtifactImage | None:
        """The artifact that a name (with handler and options) or an image ID leads to; None: not ours.

        Without a handler, a name is looked up for the default one and an ID for any.
        """
        if records.is_id(name_or_id):
            image = self._ledger.by_id(name_or_id)
            if image is None or handler is None:
                return image
            return image if self.handlers.resolve(handler).name in image.handlers else None
        name = records.record_name(Reference.parse(name_or_id))
        fingerprint = (options or PullOptions()).fingerprint()
        return self._ledger.by_tuple(name, self.handlers.resolve(handler or "").name, fingerprint)

    def list(self) -> Sequence[ArtifactImage]:
        """Every artifact, one per image ID, by ID: adding up their sizes counts no byte twice."""
        return self._ledger.all()

    def remove(self, name_or_id: str, *, handler: str | None = None) -> bool:
        """Remove the image that a name or ID leads to, as the CRI's RemoveImage does; False: not ours.

        With a handler, its tuples alone (R4): the image stays while another tuple leads to it. What
        nothing needs any more is gone when this returns. Idempotent.
        """
        image = self.find(name_or_id, handler=None if records.is_id(name_or_id) else handler)
        if image is None and handler is None and not records.is_id(name_or_id):
            # No tuple of the default handler: any other that goes by this name.
            name = records.record_name(Reference.parse(name_or_id))
            image = next((one for one in self.list() if name in one.references), None)
        if image is None:
            return False
        return self._ledger.remove(image.id, None if handler is None else self.handlers.resolve(handler).name)

    def recover(self, *, dry_run: bool = False) -> Recovered:
        """Remove what dead processes left: leases, and images and names that are not whole. Idempotent."""
        ended = leases.end_dead(self.containerd, dry_run=dry_run)
        images, names = self._ledger.settle(dry_run=dry_run)
        if not dry_run and (ended or images or names):
            self.collect()
        return Recovered(tuple(ended), tuple(images), tuple(names))

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

    def _places(self, target: Handler) -> tuple[str, ...]:
        """The snapshotters that must hold the tree, the handler's own first."""
        others = {
            handler.snapshotter
            for handler in self.handlers.known.values()
            if self._everywhere and handler.platform == target.platform
        }
        return (target.snapshotter, *sorted(others - {target.snapshotter}))

    def _prove(self, one: _Pull, image: ArtifactImage | None) -> None:
        """A tree that is here goes to those who could have fetched it (V5, delivery.possession)."""
        origins = [Reference.parse(name) for name in image.origins] if image else []
        if one.found[0].reference.name in {origin.name for origin in origins}:
            return  # the manifest was just read there, with these credentials
        believed = {origin.registry for origin in origins}
        one.engine.prove(one.plan, one.found, believed=believed, deadline=one.deadline, progress=one.progress)

    def _make(self, one: _Pull, places: Sequence[str]) -> ArtifactImage:
        purpose = f"pull {one.plan.reference}"
        cached = True
        with leases.lease(self.containerd, purpose, snapshotter=places[0]) as lease:
            request = msgspec.structs.replace(one.request, destination=AsTree(lease))
            for name in places:
                engine = one.engine.using(trees=self._trees[name])
                done = engine.carry_out(
                    one.plan, one.found, request, deadline=one.deadline, progress=one.progress
                )
                cached = cached and done.cached
                failpoints.reach("containerd.pull.delivered")
            image = self._ledger.write(done, one.tuples, snapshotters=places, lease=lease)
        return replace(image, cached=cached)


def _plan(
    engine: Engine, request: Request, found: tuple[Found, ...], *, plain: bool, deadline: Deadline
) -> Plan | None:
    """What an artifact becomes; None for an image, which containerd understands better than we do."""
    if plain and only_image_layers(found[0].manifest):
        return None
    try:
        return engine.plan(request, found=found, deadline=deadline)[0]
    except InvalidInput:
        if plain and manifest_is_image(found[0].manifest):
            return None
        raise


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
        referrer_from=Reference.parse(options.referrer_from) if options.referrer_from else None,
        artifact_type=options.artifact_type,
        annotations=options.annotations,
    )


def _tuples(
    reference: Reference, handler: Handler, places: tuple[str, ...], options: PullOptions, found: Found
) -> Sequence[ImageTuple]:
    """What a pull establishes: the reference as given, and the same content by its digests."""
    resolved = found.resolved
    names = [records.record_name(reference)]
    if not options.referrer:
        names += records.pinned_names(reference, resolved.digest, resolved.index)
    return records.stamped(
        ImageTuple(
            reference=name,
            handler=handler.name,
            options=options.fingerprint(),
            snapshotters=places,
            manifest=str(resolved.digest),
            index=str(resolved.index) if resolved.index else "",
            platform=str(resolved.platform) if resolved.platform else "",
            source=found.reference.name if found.reference.name != reference.name else "",
        )
        for name in dict.fromkeys(names)
    )


def _ordinary(found: Found, handler: Handler) -> OrdinaryImage:
    return OrdinaryImage(
        found.reference,
        handler,
        found.descriptor.digest,
        found.manifest.config.digest,
        found.index.digest if found.index else None,
        str(found.platform) if found.platform else "",
    )

"""The use case every face asks for: these references, by this policy, as a directory here.

An `Engine` holds what is worth keeping between deliveries: the registry's connections, the store, the
unpack workers. `deliver` may be called from many threads at once; deliveries of one content share the
work, because trees and blobs are made under a lock by their key (in this process and among others), and
everybody else finds them made. While a delivery runs, a lease keeps what it touches from being collected;
when it ends, a record does.

Cost: a delivery that finds its tree asks the database a handful of questions; a cold one costs its bytes
once over the network and once to the disk. Memory grows with `jobs`, not with content.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from unlade.delivery.build import Builder, Context
from unlade.delivery.images import diff_ids
from unlade.delivery.owndir import staged_beside
from unlade.delivery.request import (
    AsTree,
    Delivered,
    Directory,
    InStore,
    Mounted,
    Request,
    TarStream,
)
from unlade.delivery.sources import Found, Sources
from unlade.errors import IntegrityError, NothingProduced, StoreError
from unlade.kernel.files import EarlyWriter
from unlade.model import MAX_MANIFEST_BYTES, Deadline, Descriptor, DiffID, Digest, Reference
from unlade.planning import Plan, PlanOptions, Step, make_plan, merge_plans
from unlade.registry import Registry
from unlade.transfer import Fetcher, Progress, ProgressEvent, Verifier, pump, silent
from unlade.unpack import RULES_VERSION, UnpackPolicy, WorkerPool

if TYPE_CHECKING:
    from unlade.store import DirStore, Lease
    from unlade.tree import Staging, Tree, TreeKey, TreeStore

# One a core, and on two cores a third: it works while the others wait for the disk, and an odd last layer is
# not left alone (4 % of a large image). More help only where the network is the limit.
DEFAULT_JOBS: Final = max(3, min(8, os.cpu_count() or 2))
# A layer of at most this is fetched whole when its first bytes are wanted: less than a round trip's worth of
# a fast link. And so many of one manifest: 4 MiB of memory, whatever a manifest names.
_WHOLE_BYTES: Final = 32 << 10
_WHOLE_LAYERS: Final = 128


class Engine:
    """Delivers; thread-safe. A context manager, or call `close`.

    Without a store only directories and streams can be delivered. `trees` are kept elsewhere than in the
    store, such as in containerd; they are delivered under a lease of the caller's (`AsTree`), and a store
    beside them has records and grants alone. The registry, the store and the trees belong to the caller, the
    workers to the engine, also those that a caller started early. Without `setid`, layer trees lose set-id
    bits and file capabilities: for mounts that others bind again without nosuid.
    """

    def __init__(
        self,
        registry: Registry,
        store: DirStore | None = None,
        *,
        trees: TreeStore | None = None,
        jobs: int = DEFAULT_JOBS,
        connections: int = 1,
        workers: WorkerPool | None = None,
        setid: bool = True,
    ) -> None:
        self._setid = setid
        self._store = store
        self._trees = trees if trees is not None or store is None else _trees_of(store)
        self._jobs = jobs
        self._connections = connections
        self._workers = workers if workers is not None else WorkerPool(jobs)
        self._owns_workers = True
        self._ask(registry)

    def _ask(self, registry: Registry) -> None:
        self._registry = registry
        self._fetcher = Fetcher(registry, connections=self._connections)
        self._sources = Sources(registry, self._store)
        self._builder = Builder(self._fetcher, self._workers, self._store, jobs=self._jobs)

    def using(self, registry: Registry | None = None, trees: TreeStore | None = None) -> Engine:
        """This engine with another registry client (other credentials) or other trees; shares the workers.

        It lives as long as the engine it came from; closing it does nothing.
        """
        other = copy.copy(self)
        other._owns_workers = False
        if trees is not None:
            other._trees = trees
        other._ask(registry or self._registry)
        return other

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; idempotent."""
        if self._owns_workers:
            self._workers.close()

    def find(self, request: Request, *, deadline: Deadline | None = None) -> tuple[Found, ...]:
        """The manifests that the request means; nothing of them is looked into."""
        deadline = deadline or Deadline.never()
        return tuple(self._sources.find(ref, request, deadline=deadline) for ref in request.references)

    def plan(
        self,
        request: Request,
        *,
        found: tuple[Found, ...] | None = None,
        deadline: Deadline | None = None,
    ) -> tuple[Plan, tuple[Found, ...]]:
        """What the request would become, before content is fetched where the format allows (V16).

        What `find` gave for it is not asked for again.
        """
        deadline = deadline or Deadline.never()
        if found is None:
            found = self.find(request, deadline=deadline)
        return self._plan(found, request, deadline), found

    def prove(
        self,
        plan: Plan,
        found: Sequence[Found],
        *,
        believed: Container[str],
        deadline: Deadline,
        progress: Progress = silent,
    ) -> None:
        """Have the registry show that these credentials may have what a shared tree was made from (V5)."""
        from unlade.delivery.possession import prove

        context = Context([one.reference for one in found], deadline, progress)
        prove(self._fetcher, plan, context, believed=believed)

    def tree_key(self, plan: Plan) -> TreeKey:
        """The key of the tree that a plan becomes here."""
        return plan.key(_form(stacked=self._stackable(plan), setid=self._setid))

    def deliver(
        self, request: Request, *, deadline: Deadline | None = None, progress: Progress = silent
    ) -> Delivered:
        """Carry out the request; on any error nothing of it is visible."""
        deadline = deadline or Deadline.never()
        plan, found = self.plan(request, deadline=deadline)
        return self.carry_out(plan, found, request, deadline=deadline, progress=progress)

    def carry_out(
        self,
        plan: Plan,
        found: Sequence[Found],
        request: Request,
        *,
        deadline: Deadline | None = None,
        progress: Progress = silent,
    ) -> Delivered:
        """Deliver what `plan` gave for this request, without resolving anything again."""
        deadline = deadline or Deadline.never()
        heads = {digest: head for one in found for digest, head in one.heads.items()}
        whole = {(one.reference.name, digest): raw for one in found for digest, raw in one.whole.items()}
        context = Context([one.reference for one in found], deadline, progress, heads, whole)
        destination = request.destination
        if isinstance(destination, Directory):
            return self._directory(plan, found, request, destination, context)
        if isinstance(destination, TarStream):
            return self._tar(plan, found, request, destination, context)
        held = destination.lease if isinstance(destination, AsTree) else None
        if held is not None and self._store is None:
            tree, cached = self._tree(plan, found, request, held, held, context)
            return _as_tree(plan, found, tree, cached=cached)
        store = self._need_store()
        with store.lease(f"deliver {plan.reference}"[:200]) as lease:
            if isinstance(destination, InStore):
                return self._in_store(plan, found[0], request, lease, context)
            tree, cached = self._tree(plan, found, request, lease, held or lease, context)
            if request.reauthorize:
                known = destination.origins if isinstance(destination, AsTree) else ()
                self._entitle(plan, found, context, known)
            for one in found:
                self._record(
                    one,
                    request,
                    lease,
                    context,
                    tree=tree.key,
                    content=request.keep_blobs,
                    part=len(found) > 1,
                )
            if isinstance(destination, AsTree):
                return _as_tree(plan, found, tree, cached=cached)
            path = self._mount(tree, request, destination)
            return _delivered(plan, found, path, tree.key, tree.size, tree.entries, cached=cached)

    def _plan(self, found: Sequence[Found], request: Request, deadline: Deadline) -> Plan:
        options = PlanOptions(request.unpack, request.only, request.as_file, request.family)

        def one(source: Found) -> Plan:
            return make_plan(
                source.manifest,
                source.descriptor,
                reference=str(source.reference),
                options=options,
                one_of_several=len(found) > 1,
                read_config=lambda: self._small(source, source.manifest.config, deadline),
                peek=lambda layer, count: self._peek(source, layer, count, deadline),
            )

        plans = [one(source) for source in found]
        return plans[0] if len(plans) == 1 else merge_plans(plans)

    def _directory(
        self, plan: Plan, found: Sequence[Found], request: Request, destination: Directory, context: Context
    ) -> Delivered:
        with staged_beside(destination.path, replace=destination.replace) as own:
            size, entries = self._builder.directory(
                plan,
                own,
                partial(_policy, setid=request.setid),
                context,
                diff_ids=self._diffs(plan, found, context),
            )
            _check_produced(plan, entries)
            own.commit(request.sub_path)
        return _delivered(plan, found, os.path.abspath(destination.path), None, size, entries, cached=False)

    def _tar(
        self, plan: Plan, found: Sequence[Found], request: Request, destination: TarStream, context: Context
    ) -> Delivered:
        import tempfile

        from unlade.pack import write_tar

        # Nothing is written before all of it is verified: a reader of the stream could not take it back.
        with tempfile.TemporaryDirectory(prefix="unlade-tar-") as scratch:
            path = os.path.join(scratch, "content")
            done = self._directory(plan, found, request, Directory(path), context)
            write_tar(path, destination.out)
        return _delivered(plan, found, None, None, done.size, done.entries, cached=False)

    def _in_store(
        self, plan: Plan, found: Found, request: Request, lease: Lease, context: Context
    ) -> Delivered:
        store = self._need_store()
        blobs = {found.manifest.config.digest: found.manifest.config}
        blobs.update({layer.digest: layer for layer in found.manifest.layers})
        fetched = self._ingest_all(list(blobs.values()), found, lease, context)
        if request.reauthorize:
            self._entitle(plan, (found,), context)
        self._record(found, request, lease, context, tree=None, content=True)
        size = sum(blob.size for blob in blobs.values())
        return _delivered(plan, (found,), str(store.path), None, size, len(blobs), cached=not fetched)

    def _ingest_all(self, blobs: Sequence[Descriptor], found: Found, lease: Lease, context: Context) -> int:
        fetched: list[Digest] = []

        def one(blob: Descriptor) -> None:
            if self._ingest(blob, found, lease, context):
                fetched.append(blob.digest)

        self._builder.side_by_side(blobs, one, size=lambda blob: blob.size)
        return len(fetched)

    def _ingest(self, blob: Descriptor, found: Found, lease: Lease, context: Context) -> bool:
        """Take one blob into the store; False when it was there."""
        store = self._need_store()
        reference = str(context.references[0])

        def tell(kind: str, done: int) -> None:
            context.progress(ProgressEvent(kind, reference, blob.digest, done, blob.size))  # type: ignore[arg-type]

        with store.ingest(blob, lease=lease, deadline=context.deadline) as ingest:
            if ingest.present:
                tell("present", blob.size)
                return False
            if blob.data is not None:
                ingest.discard()
                ingest.write(blob.data)
            else:
                begun = done = ingest.offset
                file = EarlyWriter(ingest.fd, begun)
                tell("start", done)

                def write(data: memoryview) -> None:
                    nonlocal done
                    file.write(data)
                    done += len(data)
                    tell("bytes", done)

                verifier = Verifier(blob, hasher=ingest.hasher, done=ingest.offset)
                try:
                    with self._fetcher.open(
                        found.reference,
                        blob,
                        offset=ingest.offset,
                        deadline=context.deadline,
                        progress=context.progress,
                    ) as source:
                        left = blob.size - ingest.offset
                        pump(source, verifier, write, deadline=context.deadline, expected=left)
                except IntegrityError:
                    ingest.discard()
                    raise
                if begun == 0:
                    # The beginning of a partial may have come from somebody else.
                    context.fetched.add((found.reference.name, blob.digest))
            ingest.commit()
            tell("done", blob.size)
            return True

    def _entitle(
        self, plan: Plan, found: Sequence[Found], context: Context, known: Sequence[Reference] = ()
    ) -> None:
        """What was here already goes to those who could have fetched it (V5); see `possession`."""
        from unlade.delivery.possession import believed, prove, unproved

        if not unproved(plan, context):
            return
        key, manifests = self.tree_key(plan), {one.descriptor.digest for one in found}
        records = self._need_store().images.sharing(key, manifests)
        hosts = believed(found, records, known)
        if hosts is not None:
            prove(self._fetcher, plan, context, believed=hosts)

    def _tree(
        self,
        plan: Plan,
        found: Sequence[Found],
        request: Request,
        lease: Lease,
        held: Lease,
        context: Context,
    ) -> tuple[Tree, bool]:
        """The tree, `held` where the trees are; `lease` is the store's, for blobs."""
        trees = self._trees if self._trees is not None else _trees_of(self._need_store())
        key = self.tree_key(plan)
        tree = trees.find(key, lease=held)
        cached = tree is not None
        if request.keep_blobs:
            # The record will say that every blob is there: the config too, and also when the tree was.
            for one in found:
                self._ingest_all([one.manifest.config, *one.manifest.layers], one, lease, context)
        if tree is None:
            with trees.stage(key, lease=held, deadline=context.deadline) as staging:
                cached = staging.existing is not None
                tree = staging.existing or self._make_tree(staging, plan, found, held, context)
        return tree, cached

    def _make_tree(
        self, staging: Staging, plan: Plan, found: Sequence[Found], lease: Lease, context: Context
    ) -> Tree:
        from unlade.tree import DirStaging, DirTrees

        diffs = self._diffs(plan, found, context)
        if self._stackable(plan) and isinstance(staging, DirStaging) and isinstance(self._trees, DirTrees):
            from unlade.delivery.stack import LAYER_POLICY, Layers

            policy = msgspec.structs.replace(LAYER_POLICY, setid=self._setid)
            makers = Layers(self._trees, self._builder, lease, context, policy)
            layers = makers.make(plan.active(), diffs[0])
            return staging.commit(
                size=sum(layer.size for layer in layers),
                entries=sum(layer.entries for layer in layers),
                layers=[layer.key for layer in layers],
            )
        size, entries = self._builder.directory(plan, staging, _merged_policy, context, diff_ids=diffs)
        _check_produced(plan, entries)
        return staging.commit(size=size, entries=entries)

    def _mount(self, tree: Tree, request: Request, destination: Mounted) -> str:
        from unlade.mount import mount_layers

        options = replace(destination.options, sub_path=request.sub_path or destination.options.sub_path)
        path = os.path.abspath(destination.path)
        with self._need_store().mounts.mounting(os.fsencode(path), tree.key):
            mount_layers([str(layer) for layer in tree.layers], path, options)
        return path

    def _record(
        self,
        found: Found,
        request: Request,
        lease: Lease,
        context: Context,
        *,
        tree: Digest | None,
        content: bool,
        part: bool = False,
    ) -> None:
        """Write down what a reference means; as a `part` of a merged tree, a tree of its own goes before."""
        from unlade.store import ImageRecord

        store = self._need_store()
        reference = str(found.reference)
        known = store.images.get(reference, request.handler)
        same = known is not None and known.manifest.digest == found.descriptor.digest and not content
        if same and known is not None and (known.tree == tree or (part and known.tree is not None)):
            store.images.touch(reference, request.handler)
            return
        store.put(found.descriptor, found.raw, lease=lease)
        if found.index is not None and found.index_raw is not None:
            store.put(found.index, found.index_raw, lease=lease)
        # With what planning looked at, the next delivery needs no registry.
        if (config := found.configs.get(found.manifest.config.digest)) is not None:
            store.put(found.manifest.config, config, lease=lease)
        store.heads.remember({digest: context.heads[digest] for digest in context.seen})
        store.images.put(
            ImageRecord(
                reference,
                request.handler,
                manifest=found.descriptor,
                index=found.index,
                platform=found.platform,
                tree=tree,
                content=content,
            ),
            elsewhere=not self._keeps_trees(),
        )

    def _keeps_trees(self) -> bool:
        """Whether the trees are the store's own."""
        from unlade.tree import DirTrees

        return isinstance(self._trees, DirTrees)

    def _diffs(self, plan: Plan, found: Sequence[Found], context: Context) -> list[list[DiffID | None]]:
        """The diff IDs of each source's layers; empty where it is no image."""
        return [
            diff_ids(self._small(one, one.manifest.config, context.deadline), one.manifest)
            if source.kind == "image"
            else []
            for source, one in zip(plan.sources, found, strict=True)
        ]

    def _small(self, found: Found, blob: Descriptor, deadline: Deadline) -> bytes:
        if self._store is not None and self._store.stat(blob.digest) is not None:
            with self._store.open(blob.digest) as held:
                return held.read(MAX_MANIFEST_BYTES)
        raw = self._fetcher.read(found.reference, blob, limit=MAX_MANIFEST_BYTES, deadline=deadline)
        found.configs[blob.digest] = raw
        return raw

    def _peek(self, found: Found, layer: Descriptor, count: int, deadline: Deadline) -> bytes:
        if self._store is not None and self._store.stat(layer.digest) is not None:
            with self._store.open(layer.digest) as held:
                return held.read(count)
        known = self._store.heads.get(layer.digest, count, layer.size) if self._store is not None else None
        if known is not None:
            return known
        # The rest of something small costs less than asking for it a second time.
        small = layer.size <= _WHOLE_BYTES and len(found.whole) < _WHOLE_LAYERS
        wanted = layer.size if small else count
        head = self._fetcher.peek(found.reference, layer, wanted, deadline=deadline)
        if Verifier(layer).accepts(head):
            found.whole[layer.digest] = head
        head = head[:count]
        found.heads[layer.digest] = max(head, found.heads.get(layer.digest, b""), key=len)
        return head

    def _stackable(self, plan: Plan) -> bool:
        """Whether overlay can show it: one image, whole, with layers, and an owner who may make whiteouts."""
        return (
            self._keeps_trees()
            and len(plan.sources) == 1
            and plan.kind == "image"
            and not plan.sources[0].only
            and bool(plan.active())
            and os.geteuid() == 0
        )

    def _need_store(self) -> DirStore:
        if self._store is None:
            raise StoreError(
                "this needs a store, and none was given", next_step="name one with --store or UNLADE_STORE"
            )
        return self._store


def _trees_of(store: DirStore) -> TreeStore:
    # Imported here: a directory of the caller's own needs neither the store nor its trees.
    from unlade.tree import DirTrees

    return DirTrees(store)


def _form(*, stacked: bool, setid: bool) -> dict[str, object]:
    """The part of a tree's key that is not in the plan: how it is made."""
    if stacked:
        return {"form": "stack" if setid else "stack without setid", "unpack": RULES_VERSION}
    return {"form": "merged", "unpack": RULES_VERSION, "owners": _owners()}


def _owners() -> Literal["keep", "squash"]:
    return "keep" if os.geteuid() == 0 else "squash"


def _merged_policy(step: Step) -> UnpackPolicy:
    """Rules for a merged tree of the store; what they depend on is in `_form`."""
    return _policy(step, setid=False)


def _policy(step: Step, *, setid: bool) -> UnpackPolicy:
    if step.action == "layer":
        owners = _owners()
        # Only root may keep all of them, and macOS has other calls and other names for them.
        xattrs = owners == "keep" and sys.platform == "linux"
        return UnpackPolicy("image", owners=owners, xattrs=xattrs, setid=setid)
    return UnpackPolicy("artifact", prefix=step.path.encode("utf-8", "surrogateescape"))


def _check_produced(plan: Plan, entries: int) -> None:
    if entries == 0 and plan.kind == "artifact":
        raise NothingProduced(
            f"{plan.reference} produced no file: its archives are empty",
            next_step="`unlade plan` shows its layers; an artifact must hold at least one file",
        )


def _as_tree(plan: Plan, found: Sequence[Found], tree: Tree, *, cached: bool) -> Delivered:
    path = str(tree.path) if tree.path else None
    return _delivered(plan, found, path, tree.key, tree.size, tree.entries, cached=cached)


def _delivered(
    plan: Plan,
    found: Sequence[Found],
    path: str | None,
    tree: Digest | None,
    size: int,
    entries: int,
    *,
    cached: bool,
) -> Delivered:
    return Delivered(tuple(one.resolved for one in found), plan, path, tree, size, entries, cached)

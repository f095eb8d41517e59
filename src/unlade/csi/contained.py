"""Volumes' content in containerd: snapshots as trees, containerd's own leases as what holds them.

For nodes where containerd is there anyway: what a native `image:` volume pulled and what a CSI volume needs
is one snapshot. A volume's lease is containerd's, by a name made from the volume's, without an end or an
owner process: neither a restart of ours or of containerd's nor a reboot ends it, nor does the image service
when it tidies up. What no volume holds is on the shelf (`containerd.shelf`), an image that the kubelet
collects.

containerd may be away. A fetch waits for it as long as a restart takes, then fails, retryably; calls that a
kubelet waits for fail within seconds. What is mounted is the kernel's; a lease that could not be released is
found by `held` later, and released then. What the directory store held before containerd was chosen stays
held there until its volume goes.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Final

import msgspec

from unlade.containerd import Containerd, ContainerdError, ContainerdTrees, leases
from unlade.containerd.handlers import DEFAULT_SNAPSHOTTER
from unlade.containerd.shelf import Shelf
from unlade.csi.holding import DirHolder, forget_lost, mounted
from unlade.delivery import AsTree, Delivered, Engine, Found, Request
from unlade.model import Deadline, Digest, Reference
from unlade.planning import Plan
from unlade.store import DirStore, Lease, NotInStore, collect
from unlade.transfer import Progress, silent
from unlade.tree import Tree

_log = logging.getLogger(__name__)

# Of a call that a kubelet waits for: enough for a busy containerd, too little for one that restarts.
_BRIEF: Final = 3.0
_SCOPE_DIGITS: Final = 12
# Somebody removes images in the moment in which they are wanted; not often in a row.
_TRIES: Final = 2
# Whoever asked for a delivery holds it within a moment, or is gone.
_LANDED: Final = 60.0


class Invisible(ContainerdError):
    """containerd's directories are not where containerd says, as this process sees the file system."""

    code = "containerd-invisible"
    # Whoever is told waits until the pod is put right; volumes can be unpublished meanwhile.
    retryable = True


class _FoundTrees(ContainerdTrees):
    """Trees that are found without being held: a warm publish then needs no lease but its volume's.

    What was there and is gone when the volume's lease comes is noticed then, and delivered again.
    """

    def find(self, key: Digest, *, lease: Lease | None = None) -> Tree | None:  # noqa: ARG002 - see above
        return super().find(key)


class ContainerdHolder:
    """See Holder: containerd, with the driver's own store for records and grants.

    `scope` names the driver among others of this containerd: its state directory. The connection and the
    store belong to the caller.
    """

    def __init__(
        self,
        containerd: Containerd,
        store: DirStore,
        *,
        scope: str,
        snapshotter: str = DEFAULT_SNAPSHOTTER,
    ) -> None:
        self._containerd = containerd
        self._brief = containerd.patient(_BRIEF)
        self._snapshotter = snapshotter
        self._store = store
        self._before = DirHolder(store)
        self._shelf = Shelf(containerd, snapshotter)
        self._looking = ContainerdTrees(self._brief, snapshotter)
        self._prefix = f"unlade-{hashlib.sha256(scope.encode()).hexdigest()[:_SCOPE_DIGITS]}-"
        self._landing = threading.Lock()
        self._landed: dict[Digest, tuple[float, ExitStack]] = {}
        self.trees = _FoundTrees(containerd, snapshotter)

    def find(self, tree: Digest) -> Tree | None:
        return self._visible(tree) or self._before.find(tree)

    def _visible(self, tree: Digest) -> Tree | None:
        """A tree in containerd; raises Invisible when its directory cannot be seen from here."""
        found = self._looking.find(tree)
        if found is not None and (found.path is None or not found.path.is_dir()):
            raise Invisible(
                f"containerd has the content in {found.path}, which cannot be seen from here",
                next_step="give the agent's pod containerd's root directory at the same path",
            )
        return found

    def hold(self, name: str, purpose: str, tree: Digest, *, durable: bool = False) -> Tree | None:
        # containerd syncs each of its transactions: durable or not is one.
        lease = self._prefix + name
        made = leases.keep(self._brief, lease, purpose)
        snapshot = self._looking.name(tree)
        leases.try_hold_snapshot(self._brief, lease, self._snapshotter, snapshot)
        found = self._visible(tree)
        if found is not None:
            self._let_go_of(tree)
            return found
        if made:
            leases.end(self._brief, lease)
        else:
            leases.let_go(self._brief, lease, self._snapshotter, snapshot)
        return self._before.hold(name, purpose, tree, durable=durable)

    def release(self, name: str) -> None:
        self._before.release(name)
        try:
            leases.end(self._brief, self._prefix + name)
        except ContainerdError as error:
            # Unmounted is what the kubelet asked for. The lease has no volume any more and is found later.
            _log.warning("the lease of %s is released later: %s", name, error)

    def held(self) -> set[str]:
        ours = leases.kept(self._brief, self._prefix)
        return {lease.removeprefix(self._prefix) for lease in ours} | self._before.held()

    def deliver(
        self,
        engine: Engine,
        plan: Plan,
        found: Sequence[Found],
        request: Request,
        *,
        deadline: Deadline | None = None,
        progress: Progress = silent,
    ) -> Delivered:
        for _ in range(_TRIES):
            with suppress(NotInStore):
                return self._deliver(engine, plan, found, request, deadline, progress)
        return self._deliver(engine, plan, found, request, deadline, progress)

    def _deliver(
        self,
        engine: Engine,
        plan: Plan,
        found: Sequence[Found],
        request: Request,
        deadline: Deadline | None,
        progress: Progress,
    ) -> Delivered:
        """Raises NotInStore when a tree that was found was collected before it was on the shelf."""
        image = self._shelf.find(engine.tree_key(plan))
        origins: tuple[Reference, ...] = ()
        if image is not None and len(found) == 1:
            # A merged tree is of several repositories: having supplied a part of it entitles to nothing.
            origins = tuple(Reference.parse(name) for name in sorted(image.origins))
        purpose = f"volume of {plan.reference}"
        with ExitStack() as stack:
            lease = stack.enter_context(
                leases.lease(self._containerd, purpose, snapshotter=self._snapshotter, late=True)
            )
            held = msgspec.structs.replace(request, destination=AsTree(lease, origins))
            done = engine.carry_out(plan, found, held, deadline=deadline, progress=progress)
            if not (done.cached and self._shelf.has(image, found)):
                self._shelf.put(found, done, lease)
                assert done.tree is not None
                self._land(done.tree, stack.pop_all())
        return done

    def _land(self, tree: Digest, lease: ExitStack) -> None:
        """Keep a delivery's lease until a volume's own holds the tree, or nobody came for it."""
        self._let_go_of(tree)
        with self._landing:
            self._landed[tree] = (time.monotonic(), lease)

    def _let_go_of(self, tree: Digest) -> None:
        with self._landing:
            _, lease = self._landed.pop(tree, (0.0, ExitStack()))
        lease.close()

    def forget_lost(self, request: Request) -> None:
        forget_lost(self._store, self.trees.find, request)

    def room(self, _: int) -> AbstractContextManager[None]:
        """As much as containerd's disk has: the kubelet collects there, and a full disk gives all back."""
        return nullcontext()

    def tidy(self) -> None:
        """End what killed deliveries left; drop records whose tree the kubelet has collected."""
        with self._landing:
            late = [tree for tree, (at, _) in self._landed.items() if time.monotonic() - at > _LANDED]
        for tree in late:
            self._let_go_of(tree)
        leases.end_dead(self._brief)
        for record in self._store.images.all():
            if record.tree is not None and self._looking.find(record.tree) is None:
                self._store.images.delete(record.reference, record.handler)
        collect(self._store, mounted=mounted())

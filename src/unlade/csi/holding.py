"""Where volumes' content is kept, and what keeps it there while a volume needs it.

A `Holder` is a tree store with leases by name. A lease is a volume's: it holds a tree from before the volume
is recorded until it is unpublished, over restarts and reboots, whoever collects garbage meanwhile. What no
lease holds stays as a cache until the disk needs it. There are two: `DirHolder` here, the directory store of
the driver's own, and `ContainerdHolder` (`csi.contained`). Inline and writable volumes know no difference;
one suite runs on both (tests/conformance/holder.py).

Beside either, the driver's own store has the records of what references meant, and the grants (V5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

from unlade.delivery import Delivered, Engine, Found, Request
from unlade.model import Deadline, Digest
from unlade.mount import read_table
from unlade.planning import Plan
from unlade.store import DirStore
from unlade.store.leases import DirLease
from unlade.store.upkeep import Upkeep
from unlade.transfer import Progress, silent
from unlade.tree import DirTrees, Tree, TreeStore

# A volume lives as long as its pod; the lease ends when it is unpublished, not by time.
_FOR_EVER: Final = 100 * 365 * 86400.0


class Holder(Protocol):
    """Trees, and leases by name that hold them; thread-safe.

    Each call raises StoreError when the store cannot be asked, a retryable one when it is away for now.
    Calls for one name are made one after the other.
    """

    @property
    def trees(self) -> TreeStore:
        """Where engines put what is delivered for volumes."""

    def find(self, tree: Digest) -> Tree | None:
        """A tree that is there now."""

    def hold(self, name: str, purpose: str, tree: Digest, *, durable: bool = False) -> Tree | None:
        """Keep a tree until the name is released; None, and nothing held, when it is not there.

        What a name holds already stays held. `durable`: also over a power loss in this very moment, for
        callers that have no record yet from which they would hold it again.
        """

    def release(self, name: str) -> None:
        """Let go of what a name holds; idempotent. Never fails because a store is away: `held` tells."""

    def held(self) -> set[str]:
        """Every name that holds something."""

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
        """Carry out a planned request for a tree; it is there afterwards, held by nobody, as a cache is."""

    def forget_lost(self, request: Request) -> None:
        """Forget what is remembered of references whose content has left the store: it is not present."""

    def room(self, size: int, /) -> AbstractContextManager[None]:
        """Around a delivery of about so many bytes; raises NoSpace."""

    def tidy(self) -> None:
        """Called now and then: give back what nobody will ask for again."""


class DirHolder:
    """See Holder: the directory store. Without `upkeep`, the disk is somebody else's affair."""

    def __init__(self, store: DirStore, upkeep: Upkeep | None = None) -> None:
        self._store = store
        self._upkeep = upkeep
        self.trees: TreeStore = DirTrees(store)

    def find(self, tree: Digest) -> Tree | None:
        return self.trees.find(tree)

    def hold(self, name: str, purpose: str, tree: Digest, *, durable: bool = False) -> Tree | None:
        if not self._store.leases.pin(name, purpose, tree, ttl=_FOR_EVER):
            return None
        if durable:
            # Pinning is not synced of itself; a synced transaction after it carries it to the disk.
            self._store.leases.keep(name, purpose, ttl=_FOR_EVER)
        return self.trees.find(tree)

    def release(self, name: str) -> None:
        DirLease(self._store.database, name).release()

    def held(self) -> set[str]:
        # Those with an owner are of deliveries that run.
        return {lease.id for lease in self._store.leases.all() if not lease.owner}

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
        return engine.carry_out(plan, found, request, deadline=deadline, progress=progress)

    def forget_lost(self, request: Request) -> None:
        forget_lost(self._store, self.trees.find, request)

    def room(self, size: int) -> AbstractContextManager[None]:
        return self._upkeep.room(size) if self._upkeep is not None else nullcontext()

    def tidy(self) -> None:
        """Nothing: `Upkeep` watches the disk all the time."""


def forget_lost(store: DirStore, find: Callable[[Digest], Tree | None], request: Request) -> None:
    """Drop the records of a request's references whose tree is not where trees are now."""
    for reference in request.references:
        record = store.images.get(str(reference), request.handler)
        if record is not None and record.tree is not None and find(record.tree) is None:
            store.images.delete(str(reference), request.handler)


def mounted() -> list[bytes]:
    """Every mount point there is, for collections."""
    return [entry.path for entry in read_table()]

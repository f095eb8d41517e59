"""What a volume starts with: from parameters to a shared tree that stays as long as the volume does.

Parameters have the names of inline volumes' attributes and come from a storage class, an `OCISource` or a
claim's annotations. `StoreSeeds` has them delivered as a tree of the node's store and holds the tree by a
lease named after the volume (`csi.holding`): without an end, so it survives restarts, and durable before the
volume's record says that it is ready. The tree below a volume is never replaced: a tag that moves changes
what the next volume starts with.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from unlade.csi.attributes import InvalidAttribute, Wanted, parse
from unlade.csi.holding import Holder
from unlade.delivery import AsTree, Engine, PullPolicy, Request
from unlade.errors import InvalidInput, StoreError
from unlade.model import Deadline, Digest, Platform, Reference
from unlade.registry import CredentialSource, Registry
from unlade.store import NotInStore

_LEASE_PREFIX: Final = "writable:"
# The collector can come between a delivery's own lease and ours, once in a very long while.
_TRIES: Final = 5


def parse_seed(parameters: Mapping[str, str]) -> Wanted:
    """Read parameters; raises InvalidAttribute that names the one that is wrong."""
    wanted = parse(parameters)
    if wanted.sub_path or wanted.executable:
        raise InvalidAttribute(
            "subPath and exec are attributes of inline volumes",
            next_step="a container's volumeMounts choose a subPath; programs in a writable volume may run",
        )
    return wanted


@dataclass(frozen=True, slots=True)
class Planted:
    """A tree that is held: its key, and what the references resolved to."""

    tree: str
    digests: tuple[str, ...]


class StoreSeeds:
    """Seeds from a node's store; thread-safe. The engine and the holder belong to the caller.

    `connect` makes a registry client with credentials of a claim's own; the node's own are the engine's.
    `forced_pull` and `handlers` are the administrator's, as for inline volumes.
    """

    def __init__(
        self,
        engine: Engine,
        holder: Holder,
        *,
        connect: Callable[[CredentialSource], Registry] | None = None,
        forced_pull: PullPolicy | None = None,
        handlers: Mapping[str, Platform] | None = None,
    ) -> None:
        self._engine = engine
        self._holder = holder
        self._connect = connect
        self._forced_pull = forced_pull
        self._handlers = handlers or {}

    def plant(
        self,
        owner: str,
        seed: Wanted,
        *,
        credentials: CredentialSource | None = None,
        deadline: Deadline | None = None,
        again: bool = False,
    ) -> Planted:
        """Deliver the content and hold its tree for `owner`, a volume's or snapshot's id; idempotent."""
        with ExitStack() as stack:
            engine = self._engine
            if credentials is not None:
                if self._connect is None:
                    raise InvalidInput("this node takes no credentials of a claim's own")
                registry = self._connect(credentials)
                stack.callback(registry.close)
                engine = engine.using(registry=registry)
            request = Request(
                references=seed.references,
                destination=AsTree(),
                platform=seed.platform or self._handlers.get(seed.handler),
                handler=seed.handler,
                # A tree that is fetched again is known by its digest: nothing newer is meant.
                pull=(self._forced_pull if not again else None) or seed.pull,
                unpack=seed.unpack,
                referrer=seed.referrer,
                reauthorize=True,
            )
            for _ in range(_TRIES):
                self._holder.forget_lost(request)
                plan, found = engine.plan(request, deadline=deadline)
                done = self._holder.deliver(engine, plan, found, request, deadline=deadline)
                assert done.tree is not None
                if self._hold(owner, done.tree):
                    digests = tuple(str(one.reference.with_digest(one.digest)) for one in done.resolved)
                    return Planted(str(done.tree), digests)
        raise StoreError(
            "the content was collected again and again while a volume was made of it",
            next_step="look for something that runs `unlade gc` in a loop",
            retryable=True,
        )

    def share(self, owner: str, tree: str) -> None:
        """Hold a tree that is in the store for one more owner; raises NotInStore."""
        if not self._hold(owner, Digest.parse(tree)):
            raise _missing(tree)

    def restore(self, owner: str, seed: Wanted, digests: tuple[str, ...], tree: str) -> None:
        """Fetch a tree again that was lost, by the digests it was made from; raises NotInStore."""
        pinned = replace(
            seed, references=tuple(Reference.parse(text) for text in digests), pull="missing", referrer=""
        )
        if self.plant(owner, pinned, again=True).tree != tree:
            raise _missing(tree)

    def layers(self, tree: str) -> tuple[str, ...]:
        """The directories of a held tree, lowest first; raises NotInStore."""
        found = self._holder.find(Digest.parse(tree))
        if found is None:
            raise _missing(tree)
        return tuple(str(layer) for layer in found.layers)

    def release(self, owner: str) -> None:
        """Let go of whatever this owner holds; idempotent."""
        self._holder.release(_LEASE_PREFIX + owner)

    def owners(self) -> set[str]:
        """Every owner that holds something."""
        prefixed = (name for name in self._holder.held() if name.startswith(_LEASE_PREFIX))
        return {name.removeprefix(_LEASE_PREFIX) for name in prefixed}

    def _hold(self, owner: str, tree: Digest) -> bool:
        name, purpose = _LEASE_PREFIX + owner, f"writable volume {owner}"
        return self._holder.hold(name, purpose, tree, durable=True) is not None


def largest_file(layers: tuple[str, ...]) -> int:
    """The size of the largest file: what a pod's first write to it copies. Linear in the tree's entries."""
    largest = 0
    directories = list(layers)
    while directories:
        with os.scandir(directories.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    largest = max(largest, entry.stat(follow_symlinks=False).st_size)
    return largest


def _missing(tree: str) -> NotInStore:
    return NotInStore(
        f"the tree {tree} below the volume is not in the store",
        next_step="`unlade fsck` says why; pulling the same digests again brings it back",
    )

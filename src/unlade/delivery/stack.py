"""Layer trees: each layer of an image unpacked once, shared by every image that has it.

A layer's key is its digest with the rules that unpacked it, so it can be made without knowing what lies
below it, side by side with the others. A few layers cannot: one with a hard link to a lower layer's file,
or with files below a directory it has no entry for, takes content or attributes from below. Such a layer
is finished after those below it and keyed together with them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from unlade.delivery.build import Builder, Context
from unlade.model import DiffID, Digest
from unlade.planning import Step
from unlade.store import Lease
from unlade.tree import DirStaging, DirTrees, Tree, TreeKey, needs_context, resolve_context
from unlade.unpack import RULES_VERSION, Unpacked, UnpackPolicy

# Mounts are always nosuid and the store is closed to other users, so a layer tree may be faithful. Not where
# somebody binds our mount again without that flag, as container runtimes do (`Engine`'s `setid`).
LAYER_POLICY: Final = UnpackPolicy("image", whiteouts="overlay", owners="keep", xattrs=True, setid=True)


@dataclass(slots=True)
class _Pending:
    """A layer that is unpacked but needs those below it before it can be committed."""

    staging: DirStaging
    unpacked: Unpacked


@dataclass(slots=True)
class Layers:
    """Makes the layer trees of one image; used once."""

    trees: DirTrees
    builder: Builder
    lease: Lease
    context: Context
    policy: UnpackPolicy = LAYER_POLICY
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def make(self, steps: Sequence[Step], diffs: Sequence[DiffID | None]) -> list[Tree]:
        """Every layer's tree, lowest first; those that are there already are not fetched."""
        keys = [layer_key(step.layer.digest, self.policy) for step in steps]
        done: dict[int, Tree] = {}
        pending: dict[int, _Pending] = {}
        with contextlib.ExitStack() as stack:
            missing = []
            below: TreeKey | None = None
            for position, key in enumerate(keys):
                tree = self.trees.find(key, lease=self.lease)
                if tree is None and below is not None:
                    tree = self.trees.find(context_key(key, below), lease=self.lease)
                if tree is None:
                    missing.append(position)
                else:
                    done[position] = tree
                below = context_key(key, below) if below is not None else key

            def make_one(position: int) -> None:
                step = steps[position]
                block = self.trees.stage(keys[position], lease=self.lease, deadline=self.context.deadline)
                with contextlib.ExitStack() as own:
                    staging = own.enter_context(block)
                    if staging.existing is not None:
                        done[position] = staging.existing
                        return
                    unpacked = self.builder.archive(
                        step, staging, self.policy, self.context, diffs[step.index]
                    )
                    if position and needs_context(unpacked):
                        # Whoever waits for layers must not hold the key of one: others have the same layers
                        # in another order, or one of them twice.
                        staging.detach()
                        pending[position] = _Pending(staging, unpacked)
                        with self._lock:
                            stack.push(own.pop_all())
                        return
                    done[position] = _commit(staging, unpacked, None)

            self.builder.side_by_side(missing, make_one, size=lambda position: steps[position].layer.size)
            self._finish(keys, done, pending)
        return [done[position] for position in range(len(steps))]

    def _finish(self, keys: Sequence[TreeKey], done: dict[int, Tree], pending: dict[int, _Pending]) -> None:
        below = keys[0]
        for position in range(1, len(keys)):
            waiting = pending.get(position)
            if waiting is not None:
                lower = [done[lower].layers[0] for lower in range(position)]
                staging = waiting.staging
                resolve_context(
                    staging.path,
                    lower,
                    waiting.unpacked,
                    files_out=staging.files_out,
                    deadline=self.context.deadline,
                )
                done[position] = _commit(staging, waiting.unpacked, context_key(keys[position], below))
            below = context_key(keys[position], below)


def layer_key(digest: Digest, policy: UnpackPolicy = LAYER_POLICY) -> TreeKey:
    """The key of a layer tree that stands alone: its bytes and the rules that unpacked them."""
    return Digest.of(
        f"layer {digest} rules {RULES_VERSION} owners {policy.owners} whiteouts {policy.whiteouts} "
        f"xattrs {policy.xattrs} setid {policy.setid}".encode()
    )


def context_key(layer: TreeKey, below: TreeKey) -> TreeKey:
    """The key of a layer together with everything below it."""
    return Digest.of(f"layer {layer} over {below}".encode())


def _commit(staging: DirStaging, unpacked: Unpacked, key: TreeKey | None) -> Tree:
    return staging.commit(
        size=unpacked.bytes,
        entries=unpacked.entries,
        key=key,
        has_root=b"" not in unpacked.implicit_dirs,
    )

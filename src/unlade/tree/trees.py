"""Trees by key: the protocol that every store of materialised trees fulfils.

A tree is immutable once committed and private before. Its key names what it was made from and how (design,
decision 3), so whoever finds a key need not make it again. A tree is one directory, or a stack of layer
trees that overlay shows as one. Implementations: `DirTrees`; containerd's snapshots. The suite in
tests/conformance runs on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from unlade.model import Deadline, Digest
from unlade.store.content import Lease

TreeKey = Digest


@dataclass(frozen=True, slots=True)
class Tree:
    """A committed tree: `layers` lowest first, one element (equal to `path`) for a single directory."""

    key: TreeKey
    path: Path | None
    layers: tuple[Path, ...]
    size: int
    entries: int


class Staging(Protocol):
    """A tree in the making, held exclusively by key. Leaving its block without commit leaves nothing."""

    @property
    def existing(self) -> Tree | None:
        """The tree, when somebody else made it while we waited: nothing to do, nothing to write to."""

    @property
    def path(self) -> Path:
        """The directory to fill."""

    @property
    def dirfd(self) -> int:
        """A descriptor of that directory, open until the block ends."""

    @property
    def files_out(self) -> BinaryIO:
        """Takes the tree's file list, one record per entry (unpack.filelist)."""

    def commit(
        self,
        *,
        size: int,
        entries: int = 0,
        layers: Sequence[TreeKey] = (),
        key: TreeKey | None = None,
        has_root: bool = True,
    ) -> Tree:
        """Sync, make visible, record. With `layers` (lowest first) the tree is that stack.

        `key` commits under another name than the one staged, for a layer that turned out to depend on
        those below it. `has_root` False: a layer whose archive had no entry for its root, which then looks
        as the layers below it say.
        """

    def detach(self) -> None:
        """Let go of the key while keeping the staging, which is then committed under another `key`.

        Whoever waits for other trees must do so first: holding a key while waiting for one can deadlock.
        """


class TreeStore(Protocol):
    """Trees by key; thread-safe."""

    def find(self, key: TreeKey, *, lease: Lease | None = None) -> Tree | None:
        """A committed tree, from now on held by the lease; None when there is none."""

    def stage(
        self, key: TreeKey, *, lease: Lease | None = None, deadline: Deadline | None = None
    ) -> AbstractContextManager[Staging]:
        """Make a tree, alone among all processes: a second caller waits, then finds it `existing`."""

    def delete(self, key: TreeKey) -> bool:
        """Remove a tree that nothing refers to; False when it was not there, StoreError when it is needed."""

"""Trees by key: the protocol that every store of materialised trees fulfils.

A tree is immutable once committed and private before. Its key names what it was made from and how (design,
decision 3), so whoever finds a key need not make it again. A tree is one directory; a store that can
(`DirTrees`) also keeps stacks of layer trees that overlay shows as one. Implementations: `DirTrees`;
containerd's snapshots. The suite in tests/conformance runs on each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from unlade.model import Deadline, Digest
from unlade.store.content import Lease
from unlade.unpack.policy import Unpacked

TreeKey = Digest


@dataclass(frozen=True, slots=True)
class Tree:
    """A committed tree: `layers` lowest first, one element (equal to `path`) for a single directory."""

    key: TreeKey
    path: Path | None
    layers: tuple[Path, ...]
    size: int
    entries: int


@dataclass(slots=True)
class Scratch:
    """A directory on a staging's file system for one part that will be merged: never part of the tree."""

    path: Path
    dirfd: int
    files_out: BinaryIO


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

    def scratch(self) -> Scratch:
        """A fresh directory to unpack one part into before `merge`; gone with the staging."""

    def merge(self, scratch: Scratch, unpacked: Unpacked, *, deadline: Deadline | None = None) -> None:
        """Move an unpacked part, the next one up, over what the staging holds so far."""

    def commit(self, *, size: int, entries: int = 0) -> Tree:
        """Sync, make visible, record."""


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

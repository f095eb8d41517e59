"""Trees in the directory of a `DirStore`: `.unlade/trees/<key>/root`, and beside it the file list.

A staging lies in `.unlade/staging/<key>` and belongs to whoever holds the key's lock; what a dead process
left there is thrown away. Commit: one sync for the whole tree, rename, fsync of the directory, record.
The descriptor that is synced was opened before the first byte was written, because the kernel reports
write-back errors only to descriptors older than they are. A stack of layers has a record and no directory.
Removing: the record, then a rename into the trash under the key's lock, then the slow part outside it.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from unlade.kernel import failpoints
from unlade.model import Deadline, Digest
from unlade.store import DirStore, Lease
from unlade.store.failure import NotInStore, explaining
from unlade.store.layout import sync_directory
from unlade.store.leases import hold
from unlade.store.removal import delete_object, empty_trash, tree_lock
from unlade.tree.attributes import copy_attributes
from unlade.tree.listing import Listing
from unlade.tree.merge import merge_into
from unlade.tree.sync import sync_tree
from unlade.tree.trees import Scratch, Tree, TreeKey
from unlade.unpack.policy import Unpacked

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreeDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a tree's record says beside the bytes it holds itself.

    `total` is the size of a stack, whose layers hold the bytes; `own_root`: a stack has a directory of its
    own on top, for the attributes of its root; `has_root`: a layer's archive had an entry for its root;
    `files`: the digest of its file list.
    """

    entries: int
    layers: tuple[str, ...] = ()
    total: int = 0
    own_root: bool = False
    has_root: bool = True
    files: str = ""


# Made at import: msgspec must not meet a type for the first time in two threads at once.
decode_detail = msgspec.json.Decoder(TreeDetail).decode


class DirStaging:
    """See `Staging`; made by DirTrees.stage, which holds the key's lock around it."""

    def __init__(
        self, trees: DirTrees, key: TreeKey, lease: Lease | None, existing: Tree | None, held: ExitStack
    ) -> None:
        self.existing = existing
        self._held = held
        self._trees = trees
        self._key = key
        self._lease = lease
        self._home = trees.store.layout.staged(key)
        self._merged: Listing | None = None
        self._scratch: list[Scratch] = []
        self._opened = ExitStack()
        self.path = self._home / "root"
        self.dirfd = self._home_fd = -1
        self.files_out: BinaryIO = io.BytesIO()

    def make(self) -> None:
        """Make the directories and open them; whatever fails, `discard` cleans up."""
        with explaining(f"stage the tree {self._key}"):
            self._home.mkdir(mode=0o700)
            self._home_fd = self._descriptor(self._home)
            self.dirfd, self.files_out = self._root_and_list(self._home)
        failpoints.reach("tree.stage.made")

    def scratch(self) -> Scratch:
        """A fresh directory to unpack one layer into before `merge`; closed and removed with the staging."""
        home = self._home / f"scratch-{len(self._scratch)}"
        with explaining(f"stage the tree {self._key}"):
            home.mkdir(mode=0o700)
            scratch = Scratch(home / "root", *self._root_and_list(home))
        self._scratch.append(scratch)
        return scratch

    def merge(self, scratch: Scratch, unpacked: Unpacked, *, deadline: Deadline | None = None) -> None:
        """Move an unpacked layer, the next one up, over what the staging holds so far."""
        with explaining(f"merge a layer into the tree {self._key}"):
            merge_into(self.dirfd, scratch.dirfd, unpacked, deadline=deadline)
            if self._merged is None:
                self._merged = Listing()
            scratch.files_out.flush()
            scratch.files_out.seek(0)
            self._merged.add_layer(scratch.files_out, unpacked)
        failpoints.reach("tree.stage.merged")

    def commit(
        self,
        *,
        size: int,
        entries: int = 0,
        layers: Sequence[TreeKey] = (),
        key: TreeKey | None = None,
        has_root: bool = True,
    ) -> Tree:
        """Sync, rename, sync, record; see the module."""
        if self.existing:
            return self.existing
        with ExitStack() as other:
            if key is not None and key != self._key:
                other.enter_context(self._trees.store.locks.hold(tree_lock(key)))
            return self._commit(key or self._key, size, entries, layers, has_root)

    def detach(self) -> None:
        """Let go of the key while keeping the staging: it will be committed under another.

        For a layer that waits for those below it: who waits for trees must not hold the key of one, or two
        deliveries with the same layers in another order wait for each other for ever.
        """
        store = self._trees.store
        token = Digest.of(uuid.uuid4().bytes)
        with ExitStack() as mine:
            mine.enter_context(store.locks.hold(tree_lock(token)))
            with explaining(f"stage the tree {self._key}"):
                os.rename(self._home, store.layout.staged(token))
            self._home = store.layout.staged(token)
            self.path = self._home / "root"
            self._key = token
            theirs = self._held.pop_all()
            self._held.push(mine.pop_all())
        theirs.close()
        failpoints.reach("tree.stage.detached")

    def discard(self) -> None:
        """Close everything, and put what was not committed out of sight; the caller empties the trash."""
        self._opened.close()
        self.dirfd = self._home_fd = -1
        self._trees.store.layout.discard(self._home)

    def _root_and_list(self, home: Path) -> tuple[int, BinaryIO]:
        root = home / "root"
        root.mkdir()
        # As for the root of an image without an entry of its own, whatever our umask.
        root.chmod(0o755)
        return self._descriptor(root), self._opened.enter_context(open(home / "files", "w+b"))

    def _descriptor(self, directory: Path) -> int:
        fd = os.open(directory, _DIRECTORY)
        self._opened.callback(os.close, fd)
        return fd

    def _commit(
        self, key: TreeKey, size: int, entries: int, layers: Sequence[TreeKey], has_root: bool
    ) -> Tree:
        found = self._trees.find(key, lease=self._lease)
        if found:
            # A layer that depends on those below was made under its own name by somebody else before us.
            return found
        detail = TreeDetail(entries, has_root=has_root)
        with explaining(f"commit the tree {key}"):
            if layers:
                own_root = self._adopt_root(layers)
                detail = TreeDetail(entries, tuple(map(str, layers)), total=size, own_root=own_root)
            if not layers or detail.own_root:
                detail = msgspec.structs.replace(detail, files=self._settle(key))
        tree = self._trees.record(key, detail, size=0 if layers else size, lease=self._lease)
        failpoints.reach("tree.commit.recorded")
        return tree

    def _adopt_root(self, layers: Sequence[TreeKey]) -> bool:
        """Give the staged root the attributes that the stack's root has; False when overlay does that.

        Overlay takes them from the topmost layer. Few layers have an entry for their root, and keying
        those without one by their parents would end all sharing: an empty directory on top costs less.
        """
        rooted = [layer for layer in dict.fromkeys(layers) if self._trees.detail(layer).has_root]
        if not rooted or layers[-1] in rooted:
            return False
        source = os.open(
            self._trees.store.layout.tree(max(rooted, key=_last_index(layers))) / "root", _DIRECTORY
        )
        try:
            copy_attributes(source, self.dirfd, os.fstat(source))
        finally:
            os.close(source)
        return True

    def _settle(self, key: TreeKey) -> str:
        """Put the directory in place, synced; returns the digest of its file list."""
        layout = self._trees.store.layout
        if self._merged is not None:
            self.files_out.seek(0)
            self.files_out.truncate()
            self._merged.write(self.files_out)
        self.files_out.flush()
        with open(self._home / "files", "rb") as files:
            listed = hashlib.file_digest(files, "sha256").hexdigest()
        for scratch in self._scratch:
            layout.discard(scratch.path.parent)
        failpoints.reach("tree.commit.complete")
        sync_tree(self._home_fd)
        failpoints.reach("tree.commit.synced")
        # A directory without a record was renamed when the power went; ours is known to be whole.
        layout.discard(layout.tree(key))
        os.rename(self._home, layout.tree(key))
        failpoints.reach("tree.commit.renamed")
        sync_directory(layout.trees)
        failpoints.reach("tree.commit.directory-synced")
        return f"sha256:{listed}"


class DirTrees:
    """Trees of one store; thread-safe."""

    def __init__(self, store: DirStore) -> None:
        self.store = store

    def find(self, key: TreeKey, *, lease: Lease | None = None) -> Tree | None:
        """A committed tree, from now on held by the lease; None when there is none."""
        if lease is not None and not lease.hold_tree(key):
            return None
        with self.store.database.read() as connection:
            row = connection.execute(
                "SELECT size, detail FROM objects WHERE name = ?", (f"t:{key}",)
            ).fetchone()
        return self._tree(key, row[0], decode_detail(row[1])) if row else None

    def detail(self, key: TreeKey) -> TreeDetail:
        """What a tree's record says; raises NotInStore."""
        with self.store.database.read() as connection:
            row = connection.execute("SELECT detail FROM objects WHERE name = ?", (f"t:{key}",)).fetchone()
        if row is None:
            raise _missing(key)
        return decode_detail(row[0])

    @contextmanager
    def stage(
        self, key: TreeKey, *, lease: Lease | None = None, deadline: Deadline | None = None
    ) -> Iterator[DirStaging]:
        """Make a tree, alone among all processes; see TreeStore.stage."""
        layout = self.store.layout
        try:
            with ExitStack() as held:
                held.enter_context(self.store.locks.hold(tree_lock(key), deadline=deadline))
                existing = self.find(key, lease=lease)
                staging = DirStaging(self, key, lease, existing, held)
                try:
                    if not existing:
                        # What a process that died left behind; we hold its lock now.
                        layout.discard(layout.staged(key))
                        staging.make()
                    yield staging
                finally:
                    staging.discard()
        finally:
            # Deleting a large tree takes a while: not while others wait for the key.
            empty_trash(layout)

    def delete(self, key: TreeKey) -> bool:
        """Remove a tree that nothing refers to; StoreError when something does."""
        return delete_object(self.store, f"t:{key}")

    def files(self, key: TreeKey) -> Path:
        """Where the file list of a single-directory tree lies."""
        return self.store.layout.tree(key) / "files"

    def record(self, key: TreeKey, detail: TreeDetail, *, size: int, lease: Lease | None) -> Tree:
        """Make a tree valid: its directory, if it has one, is in place and synced. Called by commit."""
        name = f"t:{key}"
        layers = [f"t:{layer}" for layer in dict.fromkeys(detail.layers)]
        with self.store.database.write() as connection:
            for layer in layers:
                if not connection.execute("SELECT 1 FROM objects WHERE name = ?", (layer,)).fetchone():
                    raise _missing(Digest.parse(layer[2:]))
            connection.execute(
                "INSERT INTO objects (name, size, created, detail) VALUES (?, ?, ?, ?)",
                (name, size, time.time(), msgspec.json.encode(detail).decode()),
            )
            connection.executemany("INSERT INTO edges VALUES (?, ?)", [(name, layer) for layer in layers])
            if lease is not None:
                hold(connection, lease.id, name)
        return self._tree(key, size, detail)

    def _tree(self, key: TreeKey, size: int, detail: TreeDetail) -> Tree:
        layout = self.store.layout
        path = layout.tree(key) / "root"
        if not detail.layers:
            return Tree(key, path, (path,), size, detail.entries)
        # A layer that occurs twice says nothing new further down, and overlay refuses the same one twice.
        topmost = reversed(dict.fromkeys(reversed(detail.layers)))
        layers = tuple(layout.tree(Digest.parse(layer)) / "root" for layer in topmost)
        return Tree(key, None, (*layers, path) if detail.own_root else layers, detail.total, detail.entries)


def _last_index(layers: Sequence[TreeKey]) -> Callable[[TreeKey], int]:
    return {layer: index for index, layer in enumerate(layers)}.__getitem__


def _missing(key: TreeKey) -> NotInStore:
    return NotInStore(
        f"the tree {key} is not in the store", next_step="hold layers by a lease while their stack is made"
    )

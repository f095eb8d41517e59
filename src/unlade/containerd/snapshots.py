"""containerd's snapshots as a `TreeStore`: a tree is a committed snapshot that has no parent.

A staging is an active snapshot prepared under a lease; its directory is filled in place, so each byte is
written once and containerd's own accounting sees it. Parts that must be merged get active snapshots of
their own beside it, on the same file system, so that merging renames. Commit: sync the tree, put the
file list into the content store, commit under the name that the synthetic layer's chain ID has (`naming`);
the record of the snapshot keeps the list alive. A process that dies leaves active snapshots under a lease
whose owner is gone: `leases.end_dead` and containerd's next collection remove both.

Snapshotters whose snapshots are plain directories (overlayfs, native) are supported; others are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, cast

from google.protobuf.empty_pb2 import Empty

from unlade.containerd import labels, leases
from unlade.containerd.api import snapshots_pb2
from unlade.containerd.connection import Containerd, Method
from unlade.containerd.content import ContainerdStore
from unlade.containerd.errors import (
    ContainerdError,
    Exists,
    Missing,
    Refused,
    SnapshotterUnsupported,
)
from unlade.containerd.naming import snapshot_name
from unlade.errors import StoreError
from unlade.kernel import failpoints
from unlade.model import Deadline, Descriptor, Digest
from unlade.store import Lease, NotInStore
from unlade.store.failure import explaining
from unlade.tree import Scratch, Tree, TreeKey, merge_into
from unlade.tree.checking import compare
from unlade.tree.listing import Listing
from unlade.tree.sync import sync_tree
from unlade.unpack import Unpacked

_SNAPSHOTS: Final = "/containerd.services.snapshots.v1.Snapshots"
_PREPARE: Final = Method(
    f"{_SNAPSHOTS}/Prepare", snapshots_pb2.PrepareSnapshotRequest, snapshots_pb2.PrepareSnapshotResponse
)
_COMMIT: Final = Method(f"{_SNAPSHOTS}/Commit", snapshots_pb2.CommitSnapshotRequest, Empty)
_REMOVE: Final = Method(f"{_SNAPSHOTS}/Remove", snapshots_pb2.RemoveSnapshotRequest, Empty)
_STAT: Final = Method(
    f"{_SNAPSHOTS}/Stat", snapshots_pb2.StatSnapshotRequest, snapshots_pb2.StatSnapshotResponse
)
_LIST: Final = Method(
    f"{_SNAPSHOTS}/List", snapshots_pb2.ListSnapshotsRequest, snapshots_pb2.ListSnapshotsResponse
)
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CHUNK: Final = 1 << 20
FILE_LIST: Final = "application/vnd.unlade.filelist.v1+jsonl"
_LIST_LABEL: Final = f"{labels.GC_CONTENT}.unlade-files"


class ContainerdTrees:
    """Trees of one snapshotter in one namespace; thread-safe."""

    def __init__(self, containerd: Containerd, snapshotter: str = "overlayfs") -> None:
        self.containerd = containerd
        self.snapshotter = snapshotter
        self.content = ContainerdStore(containerd)

    def name(self, key: TreeKey) -> str:
        """What a tree's snapshot is called: the chain ID of the layer that stands for it."""
        return snapshot_name(self.containerd, key)

    def find(self, key: TreeKey, *, lease: Lease | None = None) -> Tree | None:
        """A committed tree, from now on held by the lease; None when there is none."""
        name = self.name(key)
        if lease is not None and not leases.hold_snapshot(self.containerd, lease.id, self.snapshotter, name):
            return None
        info = self._stat(name)
        if info is None or info.kind != snapshots_pb2.Kind.COMMITTED:
            return None
        path = Path(info.labels[labels.PATH])
        size, entries = int(info.labels[labels.SIZE]), int(info.labels[labels.ENTRIES])
        return Tree(key, path, (path,), size, entries)

    def files(self, key: TreeKey) -> Digest | None:
        """The digest of a tree's file list in the content store; None when there is no such tree."""
        info = self._stat(self.name(key))
        return Digest.parse(info.labels[_LIST_LABEL]) if info is not None else None

    @contextmanager
    def stage(
        self, key: TreeKey, *, lease: Lease | None = None, deadline: Deadline | None = None
    ) -> Iterator[ContainerdStaging]:
        """Make a tree, alone among all processes that share `state`; see TreeStore.stage."""
        with contextlib.ExitStack() as stack:
            if lease is None:
                # An active snapshot that nothing holds would be collected under our hands.
                lease = stack.enter_context(leases.lease(self.containerd, f"tree {key}"))
            lock = f"tree-{self.snapshotter}-{key.hex}"
            stack.enter_context(self.containerd.locks.hold(lock, deadline=deadline))
            staging = ContainerdStaging(self, key, lease, self.find(key, lease=lease))
            try:
                yield staging
            finally:
                staging.close()

    def delete(self, key: TreeKey) -> bool:
        """Remove a tree that nothing refers to, and wait until its directory is gone."""
        name = self.name(key)
        if self._stat(name) is None:
            return False
        kind = f"snapshots/{self.snapshotter}"
        held = leases.holders(self.containerd, kind=kind, resource=name)
        if held:
            raise StoreError(f"the tree {key} is needed by the lease {held[0]}", next_step="end that first")
        user = self.content.user_of_snapshot(self.snapshotter, name)
        if user:
            raise StoreError(f"the tree {key} is needed by {user}", next_step="remove its image first")
        try:
            self.remove(name)
        except Refused as error:
            raise StoreError(
                f"the tree {key} is in use: {error}", next_step="end the pods that mount it"
            ) from error
        leases.collect(self.containerd)
        return True

    def prepare(self, key: TreeKey, lease: Lease) -> tuple[str, Path]:
        """An empty active snapshot held by the lease: its key, and its directory."""
        what = f"prepare a snapshot of {self.snapshotter}"
        for _ in range(3):
            name = f"unlade-{uuid.uuid4().hex}"
            request = snapshots_pb2.PrepareSnapshotRequest(
                snapshotter=self.snapshotter, key=name, labels={labels.STAGING: str(key)}
            )
            try:
                mounts = self.containerd.call(_PREPARE, request, what, lease=lease.id).mounts
            except Exists:
                continue  # our own first attempt, whose answer was lost: the lease takes it with it
            except Missing as error:
                raise leases.ended() from error
            except ContainerdError as error:
                if "file exists" not in error.message:
                    raise
                # containerd was killed between making a snapshot's directory and recording it, and wants
                # to make the same one again. It tidies up when a snapshot is removed, and not before.
                raise ContainerdError(
                    f"cannot {what}: an earlier crash of containerd's left a directory in its way",
                    next_step="remove a container or image that is not needed: containerd then tidies up",
                    retryable=True,
                ) from error
            if len(mounts) != 1 or mounts[0].type not in ("bind", "rbind"):
                self.remove(name)
                raise SnapshotterUnsupported(
                    f"the snapshotter {self.snapshotter} cannot hold artifacts: its snapshots are no plain "
                    "directories",
                    next_step="name overlayfs or native for this handler in the node's configuration",
                )
            failpoints.reach("containerd.snapshot.prepared")
            return name, Path(mounts[0].source)
        raise ContainerdError(f"cannot {what}: its answers are lost", next_step="see containerd's log")

    def check(self, key: TreeKey, *, deadline: Deadline) -> str | None:
        """What is wrong with a tree, compared with its file list, in words; None when nothing is."""
        tree, listed = self.find(key), self.files(key)
        if tree is None or listed is None or tree.path is None:
            return "its snapshot is not there"
        try:
            with self.content.open(listed) as files:
                return compare(tree.path, files, deadline=deadline)
        except NotInStore:
            return "its file list is not there"

    def commit(self, active: str, name: str, facts: dict[str, str], lease: Lease) -> None:
        """Make an active snapshot the committed one of this name, held by the lease; idempotent."""
        request = snapshots_pb2.CommitSnapshotRequest(
            snapshotter=self.snapshotter, name=name, key=active, labels=facts
        )
        try:
            self.containerd.call(_COMMIT, request, "commit a snapshot", lease=lease.id)
        except (Exists, Missing):
            # Committed by our own first attempt, or by one whose lock directory is another than ours.
            if not leases.hold_snapshot(self.containerd, lease.id, self.snapshotter, name):
                raise

    def remove(self, name: str) -> None:
        """Remove a snapshot's record; containerd's next collection frees its disk. Missing is no error."""
        request = snapshots_pb2.RemoveSnapshotRequest(snapshotter=self.snapshotter, key=name)
        with contextlib.suppress(Missing):
            self.containerd.call(_REMOVE, request, f"remove the snapshot {name}")

    def stagings(self) -> list[str]:
        """The keys of active snapshots that are being filled, by whomever."""
        request = snapshots_pb2.ListSnapshotsRequest(
            snapshotter=self.snapshotter, filters=[f'labels."{labels.STAGING}"']
        )
        pages = self.containerd.stream(_LIST, request, "list snapshots")
        return [info.name for page in pages for info in page.info if info.kind == snapshots_pb2.Kind.ACTIVE]

    def _stat(self, name: str) -> snapshots_pb2.Info | None:
        request = snapshots_pb2.StatSnapshotRequest(snapshotter=self.snapshotter, key=name)
        try:
            return self.containerd.call(_STAT, request, f"look for the snapshot {name}").info
        except Missing:
            return None


class ContainerdStaging:
    """See `Staging`; made by ContainerdTrees.stage, which holds the key's lock around it."""

    def __init__(self, trees: ContainerdTrees, key: TreeKey, lease: Lease, existing: Tree | None) -> None:
        self.existing = existing
        self._trees = trees
        self._key = key
        self._lease = lease
        self._active: list[str] = []
        self._scratch: list[Scratch] = []
        self._merged: Listing | None = None
        # File lists are small beside what they list; they are sealed into the content store at commit.
        self.files_out: BinaryIO = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - see close
        self.path, self.dirfd = Path(), -1
        if existing is None:
            self.path, self.dirfd = self._prepare()

    def scratch(self) -> Scratch:
        """A snapshot of its own to unpack one part into before `merge`; removed with the staging."""
        path, dirfd = self._prepare()
        files = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115 - closed by `close`
        made = Scratch(path, dirfd, files)
        self._scratch.append(made)
        return made

    def merge(self, scratch: Scratch, unpacked: Unpacked, *, deadline: Deadline | None = None) -> None:
        """Move an unpacked part, the next one up, over what the staging holds so far."""
        with explaining(f"merge a part into the tree {self._key}"):
            merge_into(self.dirfd, scratch.dirfd, unpacked, deadline=deadline)
            if self._merged is None:
                self._merged = Listing()
            scratch.files_out.flush()
            scratch.files_out.seek(0)
            self._merged.add_layer(scratch.files_out, unpacked)
        failpoints.reach("containerd.snapshot.merged")

    def commit(self, *, size: int, entries: int = 0) -> Tree:
        """Sync, seal the file list, commit the snapshot; see the module."""
        if self.existing:
            return self.existing
        with explaining(f"commit the tree {self._key}"):
            described = self._file_list()
            failpoints.reach("containerd.snapshot.complete")
            # dirfd was opened before the first byte was written: it is told of every write-back error.
            sync_tree(self.dirfd)
        failpoints.reach("containerd.snapshot.synced")
        with self._trees.content.ingest(described, lease=self._lease) as ingest:
            if not ingest.present:
                ingest.discard()
                while part := self.files_out.read(_CHUNK):
                    ingest.write(part)
            ingest.commit()
        failpoints.reach("containerd.snapshot.listed")
        facts = {
            labels.TREE: str(self._key),
            labels.SIZE: str(size),
            labels.ENTRIES: str(entries),
            labels.PATH: str(self.path),
            _LIST_LABEL: str(described.digest),
        }
        self._trees.commit(self._active[0], self._trees.name(self._key), facts, self._lease)
        failpoints.reach("containerd.snapshot.committed")
        found = self._trees.find(self._key, lease=self._lease)
        if found is None:
            raise leases.ended()
        self.existing = found
        return found

    def close(self) -> None:
        """Close descriptors; throw away what was not committed. Idempotent."""
        for scratch in self._scratch:
            os.close(scratch.dirfd)
            scratch.files_out.close()
        self._scratch.clear()
        if self.dirfd >= 0:
            os.close(self.dirfd)
            self.dirfd = -1
        self.files_out.close()
        # A committed snapshot is no longer there under its active key.
        for name in self._active:
            self._trees.remove(name)
        self._active.clear()

    def _prepare(self) -> tuple[Path, int]:
        name, path = self._trees.prepare(self._key, self._lease)
        self._active.append(name)
        with explaining(f"stage the tree {self._key}"):
            # As for the root of an image without an entry of its own, whatever the snapshotter thinks.
            path.chmod(0o755)
            return path, os.open(path, _DIRECTORY)

    def _file_list(self) -> Descriptor:
        """Finish the file list and stand at its start; it may have millions of lines."""
        if self._merged is not None:
            self.files_out.seek(0)
            self.files_out.truncate()
            self._merged.write(self.files_out)
        self.files_out.flush()
        self.files_out.seek(0)
        hasher, size = hashlib.sha256(), 0
        while part := self.files_out.read(_CHUNK):
            hasher.update(part)
            size += len(part)
        self.files_out.seek(0)
        return Descriptor(media_type=FILE_LIST, digest=Digest("sha256", hasher.hexdigest()), size=size)

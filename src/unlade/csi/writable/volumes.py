"""The life of writable volumes on one node: made, mounted, grown, copied, deleted, found again.

Every call is idempotent and may be repeated after a kill at any point; each volume or snapshot is worked on
by one caller at a time, among threads and processes (a lock by id, in ROOT/locks). An id is made from the
name that the caller chose, so the same request always meets the same directory. Order of making: record
`creating`, tree held, image made and synced, record `ready`. Order of unmaking: record `deleting`, image
gone, tree let go, record gone. So the data of a volume whose record says `ready` is whole, and nothing is
ever left that no record names.

Called by the CSI services (`csi.controller`, `csi.node`) and, through a protocol, by the provisioner.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from unlade.csi import WRITABLE_PREFIX
from unlade.csi.writable import filesystem, images, records, room
from unlade.csi.writable.errors import (
    NoSuchSnapshot,
    NoSuchVolume,
    SizeOutOfRange,
    VolumeConflict,
    VolumeInUse,
)
from unlade.csi.writable.names import (
    SNAPSHOT_PREFIX,
    is_snapshot,
    is_writable,
    resolved,
    snapshot_id_of,
    volume_id_of,
)
from unlade.csi.writable.records import Snapshot, Volume
from unlade.csi.writable.seeds import StoreSeeds, largest_file, parse_seed
from unlade.errors import MountError, StoreError, UnladeError
from unlade.kernel import failpoints
from unlade.model import Deadline
from unlade.registry import CredentialSource
from unlade.store import NotInStore
from unlade.store.failure import explaining
from unlade.store.layout import sync_directory
from unlade.store.locks import KeyLocks

log = logging.getLogger(__name__)
R = TypeVar("R")

_LOCKS: Final = "locks"
_ROOM_LOCK: Final = "room"
# What a claim without a request, or a CSI call without a capacity range, gets.
DEFAULT_SIZE: Final = 1 << 30
KEEP_FREE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Expanded:
    """The size a volume has now; `pending`: its file system grows when it is next unmounted."""

    size: int
    pending: bool


@dataclass(frozen=True, slots=True)
class Stats:
    """Bytes and inodes that a volume's own writes may take, have taken, and have left."""

    total: int
    used: int
    available: int
    inodes: int
    inodes_used: int
    inodes_free: int


class Writable:
    """The writable volumes of one node, below one directory; thread-safe.

    `keep_free` is the share of the disk that is promised to nobody. `recover` is called once at start.
    """

    def __init__(
        self, root: str | os.PathLike[str], seeds: StoreSeeds, *, keep_free: float = KEEP_FREE
    ) -> None:
        self.root = Path(root).absolute()
        self._seeds = seeds
        self._keep_free = keep_free
        with explaining(f"prepare {self.root}"):
            # Files in trees keep their owners and modes: nobody but root may walk in.
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.root / _LOCKS).mkdir(mode=0o700, exist_ok=True)
        self._locks = KeyLocks(self.root / _LOCKS)

    # --- volumes

    def create(
        self,
        name: str,
        size: int,
        parameters: Mapping[str, str],
        *,
        limit: int = 0,
        origin: str = "",
        owner: str = "",
        credentials: CredentialSource | None = None,
        deadline: Deadline | None = None,
    ) -> Volume:
        """The volume of this name, made unless it is there; raises VolumeConflict when it is another.

        `limit` is the most it may have (0: no limit). `origin` is the id of a snapshot or volume to copy;
        what the parameters name is the content otherwise.
        """
        wanted = images.round_size(size or DEFAULT_SIZE)
        if (limit and wanted > limit) or wanted > images.MAX_SIZE:
            raise SizeOutOfRange(
                f"a volume of {wanted} bytes is more than {limit or images.MAX_SIZE}",
                next_step=f"the smallest volume has {images.MIN_SIZE} bytes",
            )
        volume_id = volume_id_of(name)
        if origin and not (is_writable(origin) or is_snapshot(origin)):
            raise _no_snapshot(origin)
        with contextlib.ExitStack() as held:
            # In the order of ids, so that two who copy each other's volumes never wait in a ring.
            for lock in sorted({volume_id, origin} - {""}):
                held.enter_context(self._locks.hold(lock, deadline=deadline))
            found = self._volume(volume_id)
            if found is not None and found.state == "ready":
                return _same(found, size, limit, origin, parameters)
            if found is not None:
                self._unmake(found)
            source = self._origin(origin, wanted) if origin else None
            seed = parse_seed(parameters) if source is None else None
            volume = Volume(
                id=volume_id,
                name=name,
                size=wanted,
                state="creating",
                created=time.time(),
                parameters=dict(parameters if source is None else source.parameters),
                origin=origin,
                owner=owner,
            )
            try:
                self._reserve(volume)
                if seed is not None:
                    planted = self._seeds.plant(volume_id, seed, credentials=credentials, deadline=deadline)
                    volume = msgspec.structs.replace(volume, tree=planted.tree, digests=planted.digests)
                    failpoints.reach("csi.writable.planted")
                    self._fill(volume)
                else:
                    assert source is not None
                    volume = msgspec.structs.replace(volume, tree=source.tree, digests=source.digests)
                    self._copy(source, volume)
                warnings = self._warnings(volume)
                volume = msgspec.structs.replace(volume, state="ready", grown=wanted, warnings=warnings)
                self._write(volume)
            except BaseException:
                # A failed making leaves nothing; a killed one is unmade by `recover` or the next call.
                self._unmake(volume)
                raise
            failpoints.reach("csi.writable.ready")
            return volume

    def delete(self, volume_id: str) -> None:
        """Remove a volume and its data; one that is not there is no error. Raises VolumeInUse."""
        if not is_writable(volume_id):
            return
        with self._locks.hold(volume_id):
            volume = self._volume(volume_id)
            if volume is None:
                return
            there = filesystem.published(self._home(volume_id))
            if there:
                raise VolumeInUse(
                    f"the volume {volume_id} is mounted at {os.fsdecode(there[0].path)}",
                    next_step="delete the pods that use it",
                )
            filesystem.wait_free(self._home(volume_id))
            self._unmake(volume)

    def bind(self, volume_id: str) -> None:
        """Note that a PersistentVolume stands for this volume; from now on only `delete` ends it."""
        with self._hold(volume_id):
            volume = self._ready(volume_id)
            if not volume.bound:
                self._write(msgspec.structs.replace(volume, bound=True))

    def publish(
        self,
        volume_id: str,
        target: str,
        *,
        readonly: bool = False,
        executable: bool = True,
        alone: bool = False,
        context: str = "",
    ) -> None:
        """Mount a volume at a target, which is made; a no-op when it is mounted there the same way.

        `alone`: nowhere else at the same time; raises VolumeInUse.
        """
        target = resolved(target)
        with self._hold(volume_id):
            volume = self._ready(volume_id)
            for entry in filesystem.published(self._home(volume_id)):
                if entry.path == os.fsencode(target):
                    if ("ro" in entry.options) != readonly:
                        raise VolumeConflict(
                            f"{volume_id} is mounted at {target} with another access",
                            next_step="unpublish it first",
                        )
                    return
            if alone and filesystem.published(self._home(volume_id)):
                raise VolumeInUse(
                    f"{volume_id} is mounted elsewhere on this node and may be used by one pod alone",
                    next_step="delete the other pod, or use ReadWriteOnce",
                )
            if filesystem.mounted_at(target):
                raise MountError(f"something else is mounted at {target}", next_step="unmount it first")
            with explaining(f"make {target}"):
                os.makedirs(target, mode=0o750, exist_ok=True)
            failpoints.reach("csi.writable.target-made")
            home = self._home(volume_id)
            if volume.grown < volume.size and not filesystem.published(self._home(volume_id)):
                self._grow(volume)
            layers = self._layers(volume)
            filesystem.mount(home, layers, target, readonly=readonly, executable=executable, context=context)

    def unpublish(self, volume_id: str, target: str) -> None:
        """Unmount a volume from a target and remove the target; both may be gone already."""
        target = resolved(target)
        # An id that was never ours has nothing to be guarded; its target is taken away all the same.
        with self._hold(volume_id) if is_writable(volume_id) else contextlib.nullcontext():
            filesystem.unmount(target)
            with explaining(f"remove {target}"), contextlib.suppress(FileNotFoundError):
                os.rmdir(target)
            failpoints.reach("csi.writable.target-removed")

    def expand(self, volume_id: str, size: int, *, limit: int = 0) -> Expanded:
        """Let a volume have at least this size, in use or not; it never shrinks."""
        wanted = images.round_size(size)
        if (limit and wanted > limit) or wanted > images.MAX_SIZE:
            raise SizeOutOfRange(f"{wanted} bytes are too many", next_step="ask for less")
        with self._hold(volume_id):
            volume = self._ready(volume_id)
            if wanted > volume.size:
                with self._locks.hold(_ROOM_LOCK):
                    room.require(self.room(), wanted - volume.size, f"growing {volume_id}")
                    volume = msgspec.structs.replace(volume, size=wanted)
                    self._write(volume)
                failpoints.reach("csi.writable.size-written")
            if volume.grown < volume.size:
                volume = self._grow(volume)
            return Expanded(volume.size, volume.grown < volume.size)

    def get(self, volume_id: str) -> Volume:
        """A volume that is ready; raises NoSuchVolume."""
        return self._ready(volume_id)

    def volumes(self) -> list[Volume]:
        """Every volume, those in the making included, by id."""
        found = (_readable(records.read_volume, home) for home in self._homes(WRITABLE_PREFIX))
        return [volume for volume in found if volume is not None]

    def stats(self, volume_id: str, path: str) -> Stats:
        """What a mounted volume's own writes take, asked of one of its targets; raises NoSuchVolume."""
        self._ready(volume_id)
        wanted = os.fsencode(resolved(path))
        if not any(entry.path == wanted for entry in filesystem.published(self._home(volume_id))):
            raise NoSuchVolume(f"{volume_id} is not mounted at {path}", next_step="publish it first")
        disk = os.statvfs(path)
        total, available = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        return Stats(
            total=total,
            used=total - disk.f_bfree * disk.f_frsize,
            available=available,
            inodes=disk.f_files,
            inodes_used=disk.f_files - disk.f_ffree,
            inodes_free=disk.f_ffree,
        )

    def room(self) -> room.Room:
        """How much may still be promised to volumes on this node."""
        return room.measure(self.root, self.volumes(), keep_free=self._keep_free)

    # --- snapshots

    def snapshot(self, name: str, volume_id: str) -> Snapshot:
        """A copy of the volume as it is now, made unless it is there; the pod's writers wait meanwhile."""
        snapshot_id = snapshot_id_of(name)
        with self._locks.hold(snapshot_id), self._hold(volume_id):
            found = self._snapshot(snapshot_id)
            if found is not None and found.state == "ready":
                if found.volume != volume_id:
                    raise VolumeConflict(
                        f"the snapshot {name!r} is of {found.volume}", next_step="choose another name"
                    )
                return found
            if found is not None:
                self._unmake(found)
            volume = self._ready(volume_id)
            snapshot = Snapshot(
                id=snapshot_id,
                name=name,
                volume=volume_id,
                size=volume.size,
                state="creating",
                created=time.time(),
                parameters=volume.parameters,
                tree=volume.tree,
                digests=volume.digests,
            )
            try:
                self._reserve(snapshot)
                self._copy(volume, snapshot)
                snapshot = msgspec.structs.replace(snapshot, state="ready")
                self._write(snapshot)
            except BaseException:
                self._unmake(snapshot)
                raise
            failpoints.reach("csi.writable.snapshot-ready")
            return snapshot

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Remove a snapshot; one that is not there is no error. Volumes copied from it do not need it."""
        if not is_snapshot(snapshot_id):
            return
        with self._locks.hold(snapshot_id):
            snapshot = self._snapshot(snapshot_id)
            if snapshot is not None:
                self._unmake(snapshot)

    def snapshots(self) -> list[Snapshot]:
        """Every snapshot that is ready, by id."""
        found = (_readable(records.read_snapshot, home) for home in self._homes(SNAPSHOT_PREFIX))
        return [snapshot for snapshot in found if snapshot is not None and snapshot.state == "ready"]

    # --- after a restart

    def recover(self) -> None:
        """Finish or undo what a killed process left; after a reboot, too. Data of ready volumes stays."""
        for prefix, one in (
            (SNAPSHOT_PREFIX, self._recover_snapshot),
            (WRITABLE_PREFIX, self._recover_volume),
        ):
            for home in self._homes(prefix):
                try:
                    with self._locks.hold(home.name):
                        one(home)
                except UnladeError as error:
                    # One volume that cannot be put right must not keep the others from their pods.
                    log.error("%s: %s; next: %s", home.name, error, error.next_step or "see the log")
        self.tidy()
        for name in os.listdir(self.root / _LOCKS):
            # A killed holder leaves the empty file of its lock; whoever lets go of it removes it.
            with self._locks.try_hold(name):
                pass

    def tidy(self) -> None:
        """Let go of trees that no volume or snapshot is behind any more."""
        for owner in self._seeds.owners():
            if is_writable(owner) or is_snapshot(owner):
                with self._locks.hold(owner):
                    if not self._home(owner).exists():
                        self._seeds.release(owner)

    def _recover_snapshot(self, home: Path) -> None:
        snapshot = records.read_snapshot(home)
        if snapshot is not None and snapshot.state == "ready":
            self._seeds.share(home.name, snapshot.tree)
            return
        self._thaw(snapshot.volume if snapshot is not None else "")
        self._unmake(snapshot or home)

    def _recover_volume(self, home: Path) -> None:
        volume = records.read_volume(home)
        if volume is not None and volume.state == "ready":
            filesystem.tidy(home, thaw=False)
            self._seeds.share(home.name, volume.tree)
            return
        self._thaw(volume.origin if volume is not None else "")
        self._unmake(volume or home)

    # --- inside

    def _hold(self, volume_id: str) -> contextlib.AbstractContextManager[None]:
        """The volume's lock, whose name is a path: an id of another form is refused before it is one."""
        if not is_writable(volume_id):
            raise _no_volume(volume_id)
        return self._locks.hold(volume_id)

    def _reserve(self, record: Volume | Snapshot) -> None:
        """Write the first record, if the disk can promise what it asks for; nobody else looks meanwhile."""
        home = self._home(record.id)
        with self._locks.hold(_ROOM_LOCK):
            needed = record.size
            if isinstance(record, Snapshot):
                needed = images.allocated(self._home(record.volume))
            room.require(self.room(), needed, record.id)
            with explaining(f"make {home}"):
                home.mkdir(mode=0o700, exist_ok=True)
                sync_directory(self.root)
            failpoints.reach("csi.writable.home-made")
            self._write(record)
        failpoints.reach("csi.writable.reserved")

    def _layers(self, volume: Volume) -> tuple[str, ...]:
        try:
            return self._seeds.layers(volume.tree)
        except NotInStore:
            # Rotten and quarantined, or deleted by hand: the same bytes are still where they came from.
            self._seeds.restore(volume.id, parse_seed(volume.parameters), volume.digests, volume.tree)
            return self._seeds.layers(volume.tree)

    def _fill(self, volume: Volume) -> None:
        layers = self._seeds.layers(volume.tree)
        images.make(self._home(volume.id), volume.size, layers[-1])

    def _copy(self, source: Volume | Snapshot, target: Volume | Snapshot) -> None:
        self._seeds.share(target.id, source.tree)
        failpoints.reach("csi.writable.shared")
        origin, home = self._home(source.id), self._home(target.id)
        if isinstance(source, Volume):
            with filesystem.still(origin):
                images.copy(origin / images.IMAGE, home)
        else:
            images.copy(origin / images.IMAGE, home)
        if isinstance(target, Volume):
            images.extend(home, target.size)
            images.grow_unmounted(home)

    def _grow(self, volume: Volume) -> Volume:
        home = self._home(volume.id)
        images.extend(home, volume.size)
        if not filesystem.grow(home, volume.size):
            return volume
        volume = msgspec.structs.replace(volume, grown=volume.size)
        self._write(volume)
        return volume

    def _unmake(self, record: Volume | Snapshot | Path) -> None:
        """Give up a volume or snapshot that nothing has mounted, from whatever state it is in."""
        home = record if isinstance(record, Path) else self._home(record.id)
        if not isinstance(record, Path) and home.exists() and record.state == "ready":
            self._write(msgspec.structs.replace(record, state="deleting"))
            failpoints.reach("csi.writable.deleting")
        with explaining(f"remove {home}"):
            if home.exists():
                filesystem.tidy(home, thaw=False)
                images.remove(home)
            failpoints.reach("csi.writable.image-removed")
            self._seeds.release(home.name)
            failpoints.reach("csi.writable.released")
            if home.exists():
                records.erase(home)
                failpoints.reach("csi.writable.record-erased")
                images.remove_tree_at(home)
                sync_directory(self.root)
        failpoints.reach("csi.writable.removed")

    def _thaw(self, volume_id: str) -> None:
        if is_writable(volume_id) and self._home(volume_id).exists():
            filesystem.tidy(self._home(volume_id), thaw=True)

    def _warnings(self, volume: Volume) -> tuple[str, ...]:
        largest, usable = largest_file(self._seeds.layers(volume.tree)), images.usable(self._home(volume.id))
        if largest <= usable:
            return ()
        return (
            f"the largest file has {largest} bytes, the volume has room for {usable}: a write to that file"
            " copies it first and will fail with ENOSPC; ask for more storage if pods change it",
        )

    def _origin(self, origin: str, size: int) -> Volume | Snapshot:
        source: Volume | Snapshot | None = (
            self._ready(origin) if is_writable(origin) else self._snapshot(origin)
        )
        if source is None or source.state != "ready":
            raise NoSuchSnapshot(
                f"there is no snapshot {origin} on this node", next_step="list the snapshots"
            )
        if size < source.size:
            raise SizeOutOfRange(
                f"{size} bytes are less than the {source.size} of {origin}", next_step="ask for at least that"
            )
        return source

    def _ready(self, volume_id: str) -> Volume:
        volume = self._volume(volume_id) if is_writable(volume_id) else None
        if volume is None or volume.state != "ready":
            raise _no_volume(volume_id)
        return volume

    def _volume(self, volume_id: str) -> Volume | None:
        return records.read_volume(self._home(volume_id))

    def _snapshot(self, snapshot_id: str) -> Snapshot | None:
        return records.read_snapshot(self._home(snapshot_id)) if is_snapshot(snapshot_id) else None

    def _write(self, record: Volume | Snapshot) -> None:
        with explaining(f"write the record of {record.id}"):
            records.write(self._home(record.id), record)

    def _home(self, record_id: str) -> Path:
        return self.root / record_id

    def _homes(self, prefix: str) -> Iterator[Path]:
        for name in sorted(os.listdir(self.root)):
            if name.startswith(prefix):
                yield self.root / name


def _no_volume(volume_id: str) -> NoSuchVolume:
    return NoSuchVolume(
        f"there is no writable volume {volume_id[:80]!r} on this node",
        next_step="a volume can be used only on the node that made it",
    )


def _no_snapshot(snapshot_id: str) -> NoSuchSnapshot:
    return NoSuchSnapshot(
        f"there is no snapshot {snapshot_id[:80]!r} on this node",
        next_step="a snapshot can be used only on the node that made it",
    )


def _readable(read: Callable[[Path], R | None], home: Path) -> R | None:
    try:
        return read(home)
    except StoreError:
        return None  # `recover` has said so


def _same(found: Volume, size: int, limit: int, origin: str, parameters: Mapping[str, str]) -> Volume:
    too_small = found.size < size
    too_large = bool(limit) and found.size > limit
    other = origin != found.origin or (not origin and dict(parameters) != found.parameters)
    if too_small or too_large or other:
        raise VolumeConflict(
            f"the volume {found.name!r} exists with another {'content' if other else 'size'}",
            next_step="choose another name, or delete it first",
        )
    return found

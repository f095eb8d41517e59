"""How much may still be promised: what the scheduler is told, and what a new volume is refused for (E9).

Images are sparse, so the disk's free bytes are partly promised already: each volume may still write what it
has not written. Room is the free bytes, less that, less a share kept free for everything else on the disk
(by default a tenth: where the kubelet begins to evict). Snapshots never grow and promise nothing. Volumes
alone therefore never fill the disk; other users of it can, and then a pod's write fails as on any full disk.
Cost: one stat per volume.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unlade.csi.writable import images
from unlade.csi.writable.errors import NoRoom
from unlade.csi.writable.records import Volume


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes: of the disk, free on it, promised to volumes and not written yet, and left to promise."""

    total: int
    free: int
    promised: int
    available: int


def measure(root: Path, volumes: Iterable[Volume], *, keep_free: float, without: str = "") -> Room:
    """The room on the disk below `root`; the volume `without` counts as if it were not there."""
    disk = os.statvfs(root)
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    promised = 0
    for volume in volumes:
        # A volume that grows has written what it has: only its promise is counted anew.
        size = volume.size if volume.id != without else 0
        promised += max(0, size - images.allocated(root / volume.id))
    available = max(0, free - promised - int(total * keep_free))
    return Room(total, free, promised, available // images.BLOCK * images.BLOCK)


def require(room: Room, size: int, what: str) -> None:
    """Raise NoRoom unless `size` more bytes can be promised."""
    if size > room.available:
        raise NoRoom(
            f"{what} needs {_mib(size)}; {_mib(room.available)} can still be promised on this node"
            f" ({_mib(room.free)} free, {_mib(room.promised)} of it promised to other volumes)",
            next_step="ask for less, delete volumes, or let the scheduler choose another node",
        )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"

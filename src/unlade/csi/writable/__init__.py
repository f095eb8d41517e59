"""Writable volumes that start with what is in a registry (E7, E8, E9).

A volume is a directory of the node: a record, and one file that holds an ext4 of the size the claim asked
for. Mounted, it is an overlay: the shared, read-only tree of the content below, the ext4 above. So ten
volumes of one model share its bytes, a volume's own writes are bounded by its own file, and a volume that
is full is full for its pod alone. Volume ids begin with `w-`, snapshot ids with `s-`.

`Writable` is all that the faces see: the CSI services call it, and the provisioner in `unlade.controllers`
has a protocol of the same shape. Nothing here knows Kubernetes.
"""

from unlade.csi.writable.errors import (
    NoRoom,
    NoSuchSnapshot,
    NoSuchVolume,
    SizeOutOfRange,
    VolumeConflict,
    VolumeInUse,
)
from unlade.csi.writable.names import is_snapshot, is_writable
from unlade.csi.writable.records import Snapshot, Volume
from unlade.csi.writable.room import Room
from unlade.csi.writable.seeds import StoreSeeds
from unlade.csi.writable.volumes import Expanded, Stats, Writable

__all__ = [
    "Expanded",
    "NoRoom",
    "NoSuchSnapshot",
    "NoSuchVolume",
    "Room",
    "SizeOutOfRange",
    "Snapshot",
    "Stats",
    "StoreSeeds",
    "Volume",
    "VolumeConflict",
    "VolumeInUse",
    "Writable",
    "is_snapshot",
    "is_writable",
]

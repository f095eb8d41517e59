"""From a tree to a mounted directory: bind or overlay, flags, and the mount table."""

from unlade.mount.attach import MAX_LAYERS, MountOptions, NoSuchSubPath, mount_layers, unmount
from unlade.mount.table import MountPoint, find, read_table

__all__ = [
    "MAX_LAYERS",
    "MountOptions",
    "MountPoint",
    "NoSuchSubPath",
    "find",
    "mount_layers",
    "read_table",
    "unmount",
]

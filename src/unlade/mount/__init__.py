"""From a tree to a mounted directory: bind or overlay, flags, and the mount table."""

from typing import TYPE_CHECKING

from unlade.lazy import lazily

if TYPE_CHECKING:
    from unlade.mount.attach import MAX_LAYERS, MountOptions, NoSuchSubPath, mount_layers, unmount, unpublish
    from unlade.mount.table import MountPoint, find, is_mount_point, read_table
else:
    __getattr__ = lazily(
        __name__,
        {
            "attach": "MAX_LAYERS MountOptions NoSuchSubPath mount_layers unmount unpublish",
            "table": "MountPoint find is_mount_point read_table",
        },
    )

__all__ = [
    "MAX_LAYERS",
    "MountOptions",
    "MountPoint",
    "NoSuchSubPath",
    "find",
    "is_mount_point",
    "mount_layers",
    "read_table",
    "unmount",
    "unpublish",
]

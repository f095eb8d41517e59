"""A file system of its own below a node's containerd: as large as a test says, its writes counted.

A sparse file on a loop device, mounted where containerd keeps its content and snapshots. The block device
counts what reaches it, the file system's own records included; nothing else of the rig writes there. It goes
with the rig's directory, which unmounts whatever is below it.
"""

from __future__ import annotations

import os
from pathlib import Path

from rig import machine
from rig.cluster import Rig
from unlade.kernel.files import syncfs

# Few inodes and nothing left for later: a fresh ext4 would otherwise write its tables while we count.
_MKFS = ("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard")
_SECTOR = 512


class Disk:
    """Mounted under the first node's containerd from now on; containerd is restarted, empty."""

    def __init__(self, rig: Rig, size: int) -> None:
        node = rig.node
        self.path = node.directory / "containerd"
        image = rig.directory / "disk.img"
        with image.open("wb") as file:
            file.truncate(size)
        rig.stop(f"containerd-{node.name}")
        machine.unmount_below(self.path)
        machine.remove_tree(self.path)
        self.path.mkdir()
        # A GB of inode tables would be written where a few files are to go.
        machine.run(*_MKFS, "-T", "largefile" if size > 1 << 30 else "default", str(image))
        machine.run("mount", "-o", "loop,discard", str(image), str(self.path))
        self._device = Path(machine.run("findmnt", "-no", "SOURCE", str(self.path)).strip()).name
        rig.restart_containerd(node)

    def written(self) -> int:
        """Bytes that reached the device so far; what waits in memory is written out first."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            syncfs(fd)
        finally:
            os.close(fd)
        fields = Path("/sys/block", self._device, "stat").read_text().split()
        return int(fields[6]) * _SECTOR

    @property
    def free(self) -> int:
        """Bytes that are free."""
        room = os.statvfs(self.path)
        return room.f_bavail * room.f_frsize

    @property
    def size(self) -> int:
        """Bytes in all, as the file system counts them."""
        room = os.statvfs(self.path)
        return room.f_blocks * room.f_frsize

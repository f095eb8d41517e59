"""A volume's file system while it is in use: loop device, ext4, overlay, and how each is taken away.

Nothing of ours stays mounted but the volume itself. The ext4 is mounted at `HOME/fs` only while something
is done to it; the overlay that a pod sees keeps it alive without that. So a volume's only mounts are its
targets, they carry `unlade:ID:ROOT` as their source, and the mount table is the one truth about what is
published: after the last target is gone the kernel ends overlay, ext4 and loop device of its own accord.

Two overlays over one upper directory are undefined, so a second target is a bind of the first, and a volume
whose device is held in another mount namespace is refused. Callers hold the volume's lock.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from unlade.csi.writable import images
from unlade.csi.writable.errors import VolumeInUse
from unlade.errors import MountError
from unlade.kernel import failpoints, loops, mounts
from unlade.mount.table import MountPoint, read_table
from unlade.store.failure import explaining

FS: Final = "fs"
_FLAGS: Final = mounts.ATTR_NOSUID | mounts.ATTR_NODEV
# Deleted files give their blocks back to the node's disk, and unused inode tables stay holes.
_OPTIONS: Final = ("discard", "noinit_itable")
# The kernel lets go of a device a moment after the last unmount returned.
_LETTING_GO: Final = 3.0
_OVERLAY_FILE_SYSTEM: Final = "overlay"


def published(home: Path) -> list[MountPoint]:
    """The mounts of the volume of this directory in this namespace, oldest first."""
    source = os.fsencode(_source(home))
    return [
        entry
        for entry in read_table()
        if entry.source == source and entry.file_system == _OVERLAY_FILE_SYSTEM
    ]


def mount(
    home: Path, layers: tuple[str, ...], target: str, *, readonly: bool, executable: bool, context: str = ""
) -> None:
    """Mount a volume at a target that exists: whole, with every flag, by one call; or not at all."""
    flags = _FLAGS | (mounts.ATTR_RDONLY if readonly else 0) | (0 if executable else mounts.ATTR_NOEXEC)
    # A mount of a part of it (a container's subPath) is one too, but not one to copy.
    there = [entry for entry in published(home) if entry.root == b"/"]
    if there:
        detached = _another(there[0], flags)
    else:
        wait_free(home)
        with opened(home) as fs:
            upper = mounts.Upper(f"{fs}/{images.UPPER}", f"{fs}/{images.WORK}")
            detached = mounts.overlay(
                list(reversed(layers)), flags, context=context, upper=upper, source=_source(home)
            )
            failpoints.reach("csi.writable.overlay-made")
    try:
        target_fd = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            mounts.attach(detached, target_fd)
        finally:
            os.close(target_fd)
    finally:
        os.close(detached)
    failpoints.reach("csi.writable.target-mounted")


def unmount(target: str) -> None:
    """Take away every mount at a target; one that is in use is detached and ends with its users."""
    while mounted_at(target):
        try:
            mounts.detach(target, lazy=False)
        except MountError:
            mounts.detach(target, lazy=True)
        failpoints.reach("csi.writable.target-unmounted")


def mounted_at(target: str) -> bool:
    """Whether anything at all is mounted exactly there."""
    path = os.fsencode(target)
    return any(entry.path == path for entry in read_table())


@contextlib.contextmanager
def opened(home: Path) -> Iterator[str]:
    """The volume's ext4 at HOME/fs for the length of the block, whether the volume is mounted or not."""
    where = home / FS
    with explaining(f"mount the file system of {home.name}"):
        where.mkdir(mode=0o700, exist_ok=True)
        device = loops.find(str(home / images.IMAGE))
        held = -1
        try:
            if device is None:
                if published(home):
                    # Never a second device over a file that one serves already: both would write to it.
                    raise VolumeInUse(
                        f"the device of {home.name} cannot be found although it is mounted",
                        next_step="the agent needs the host's /dev and /sys",
                    )
                image = os.open(home / images.IMAGE, os.O_RDWR | os.O_CLOEXEC)
                try:
                    held, device = loops.attach(image)
                finally:
                    os.close(image)
                failpoints.reach("csi.writable.loop-attached")
            detached = mounts.block_device(device, "ext4", _FLAGS, options=_OPTIONS)
        finally:
            if held >= 0:
                os.close(held)
        try:
            where_fd = os.open(where, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                mounts.attach(detached, where_fd)
            finally:
                os.close(where_fd)
        finally:
            os.close(detached)
    failpoints.reach("csi.writable.fs-mounted")
    try:
        yield str(where)
    finally:
        _close(where)


@contextlib.contextmanager
def still(home: Path) -> Iterator[None]:
    """Hold back the volume's writers for the length of the block, everything written down before.

    A killed process leaves them held back; `tidy` of the next start lets them go, because the copy that
    the block is for is on record before it begins.
    """
    if not published(home):
        wait_free(home)
        yield
        return
    with opened(home) as fs, _directory(fs) as fd:
        loops.freeze(fd)
        try:
            failpoints.reach("csi.writable.frozen")
            yield
        finally:
            loops.thaw(fd)


def tidy(home: Path, *, thaw: bool) -> None:
    """Undo what a killed process left: its own mount of the ext4, and writers held back."""
    # A frozen file system outlives its last mount: the device, not the mount table, says whether it is there.
    if thaw and os.path.exists(home / images.IMAGE) and loops.find(str(home / images.IMAGE)) is not None:
        with opened(home) as fs, _directory(fs) as fd:
            loops.thaw(fd)
    if os.path.lexists(home / FS):
        _close(home / FS)


def grow(home: Path, size: int) -> bool:
    """Let the file system fill its file, in use or not; False when it must be unmounted for that.

    Growing one in use needs CAP_SYS_RESOURCE, which root in a container may lack.
    """
    if not published(home):
        wait_free(home)
        images.grow_unmounted(home)
        return True
    device = loops.find(str(home / images.IMAGE))
    if device is None:
        return False
    with explaining(f"grow {home.name}"):
        loops.adopt_size(device)
        failpoints.reach("csi.writable.device-grown")
        with opened(home) as fs, _directory(fs) as fd:
            try:
                loops.grow_ext4(fd, size // images.BLOCK)
            except PermissionError:
                return False
    failpoints.reach("csi.writable.fs-grown")
    return True


def wait_free(home: Path) -> None:
    """Wait a moment until no device serves the image; raises VolumeInUse."""
    image = str(home / images.IMAGE)
    end = time.monotonic() + _LETTING_GO
    while os.path.exists(image) and loops.find(image) is not None:
        if time.monotonic() > end:
            raise VolumeInUse(
                f"the volume {home.name} is held by mounts that cannot be seen from here",
                next_step="end the processes that still use it; a DaemonSet needs mountPropagation"
                " Bidirectional on its state directory",
            )
        time.sleep(0.01)


def _close(where: Path) -> None:
    while mounted_at(str(where)):
        mounts.detach(str(where), lazy=True)
    failpoints.reach("csi.writable.fs-detached")
    # A namespace that was made meanwhile, such as a container's, has a copy of the mount, and would hold the
    # file system for as long as it lives. Removing a mount point takes its mounts away everywhere.
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(where)


def _source(home: Path) -> str:
    # Ids are made from names: the same one may exist below another root. An inode says which root this is,
    # however its path is spelled inside and outside of a container.
    root = os.stat(home.parent)
    return f"unlade:{home.name}:{root.st_dev:x}.{root.st_ino:x}"


def _another(there: MountPoint, flags: int) -> int:
    fd = os.open(there.path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return mounts.clone(fd, flags, clear=mounts.ATTR_RDONLY | mounts.ATTR_NOEXEC)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _directory(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)

"""Loop devices, and what an ext4 on one is asked for: loop(4), ioctl_fsfreeze(2), FICLONE, ext4's resize.

A device is made with autoclear: the kernel lets go of the file when the last user (our descriptor, then
the mounted file system) is gone, so a process that is killed leaks none. Which device serves a file is asked
of the devices themselves, by inode, because names in sysfs are those of whoever attached it. Only
`unlade.csi.writable` calls this. Raises OSError; Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from typing import Final

# <linux/loop.h>
_SET_CAPACITY: Final = 0x4C07
_GET_STATUS64: Final = 0x4C05
_CONFIGURE: Final = 0x4C0A
_CTL_GET_FREE: Final = 0x4C82
_FLAG_AUTOCLEAR: Final = 4
# struct loop_info64 begins with the device and inode of the file behind; 232 bytes in all.
_INFO_SIZE: Final = 232
# struct loop_config: fd, block size, loop_info64 (whose flags stand at its byte 52), eight reserved words.
_CONFIG_SIZE: Final = 8 + _INFO_SIZE + 64
_FLAGS_AT: Final = 8 + 52
# Somebody else may take the free device between two calls; with a hundred starting at once it takes a few.
_TRIES: Final = 64

# <linux/fs.h> and ext4: the sizes in these numbers are the same on every architecture we run on.
_FIFREEZE: Final = 0xC0045877
_FITHAW: Final = 0xC0045878
_FICLONE: Final = 0x40049409
_EXT4_RESIZE: Final = 0x40086610


def attach(image: int) -> tuple[int, str]:
    """A fresh loop device over an open file: its descriptor (caller closes, after mounting) and its path."""
    for _ in range(_TRIES):
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            number = fcntl.ioctl(control, _CTL_GET_FREE)
        finally:
            os.close(control)
        path = f"/dev/loop{number}"
        try:
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            # Being torn down by its last user at this moment.
            if error.errno in (errno.ENXIO, errno.EBUSY):
                continue
            raise
        config = bytearray(_CONFIG_SIZE)
        struct.pack_into("=II", config, 0, image, 0)
        struct.pack_into("=I", config, _FLAGS_AT, _FLAG_AUTOCLEAR)
        try:
            fcntl.ioctl(device, _CONFIGURE, bytes(config))
        except OSError as error:
            os.close(device)
            if error.errno == errno.EBUSY:
                continue
            raise
        return device, path
    raise OSError(errno.EBUSY, "no loop device stayed free long enough to be taken")


def find(image: str) -> str | None:
    """The device that serves this file now, in whatever mount namespace; None when there is none.

    Believed by whoever attaches one next, and two devices over one file destroy it: so a device that may be
    the one and cannot be asked is an error (OSError), not an absence.
    """
    wanted = os.stat(image)
    hint = os.fsencode(os.path.basename(os.path.dirname(image)))
    for name in os.listdir("/sys/block"):
        if not name.startswith("loop"):
            continue
        try:
            # The path may be spelled otherwise there, but the volume's own directory is in it: this spares
            # us opening, and thereby for a moment holding, devices that are none of ours.
            with open(f"/sys/block/{name}/loop/backing_file", "rb") as file:
                if hint not in file.read():
                    continue
        except FileNotFoundError:
            continue  # serves no file
        try:
            device = os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENXIO:
                continue  # let go of its file this moment
            raise
        try:
            info = fcntl.ioctl(device, _GET_STATUS64, bytes(_INFO_SIZE))
        except OSError as error:
            if error.errno == errno.ENXIO:
                continue
            raise
        finally:
            os.close(device)
        # The kernel encodes the device number the new way, as st_dev does.
        if struct.unpack_from("=QQ", info) == (wanted.st_dev, wanted.st_ino):
            return f"/dev/{name}"
    return None


def adopt_size(device: str) -> None:
    """Let a device notice that the file behind it has grown."""
    fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _SET_CAPACITY)
    finally:
        os.close(fd)


def freeze(directory: int) -> None:
    """Write everything down and hold back every writer of a mounted file system until `thaw`."""
    fcntl.ioctl(directory, _FIFREEZE, 0)


def thaw(directory: int) -> bool:
    """Let writers go on; False when it was not frozen."""
    try:
        fcntl.ioctl(directory, _FITHAW, 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def grow_ext4(directory: int, blocks: int) -> None:
    """Grow a mounted ext4 to this many of its blocks, while it is in use."""
    fcntl.ioctl(directory, _EXT4_RESIZE, bytes(ctypes.c_uint64(blocks)))


def clone(source: int, target: int) -> bool:
    """Make a file share another's blocks until one of them is written; False where that is not possible."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL):
            return False
        raise
    return True

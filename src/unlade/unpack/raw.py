"""Raw blobs that become files: a title is all they have of an archive.

`write_file` gives a descriptor to write the verified bytes into, beneath the destination and by the
artifact rules: a plain relative name, parents made, no link on the way. A file of the same name from an
earlier layer is removed first, never written into: the higher layer index wins.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Final

from unlade.unpack import safe_path
from unlade.unpack.places import IMPLICIT_MODE
from unlade.unpack.refusals import UnsafeLink, UnsafeName, cannot_write, show

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_file(dirfd: int, unsafe_path: bytes | str, mode: int = 0o644) -> int:
    """Create a file and its parents; returns a read-write descriptor that the caller closes.

    Set-id bits of `mode` are dropped. Raises UnsafeName, UnsafeLink or CannotWrite.
    """
    *parents, name = safe_path.check(unsafe_path)
    shown = b"/".join((*parents, name))
    here = descend(dirfd, parents)
    try:
        try:
            fd = os.open(name, _NEW_FILE, mode & 0o777, dir_fd=here)
        except FileExistsError:
            try:
                os.unlink(name, dir_fd=here)
            except OSError as error:
                if error.errno in (errno.EISDIR, errno.EPERM):
                    raise UnsafeName(f"{show(shown)} is a directory in another layer") from None
                raise
            fd = os.open(name, _NEW_FILE, mode & 0o777, dir_fd=here)
        try:
            os.fchmod(fd, mode & 0o777)
        except BaseException:
            os.close(fd)
            raise
        return fd
    except OSError as error:
        raise cannot_write(error, shown) from error
    finally:
        os.close(here)


def descend(dirfd: int, parts: Sequence[bytes]) -> int:
    """Open a directory by its parts, making what is missing, through no link; the caller closes it."""
    shown = b"/".join(parts)
    here = os.open(b".", _DIRECTORY, dir_fd=dirfd)
    for part in parts:
        try:
            try:
                os.mkdir(part, IMPLICIT_MODE, dir_fd=here)
            except FileExistsError:
                below = os.open(part, _DIRECTORY, dir_fd=here)
            else:
                below = os.open(part, _DIRECTORY, dir_fd=here)
                os.fchmod(below, IMPLICIT_MODE)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise UnsafeLink(f"{show(shown)} passes through a link or a file") from None
            raise cannot_write(error, shown) from error
        finally:
            os.close(here)
        here = below
    return here

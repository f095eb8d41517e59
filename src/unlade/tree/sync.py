"""Making a staged tree durable before it is committed, by the cheaper of two ways.

syncfs(2) writes everything the file system has not written yet: one call for any number of files, and the
fastest way from about ten of them. But it waits for other people's data too, so a small tree beside a
large download would wait for the download. A tree of a few files is therefore synced file by file.
Measured on ext4, quiet: 1 file 0.2 ms either way, 10 files 0.3 ms against 0.8, 100 files 1.4 against 14;
beside a writer of 3 GB: 1 file 45 ms by syncfs against 5.
"""

from __future__ import annotations

import os
import stat
from typing import Final

from unlade.kernel.files import syncfs

# Files and directories; see the figures above.
_FEW: Final = 10
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def sync_tree(dirfd: int) -> None:
    """Make all below a directory durable, and the directory itself; raises OSError.

    The descriptor should be older than what was written below it: the kernel reports errors of writing
    back only to those.
    """
    few = _open_few(dirfd)
    if few is None:
        syncfs(dirfd)
        return
    try:
        # Deepest last in the list: a directory is synced after what it names.
        for fd in reversed(few):
            os.fsync(fd)
        os.fsync(dirfd)
    finally:
        for fd in few:
            os.close(fd)


def _open_few(dirfd: int) -> list[int] | None:
    """Descriptors of all files and directories below, parents first; None when they are many or closed."""
    opened: list[int] = []
    few = False
    try:
        few = _open_below(dirfd, opened)
    except PermissionError:
        # Files without permissions that an unprivileged owner may not open: syncfs asks for none.
        pass
    finally:
        if not few:
            for fd in opened:
                os.close(fd)
    return opened if few else None


def _open_below(dirfd: int, opened: list[int]) -> bool:
    todo = [dirfd]
    while todo:
        here = todo.pop(0)
        for name in os.listdir(here):
            mode = os.stat(name, dir_fd=here, follow_symlinks=False).st_mode
            # Links and whiteouts are part of their directory.
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
                if len(opened) == _FEW:
                    return False
                opened.append(os.open(name, _OPEN, dir_fd=here))
                if stat.S_ISDIR(mode):
                    todo.append(opened[-1])
    return True

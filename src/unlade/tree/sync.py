"""Making a staged tree durable before it is committed, by the cheaper of two ways.

syncfs(2) writes everything the file system has not written yet: one call for any number of files, and the
fastest way from about ten of them. But it waits for other people's data too, so a small tree beside a
large download would wait for the download. A tree of a few files is therefore synced file by file.
Measured on ext4, quiet: 1 file 0.2 ms either way, 10 files 0.3 ms against 0.8, 100 files 1.4 against 14;
beside a writer of 3 GB: 1 file 45 ms by syncfs against 5.

`written_early` is for what is large: the disk begins while the archive is still being unpacked.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterator
from typing import Final

from unlade.kernel.files import syncfs

# Files and directories; see the figures above.
_FEW: Final = 10
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# An archive of less is unpacked before a sync of its first part would have ended.
_EARLY_BYTES: Final = 32 << 20
# Between two syncs: each one closes the file system's journal for a moment, and needs some data to pay.
_EARLY_PAUSE: Final = 0.5


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


@contextlib.contextmanager
def written_early(dirfd: int, size: int) -> Iterator[None]:
    """Have the disk write while the block runs; `size` is that of the archive being unpacked below `dirfd`.

    Left alone the kernel begins when a tenth of all memory is dirty: then `sync_tree` waits for all of it.
    One thread serves every archive on the same file system. Nothing is promised here: `sync_tree` still
    syncs, and reports what went wrong.
    """
    if size < _EARLY_BYTES:
        yield
        return
    device = os.fstat(dirfd).st_dev
    with _flushers_lock:
        flusher = _flushers.get(device)
        if flusher is None:
            flusher = _flushers[device] = _Flusher(dirfd)
        flusher.users += 1
    try:
        yield
    finally:
        with _flushers_lock:
            flusher.users -= 1
            if flusher.users == 0:
                del _flushers[device]
        if flusher.users == 0:
            flusher.end()


class _Flusher:
    """A thread that syncs one file system again and again."""

    def __init__(self, dirfd: int) -> None:
        self.users = 0
        # A description of its own: what it is told of errors must not be kept from the one that commits.
        self._fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dirfd)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unlade-write-back", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop and wait: nobody may find the file system busy because of us."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over.wait(_EARLY_PAUSE):
                with contextlib.suppress(OSError):
                    syncfs(self._fd)
        finally:
            os.close(self._fd)


# File systems belong to the machine, so their flushers belong to the process and not to one engine.
_flushers: Final[dict[int, _Flusher]] = {}
_flushers_lock: Final = threading.Lock()


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

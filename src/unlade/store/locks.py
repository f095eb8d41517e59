"""Exclusive names: one holder per name among all threads of all processes that share a store.

A name is held by `flock` on a file in `.unlade/locks`, so the kernel releases it when its process dies,
however it dies; nobody has to guess from a pid. Threads of one process queue on a condition first: only one
of them polls the kernel. The holder unlinks the file before it lets go; whoever then wins the old inode
notices that the name moved on and tries again, so the directory stays empty when nothing is locked.
Used by ingest (per digest), trees (per key), the index projection and garbage collection.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from unlade.model import Deadline
from unlade.store.failure import explaining

# Another process's release is noticed within this time; doubling from the first keeps short waits short.
_POLL_FIRST: Final = 0.002
_POLL_LAST: Final = 0.05


class KeyLocks:
    """Locks by name below one directory; thread-safe, safe across processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._changed = threading.Condition()
        self._held: set[str] = set()

    @contextmanager
    def hold(self, name: str, *, deadline: Deadline | None = None) -> Iterator[None]:
        """Hold the name, waiting for it as long as the deadline allows (DeadlineExceeded)."""
        deadline = deadline or Deadline.never()
        self._enter(name, deadline)
        try:
            fd = self._flock(name, deadline)
        except BaseException:
            self._leave(name)
            raise
        try:
            yield
        finally:
            self._release(name, fd)

    @contextmanager
    def try_hold(self, name: str) -> Iterator[bool]:
        """Hold the name if nobody else does; yields whether it is held."""
        with self._changed:
            busy = name in self._held
            if not busy:
                self._held.add(name)
        if busy:
            yield False
            return
        try:
            fd = self._attempt(name)
        except BaseException:
            self._leave(name)
            raise
        if fd is None:
            self._leave(name)
            yield False
            return
        try:
            yield True
        finally:
            self._release(name, fd)

    def _enter(self, name: str, deadline: Deadline) -> None:
        with self._changed:
            while name in self._held:
                left = deadline.remaining()
                # A cancelled deadline has no way to wake this condition: look at it a few times a second.
                self._changed.wait(0.2 if left is None else min(left, 0.2))
                deadline.check()
            self._held.add(name)

    def _leave(self, name: str) -> None:
        with self._changed:
            self._held.discard(name)
            self._changed.notify_all()

    def _flock(self, name: str, deadline: Deadline) -> int:
        pause = _POLL_FIRST
        while True:
            fd = self._attempt(name)
            if fd is not None:
                return fd
            deadline.wait(pause)
            pause = min(pause * 2, _POLL_LAST)

    def _attempt(self, name: str) -> int | None:
        with explaining(f"lock {name}"):
            return self._flock_now(name)

    def _flock_now(self, name: str) -> int | None:
        path = self._directory / name
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    return None
                raise
            if _still_named(fd, path):
                return fd
            # The previous holder unlinked this inode between our open and our lock.
            os.close(fd)

    def _release(self, name: str, fd: int) -> None:
        try:
            (self._directory / name).unlink(missing_ok=True)
        finally:
            os.close(fd)
            self._leave(name)


class OwnerLock:
    """A file that stays locked as long as this process lives: the proof that an owner is alive.

    Better than a pid with its start time: it holds across pid namespaces, needs no /proc, and a reboot
    or SIGKILL releases it. A child that was forked without exec shares it, by design of flock.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self._path = directory / name
        # Locked before it gets its name: nobody ever sees an owner that looks dead.
        unnamed = directory / f"{name}.new"
        self._fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._fd, f"{os.getpid()} {time.time():.0f}\n".encode())
        os.rename(unnamed, self._path)

    def close(self) -> None:
        """Let go and remove the file; idempotent."""
        if self._fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    @staticmethod
    def alive(directory: Path, name: str) -> bool:
        """Whether the process that made this owner still runs."""
        try:
            fd = os.open(directory / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            # Shared, so that two who ask at once do not take each other for the owner.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return True
            raise
        finally:
            os.close(fd)
        return False


def _still_named(fd: int, path: Path) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), named)

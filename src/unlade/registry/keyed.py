"""Locks by key: one thread does the work for a key (a token, a credential helper), the others wait for it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager


class KeyedLocks:
    """A lock per key, kept only while somebody holds or awaits it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[Hashable, tuple[threading.Lock, int]] = {}

    @contextmanager
    def held(self, key: Hashable) -> Iterator[None]:
        """Hold the key's lock; look again for the result once inside, another may have made it."""
        with self._guard:
            lock, waiting = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, waiting + 1)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                waiting = self._locks[key][1] - 1
                if waiting:
                    self._locks[key] = (lock, waiting)
                else:
                    del self._locks[key]

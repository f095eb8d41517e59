"""A queue of keys for workers: no key twice at once, failures later and later.

A key added while it waits is the same wait; a key added while a worker has it is handed out again once
that worker is done, never to two workers together. So a handler may assume that it is alone with its
key, and that what changed during its run will be seen by a run after it.

Failures pause for `FIRST_RETRY` doubling up to `MOST_RETRY`, per key, and a token bucket over all keys
keeps ten thousand failing keys from drowning the healthy ones. Used by every controller; thread-safe.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable

from unlade.controllers.throttle import TokenBucket

FIRST_RETRY = 0.005  # a conflict of caches is over in milliseconds; the first tries should not be felt
MOST_RETRY = 300.0  # a raised quota announces itself to nobody: five minutes is what a person will wait
RETRY_RATE = 10.0  # retries a second over all keys, once the burst is spent
RETRY_BURST = 100


class WorkQueue:
    """Keys waiting for workers. `get` blocks; every key got must be given back with `done`."""

    def __init__(
        self,
        *,
        first_retry: float = FIRST_RETRY,
        most_retry: float = MOST_RETRY,
        clock: Callable[[], float] = time.monotonic,
        observe_wait: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._first_retry = first_retry
        self._most_retry = most_retry
        self._clock = clock
        self._observe_wait = observe_wait
        self._retries = TokenBucket(RETRY_RATE, RETRY_BURST, clock=clock)
        self._changed = threading.Condition()
        self._ready: deque[str] = deque()
        self._waiting: dict[str, float] = {}  # key -> since when; also says which keys are in _ready or due
        self._running: set[str] = set()
        self._later: list[tuple[float, int, str]] = []
        self._due: dict[str, float] = {}  # the earliest pending time per key; older heap entries are stale
        self._order = 0
        self._failures: dict[str, int] = {}
        self._closed = False

    def add(self, key: str) -> None:
        """Asks for one run of this key, as soon as a worker is free."""
        with self._changed:
            self._add(key)

    def add_after(self, key: str, seconds: float) -> None:
        """Asks for one run of this key, not before `seconds` have passed; an earlier request wins."""
        if seconds <= 0:
            self.add(key)
            return
        with self._changed:
            at = self._clock() + seconds
            if self._closed or self._due.get(key, at + 1) <= at:
                return
            self._due[key] = at
            self._order += 1
            heapq.heappush(self._later, (at, self._order, key))
            self._changed.notify()

    def retry(self, key: str) -> float:
        """Asks for another run after a failure and returns the pause chosen."""
        with self._changed:
            failures = self._failures.get(key, 0)
            self._failures[key] = failures + 1
        # the bound keeps the power a number: 2**64 is beyond any pause
        pause = min(self._first_retry * 2.0 ** min(failures, 64), self._most_retry)
        pause = max(pause, self._retries.reserve())
        self.add_after(key, pause)
        return pause

    def forget(self, key: str) -> None:
        """The key succeeded or is gone: its next failure starts from the shortest pause."""
        with self._changed:
            self._failures.pop(key, None)

    def get(self, timeout: float | None = None) -> str | None:
        """The next key, or None when the queue was closed or `timeout` seconds passed."""
        with self._changed:
            end = None if timeout is None else self._clock() + timeout
            while True:
                pause = self._promote()
                if self._closed:
                    return None
                if self._ready:
                    key = self._ready.popleft()
                    self._observe_wait(max(0.0, self._clock() - self._waiting.pop(key)))
                    self._running.add(key)
                    if self._later or self._ready:
                        self._changed.notify()  # this worker leaves: another must watch the clock
                    return key
                if end is not None:
                    left = end - self._clock()
                    if left <= 0:
                        return None
                    pause = left if pause is None else min(pause, left)
                self._changed.wait(pause)

    def done(self, key: str) -> None:
        """Gives a key back; if it was asked for meanwhile, it is ready again now."""
        with self._changed:
            self._running.discard(key)
            if key in self._waiting and not self._closed:
                self._ready.append(key)
                self._changed.notify()

    def close(self) -> None:
        """Wakes every worker with None; what waited is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        """Keys that could run now; those pausing after a failure are not counted."""
        with self._changed:
            self._promote()
            return len(self._ready)

    @property
    def failing(self) -> int:
        """Keys whose last run failed."""
        with self._changed:
            return len(self._failures)

    def _add(self, key: str) -> None:
        if self._closed or key in self._waiting:
            return
        self._waiting[key] = self._clock()
        if key not in self._running:
            self._ready.append(key)
            self._changed.notify()

    def _promote(self) -> float | None:
        """Moves keys whose time has come to the ready ones; returns seconds until the next, if any."""
        while self._later:
            at, _order, key = self._later[0]
            if self._due.get(key) != at:
                heapq.heappop(self._later)  # replaced by an earlier request
                continue
            left = at - self._clock()
            if left > 0:
                return left
            heapq.heappop(self._later)
            del self._due[key]
            self._add(key)
        return None

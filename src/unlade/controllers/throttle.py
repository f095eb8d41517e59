"""Two ways of waiting: a token bucket for calls that succeed, a growing pause for calls that fail.

Owned here because every part that talks to the API server needs one or the other, and because both must
be driven by a clock that tests can hold. `TokenBucket` is shared by threads; `Backoff` belongs to one.

The bucket has the meaning of the `--kube-api-qps` and `--kube-api-burst` options of the Kubernetes
components: `burst` calls at once, then `rate` a second, waiters served in the order in which they came.
"""

import random
import threading
import time
from collections.abc import Callable


class TokenBucket:
    """At most `burst` takes at once and `rate` a second over time; `rate` 0 means no limit. Thread-safe."""

    def __init__(self, rate: float, burst: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = max(1, burst)
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = float(self._burst)
        self._at = clock()

    def reserve(self) -> float:
        """Takes a token, into debt if need be, and returns how many seconds to wait before using it."""
        if self._rate <= 0:
            return 0.0
        with self._lock:
            self._refill()
            self._tokens -= 1.0
            return 0.0 if self._tokens >= 0 else -self._tokens / self._rate

    def try_take(self) -> bool:
        """Takes a token if one is there now; never waits."""
        if self._rate <= 0:
            return True
        with self._lock:
            self._refill()
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True

    def wait(self, stop: threading.Event) -> bool:
        """Blocks until a token may be used; False when `stop` was set first (the token is then lost)."""
        delay = self.reserve()
        if delay <= 0:
            return not stop.is_set()
        return not stop.wait(delay)

    def _refill(self) -> None:
        now = self._clock()
        self._tokens = min(float(self._burst), self._tokens + (now - self._at) * self._rate)
        self._at = now


class Backoff:
    """Pauses that double from `first` to `most`, each drawn from the upper half so that many clients part."""

    def __init__(self, first: float, most: float, *, draw: Callable[[], float] = random.random) -> None:
        self._first = first
        self._most = most
        self._draw = draw
        self._next = first

    def next(self) -> float:
        """The pause to make now; the one after will be up to twice as long."""
        pause = self._next
        self._next = min(self._next * 2, self._most)
        return pause * (0.5 + self._draw() / 2)

    def reset(self) -> None:
        """The thing worked: the next failure starts from the first pause again."""
        self._next = self._first

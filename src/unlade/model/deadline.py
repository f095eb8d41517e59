"""Deadlines: how long a caller is willing to wait, passed down every call.

Threads cannot be cancelled from outside, so long loops call `check()` per chunk and per entry. A
deadline is shared: `cancel()` from any thread ends every loop that holds it.
"""

from __future__ import annotations

import threading
import time

from unlade.errors import DeadlineExceeded


class Deadline:
    """A moment by which work must end, and a switch that ends it sooner; thread-safe."""

    __slots__ = ("_at", "_cancelled")

    def __init__(self, at: float | None) -> None:
        self._at = at
        self._cancelled = threading.Event()

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """A deadline this many seconds from now."""
        return cls(time.monotonic() + seconds)

    @classmethod
    def never(cls) -> Deadline:
        """No limit of time; `cancel` still works."""
        return cls(None)

    def remaining(self) -> float | None:
        """Seconds left, at least 0; None when there is no limit."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether `check` would raise."""
        return self._cancelled.is_set() or (self._at is not None and time.monotonic() >= self._at)

    def check(self) -> None:
        """Raise DeadlineExceeded when time is up or the work was cancelled."""
        if self._cancelled.is_set():
            raise DeadlineExceeded("cancelled", next_step="start again when the caller is ready")
        if self._at is not None and time.monotonic() >= self._at:
            raise DeadlineExceeded(
                "deadline exceeded", next_step="allow more time (--timeout), or try again later"
            )

    def cancel(self) -> None:
        """End the work that holds this deadline at its next check; idempotent."""
        self._cancelled.set()

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than the deadline; raises DeadlineExceeded like `check`."""
        left = self.remaining()
        self._cancelled.wait(seconds if left is None else min(seconds, left))
        self.check()

"""When to try again, and when not: one loop for every request of this room.

Only errors that say `retryable` are tried again, at most `attempts` times in all, with waits that are random
below a growing, capped bound (so that a thousand clients of a restarted registry do not return in step) and
never beyond the caller's deadline. A Retry-After is honoured up to a cap; a longer one ends the loop at once:
waiting an hour inside a call helps nobody, and asking sooner would be the storm the server is warding off.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import TypeVar

from unlade.errors import RegistryError
from unlade.model import Deadline
from unlade.registry.config import RegistryConfig
from unlade.registry.errors import HTTPFailure

T = TypeVar("T")


def retrying(operation: Callable[[], T], *, config: RegistryConfig, attempts: int, deadline: Deadline) -> T:
    """Call until it succeeds, fails for good, or attempts are used up; raises the last error."""
    attempt = 1
    while True:
        deadline.check()
        try:
            return operation()
        except RegistryError as error:
            wait = _wait(error, attempt, config)
            left = deadline.remaining()
            if attempt >= attempts or wait is None or (left is not None and wait >= left):
                raise
            deadline.wait(wait)
            attempt += 1


def _wait(error: RegistryError, attempt: int, config: RegistryConfig) -> float | None:
    """Seconds to wait before the next attempt; None when there should be none."""
    if not error.retryable:
        return None
    asked = error.retry_after if isinstance(error, HTTPFailure) else None
    if asked is not None and asked > config.retry_after_cap:
        return None
    bound: float = min(config.backoff_cap, config.backoff * 2 ** (attempt - 1))
    jitter = random.uniform(0, bound)  # noqa: S311 # spreads load; nothing secret depends on it
    return jitter if asked is None else asked + jitter


def parse_retry_after(unsafe_header: str | None) -> float | None:
    """Seconds from a Retry-After header (a number or a date); None when there is none or it is nonsense."""
    if unsafe_header is None:
        return None
    text = unsafe_header.strip()
    if text.isascii() and text.isdigit():
        # Compared as a length first: int() of a megabyte of digits is slow.
        return float(text) if len(text) <= 12 else float("inf")
    try:
        when = parsedate_to_datetime(text[:100])
        import time

        return max(0.0, when.timestamp() - time.time())
    except (ValueError, TypeError, OverflowError, IndexError):
        return None

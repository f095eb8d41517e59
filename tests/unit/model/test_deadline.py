"""Deadlines end loops, by time or by another thread."""

from __future__ import annotations

import threading
import time

import pytest

from unlade.errors import DeadlineExceeded
from unlade.model import Deadline


def test_never_has_no_limit_but_can_be_cancelled() -> None:
    deadline = Deadline.never()
    deadline.check()
    assert deadline.remaining() is None
    deadline.cancel()
    with pytest.raises(DeadlineExceeded):
        deadline.check()


def test_expires() -> None:
    deadline = Deadline.after(0.01)
    with pytest.raises(DeadlineExceeded) as caught:
        deadline.wait(5)
    assert caught.value.retryable
    assert deadline.expired
    assert deadline.remaining() == 0


def test_cancel_wakes_a_sleeper() -> None:
    deadline = Deadline.after(60)
    threading.Timer(0.02, deadline.cancel).start()
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        deadline.wait(30)
    assert time.monotonic() - began < 10

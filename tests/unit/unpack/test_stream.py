"""The pipeline: whoever fails, in whichever thread, both ends come to rest and the right error comes out."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator

import pytest

from unlade.errors import DeadlineExceeded
from unlade.model import Deadline
from unlade.unpack import LimitExceeded, Limits
from unlade.unpack.stream import NextBlock, run

SIZE = 40 << 20


class Source:
    """So many random bytes; then, perhaps, an error."""

    def __init__(self, size: int, failure: Exception | None = None) -> None:
        self.left = size
        self._failure = failure
        self._data = os.urandom(1 << 16)
        self.hasher = hashlib.sha256()

    def readinto(self, buffer: memoryview, /) -> int:
        if not self.left and self._failure is not None:
            raise self._failure
        count = min(len(buffer), self.left, len(self._data))
        buffer[:count] = self._data[:count]
        self.hasher.update(self._data[:count])
        self.left -= count
        return count


@pytest.fixture(autouse=True)
def all_threads_end() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def count(next_block: NextBlock) -> int:
    total = 0
    while block := next_block():
        total += len(block)
    return total


@pytest.mark.parametrize("size", [0, 1000, SIZE])
def test_every_byte_is_given_on_and_hashed(size: int) -> None:
    source = Source(size)
    total, diff_id = run(source, count, Limits(), deadline=Deadline.never())
    assert total == size
    assert diff_id.hex == source.hasher.hexdigest()


@pytest.mark.parametrize("size", [1000, SIZE])
def test_the_sources_error_wins(size: int) -> None:
    with pytest.raises(ConnectionError, match="cut"):
        run(Source(size, ConnectionError("cut")), count, Limits(), deadline=Deadline.never())


@pytest.mark.parametrize("size", [1000, SIZE])
def test_a_consumer_that_fails_stops_the_reading(size: int) -> None:
    def fail(next_block: NextBlock) -> int:
        next_block()
        raise ValueError("enough")

    source = Source(size)
    with pytest.raises(ValueError, match="enough"):
        run(source, fail, Limits(), deadline=Deadline.never())
    assert size <= 1000 or source.left > 0


def test_a_slow_consumer_holds_the_reader_back() -> None:
    seen: list[int] = []

    def slowly(next_block: NextBlock) -> int:
        next_block()
        time.sleep(0.3)
        seen.append(source.left)
        return count(next_block)

    source = Source(SIZE)
    run(source, slowly, Limits(), deadline=Deadline.never())
    assert SIZE - seen[0] < 16 << 20


def test_limits_and_deadlines_end_it() -> None:
    with pytest.raises(LimitExceeded):
        run(Source(SIZE), count, Limits(max_bytes=1 << 20), deadline=Deadline.never())
    deadline = Deadline.never()
    with pytest.raises(DeadlineExceeded):
        run(Source(SIZE), count, Limits(), deadline=deadline, on_bytes=lambda _: deadline.cancel())


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    started = threading.Thread.start
    tries: list[object] = []

    def start(self: threading.Thread) -> None:
        tries.append(self)
        if len(tries) == 2:
            raise RuntimeError("can't start new thread")
        started(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        run(Source(SIZE), count, Limits(), deadline=Deadline.never())

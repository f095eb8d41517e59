"""A blob arrives whole and verified, or not at all: cuts, ignored ranges, wrong bytes, slow ends."""

from __future__ import annotations

import contextlib
import io
import random
import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from unlade.errors import DeadlineExceeded, RegistryError
from unlade.model import Deadline, Descriptor, Digest, Reference
from unlade.registry import Registry
from unlade.transfer import DigestMismatch, Fetcher, ProgressEvent, SizeMismatch, Verifier, pump

REF = Reference.parse("registry.test/repo")


class Cut(RegistryError):
    retryable = True


class Stream:
    def __init__(self, data: bytes, offset: int, end: int, cut_after: int | None) -> None:
        self.offset = offset
        self._data = io.BytesIO(data[offset:end])
        self._left = cut_after

    def readinto(self, buffer: memoryview) -> int:
        if self._left is not None:
            if self._left <= 0:
                raise Cut("cut")
            buffer = buffer[: self._left]
        got = self._data.readinto(buffer)
        if self._left is not None:
            self._left -= got
        return got


class Server:
    """Just the calls a fetcher makes, with faults: `cuts` says after how many bytes each request ends."""

    def __init__(self, data: bytes, cuts: list[int | None] | None = None, *, ranges: bool = True) -> None:
        self.data = data
        self.cuts = cuts or []
        self.ranges = ranges
        self.served = 0
        self.distrusted = 0
        self.requests: list[tuple[int, int | None]] = []
        self._lock = threading.Lock()

    def distrust(self, ref: Reference) -> None:
        self.distrusted += 1

    @contextlib.contextmanager
    def blob(
        self,
        ref: Reference,
        descriptor: Descriptor,
        *,
        offset: int = 0,
        end: int | None = None,
        deadline: Deadline,
    ) -> Iterator[Stream]:
        with self._lock:
            self.requests.append((offset, end))
            cut = self.cuts.pop(0) if self.cuts else None
        stop = len(self.data) if end is None or not self.ranges else end
        yield Stream(self.data, offset if self.ranges else 0, stop, cut)


def descriptor(data: bytes) -> Descriptor:
    return Descriptor(media_type="application/octet-stream", digest=Digest.of(data), size=len(data))


def fetch(server: Server, blob: Descriptor, *, connections: int = 1, offset: int = 0) -> bytes:
    out = bytearray()
    fetcher = Fetcher(cast("Registry", server), connections=connections)
    with fetcher.open(REF, blob, offset=offset, deadline=Deadline.after(60)) as source:
        pump(source, Verifier(blob), out.extend, deadline=Deadline.after(60), expected=blob.size)
    return bytes(out)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, (9 << 20) + 7])
def test_whole(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert fetch(Server(data), descriptor(data)) == data


def test_resumes_where_it_was_cut_and_fetches_nothing_twice() -> None:
    data = random.Random(1).randbytes(12 << 20)
    cuts: list[int | None] = [random.Random(2).randrange(300_000, 900_000) for _ in range(10)]
    server = Server(data, list(cuts))
    assert fetch(server, descriptor(data)) == data
    expected, position = [], 0
    for cut in cuts:
        expected.append((position, None))
        position += cast("int", cut)
    assert server.requests == [*expected, (position, None)]


def test_a_server_without_ranges_is_read_past_what_we_have() -> None:
    data = random.Random(3).randbytes(3 << 20)
    server = Server(data, [1 << 20, None], ranges=False)
    assert fetch(server, descriptor(data)) == data
    assert len(server.requests) == 2


def test_parallel_segments_arrive_in_order() -> None:
    data = random.Random(4).randbytes((70 << 20) + 123)
    server = Server(data, [None, 500_000, None, 700_000])
    assert fetch(server, descriptor(data), connections=3) == data
    assert len({request[0] for request in server.requests}) > 4


def test_wrong_bytes_are_refused() -> None:
    data = b"x" * 100
    server = Server(b"y" * 100)
    with pytest.raises(DigestMismatch):
        fetch(server, descriptor(data))
    assert server.distrusted == 1  # a mirror that sent them is not asked again at once


def test_wrong_bytes_of_a_large_blob_are_refused() -> None:
    data = bytes(8 << 20)
    with pytest.raises(DigestMismatch):
        fetch(Server(data[:-1] + b"!"), descriptor(data))


def test_more_bytes_than_promised_are_refused_before_they_are_read() -> None:
    blob = descriptor(b"x" * 100)
    out = bytearray()
    source = io.BytesIO(b"x" * 101)
    with pytest.raises(SizeMismatch):
        pump(cast("Stream", source), Verifier(blob), out.extend, deadline=Deadline.never())


def test_an_early_end_is_asked_for_again_and_then_an_error() -> None:
    server = Server(b"x" * 50)
    with pytest.raises(RegistryError) as caught:
        fetch(server, descriptor(b"x" * 100))
    assert caught.value.retryable
    assert 3 < len(server.requests) < 12, "a bounded number of tries, not a storm"


def test_a_dripping_server_does_not_reset_the_patience() -> None:
    data = bytes(1 << 20)
    server = Server(data, [10] * 1000)
    with pytest.raises(RegistryError):
        fetch(server, descriptor(data))
    assert len(server.requests) < 12


def test_a_writer_that_fails_ends_the_pipeline() -> None:
    data = random.Random(5).randbytes(16 << 20)

    def full(_data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    threads = threading.active_count()
    fetcher = Fetcher(cast("Registry", Server(data)))
    blob = descriptor(data)
    with fetcher.open(REF, blob, deadline=Deadline.never()) as source, pytest.raises(OSError, match="space"):
        pump(source, Verifier(blob), full, deadline=Deadline.never(), expected=blob.size)
    assert threading.active_count() == threads


@pytest.mark.parametrize("size", [100, 16 << 20])
def test_a_cancelled_deadline_ends_it(size: int) -> None:
    data = bytes(size)
    deadline = Deadline.never()

    def cancel(_data: memoryview) -> None:
        deadline.cancel()

    blob = descriptor(data)
    fetcher = Fetcher(cast("Registry", Server(data)))
    with pytest.raises(DeadlineExceeded):
        with fetcher.open(REF, blob, deadline=deadline) as source:
            pump(source, Verifier(blob), cancel, deadline=deadline, expected=size)
        deadline.check()


def test_continues_a_partial() -> None:
    data = random.Random(6).randbytes(6 << 20)
    blob = descriptor(data)
    hasher = blob.digest.hasher()
    hasher.update(data[: 1 << 20])
    server = Server(data)
    out = bytearray(data[: 1 << 20])
    fetcher = Fetcher(cast("Registry", server))
    with fetcher.open(REF, blob, offset=1 << 20, deadline=Deadline.never()) as source:
        verifier = Verifier(blob, hasher=hasher, done=1 << 20)
        pump(source, verifier, out.extend, deadline=Deadline.never(), expected=5 << 20)
    assert bytes(out) == data
    assert server.requests == [(1 << 20, None)]


def test_peek_asks_for_the_first_bytes_only() -> None:
    data = random.Random(7).randbytes(1 << 20)
    server = Server(data)
    fetcher = Fetcher(cast("Registry", server))
    assert fetcher.peek(REF, descriptor(data), 512, deadline=Deadline.never()) == data[:512]
    assert server.requests == [(0, 512)]


def test_read_refuses_what_is_too_large_before_asking() -> None:
    server = Server(bytes(100))
    with pytest.raises(SizeMismatch):
        Fetcher(cast("Registry", server)).read(
            REF, descriptor(bytes(100)), limit=99, deadline=Deadline.never()
        )
    assert server.requests == []


def test_resumption_is_told() -> None:
    data = random.Random(8).randbytes(2 << 20)
    events: list[ProgressEvent] = []
    fetcher = Fetcher(cast("Registry", Server(data, [1 << 20, None])))
    blob = descriptor(data)
    sink: Callable[[memoryview], object] = bytearray().extend
    with fetcher.open(REF, blob, deadline=Deadline.never(), progress=events.append) as source:
        pump(source, Verifier(blob), sink, deadline=Deadline.never(), expected=blob.size)
    assert [event.kind for event in events] == ["resumed"]
    assert events[0].done == 1 << 20

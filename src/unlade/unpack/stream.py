"""The pipeline: read and inflate here, parse and write there, hash in a third thread.

The caller's own thread reads the source, because the source is the caller's; a writing thread and a hashing
thread take the inflated blocks over bounded belts, so memory stays the same whatever the size. Inflating,
hashing and file calls release the GIL. Whatever fits in one read is handled without threads. Every block is
hashed, also what follows the end of the archive, and counted against the limits before it is handed on.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from unlade.model.deadline import Deadline
from unlade.model.digest import DiffID, Digest
from unlade.unpack.compression import SNIFF_BYTES, Decoder, decoder_for
from unlade.unpack.refusals import LimitExceeded

if TYPE_CHECKING:
    from unlade.unpack.policy import Limits

Block = bytes | memoryview
NextBlock = Callable[[], Block]
T = TypeVar("T")

_INPUT: Final = 512 << 10
_BELT: Final = 6  # blocks in flight to each consumer: 6 MiB


class Readable(Protocol):
    """Where the archive comes from: a verified stream, a pipe, a file."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill the buffer from its start; 0 at the end."""


def run(
    source: Readable,
    consume: Callable[[NextBlock], T],
    limits: Limits,
    *,
    deadline: Deadline,
    on_bytes: Callable[[int], None] | None = None,
) -> tuple[T, DiffID]:
    """Feed a source through its decoder to `consume`; returns its result and the diff ID.

    `consume` gets a function that returns the next block, empty at the end, and must take them all.
    """
    inflow = _Inflow(source, limits, deadline, on_bytes)
    hasher = hashlib.sha256()
    blocks = inflow.blocks()
    if inflow.whole:

        def next_block() -> Block:
            block = next(blocks, b"")
            hasher.update(block)
            return block

        result = consume(next_block)
    else:
        result = _threaded(blocks, consume, hasher.update)
    return result, DiffID(Digest("sha256", hasher.hexdigest()))


class _Inflow:
    """The source, decoded and counted."""

    def __init__(
        self, source: Readable, limits: Limits, deadline: Deadline, on_bytes: Callable[[int], None] | None
    ) -> None:
        self._source = source
        self._limits = limits
        self._deadline = deadline
        self._on_bytes = on_bytes
        # Not a bytearray, which is filled with zeros at once: a tiny archive touches one page of this.
        self._buffer = memoryview(mmap.mmap(-1, _INPUT))
        self._taken = 0
        self._given = 0
        self._filled = 0
        # Fill the first buffer: enough to tell the compression, and whether there is more than this.
        while self._filled < _INPUT and (count := self._read(self._buffer[self._filled :])):
            self._filled += count
        self.whole = self._filled < _INPUT
        self._decoder: Decoder = decoder_for(bytes(self._buffer[:SNIFF_BYTES]), limits)
        if self._filled == 0:
            self._decoder = decoder_for(b"", limits)

    def blocks(self) -> Iterator[Block]:
        count = self._filled
        while count:
            for block in self._decoder.feed(self._buffer[:count]):
                self._count(len(block))
                yield block
            count = 0 if self.whole else self._read(self._buffer)
        self._decoder.finish()

    def _read(self, into: memoryview) -> int:
        self._deadline.check()
        count = self._source.readinto(into) or 0
        self._taken += count
        if self._on_bytes is not None and count:
            self._on_bytes(count)
        return count

    def _count(self, size: int) -> None:
        self._deadline.check()
        limits = self._limits
        self._given += size
        if self._given > limits.max_bytes:
            raise LimitExceeded(
                f"the archive unpacks to more than {limits.max_bytes} bytes",
                next_step="raise the limit if you trust its publisher",
            )
        if self._given > limits.ratio_floor and self._given > self._taken * limits.max_ratio:
            raise LimitExceeded(
                f"the archive unpacks to more than {limits.max_ratio} times its size",
                next_step="this is how decompression bombs look; raise the limit if you trust its publisher",
            )


class _Belt:
    """A bounded hand-over of blocks from one thread to another; ending it wakes both sides."""

    def __init__(self) -> None:
        self._blocks: deque[Block] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._ended = False  # no more blocks will come
        self._dropped = False  # nobody takes them any more

    def put(self, block: Block) -> bool:
        """Hand a block over; False when the other side has stopped taking."""
        with self._changed:
            while len(self._blocks) >= _BELT and not self._dropped:
                self._changed.wait()
            self._blocks.append(block)
            self._changed.notify()
            return not self._dropped

    def get(self) -> Block:
        """The next block, empty at the end."""
        with self._changed:
            while not self._blocks:
                if self._ended:
                    return b""
                self._changed.wait()
            block = self._blocks.popleft()
            self._changed.notify()
            return block

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def drop(self) -> None:
        with self._changed:
            self._dropped = True
            self._blocks.clear()
            self._changed.notify()


class _Cut(Exception):
    """The inflow failed: the consumer must stop, and its own failure is only an echo of that."""


def _threaded(
    blocks: Iterator[Block], consume: Callable[[NextBlock], T], hash_block: Callable[[Block], None]
) -> T:
    to_writer, to_hasher = _Belt(), _Belt()
    results: list[T] = []
    failures: list[BaseException] = []
    cut = False

    def next_block() -> Block:
        block = to_writer.get()
        if not block and cut:
            raise _Cut
        return block

    def write() -> None:
        try:
            results.append(consume(next_block))
        except BaseException as error:
            failures.append(error)
        finally:
            to_writer.drop()

    def digest() -> None:
        while block := to_hasher.get():
            hash_block(block)

    threads = [
        threading.Thread(target=write, name="unpack-write"),
        threading.Thread(target=digest, name="unpack-hash"),
    ]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for block in blocks:
            to_hasher.put(block)
            if not to_writer.put(block):
                break
    except BaseException:
        cut = True
        raise
    finally:
        to_writer.end()
        to_hasher.end()
        for thread in started:
            thread.join()
        failure = failures[0] if failures else None
        failures.clear()  # no reference cycle through this frame
    if failure is not None:
        raise failure
    return results[0]

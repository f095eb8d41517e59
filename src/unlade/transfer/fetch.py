"""Fetching: a blob becomes a stream that is exactly what its descriptor promised, or an error.

`Fetcher.open` gives bytes in order; a cut connection is continued where it stopped by a range request,
so a consumer in the middle of a tar archive never notices. Large blobs may be read over several
connections at once: segments are fetched ahead into a bounded window and handed out in order, so each
byte is still hashed once and written once, and memory stays bounded whatever the blob's size.
`pump` joins a source to a sink with reading, hashing and writing overlapped.

Nothing that comes out of here is trusted until `Verifier.finish` has returned: callers stage, then commit.
Cost: one request per cut or segment, one pass of the hash per byte, and memory for one segment a connection.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Protocol

from unlade.errors import IntegrityError, RegistryError, UnladeError
from unlade.model import Deadline, Descriptor, Reference
from unlade.transfer.progress import Progress, ProgressEvent, silent

if TYPE_CHECKING:
    from hashlib import _Hash

    from unlade.registry import Registry

# Large enough that the cost per call vanishes beside the copy, small enough for several in the cache.
_CHUNK: Final = 1 << 20
_PIPELINE_CHUNKS: Final = 4
# A blob below this is read, hashed and written in one thread: starting two more costs more than it saves.
_PIPELINE_MIN: Final = 4 << 20
_SEGMENT: Final = 16 << 20
# Below this a second connection costs a round trip and saves nothing.
_PARALLEL_MIN: Final = 4 * _SEGMENT
# A connection that brought less than this before it broke counts as a failure in a row.
_PROGRESS_BYTES: Final = 256 << 10
_MAX_FAILURES: Final = 6
_BACKOFF_FIRST: Final = 0.1
_BACKOFF_CAP: Final = 5.0


class SizeMismatch(IntegrityError):
    """More or fewer bytes than the descriptor says."""

    code = "size-mismatch"


class DigestMismatch(IntegrityError):
    """Bytes whose digest is not the one that was asked for."""

    code = "digest-mismatch"


class Readable(Protocol):
    """A source of bytes in order; 0 means the end."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill some of the buffer; returns how much."""


class Verifier:
    """Counts and hashes what passes; `finish` raises IntegrityError unless it is what was promised."""

    def __init__(self, descriptor: Descriptor, *, hasher: _Hash | None = None, done: int = 0) -> None:
        self._descriptor = descriptor
        self._hasher = hasher if hasher is not None else descriptor.digest.hasher()
        self.done = done

    def update(self, data: memoryview | bytes) -> None:
        """Take the next bytes; raises SizeMismatch as soon as there are too many."""
        self.done += len(data)
        if self.done > self._descriptor.size:
            raise self._size_error()
        self._hasher.update(data)

    def finish(self) -> None:
        """Raise unless size and digest match exactly."""
        if self.done != self._descriptor.size:
            raise self._size_error()
        if not self._descriptor.digest.matches(self._hasher):
            raise DigestMismatch(
                f"content of {self._descriptor.digest} has the digest {self._hasher.hexdigest()}",
                next_step="something changed the bytes on the way; try again or use another mirror",
            )

    def accepts(self, data: bytes) -> bool:
        """Whether these bytes are all of the content; for a verifier that saw nothing yet."""
        if len(data) != self._descriptor.size:
            return False
        self.update(data)
        return self._descriptor.digest.matches(self._hasher)

    def _size_error(self) -> SizeMismatch:
        return SizeMismatch(
            f"content of {self._descriptor.digest} has {self.done} bytes where {self._descriptor.size} "
            "were promised",
            next_step="the manifest or the registry is wrong; push the object again or use another mirror",
        )


class Fetcher:
    """Fetches blobs of one client; thread-safe, holds no state between calls.

    `connections` is how many ranges of one large blob are read at once.
    """

    def __init__(self, registry: Registry, *, connections: int = 1) -> None:
        self._registry = registry
        self._connections = connections

    @contextlib.contextmanager
    def open(
        self,
        ref: Reference,
        descriptor: Descriptor,
        *,
        offset: int = 0,
        deadline: Deadline,
        progress: Progress = silent,
    ) -> Iterator[Readable]:
        """The blob's bytes from `offset`, in order and resumed on a cut; not yet verified."""
        stream: _ParallelStream | _ResumingStream
        if self._connections > 1 and descriptor.size - offset >= _PARALLEL_MIN:
            stream = _ParallelStream(self._registry, ref, descriptor, offset, self._connections, deadline)
        else:
            stream = _ResumingStream(
                self._registry, ref, descriptor, offset, descriptor.size, deadline, progress
            )
        try:
            yield stream
        except IntegrityError:
            self._registry.distrust(ref)
            raise
        finally:
            stream.close()

    def read(self, ref: Reference, descriptor: Descriptor, *, limit: int, deadline: Deadline) -> bytes:
        """A small blob whole and verified, such as a config; raises SizeMismatch above `limit`."""
        if descriptor.data is not None:
            return descriptor.data
        if descriptor.size > limit:
            raise SizeMismatch(f"{descriptor.digest} has {descriptor.size} bytes; the limit here is {limit}")
        out = bytearray()
        with self.open(ref, descriptor, deadline=deadline) as source:
            pump(source, Verifier(descriptor), out.extend, deadline=deadline)
        return bytes(out)

    def peek(self, ref: Reference, descriptor: Descriptor, count: int, *, deadline: Deadline) -> bytes:
        """The first bytes of a blob, unverified: good for a guess about its format and for nothing else."""
        if descriptor.data is not None:
            return descriptor.data[:count]
        wanted = min(count, descriptor.size)
        buffer = bytearray(wanted)
        view, filled = memoryview(buffer), 0
        stream = _ResumingStream(self._registry, ref, descriptor, 0, wanted, deadline, silent)
        with contextlib.closing(stream):
            while filled < wanted and (got := stream.readinto(view[filled:])):
                filled += got
        return bytes(view[:filled])


class _ResumingStream:
    """One range of a blob, continued after a cut; ends at `end` or with an error."""

    def __init__(
        self,
        registry: Registry,
        ref: Reference,
        descriptor: Descriptor,
        offset: int,
        end: int,
        deadline: Deadline,
        progress: Progress,
    ) -> None:
        self._registry, self._ref, self._descriptor = registry, ref, descriptor
        self._position, self._end = offset, end
        self._deadline, self._progress = deadline, progress
        self._stack = contextlib.ExitStack()
        self._stream: Readable | None = None
        self._failures = 0
        self._brought = 0

    def readinto(self, buffer: memoryview, /) -> int:
        wanted = min(len(buffer), self._end - self._position)
        if wanted == 0:
            return 0
        while True:
            self._deadline.check()
            try:
                stream = self._stream or self._connect()
                got = stream.readinto(buffer[:wanted])
                if got == 0:
                    raise _Cut(f"the registry ended {self._descriptor.digest} at byte {self._position}")
            except UnladeError as error:
                self._after(error)
                continue
            self._position += got
            self._brought += got
            return got

    def _connect(self) -> Readable:
        stream = self._stack.enter_context(
            self._registry.blob(
                self._ref,
                self._descriptor,
                offset=self._position,
                end=self._end if self._end != self._descriptor.size else None,
                deadline=self._deadline,
            )
        )
        skip = self._position - stream.offset
        if skip < 0:
            raise SizeMismatch(f"the registry started {self._descriptor.digest} beyond what was asked for")
        # A server that ignores ranges sends the blob from its start: pass over what we have.
        scratch = memoryview(bytearray(min(skip, _CHUNK)))
        while skip:
            self._deadline.check()
            got = stream.readinto(scratch[: min(skip, len(scratch))])
            if got == 0:
                raise _Cut(f"the registry ended {self._descriptor.digest} before byte {self._position}")
            skip -= got
        self._brought = 0
        self._stream = stream
        return stream

    def _after(self, error: UnladeError) -> None:
        self._disconnect()
        if not error.retryable or not isinstance(error, RegistryError):
            raise error
        self._failures = 0 if self._brought >= _PROGRESS_BYTES else self._failures + 1
        self._brought = 0
        if self._failures > _MAX_FAILURES:
            raise error
        if self._failures:
            pause = min(_BACKOFF_CAP, _BACKOFF_FIRST * 2 ** (self._failures - 1))
            self._deadline.wait(pause * random.uniform(0.5, 1.0))  # noqa: S311 - jitter is no secret
        self._progress(
            ProgressEvent(
                "resumed", str(self._ref), self._descriptor.digest, self._position, self._descriptor.size
            )
        )

    def _disconnect(self) -> None:
        self._stream = None
        with contextlib.suppress(UnladeError, OSError):
            self._stack.close()

    def close(self) -> None:
        """Give the connection back."""
        self._disconnect()


class _Cut(RegistryError):
    """A body that ended early; the rest is asked for again."""

    code = "connection-cut"
    retryable = True


class _ParallelStream:
    """Segments of one blob, fetched ahead over several connections and handed out in order."""

    def __init__(
        self,
        registry: Registry,
        ref: Reference,
        descriptor: Descriptor,
        offset: int,
        connections: int,
        deadline: Deadline,
    ) -> None:
        self._registry, self._ref, self._descriptor, self._deadline = registry, ref, descriptor, deadline
        self._next = offset
        self._pool = ThreadPoolExecutor(connections, thread_name_prefix="unlade-range")
        self._pending: queue.SimpleQueue[Future[memoryview]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._current = memoryview(b"")
        self._outstanding = 0
        for _ in range(connections):
            self._submit()

    def _submit(self) -> None:
        start = self._next
        if start >= self._descriptor.size:
            return
        self._next = min(start + _SEGMENT, self._descriptor.size)
        self._pending.put(self._pool.submit(self._segment, start, self._next))
        self._outstanding += 1

    def _segment(self, start: int, end: int) -> memoryview:
        view = memoryview(bytearray(end - start))
        stream = _ResumingStream(
            self._registry, self._ref, self._descriptor, start, end, self._deadline, silent
        )
        filled = 0
        with contextlib.closing(stream):
            while filled < len(view) and not self._closed.is_set():
                filled += stream.readinto(view[filled : filled + _CHUNK])
        return view[:filled]

    def readinto(self, buffer: memoryview, /) -> int:
        if not self._current:
            if not self._outstanding:
                return 0
            self._current = self._pending.get().result()
            self._outstanding -= 1
            self._submit()
        taken = min(len(buffer), len(self._current))
        buffer[:taken] = self._current[:taken]
        self._current = self._current[taken:]
        return taken

    def close(self) -> None:
        """Stop fetching ahead and wait for the threads."""
        self._closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def pump(
    source: Readable,
    verifier: Verifier,
    write: Callable[[memoryview], object],
    *,
    deadline: Deadline,
    on_bytes: Callable[[int], None] | None = None,
    expected: int | None = None,
) -> None:
    """Move everything from source to `write`, verified; raises IntegrityError at the latest at the end.

    `write` must take the whole view and not keep it. With `expected` large, reading and hashing have a
    thread each, because all three release the interpreter lock.
    """
    if expected is not None and expected >= _PIPELINE_MIN:
        _pump_overlapped(source, verifier, write, deadline, on_bytes)
    else:
        view = memoryview(bytearray(min(_CHUNK, expected + 1) if expected is not None else _CHUNK))
        while got := source.readinto(view):
            deadline.check()
            verifier.update(view[:got])
            write(view[:got])
            if on_bytes:
                on_bytes(got)
    verifier.finish()


def _pump_overlapped(
    source: Readable,
    verifier: Verifier,
    write: Callable[[memoryview], object],
    deadline: Deadline,
    on_bytes: Callable[[int], None] | None,
) -> None:
    free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
    to_hash: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
    hashed: queue.SimpleQueue[None] = queue.SimpleQueue()
    failed: list[BaseException] = []
    for _ in range(_PIPELINE_CHUNKS):
        free.put(memoryview(bytearray(_CHUNK)))

    def read() -> None:
        try:
            while (buffer := free.get()) is not None:
                # Fill the chunk: short reads from a socket would multiply the hand-overs.
                filled = 0
                while filled < _CHUNK and (got := source.readinto(buffer[filled:])):
                    filled += got
                if filled:
                    full.put((buffer, filled))
                if filled < _CHUNK:
                    break
        except BaseException as error:  # carried to the calling thread, which raises it
            failed.append(error)
        finally:
            full.put(None)

    def digest() -> None:
        try:
            while (data := to_hash.get()) is not None:
                if not failed:
                    verifier.update(data)
                hashed.put(None)
        except BaseException as error:  # as above
            failed.append(error)
            hashed.put(None)
            while to_hash.get() is not None:
                hashed.put(None)

    threads = [threading.Thread(target=work, name=f"unlade-{work.__name__}") for work in (read, digest)]
    for thread in threads:
        thread.start()
    try:
        while (chunk := full.get()) is not None:
            buffer, filled = chunk
            data = buffer[:filled]
            to_hash.put(data)
            try:
                deadline.check()
                write(data)
            finally:
                hashed.get()
            if failed:
                break
            if on_bytes:
                on_bytes(len(data))
            free.put(buffer)
    finally:
        free.put(None)
        to_hash.put(None)
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]

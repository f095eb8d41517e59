"""Carrying out a plan: blobs in, one directory out, each byte written once.

Parts are fetched and unpacked side by side, the largest first. Archives are parsed by worker processes
that see a pipe and a directory descriptor and nothing else (`unpack`); this process only moves verified
bytes. A blob the store keeps is read from there instead of the registry, and hashed again all the same.
Whatever fails, the caller throws the whole staging away.

Cost: one fetch, one hash and one write per byte; memory bounded by `jobs` times the pipeline's buffers.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, TypeVar

import msgspec

from unlade.delivery.assembly import Assembly, Directory, Part, Target
from unlade.errors import IntegrityError
from unlade.kernel.files import EarlyWriter, write_all
from unlade.model import Deadline, Descriptor, DiffID, Digest, Reference
from unlade.planning import Plan, Step
from unlade.store.failure import explaining
from unlade.transfer import Fetcher, Progress, ProgressEvent, Readable, Verifier, pump, silent
from unlade.tree.sync import written_early
from unlade.unpack import Unpacked, UnpackPolicy, WorkerPool, write_file

if TYPE_CHECKING:
    from unlade.store import DirStore

# A larger pipe means fewer switches between this process and the worker; 1 MiB is what an
# unprivileged process may ask for (/proc/sys/fs/pipe-max-size).
_PIPE_BYTES: Final = 1 << 20
_F_SETPIPE_SZ: Final = 1031
_FILE_MODE: Final = 0o644
_T = TypeVar("_T")


class TrailingBytes(IntegrityError):
    """An archive whose reader was done before its bytes were."""

    code = "trailing-bytes"


class TwoFaced(IntegrityError):
    """Content that begins otherwise than when its format was looked at."""

    code = "two-faced"


class DiffMismatch(IntegrityError):
    """A layer that unpacks to something else than its publisher says, in a config or an annotation."""

    code = "diff-mismatch"


class Context(msgspec.Struct, frozen=True):
    """What every part of one delivery shares: where its sources' blobs are, and until when."""

    references: Sequence[Reference]
    deadline: Deadline
    progress: Progress = silent
    # First bytes that decided the plan; the content must begin with them. Those that did are `seen`.
    heads: Mapping[Digest, bytes] = msgspec.field(default_factory=dict)
    # Small layers that planning fetched whole and verified, by the repository they came from.
    whole: Mapping[tuple[str, Digest], bytes] = msgspec.field(default_factory=dict)
    seen: set[Digest] = msgspec.field(default_factory=set)
    # What this delivery itself had from a repository, verified: nobody need ask whether it may have it.
    fetched: set[tuple[str, Digest]] = msgspec.field(default_factory=set)


class Task(msgspec.Struct, frozen=True):
    """A unit of fetching: an archive, or one file."""

    part: Part
    step: Step


class Builder:
    """Fetches and unpacks; shared by all deliveries of an engine, thread-safe."""

    def __init__(self, fetcher: Fetcher, workers: WorkerPool, store: DirStore | None, *, jobs: int) -> None:
        self._fetcher = fetcher
        self._workers = workers
        self._store = store
        self._jobs = jobs

    def directory(
        self,
        plan: Plan,
        target: Target[Any],
        policy: Callable[[Step], UnpackPolicy],
        context: Context,
        *,
        diff_ids: Sequence[Sequence[DiffID | None]] = (),
    ) -> tuple[int, int]:
        """Fill the target with everything the plan names; returns bytes and entries."""
        assembly = Assembly(plan, target)

        def carry_out(task: Task) -> None:
            step = task.step
            if step.action == "file":
                self._file(task, context)
            else:
                expected = step.diff_id
                if step.action == "layer" and diff_ids:
                    expected = diff_ids[step.source][step.index]
                unpacked = self.archive(step, task.part.directory, policy(step), context, expected)
                task.part.unpacked = unpacked
                task.part.size, task.part.entries = unpacked.bytes, unpacked.entries

        tasks = [Task(part, step) for part in assembly.parts for step in part.steps]
        self.side_by_side(tasks, carry_out, size=lambda task: task.step.layer.size)
        assembly.merge(context.deadline)
        return assembly.measure(context.deadline)

    def side_by_side(
        self, tasks: Sequence[_T], work: Callable[[_T], object], *, size: Callable[[_T], int]
    ) -> None:
        """Run `work` on every task, largest first, at most `jobs` at once; the first error ends the rest."""
        if len(tasks) == 1:
            work(tasks[0])
            return
        with ThreadPoolExecutor(self._jobs, thread_name_prefix="unlade-part") as pool:
            running = [pool.submit(work, task) for task in sorted(tasks, key=size, reverse=True)]
            try:
                for future in as_completed(running):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def archive(
        self,
        step: Step,
        place: Directory,
        policy: UnpackPolicy,
        context: Context,
        diff_id: DiffID | None,
    ) -> Unpacked:
        """Fetch an archive and have it unpacked into a directory; verified when this returns."""
        with written_early(place.dirfd, step.layer.size):
            return self._archive(step, place, policy, context, diff_id)

    def _archive(
        self,
        step: Step,
        place: Directory,
        policy: UnpackPolicy,
        context: Context,
        diff_id: DiffID | None,
    ) -> Unpacked:
        reading, writing = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(writing, _F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            answer = self._workers.unpack(
                reading, place.dirfd, policy, files_out=place.files_out, deadline=context.deadline
            )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        stopped = False
        try:
            with self._source(step, context) as source:
                self._pump(step, source, functools.partial(write_all, writing), context)
        except BrokenPipeError:
            stopped = True  # the worker reads no more: its own error says why
        except BaseException:
            os.close(writing)
            writing = -1
            answer.exception()  # its descriptors must be closed before the staging is removed
            raise
        finally:
            if writing >= 0:
                os.close(writing)
        unpacked = answer.result()
        if stopped:
            raise TrailingBytes(
                f"the archive {step.layer.digest} has bytes after its end", next_step="push it again"
            )
        if diff_id is not None and unpacked.diff_id != diff_id:
            raise DiffMismatch(
                f"layer {step.layer.digest} unpacks to {unpacked.diff_id}; its publisher says {diff_id}",
                next_step="the content is damaged or forged; push it again",
            )
        return unpacked

    def _file(self, task: Task, context: Context) -> None:
        from unlade.unpack.checksum import crc32

        step, place = task.step, task.part.directory
        mode = step.mode if step.mode is not None else _FILE_MODE
        fd = write_file(place.dirfd, step.path.encode("utf-8", "surrogateescape"), mode)
        checksum = 0
        file = EarlyWriter(fd)

        def write(data: memoryview) -> None:
            nonlocal checksum
            with explaining(f"write {step.path}"):
                file.write(data)
            checksum = crc32(data, checksum)

        try:
            with self._source(step, context) as source:
                self._pump(step, source, write, context)
            if step.mtime_ns is not None:
                os.utime(fd, ns=(step.mtime_ns, step.mtime_ns))
            task.part.add_file(step.path, os.fstat(fd), checksum)
        finally:
            os.close(fd)

    def _pump(
        self, step: Step, source: Readable, write: Callable[[memoryview], object], context: Context
    ) -> None:
        layer, reference = step.layer, str(context.references[step.source])
        done = 0

        def tell(kind: Literal["start", "bytes", "done", "failed"]) -> None:
            context.progress(ProgressEvent(kind, reference, layer.digest, done, layer.size, step.path))

        def on_bytes(count: int) -> None:
            nonlocal done
            done += count
            tell("bytes")

        tell("start")
        verifier = Verifier(layer)
        head = context.heads.get(layer.digest)
        if head is not None:
            write = _beginning_with(head, layer, write)
        try:
            pump(source, verifier, write, deadline=context.deadline, on_bytes=on_bytes, expected=layer.size)
        except BaseException:
            tell("failed")
            raise
        if head is not None:
            context.seen.add(layer.digest)
        tell("done")

    @contextlib.contextmanager
    def _source(self, step: Step, context: Context) -> Iterator[Readable]:
        known = step.content if step.content is not None else step.layer.data
        if known is not None:
            yield io.BytesIO(known)
            return
        if self._store is not None and self._store.stat(step.layer.digest) is not None:
            with self._store.open(step.layer.digest) as blob:
                yield _File(blob)
            return
        reference = context.references[step.source]
        whole = context.whole.get((reference.name, step.layer.digest))
        if whole is not None:
            yield io.BytesIO(whole)
            context.fetched.add((reference.name, step.layer.digest))
            return
        with self._fetcher.open(
            reference, step.layer, deadline=context.deadline, progress=context.progress
        ) as stream:
            yield stream
        context.fetched.add((reference.name, step.layer.digest))


def _beginning_with(
    head: bytes, layer: Descriptor, write: Callable[[memoryview], object]
) -> Callable[[memoryview], None]:
    """Writes on, and refuses content that begins otherwise than what its plan was made from."""
    position = 0

    def checked(data: memoryview) -> None:
        nonlocal position
        expected = head[position : position + len(data)]
        if data[: len(expected)] != expected:
            raise TwoFaced(
                f"the registry showed other first bytes of {layer.digest} than it sent",
                next_step="the registry or something on the way is broken or hostile; use another mirror",
            )
        position += len(data)
        write(data)

    return checked


class _File:
    """A blob of the store as a source."""

    def __init__(self, blob: BinaryIO) -> None:
        self._fd = blob.fileno()

    def readinto(self, buffer: memoryview, /) -> int:
        return os.readv(self._fd, [buffer])

"""Pushing: blobs first, several at once, then the manifest that names them.

The invariant: a manifest is put only after every blob it names is in the registry, so that a tag never
points at something that cannot be pulled; a push that ends half-way leaves unreferenced blobs and nothing
else. A blob that the registry has is not sent (one HEAD), one that another repository of the registry has
is mounted, and the rest is streamed from its source, which may be asked again from any offset when a
connection breaks.

Called by `pack.publish`, `transfer.copy` and packages (distribution-spec 1.1, "Push").
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, Final, Literal, Protocol

from unlade.errors import DeadlineExceeded
from unlade.kernel import failpoints
from unlade.model import Deadline, Descriptor, Digest, Reference
from unlade.transfer.fetch import Readable, Verifier
from unlade.transfer.progress import Progress, ProgressEvent, silent

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from unlade.registry import Registry

# Blobs in flight at once. Registries limit connections per client; four fill a link without queueing.
DEFAULT_JOBS: Final = 4


_Kind = Literal["start", "bytes", "present", "done", "failed"]


class Blob(Protocol):
    """Something to be sent: what it is, and its bytes from any offset."""

    @property
    def descriptor(self) -> Descriptor:
        """Exact before the first byte is sent."""

    def open(self, offset: int = 0, /) -> BinaryIO:
        """A reader from `offset` on, closed by whoever asked for it; may be called again after a failure."""


class BytesBlob:
    """A small blob that is in memory: a config."""

    def __init__(self, data: bytes, media_type: str) -> None:
        self.descriptor = Descriptor(media_type=media_type, digest=Digest.of(data), size=len(data))
        self._data = data

    def open(self, offset: int = 0, /) -> BinaryIO:
        """A reader from `offset` on."""
        return io.BytesIO(self._data[offset:])


class VerifiedReader(io.RawIOBase):
    """A Readable as a file: raises IntegrityError instead of its last bytes unless everything matched.

    Before the last bytes, not at the end: whoever sends a known number of bytes never asks for the end.
    """

    def __init__(self, source: Readable, descriptor: Descriptor, stack: ExitStack, *, offset: int) -> None:
        self._source = source
        self._size = descriptor.size
        # From an offset the whole cannot be hashed: then whoever takes the blob checks it alone.
        self._verifier = Verifier(descriptor) if offset == 0 else None
        self._stack = stack

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """The next bytes, hashed on their way; the last of them only after size and digest were checked."""
        view = memoryview(buffer).cast("B")
        count = self._source.readinto(view)
        if self._verifier is not None:
            self._verifier.update(view[:count])
            if not count or self._verifier.done == self._size:
                self._verifier.finish()
        return count

    def close(self) -> None:
        """Give the source back."""
        self._stack.close()
        super().close()


@dataclass(frozen=True, slots=True)
class Sent:
    """What a push moved: bytes sent, and blobs by what happened to them."""

    bytes_sent: int = 0
    sent: int = 0
    present: int = 0
    mounted: int = 0

    def __add__(self, other: Sent) -> Sent:
        return Sent(
            self.bytes_sent + other.bytes_sent,
            self.sent + other.sent,
            self.present + other.present,
            self.mounted + other.mounted,
        )


def push_blobs(
    registry: Registry,
    ref: Reference,
    blobs: Iterable[Blob],
    *,
    mount_from: Sequence[Reference] = (),
    jobs: int = DEFAULT_JOBS,
    deadline: Deadline,
    progress: Progress = silent,
) -> Sent:
    """See to it that the repository has every blob; idempotent. The first failure stops the others.

    `mount_from` names repositories of the same registry that may have the blobs already.
    """
    pushing = _Pushing(registry, ref, tuple(mount_from), deadline, progress)
    return in_parallel([partial(pushing.push, blob) for blob in distinct(blobs)], jobs, pushing.stop)


def push_manifest(
    registry: Registry,
    ref: Reference,
    raw: bytes,
    media_type: str,
    *,
    deadline: Deadline,
) -> Reference:
    """Put the manifest under the reference's tag (or under its digest alone); what it is called by digest."""
    failpoints.reach("transfer.push.before-manifest")
    digest = registry.put_manifest(ref, raw, media_type, tag=ref.tag, deadline=deadline)
    failpoints.reach("transfer.push.manifest-sent")
    return ref.with_digest(digest)


def in_parallel(tasks: Sequence[Callable[[], Sent]], jobs: int, stop: threading.Event) -> Sent:
    """Run tasks on `jobs` threads; the first failure sets `stop`, ends the rest and is raised."""
    if len(tasks) <= 1 or jobs <= 1:
        return sum((task() for task in tasks), Sent())
    with ThreadPoolExecutor(jobs, thread_name_prefix="unlade-push") as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            done, pending = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        if pending:
            stop.set()
            for future in pending:
                future.cancel()
        failures = [error for future in done if (error := future.exception()) is not None]
        if failures:
            # A task that ended because another failed says "cancelled": raise the reason, not the echo.
            raise next((error for error in failures if not isinstance(error, Stopped)), failures[0])
        return sum((future.result() for future in futures), Sent())


class Stopped(DeadlineExceeded):
    """This blob was given up because another one failed."""


class _Pushing:
    """One push of several blobs to one repository; `push` runs on many threads."""

    def __init__(
        self,
        registry: Registry,
        ref: Reference,
        mount_from: tuple[Reference, ...],
        deadline: Deadline,
        progress: Progress,
    ) -> None:
        self._registry = registry
        self._ref = ref
        # Only repositories of the same registry can be mounted from.
        self._mount_from = tuple(
            other
            for other in mount_from
            if other.registry == ref.registry and other.repository != ref.repository
        )
        self._deadline = deadline
        self._progress = progress
        self.stop = threading.Event()

    def push(self, blob: Blob) -> Sent:
        self._check()
        descriptor = blob.descriptor
        if self._registry.head_blob(self._ref, descriptor.digest, deadline=self._deadline) is not None:
            self._tell("present", descriptor, descriptor.size)
            return Sent(present=1)
        for other in self._mount_from:
            if self._registry.mount_blob(self._ref, descriptor.digest, source=other, deadline=self._deadline):
                self._tell("present", descriptor, descriptor.size)
                return Sent(mounted=1)
        failpoints.reach("transfer.push.before-blob")
        self._tell("start", descriptor, 0)

        def on_sent(position: int) -> None:
            self._check()
            self._tell("bytes", descriptor, position)

        try:
            self._registry.upload_blob(
                self._ref,
                descriptor.digest,
                descriptor.size,
                blob.open,
                deadline=self._deadline,
                on_sent=on_sent,
            )
        except BaseException:
            self._tell("failed", descriptor, 0)
            raise
        failpoints.reach("transfer.push.blob-sent")
        self._tell("done", descriptor, descriptor.size)
        return Sent(bytes_sent=descriptor.size, sent=1)

    def _check(self) -> None:
        self._deadline.check()
        if self.stop.is_set():
            raise Stopped("given up because another blob failed")

    def _tell(self, kind: _Kind, descriptor: Descriptor, done: int) -> None:
        self._progress(
            ProgressEvent(
                kind, str(self._ref), descriptor.digest, done, descriptor.size, descriptor.title or ""
            )
        )


def distinct(blobs: Iterable[Blob]) -> list[Blob]:
    """One blob per digest, in order."""
    return list({blob.descriptor.digest: blob for blob in blobs}.values())

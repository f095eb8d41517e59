"""containerd's content store as a `ContentStore`.

containerd hashes what it takes in and refuses what does not match, so nothing unverified becomes visible
whoever the caller is. An ingest has a name made from its digest; a partial stays under that name and is
continued, containerd having hashed it again. Two things containerd does not do are done here: a second
ingest of a digest waits (it would fail), and `delete` looks whether something needs the blob (it would not
ask). Content that no lease and no record holds may be collected at any time.
"""

from __future__ import annotations

import contextlib
import io
import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, BinaryIO, Final

import grpc
from google.protobuf.empty_pb2 import Empty

from unlade.containerd import labels, leases
from unlade.containerd.api import content_pb2, images_pb2
from unlade.containerd.connection import Containerd, Method
from unlade.containerd.errors import ContainerdUnavailable, Exists, Missing, Refused, explained
from unlade.errors import IntegrityError, StoreError, UnladeError
from unlade.kernel import failpoints
from unlade.model import Deadline, Descriptor, Digest, mediatypes
from unlade.store import BlobInfo, Lease, NotInStore
from unlade.store.ingest import children_of

_CONTENT: Final = "/containerd.services.content.v1.Content"
_INFO: Final = Method(f"{_CONTENT}/Info", content_pb2.InfoRequest, content_pb2.InfoResponse)
_UPDATE: Final = Method(f"{_CONTENT}/Update", content_pb2.UpdateRequest, content_pb2.UpdateResponse)
_LIST: Final = Method(f"{_CONTENT}/List", content_pb2.ListContentRequest, content_pb2.ListContentResponse)
_DELETE: Final = Method(f"{_CONTENT}/Delete", content_pb2.DeleteContentRequest, Empty)
_READ: Final = Method(f"{_CONTENT}/Read", content_pb2.ReadContentRequest, content_pb2.ReadContentResponse)
_WRITE: Final = Method(f"{_CONTENT}/Write", content_pb2.WriteContentRequest, content_pb2.WriteContentResponse)
_ABORT: Final = Method(f"{_CONTENT}/Abort", content_pb2.AbortRequest, Empty)
_IMAGES: Final = Method(
    "/containerd.services.images.v1.Images/List", images_pb2.ListImagesRequest, images_pb2.ListImagesResponse
)
# One message; containerd takes up to 16 MiB.
_CHUNK: Final = 1 << 20
# The writer of a process that just died keeps its lock until containerd notices.
_LOCKED_SECONDS: Final = 10.0
_LOCKED_PAUSE: Final = 0.05


class ContainerdStore:
    """Blobs of one namespace; thread-safe."""

    def __init__(self, containerd: Containerd) -> None:
        self.containerd = containerd

    def stat(self, digest: Digest) -> BlobInfo | None:
        """What is known about a committed blob; None when it is not there."""
        info = self.info(digest)
        return _info(info) if info is not None else None

    def info(self, digest: Digest) -> content_pb2.Info | None:
        """A blob as containerd tells it, labels included; None when it is not there."""
        try:
            request = content_pb2.InfoRequest(digest=str(digest))
            return self.containerd.call(_INFO, request, f"look for {digest}").info
        except Missing:
            return None

    def open(self, digest: Digest) -> BinaryIO:
        """A committed blob, read from its start to its end; raises NotInStore."""
        info = self.info(digest)
        if info is None:
            raise NotInStore(f"{digest} is not in containerd", next_step="pull what needs it again")
        return io.BufferedReader(_Reading(self.containerd, digest, info.size), _CHUNK)

    def read(self, digest: Digest) -> bytes:
        """A small blob, whole; raises NotInStore."""
        with self.open(digest) as stream:
            return stream.read()

    @contextmanager
    def ingest(
        self, descriptor: Descriptor, *, lease: Lease | None = None, deadline: Deadline | None = None
    ) -> Iterator[ContainerdIngest]:
        """Take a blob in, alone among all processes that share `state`; see ContentStore.ingest."""
        found = self._present(descriptor, lease)
        if found:
            yield ContainerdIngest(self, descriptor, lease, deadline, found)
            return
        with self.containerd.locks.hold(f"blob-{descriptor.digest.hex}", deadline=deadline):
            found = self._present(descriptor, lease)
            ingest = ContainerdIngest(self, descriptor, lease, deadline, found)
            try:
                yield ingest
            finally:
                ingest.close()

    def put(
        self,
        descriptor: Descriptor,
        data: bytes,
        *,
        lease: Lease | None = None,
        children: Sequence[Digest] = (),
        extra_labels: dict[str, str] | None = None,
    ) -> BlobInfo:
        """Take in a blob that is in memory; when it is there, only `extra_labels` are written."""
        with self.ingest(descriptor, lease=lease) as ingest:
            if ingest.present:
                if extra_labels:
                    self.label(descriptor.digest, extra_labels)
                return ingest.commit()
            if ingest.offset < descriptor.size:
                ingest.discard()
                ingest.write(data)
            return ingest.commit(children=children, extra_labels=extra_labels)

    def label(self, digest: Digest, changes: dict[str, str]) -> None:
        """Set labels of a blob; an empty value removes the label. Raises Missing."""
        request = content_pb2.UpdateRequest(info=content_pb2.Info(digest=str(digest), labels=changes))
        request.update_mask.paths.extend(f"labels.{key}" for key in changes)
        self.containerd.call(_UPDATE, request, f"label {digest}")

    def delete(self, digest: Digest) -> bool:
        """Remove a blob that nothing refers to; StoreError when something does."""
        if self.info(digest) is None:
            return False
        user = self._user(digest)
        if user:
            raise StoreError(f"{digest} is needed by {user}", next_step="remove that first")
        try:
            self.containerd.call(
                _DELETE, content_pb2.DeleteContentRequest(digest=str(digest)), f"delete {digest}"
            )
        except Missing:
            return False
        return True

    def walk(self) -> Iterator[BlobInfo]:
        """Every committed blob of the namespace, in the order of digests; others' content too."""
        return iter(sorted(map(_info, self._list()), key=lambda info: info.digest))

    def lease(self, purpose: str, *, ttl: float = leases.DAY) -> AbstractContextManager[Lease]:
        """A lease that ends with the block, with its time, or with this process."""
        return leases.lease(self.containerd, purpose, ttl=ttl)

    def with_label(self, label: str) -> Iterator[content_pb2.Info]:
        """The blobs that have a label."""
        return self._list(f'labels."{label}"')

    def _list(self, *filters: str) -> Iterator[content_pb2.Info]:
        request = content_pb2.ListContentRequest(filters=filters)
        for page in self.containerd.stream(_LIST, request, "list containerd's content"):
            yield from page.info

    def _user(self, digest: Digest) -> str:
        """What needs a blob: a lease in force, an image's record, or a label of other content."""
        text = str(digest)
        held = leases.holders(self.containerd, kind="content", resource=text)
        if held:
            return f"the lease {held[0]}"
        images = self.containerd.call(_IMAGES, images_pb2.ListImagesRequest(), "list images").images
        for image in images:
            if image.target.digest == text:
                return f"the image {image.name}"
        for info in self._list():
            if any(key.startswith(labels.GC_CONTENT) and value == text for key, value in info.labels.items()):
                return info.digest
        return ""

    def user_of_snapshot(self, snapshotter: str, name: str) -> str:
        """The content whose labels keep a snapshot alive: an image's config; empty when there is none."""
        key = f"{labels.GC_SNAPSHOT}.{snapshotter}"
        return next((info.digest for info in self._list() if info.labels.get(key) == name), "")

    def _present(self, descriptor: Descriptor, lease: Lease | None) -> BlobInfo | None:
        digest = descriptor.digest
        if lease is not None and not lease.hold(digest):
            return None
        info = self.stat(digest)
        if info and info.size != descriptor.size:
            raise IntegrityError(
                f"{digest} has {info.size} bytes; the descriptor says {descriptor.size}",
                next_step="the manifest that says so is wrong: report it to its author",
            )
        return info


class ContainerdIngest:
    """See `Ingest`; made by ContainerdStore.ingest, which holds the digest's lock around it."""

    def __init__(
        self,
        store: ContainerdStore,
        descriptor: Descriptor,
        lease: Lease | None,
        deadline: Deadline | None,
        found: BlobInfo | None,
    ) -> None:
        self._store = store
        self._descriptor = descriptor
        self._lease = lease
        self._deadline = deadline
        self._found = found
        self._ref = f"unlade-{descriptor.digest}"
        self._stream: _Writing | None = None
        self._written = found.size if found else 0
        if found is None:
            self._open()

    @property
    def present(self) -> bool:
        """The content is already there: there is nothing to write to."""
        return self._found is not None

    @property
    def offset(self) -> int:
        """How many bytes containerd has, hashed."""
        return self._written

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append; refuses to grow beyond the descriptor's size."""
        view = memoryview(data).cast("B")
        if self._written + view.nbytes > self._descriptor.size:
            raise IntegrityError(
                f"{self._descriptor.digest} is longer than its {self._descriptor.size} bytes",
                next_step="the registry sent more than it promised: report it to its owner",
            )
        stream = self._writing()
        for start in range(0, view.nbytes, _CHUNK):
            part = bytes(view[start : start + _CHUNK])
            stream.ask(action=content_pb2.WriteAction.WRITE, offset=self._written, data=part)
            self._written += len(part)

    def commit(
        self, *, children: Sequence[Digest] = (), extra_labels: dict[str, str] | None = None
    ) -> BlobInfo:
        """Have containerd check, sync and show it; see Ingest.commit."""
        if self._found is not None:
            return self._found
        digest, size = self._descriptor.digest, self._descriptor.size
        if self._written < size:
            raise IntegrityError(
                f"{digest} has {self._written} of {size} bytes",
                next_step="pull again: it continues there",
                retryable=True,
            )
        whole = self._writing().whole()
        facts = {labels.MEDIA_TYPE: self._descriptor.media_type, **(extra_labels or {})}
        facts.update(_references([*self._children(whole), *children]))
        failpoints.reach("containerd.ingest.written")
        try:
            self._writing().ask(
                action=content_pb2.WriteAction.COMMIT, total=size, expected=str(digest),
                offset=self._written, labels=facts,
            )  # fmt: skip
        except Exists:
            pass  # committed by our own first attempt, or by containerd's own pull
        except Refused as error:
            self.discard()
            raise IntegrityError(
                f"the bytes received are not {digest}",
                next_step="pull again; if it persists the registry's copy is damaged",
                retryable=True,
            ) from error
        failpoints.reach("containerd.ingest.committed")
        self.close()
        if self._lease is not None and not self._lease.hold(digest):
            raise leases.ended()
        if whole is None:
            # Part of a manifest was there before us, so its children are known only now.
            found = _references([*self._children(self._store.read(digest)), *children])
            self._store.label(digest, found)
        info = self._store.stat(digest)
        if info is None:
            raise NotInStore(
                f"{digest} was collected as soon as it was there", next_step="take it in under a lease"
            )
        self._found = info
        return info

    def discard(self) -> None:
        """Forget the partial; the ingest may be written again from 0."""
        if self._found is not None:
            return
        self.close()
        self._abort()
        self._written = 0

    def close(self) -> None:
        """End the stream: containerd keeps the partial. An empty one leaves nothing behind. Idempotent."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            if self._written == 0 and self._found is None:
                self._abort()

    def _abort(self) -> None:
        with contextlib.suppress(Missing):
            self._store.containerd.call(
                _ABORT, content_pb2.AbortRequest(ref=self._ref), f"discard {self._descriptor.digest}"
            )

    def _open(self) -> None:
        stream = _Writing(self._store.containerd, self._ref, self._descriptor, self._lease, self._deadline)
        if stream.offset > self._descriptor.size:
            # A partial of somebody who believed in a larger size.
            stream.close()
            self._abort()
            stream = _Writing(
                self._store.containerd, self._ref, self._descriptor, self._lease, self._deadline
            )
        self._stream, self._written = stream, stream.offset

    def _writing(self) -> _Writing:
        if self._stream is None:
            self._open()
        assert self._stream is not None
        return self._stream

    def _children(self, raw: bytes | None) -> list[Digest]:
        """What a manifest or index keeps alive."""
        return children_of(raw, self._descriptor.media_type) if raw else []


class _Writing:
    """A write stream, in lock step: each message is answered before the next is sent."""

    def __init__(
        self,
        containerd: Containerd,
        ref: str,
        descriptor: Descriptor,
        lease: Lease | None,
        deadline: Deadline | None,
    ) -> None:
        self._what = f"write {descriptor.digest}"
        self._ref = ref
        self._keep = descriptor.media_type in mediatypes.MANIFESTS | mediatypes.INDEXES
        self._size = descriptor.size
        self._sent = bytearray()
        until = time.monotonic() + _LOCKED_SECONDS
        while True:
            self._requests: queue.SimpleQueue[content_pb2.WriteContentRequest | None] = queue.SimpleQueue()
            self._answers: Any = containerd.exchange(
                _WRITE, iter(self._requests.get, None), lease=lease.id if lease else "", deadline=deadline
            )
            try:
                answer = self.ask(
                    action=content_pb2.WriteAction.STAT,
                    total=descriptor.size,
                    expected=str(descriptor.digest),
                )
            except ContainerdUnavailable:
                if time.monotonic() > until:
                    raise
                time.sleep(_LOCKED_PAUSE)
                continue
            except Missing as error:
                raise leases.ended() from error
            self.offset: int = answer.offset
            return

    def ask(self, **fields: Any) -> content_pb2.WriteContentResponse:
        """Send a message and wait for its answer."""
        self._requests.put(content_pb2.WriteContentRequest(ref=self._ref, **fields))
        if self._keep:
            self._sent += fields.get("data", b"")
        try:
            answer: content_pb2.WriteContentResponse = next(self._answers)
        except (StopIteration, grpc.RpcError) as error:
            # gRPC's own thread waits for the next message: it must not wait for ever.
            self._requests.put(None)
            if isinstance(error, StopIteration):
                raise ContainerdUnavailable(
                    f"cannot {self._what}: containerd ended the stream", next_step="try again"
                ) from error
            raise explained(self._what, error) from error
        return answer

    def whole(self) -> bytes | None:
        """A manifest, if all of it came through this stream, else None; empty for what is no manifest."""
        if self._keep and len(self._sent) != self._size:
            return None
        return bytes(self._sent)

    def close(self) -> None:
        """Half-close and wait until containerd has let go of the name; idempotent."""
        self._requests.put(None)
        with contextlib.suppress(grpc.RpcError, UnladeError):
            for _ in self._answers:
                pass


class _Reading(io.RawIOBase):
    """A blob being read: one stream from its first byte, so that a deleted blob is still read whole."""

    def __init__(self, containerd: Containerd, digest: Digest, size: int) -> None:
        super().__init__()
        request = content_pb2.ReadContentRequest(digest=str(digest))
        self._pages = containerd.stream(_READ, request, f"read {digest}")
        self._left = size
        self._page = memoryview(b"")
        self._digest = digest
        if size:
            self._next()  # containerd opens the file with the first page

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if self._left == 0:
            return 0
        if not self._page:
            self._next()
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._page))
        view[:count] = self._page[:count]
        self._page = self._page[count:]
        self._left -= count
        return count

    def _next(self) -> None:
        try:
            page = next(self._pages)
        except StopIteration:
            raise IntegrityError(
                f"{self._digest} ends {self._left} bytes early in containerd", next_step="pull it again"
            ) from None
        except Missing as error:
            raise NotInStore(f"{self._digest} is not in containerd", next_step="pull it again") from error
        self._page = memoryview(page.data)


def _references(children: Sequence[Digest]) -> dict[str, str]:
    return {f"{labels.GC_CONTENT}.{number}": str(child) for number, child in enumerate(children)}


def _info(info: content_pb2.Info) -> BlobInfo:
    media_type = info.labels.get(labels.MEDIA_TYPE, "application/octet-stream")
    return BlobInfo(Digest.parse(info.digest), info.size, media_type, info.created_at.ToNanoseconds() / 1e9)

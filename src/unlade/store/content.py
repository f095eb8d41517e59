"""Content by digest: the protocol that every store of blobs fulfils.

Lifecycle: content that is being ingested is invisible; it becomes visible at once and whole by `commit`,
after its size and digest were checked and its bytes were synced. Nothing visible ever changes. `DirStore`
keeps blobs in an OCI image layout; containerd's content store is the other implementation. The suite in
tests/conformance runs on each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Protocol

from unlade.model import Deadline, Descriptor, Digest

if TYPE_CHECKING:
    from hashlib import _Hash


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A committed blob."""

    digest: Digest
    size: int
    media_type: str
    created: float


class Lease(Protocol):
    """What keeps content alive while someone works with it and no record names it yet."""

    @property
    def id(self) -> str:
        """The lease's name in the store."""

    def hold(self, digest: Digest) -> bool:
        """Keep a blob alive; False when it is not (or no longer) in the store. Idempotent."""

    def hold_tree(self, key: Digest) -> bool:
        """Keep a tree alive; False when it is not (or no longer) there. Idempotent."""

    def renew(self, ttl: float) -> None:
        """Let the lease end this many seconds from now."""

    def release(self) -> None:
        """End the lease now; idempotent."""


class Ingest(Protocol):
    """One blob on its way in, held exclusively. Leaving its block without commit keeps the partial."""

    @property
    def present(self) -> bool:
        """The content is already there: nothing to write, and `commit` has nothing left to do."""

    @property
    def offset(self) -> int:
        """How many bytes are there, hashed: where to continue."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes; more than the descriptor's size is an IntegrityError."""

    def commit(self, *, children: Sequence[Digest] = ()) -> BlobInfo:
        """Check size and digest, sync, make visible. IntegrityError discards what was written.

        A manifest's or index's own children are found by its media type; `children` adds to them.
        """

    def discard(self) -> None:
        """Throw the partial away: the next ingest begins at 0."""


class PipelinedIngest(Ingest, Protocol):
    """An ingest whose bytes may be written and hashed by two threads."""

    @property
    def fd(self) -> int:
        """The partial, open for writing at `offset`."""

    @property
    def hasher(self) -> _Hash:
        """Fed with every byte before `offset`; the pipeline feeds it the rest, in order."""


class ContentStore(Protocol):
    """Blobs by digest; thread-safe."""

    def stat(self, digest: Digest) -> BlobInfo | None:
        """What is known about a committed blob; None when it is not there."""

    def open(self, digest: Digest) -> BinaryIO:
        """A committed blob, to be closed by the caller; raises NotInStore."""

    def ingest(
        self, descriptor: Descriptor, *, lease: Lease | None = None, deadline: Deadline | None = None
    ) -> AbstractContextManager[Ingest]:
        """Take a blob in. Exclusive per digest: a second caller waits, then finds it `present`.

        With a lease, the blob is born held by it: a garbage collection never comes in between.
        """

    def put(
        self,
        descriptor: Descriptor,
        data: bytes,
        *,
        lease: Lease | None = None,
        children: Sequence[Digest] = (),
    ) -> BlobInfo:
        """Take in a blob that is already in memory; nothing is written when it is there."""

    def delete(self, digest: Digest) -> bool:
        """Remove a blob that nothing refers to; False when it was not there, StoreError when it is needed."""

    def walk(self) -> Iterator[BlobInfo]:
        """Every committed blob, in the order of their digests."""

    def lease(self, purpose: str, *, ttl: float) -> AbstractContextManager[Lease]:
        """A lease that ends with the block, with its time, or with this process, whichever is first."""

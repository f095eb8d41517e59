"""One blob on its way into a `DirStore`: hashed while written, resumed after a cut, then committed.

The partial is `.unlade/ingest/<digest>`; holding the digest's lock makes it ours. Its length is the
progress, so a process that was killed left a prefix: it is hashed again and continued. Bytes that a power
loss made up are found by the digest, and the partial is thrown away. A blob that was renamed but not yet
recorded when the power went is taken back as a partial and hashed again.
Commit: size and digest, fsync of the data, rename, fsync of the directory, record.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from unlade.errors import IntegrityError
from unlade.kernel import failpoints
from unlade.kernel.files import write_all
from unlade.model import (
    MAX_MANIFEST_BYTES,
    Deadline,
    Descriptor,
    Digest,
    Index,
    InvalidManifest,
    decode_manifest,
    mediatypes,
)
from unlade.store.content import BlobInfo
from unlade.store.failure import explaining
from unlade.store.layout import Layout, sync_directory

if TYPE_CHECKING:
    from hashlib import _Hash

# Large enough that hashing, which releases the GIL per update, dominates the loop around it.
_REHASH_CHUNK: Final = 1 << 20
# Others read the layout, and a kept blob may be hard-linked into a tree: the mode of an ordinary file.
_BLOB_MODE: Final = 0o644


class DirIngest:
    """See `PipelinedIngest`; made by DirStore.ingest, which holds the digest's lock around it."""

    def __init__(
        self,
        layout: Layout,
        descriptor: Descriptor,
        record: Callable[[Sequence[Digest]], BlobInfo],
        deadline: Deadline,
        *,
        found: BlobInfo | None = None,
    ) -> None:
        self._layout = layout
        self._descriptor = descriptor
        self._record = record
        self._path = layout.partial(descriptor.digest)
        self._final = layout.blob(descriptor.digest)
        self._found = found
        self.hasher: _Hash = descriptor.digest.hasher()
        self._written = 0
        self.fd = -1
        if found is not None:
            self._written = found.size
            return
        with explaining(f"write {descriptor.digest}"):
            self._take_back_unrecorded()
            self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _BLOB_MODE)
            try:
                self._resume(deadline)
            except BaseException:
                self.close()
                raise

    @property
    def present(self) -> bool:
        """The content is already there: there is nothing to write to."""
        return self._found is not None

    @property
    def offset(self) -> int:
        """How many bytes are there, hashed."""
        return self._written

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append and hash; refuses to grow beyond the descriptor's size."""
        view = memoryview(data)
        if self._written + view.nbytes > self._descriptor.size:
            raise IntegrityError(
                f"{self._descriptor.digest} is longer than its {self._descriptor.size} bytes",
                next_step="the registry sent more than it promised: report it to its owner",
            )
        with explaining(f"write {self._descriptor.digest}"):
            write_all(self.fd, view)
        self.hasher.update(view)
        self._written += view.nbytes

    def commit(self, *, children: Sequence[Digest] = ()) -> BlobInfo:
        """Check, sync, rename, sync, record; see the module."""
        if self._found is not None:
            return self._found
        self._verify()
        digest = self._descriptor.digest
        with explaining(f"commit {digest}"):
            found = self._children()
            failpoints.reach("store.ingest.verified")
            os.fsync(self.fd)
            failpoints.reach("store.ingest.synced")
            os.rename(self._path, self._final)
            failpoints.reach("store.ingest.renamed")
            sync_directory(self._final.parent)
            failpoints.reach("store.ingest.directory-synced")
        info = self._record([*found, *children])
        failpoints.reach("store.ingest.recorded")
        return info

    def move_into(self, dirfd: int, name: bytes, *, mode: int) -> None:
        """Check the bytes, then move them into a staged tree instead of the store: written once.

        The staging's own commit syncs them. The name must be one component that does not exist.
        """
        self._verify()
        with explaining(f"place {self._descriptor.digest}"):
            os.fchmod(self.fd, mode)
            failpoints.reach("store.ingest.before-move")
            os.link(self._path, name, dst_dir_fd=dirfd)
            failpoints.reach("store.ingest.linked")
            os.unlink(self._path)
            failpoints.reach("store.ingest.moved")

    def discard(self) -> None:
        """Forget the partial; the ingest may be written again from 0."""
        if self._found is not None:
            return
        with explaining(f"discard {self._descriptor.digest}"):
            self._reset()
        failpoints.reach("store.ingest.discarded")

    def close(self) -> None:
        """Close the descriptor; an empty partial leaves nothing behind. Idempotent."""
        if self.fd < 0:
            return
        if os.fstat(self.fd).st_size == 0:
            self._path.unlink(missing_ok=True)
        os.close(self.fd)
        self.fd = -1

    def _take_back_unrecorded(self) -> None:
        if self._final.exists():
            # Renamed, then the power went before the record: unverified until hashed again.
            os.rename(self._final, self._path)
            failpoints.reach("store.ingest.taken-back")

    def _resume(self, deadline: Deadline) -> None:
        size = os.fstat(self.fd).st_size
        if size > self._descriptor.size:
            self._reset()
            return
        buffer = bytearray(min(_REHASH_CHUNK, max(size, 1)))
        view = memoryview(buffer)
        while self._written < size:
            deadline.check()
            count = os.preadv(self.fd, [view], self._written)
            if count == 0:
                break
            self.hasher.update(view[:count])
            self._written += count
        os.lseek(self.fd, self._written, os.SEEK_SET)

    def _reset(self) -> None:
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)
        self.hasher = self._descriptor.digest.hasher()
        self._written = 0

    def _verify(self) -> None:
        digest, size = self._descriptor.digest, self._descriptor.size
        # The pipeline may have written through `fd`: the file's length is what counts.
        actual = os.fstat(self.fd).st_size
        if actual < size:
            raise IntegrityError(
                f"{digest} has {actual} of {size} bytes",
                next_step="pull again: it continues there",
                retryable=True,
            )
        if actual != size or not digest.matches(self.hasher):
            self.discard()
            raise IntegrityError(
                f"the bytes received are not {digest}",
                next_step="pull again; if it persists the registry's copy is damaged",
                retryable=True,
            )

    def _children(self) -> list[Digest]:
        if self._descriptor.media_type not in mediatypes.MANIFESTS | mediatypes.INDEXES:
            return []
        if self._descriptor.size > MAX_MANIFEST_BYTES:
            return []
        raw = os.pread(self.fd, self._descriptor.size, 0)
        return children_of(raw, self._descriptor.media_type)


def children_of(raw: bytes, media_type: str) -> list[Digest]:
    """What a manifest or index keeps alive: config and layers, or its manifests. Not its subject.

    Bytes that only claim to be a manifest keep nothing alive.
    """
    try:
        document = decode_manifest(raw, content_type=media_type)
    except InvalidManifest:
        return []
    if isinstance(document, Index):
        return [entry.digest for entry in document.manifests]
    return [document.config.digest, *(layer.digest for layer in document.layers)]

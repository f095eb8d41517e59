"""A store in a directory: blobs as an OCI image layout, records in a database beside them.

The record of a blob is what makes it visible; the file alone means nothing. So a crash between rename and
record leaves a file without a record (harmless, taken back by the next ingest or swept), never a record
without its synced file. Deleting goes the other way: the record first, then the file, under the lock of
its digest. One `DirStore` serves a process; many processes may open the same directory.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from unlade.errors import IntegrityError
from unlade.model import Deadline, Descriptor, Digest
from unlade.store.content import BlobInfo, Lease
from unlade.store.database import Database
from unlade.store.failure import NotInStore, explained
from unlade.store.grants import Grants
from unlade.store.heads import Heads
from unlade.store.images import Images
from unlade.store.ingest import DirIngest
from unlade.store.layout import Layout
from unlade.store.leases import DirLease, Leases, hold
from unlade.store.locks import KeyLocks
from unlade.store.mounts import Mounts
from unlade.store.recovery import recover
from unlade.store.removal import blob_lock, delete_object

# A page of a walk: large enough to be fast, small enough that no reader keeps old pages of the log alive.
_WALK_PAGE = 1000


class DirStore:
    """Blobs, records and locks in one directory; thread-safe. A context manager, or call `close`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.layout = Layout(Path(path).absolute())
        self.locks = KeyLocks(self.layout.locks)
        self.database = Database(self.layout.database)
        try:
            self.leases = Leases(self.database, self.layout.owners)
        except BaseException:
            self.database.close()
            raise
        self.images = Images(self.database, self.layout, self.locks)
        self.grants = Grants(self.database)
        self.heads = Heads(self.database)
        self.mounts = Mounts(self.database, self.layout.owners, self.leases.owner.name)
        try:
            recover(self)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """The directory of the store."""
        return self.layout.root

    def __enter__(self) -> DirStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database and give up this process's leases; idempotent."""
        self.leases.close()
        self.database.close()

    def stat(self, digest: Digest) -> BlobInfo | None:
        """What is known about a committed blob; None when it is not there."""
        with self.database.read() as connection:
            return _find(connection, digest)

    def open(self, digest: Digest) -> BinaryIO:
        """A committed blob, to be closed by the caller; raises NotInStore."""
        if self.stat(digest) is None:
            raise NotInStore(
                f"{digest} is not in the store {self.path}", next_step="pull what needs it again"
            )
        try:
            return open(self.layout.blob(digest), "rb")
        except FileNotFoundError as error:
            if self.stat(digest) is None:
                # Deleted between two looks, as may happen to what nobody holds.
                raise NotInStore(f"{digest} was just deleted", next_step="hold it by a lease") from error
            raise NotInStore(
                f"the file of {digest} is missing from the store {self.path}",
                next_step="run unlade fsck --repair, then pull what needs it again",
            ) from error
        except OSError as error:
            raise explained(f"read {digest}", error) from error

    @contextmanager
    def ingest(
        self, descriptor: Descriptor, *, lease: Lease | None = None, deadline: Deadline | None = None
    ) -> Iterator[DirIngest]:
        """Take a blob in, alone among all processes; see ContentStore.ingest."""
        deadline = deadline or Deadline.never()

        def record(children: Sequence[Digest]) -> BlobInfo:
            return self._record(descriptor, children, lease)

        found = self._present(descriptor, lease)
        if found:
            yield DirIngest(self.layout, descriptor, record, deadline, found=found)
            return
        with self.locks.hold(blob_lock(descriptor.digest), deadline=deadline):
            found = self._present(descriptor, lease)
            ingest = DirIngest(self.layout, descriptor, record, deadline, found=found)
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
    ) -> BlobInfo:
        """Take in a blob that is in memory; nothing is written when it is there."""
        with self.ingest(descriptor, lease=lease) as ingest:
            if not ingest.present:
                ingest.discard()
                ingest.write(data)
            return ingest.commit(children=children)

    def delete(self, digest: Digest) -> bool:
        """Remove a blob that nothing refers to; StoreError when something does."""
        return delete_object(self, f"b:{digest}")

    def walk(self) -> Iterator[BlobInfo]:
        """Every committed blob in the order of digests, a page at a time: no transaction stays open."""
        last = "b:"
        while True:
            with self.database.read() as connection:
                rows = connection.execute(
                    "SELECT name, size, detail, created FROM objects WHERE name > ? AND name < 'b;'"
                    " ORDER BY name LIMIT ?",
                    (last, _WALK_PAGE),
                ).fetchall()
            for row in rows:
                yield _info(row)
            if len(rows) < _WALK_PAGE:
                return
            last = rows[-1][0]

    def lease(self, purpose: str, *, ttl: float = 24 * 3600) -> AbstractContextManager[DirLease]:
        """A lease that ends with the block, with its time, or with this process.

        A day by default: longer than the pull of the largest model, shorter than a disk's patience.
        """
        return self.leases.lease(purpose, ttl=ttl)

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

    def _record(self, descriptor: Descriptor, children: Sequence[Digest], lease: Lease | None) -> BlobInfo:
        name = f"b:{descriptor.digest}"
        row = (name, descriptor.size, time.time(), descriptor.media_type)
        with self.database.write() as connection:
            connection.execute("INSERT INTO objects (name, size, created, detail) VALUES (?, ?, ?, ?)", row)
            connection.executemany(
                "INSERT OR IGNORE INTO edges VALUES (?, ?)", [(name, f"b:{child}") for child in children]
            )
            if lease is not None:
                hold(connection, lease.id, name)
        return BlobInfo(descriptor.digest, descriptor.size, descriptor.media_type, row[2])


def _find(connection: sqlite3.Connection, digest: Digest) -> BlobInfo | None:
    row = connection.execute(
        "SELECT name, size, detail, created FROM objects WHERE name = ?", (f"b:{digest}",)
    ).fetchone()
    return _info(row) if row else None


def _info(row: tuple[str, int, str, float]) -> BlobInfo:
    name, size, media_type, created = row
    return BlobInfo(Digest.parse(name[2:]), size, media_type, created)

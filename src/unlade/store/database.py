"""The store's records: one sqlite database in WAL mode, shared by threads and processes.

Everything that makes content valid or keeps it alive is a row here. Objects (blobs and trees) and roots
(image records, leases, mounts) are the nodes of one graph; `edges` says who keeps whom alive. The prefix
of a name tells what it is: `b:` blob, `t:` tree, `i:` image record, `l:` lease, `m:` mount.

Writers queue on an in-process lock and then on `flock`, so that a waiting writer is woken when its turn
comes instead of polling as sqlite's busy handler does. Readers never wait. A transaction that makes a
record valid, or unmakes one before its data is removed, is synced (synchronous=FULL); bookkeeping that a
power loss may forget is not. A connection is used by one thread at a time and returned to a pool.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from unlade.errors import StoreError
from unlade.kernel import failpoints
from unlade.store.failure import NoSpace, explained

SCHEMA_VERSION: Final = 1
# A checkpoint or a foreign sqlite shell may hold the database for a moment; our own writers never do.
_BUSY_SECONDS: Final = 30.0
# Idle connections kept: enough for a node's pull queue, few enough to leave file descriptors alone.
_POOL_SIZE: Final = 16

_SCHEMA: Final = """
CREATE TABLE objects (
    name TEXT PRIMARY KEY,          -- b:<digest> or t:<key>
    size INTEGER NOT NULL,
    created REAL NOT NULL,
    detail TEXT NOT NULL DEFAULT '' -- blobs: media type; trees: entries and layers as JSON
) WITHOUT ROWID;
CREATE TABLE edges (
    parent TEXT NOT NULL,
    child TEXT NOT NULL,
    PRIMARY KEY (parent, child)
) WITHOUT ROWID;
CREATE INDEX edges_by_child ON edges (child, parent);
CREATE TABLE images (
    reference TEXT NOT NULL,
    handler TEXT NOT NULL,
    manifest TEXT NOT NULL,         -- descriptor as JSON
    manifest_digest TEXT NOT NULL,
    index_descriptor TEXT,          -- of the index it was chosen from, as JSON
    index_digest TEXT,
    platform TEXT,                  -- as JSON
    tree TEXT,
    content INTEGER NOT NULL,       -- whether every blob below the manifest is held
    whole_index INTEGER NOT NULL,   -- whether every blob below the index is held
    created REAL NOT NULL,
    used REAL NOT NULL,
    PRIMARY KEY (reference, handler)
) WITHOUT ROWID;
CREATE INDEX images_by_manifest ON images (manifest_digest);
CREATE INDEX images_by_index ON images (index_digest);
CREATE TABLE leases (
    id TEXT PRIMARY KEY,
    purpose TEXT NOT NULL,
    owner TEXT NOT NULL,            -- '' outlives its process, until it expires
    created REAL NOT NULL,
    expires REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX leases_by_expiry ON leases (expires);
CREATE TABLE grants (
    repository TEXT NOT NULL,
    digest TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    expires REAL NOT NULL,
    PRIMARY KEY (repository, digest, fingerprint)
) WITHOUT ROWID;
CREATE INDEX grants_by_expiry ON grants (expires);
CREATE TABLE heads (
    digest TEXT PRIMARY KEY,
    head BLOB NOT NULL
);
CREATE TABLE mounts (
    mountpoint TEXT NOT NULL,       -- percent-encoded: a path need not be text
    tree TEXT NOT NULL,
    boot TEXT NOT NULL,
    namespace TEXT NOT NULL,
    owner TEXT NOT NULL,            -- '' once mounted; until then who is mounting it
    created REAL NOT NULL,
    PRIMARY KEY (mountpoint, tree)
) WITHOUT ROWID;
"""


class StoreIsNewer(StoreError):
    """The store was written by a later version of this program."""

    code = "store-is-newer"


class Database:
    """Connections to state.db; thread-safe. `close` ends them all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pool: list[sqlite3.Connection] = []
        self._pool_lock = threading.Lock()
        self._writers = threading.Lock()
        self._closed = False
        self._turn = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection for single statements; each sees a consistent database, never waits for writers."""
        connection = self._take()
        try:
            yield connection
        except sqlite3.Error as error:
            raise _explained(error, self._path) from error
        finally:
            self._give(connection)

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """A connection whose statements all see the database of one moment."""
        with self.read() as connection:
            connection.execute("BEGIN DEFERRED")
            try:
                yield connection
            finally:
                connection.execute("ROLLBACK")

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """One short transaction, alone among all processes; rolled back when the block raises.

        durable=False is for what a power loss may forget (leases of a running process, times of use): it
        commits without waiting for the disk, and a crash of the process alone still keeps it.
        """
        connection = self._take()
        try:
            connection.execute("PRAGMA synchronous=FULL" if durable else "PRAGMA synchronous=NORMAL")
            with self._writers:
                fcntl.flock(self._turn, fcntl.LOCK_EX)
                try:
                    connection.execute("BEGIN IMMEDIATE")
                    try:
                        yield connection
                        failpoints.reach("store.database.before-commit")
                        connection.execute("COMMIT")
                    except BaseException:
                        # A COMMIT that failed for want of space may have ended the transaction itself.
                        if connection.in_transaction:
                            connection.execute("ROLLBACK")
                        raise
                    failpoints.reach("store.database.committed")
                finally:
                    fcntl.flock(self._turn, fcntl.LOCK_UN)
        except sqlite3.Error as error:
            raise _explained(error, self._path) from error
        except OSError as error:
            raise explained(f"write {self._path}", error) from error
        finally:
            self._give(connection)

    def integrity(self) -> str:
        """sqlite's own check of the file: "ok", or what is wrong."""
        with self.read() as connection:
            return str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])

    def close(self) -> None:
        """Close every idle connection; those in use are closed when returned. Idempotent."""
        with self._pool_lock:
            closing, self._pool = self._pool, []
            first = not self._closed
            self._closed = True
        for connection in closing:
            connection.close()
        if first:
            os.close(self._turn)

    def _prepare(self) -> None:
        with self.write() as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise StoreIsNewer(
                    f"{self._path} has format {version}; this program knows {SCHEMA_VERSION}",
                    next_step="use the newer unlade that wrote it, or another --store",
                )
            if version == 0:
                for statement in _SCHEMA.split(";\n"):
                    if statement.strip():
                        connection.execute(statement)
                connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def _take(self) -> sqlite3.Connection:
        with self._pool_lock:
            if self._closed:
                raise StoreError("the store is closed", next_step="open it again")
            if self._pool:
                return self._pool.pop()
        try:
            connection = sqlite3.connect(
                self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise _explained(error, self._path) from error
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.Error as error:
            connection.close()
            raise _explained(error, self._path) from error
        return connection

    def _give(self, connection: sqlite3.Connection) -> None:
        with self._pool_lock:
            if not self._closed and len(self._pool) < _POOL_SIZE:
                self._pool.append(connection)
                return
        connection.close()


def _explained(error: sqlite3.Error, path: Path) -> StoreError:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return NoSpace(f"no space left to write {path}", next_step="free space, or run unlade gc")
    return StoreError(
        f"the store's database {path} cannot be used: {error}",
        next_step="check the disk and the file's permissions, then run unlade fsck",
    )

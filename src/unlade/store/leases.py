"""Leases: what keeps content alive while someone works with it and no record names it yet.

A lease ends when it is released, when its time is over, or when the process that owns it is gone, whichever
comes first; whether a process lives is asked of the lock it holds (see `OwnerLock`). Times are wall-clock,
so that they mean the same after a reboot. `hold` looks and holds in one transaction: when it says True, no
garbage collection can take the object until the lease ends.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection

from unlade.errors import StoreError
from unlade.kernel import failpoints
from unlade.model import Digest
from unlade.store.database import Database
from unlade.store.failure import explaining
from unlade.store.locks import OwnerLock


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """A lease as the store lists it; owner "" means that it outlives its process."""

    id: str
    purpose: str
    owner: str
    created: float
    expires: float


class LeaseEnded(StoreError):
    """The lease is over: nothing can be held by it any more."""

    code = "lease-ended"
    retryable = True


class DirLease:
    """See `Lease`; made by DirStore.lease and DirStore.keep."""

    def __init__(self, database: Database, lease_id: str) -> None:
        self._database = database
        self.id = lease_id

    def hold(self, digest: Digest) -> bool:
        """Keep a blob alive; False when it is not in the store."""
        return self._hold(f"b:{digest}")

    def hold_tree(self, key: Digest) -> bool:
        """Keep a tree, and with it the trees it stands on, alive; False when it is not there."""
        return self._hold(f"t:{key}")

    def renew(self, ttl: float) -> None:
        """Let the lease end this many seconds from now."""
        with self._database.write(durable=False) as connection:
            connection.execute("UPDATE leases SET expires = ? WHERE id = ?", (time.time() + ttl, self.id))

    def release(self) -> None:
        """End the lease now; idempotent."""
        with self._database.write(durable=False) as connection:
            end_lease(connection, self.id)
        failpoints.reach("store.lease.released")

    def _hold(self, name: str) -> bool:
        with self._database.write(durable=False) as connection:
            return hold(connection, self.id, name)


class Leases:
    """The leases of one store; thread-safe."""

    def __init__(self, database: Database, owners: Path) -> None:
        self._database = database
        self._owners = owners
        with explaining("announce this process in the store"):
            self.owner = OwnerLock(owners, uuid.uuid4().hex)

    @contextmanager
    def lease(self, purpose: str, *, ttl: float) -> Iterator[DirLease]:
        """A lease that ends with the block, with its time, or with this process."""
        lease = self.open(purpose, ttl=ttl)
        try:
            yield lease
        finally:
            lease.release()

    def open(self, purpose: str, *, ttl: float) -> DirLease:
        """The same without a block: the caller releases it."""
        return self._add(uuid.uuid4().hex, purpose, ttl, self.owner.name)

    def keep(self, lease_id: str, purpose: str, *, ttl: float) -> DirLease:
        """A lease by a chosen name that outlives this process, until released or expired."""
        return self._add(lease_id, purpose, ttl, "")

    def pin(self, lease_id: str, purpose: str, key: Digest, *, ttl: float) -> bool:
        """`keep` a lease and hold a tree by it at once; False, and no lease made, when it is not there.

        Not synced: for callers that have a durable record of their own and pin again after a power loss.
        """
        with self._database.write(durable=False) as connection:
            there = connection.execute("SELECT 1 FROM objects WHERE name = ?", (f"t:{key}",)).fetchone()
            if there:
                _put(connection, lease_id, purpose, "", ttl)
                hold(connection, lease_id, f"t:{key}")
        failpoints.reach("store.lease.pinned")
        return bool(there)

    def all(self) -> list[LeaseInfo]:
        """Every lease that is still on record, dead ones included."""
        with self._database.read() as connection:
            rows = connection.execute("SELECT id, purpose, owner, created, expires FROM leases ORDER BY id")
            return [LeaseInfo(*row) for row in rows]

    def dead(self, now: float) -> list[LeaseInfo]:
        """Leases whose time or owner is gone."""
        return [lease for lease in self.all() if lease.expires <= now or not self._lives(lease.owner)]

    def end_dead(self, now: float) -> int:
        """Drop leases whose time or owner is gone, and the files of dead owners; returns how many."""
        dead = self.dead(now)
        for lease in dead:
            with self._database.write(durable=False) as connection:
                # One that was renewed since it was listed stays; a dead owner does not come back.
                connection.execute(
                    "DELETE FROM leases WHERE id = ? AND (expires <= ? OR owner = ? AND ?)",
                    (lease.id, now, lease.owner, not self._lives(lease.owner)),
                )
                connection.execute(
                    "DELETE FROM edges WHERE parent = ? AND NOT EXISTS (SELECT 1 FROM leases WHERE id = ?)",
                    (f"l:{lease.id}", lease.id),
                )
        for entry in self._owners.iterdir():
            # A name with a dot is still being made by its owner.
            if "." not in entry.name and not self._lives(entry.name):
                entry.unlink(missing_ok=True)
        return len(dead)

    def close(self) -> None:
        """End this process's ownership; its leases die with it."""
        self.owner.close()

    def _lives(self, owner: str) -> bool:
        return not owner or OwnerLock.alive(self._owners, owner)

    def _add(self, lease_id: str, purpose: str, ttl: float, owner: str) -> DirLease:
        # One that outlives its process must survive a power loss too; one that does not, need not.
        with self._database.write(durable=not owner) as connection:
            _put(connection, lease_id, purpose, owner, ttl)
        failpoints.reach("store.lease.added")
        return DirLease(self._database, lease_id)


def _put(connection: Connection, lease_id: str, purpose: str, owner: str, ttl: float) -> None:
    now = time.time()
    connection.execute(
        "INSERT INTO leases (id, purpose, owner, created, expires) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET purpose = excluded.purpose, expires = excluded.expires",
        (lease_id, purpose, owner, now, now + ttl),
    )


def hold(connection: Connection, lease_id: str, name: str) -> bool:
    """Inside a write transaction: let a lease keep an object; False when the object is not there.

    Raises LeaseEnded: an edge from a lease that is gone would keep the object for ever.
    """
    if not connection.execute("SELECT 1 FROM leases WHERE id = ?", (lease_id,)).fetchone():
        raise LeaseEnded("the lease has ended while it was needed", next_step="start again with a longer one")
    there = connection.execute("SELECT 1 FROM objects WHERE name = ?", (name,)).fetchone()
    if there:
        connection.execute("INSERT OR IGNORE INTO edges VALUES (?, ?)", (f"l:{lease_id}", name))
    return bool(there)


def end_lease(connection: Connection, lease_id: str) -> None:
    """Inside a write transaction: drop a lease and what it holds."""
    connection.execute("DELETE FROM leases WHERE id = ?", (lease_id,))
    connection.execute("DELETE FROM edges WHERE parent = ?", (f"l:{lease_id}",))

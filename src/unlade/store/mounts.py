"""Mounts: which trees are in use at which mount points, so that nothing mounted is ever collected (V6).

The row is written before the kernel is asked, with the process that asks as its owner, and confirmed after:
a crash in between leaves a row of a dead owner, never a mount without a row. Unmounting goes the other way.
`reconcile` drops rows that the kernel's mount table contradicts. It believes the table only for rows of
this boot and this mount namespace: a mount in another namespace is invisible here, so its row stays until
it is unmounted or the machine starts again.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

from unlade.kernel import failpoints
from unlade.model import Digest
from unlade.store.database import Database
from unlade.store.failure import NotInStore
from unlade.store.locks import OwnerLock


@dataclass(frozen=True, slots=True)
class MountRecord:
    """A tree that is mounted, or being mounted, somewhere."""

    mountpoint: bytes
    tree: Digest
    created: float
    mounting: bool


class Mounts:
    """The mount records of one store; thread-safe."""

    def __init__(self, database: Database, owners: Path, owner: str) -> None:
        self._database = database
        self._owners = owners
        self._owner = owner

    @contextmanager
    def mounting(self, mountpoint: bytes, tree: Digest) -> Iterator[None]:
        """Around the mount itself: the tree is in use from before until `remove`. Raises NotInStore.

        The record is withdrawn when the block raises.
        """
        where = quote_from_bytes(mountpoint)
        # Never synced: a power loss that forgets the record ends the mount as well, and a record that one
        # brings back names a boot that is over.
        with self._database.write(durable=False) as connection:
            if not connection.execute("SELECT 1 FROM objects WHERE name = ?", (f"t:{tree}",)).fetchone():
                raise NotInStore(f"the tree {tree} is not in the store", next_step="make it, then mount it")
            connection.execute(
                "INSERT OR REPLACE INTO mounts VALUES (?, ?, ?, ?, ?, ?)",
                (where, str(tree), boot(), namespace(), self._owner, time.time()),
            )
            connection.execute("INSERT OR IGNORE INTO edges VALUES (?, ?)", (_name(where, tree), f"t:{tree}"))
        failpoints.reach("store.mount.announced")
        try:
            yield
        except BaseException:
            self.remove(mountpoint, tree)
            raise
        failpoints.reach("store.mount.mounted")
        with self._database.write(durable=False) as connection:
            connection.execute(
                "UPDATE mounts SET owner = '' WHERE mountpoint = ? AND tree = ?", (where, str(tree))
            )
        failpoints.reach("store.mount.confirmed")

    def remove(self, mountpoint: bytes, tree: Digest | None = None) -> bool:
        """It was unmounted: let go of the tree that was mounted there last, or of the one named."""
        where = quote_from_bytes(mountpoint)
        with self._database.write(durable=False) as connection:
            row = connection.execute(
                "SELECT tree FROM mounts WHERE mountpoint = ? AND (?2 IS NULL OR tree = ?2)"
                " ORDER BY created DESC LIMIT 1",
                (where, str(tree) if tree else None),
            ).fetchone()
            if row is None:
                return False
            connection.execute("DELETE FROM mounts WHERE mountpoint = ? AND tree = ?", (where, row[0]))
            connection.execute("DELETE FROM edges WHERE parent = ?", (_name(where, Digest.parse(row[0])),))
        failpoints.reach("store.mount.removed")
        return True

    def all(self) -> list[MountRecord]:
        """Every record, by mount point."""
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT mountpoint, tree, created, owner FROM mounts ORDER BY mountpoint, created"
            )
            return [
                MountRecord(unquote_to_bytes(where), Digest.parse(tree), created, bool(owner))
                for where, tree, created, owner in rows
            ]

    def reconcile(self, mounted: Sequence[bytes]) -> list[MountRecord]:
        """Drop records that are not so, and return them.

        `mounted` are the mount points of this namespace, one for each mount: a mount point that occurs
        twice has two mounts on top of each other, and the two newest of its records are believed.
        """
        with self._database.read() as connection:
            rows = connection.execute(
                "SELECT mountpoint, tree, created, owner, boot, namespace FROM mounts ORDER BY created DESC"
            ).fetchall()
        left = Counter(mounted)
        suspects = [row for row in rows if self._is_gone(row, left)]
        dropped = []
        for where, tree, created, owner, _, _ in suspects:
            with self._database.write() as connection:
                # The same row, not one that was written since.
                gone = connection.execute(
                    "DELETE FROM mounts WHERE mountpoint = ? AND tree = ? AND created = ? AND owner = ?",
                    (where, tree, created, owner),
                ).rowcount
                if gone:
                    key = Digest.parse(tree)
                    connection.execute("DELETE FROM edges WHERE parent = ?", (_name(where, key),))
                    dropped.append(MountRecord(unquote_to_bytes(where), key, created, bool(owner)))
        return dropped

    def _is_gone(self, row: tuple[str, str, float, str, str, str], left: Counter[bytes]) -> bool:
        where, _, _, owner, its_boot, its_namespace = row
        if its_boot != boot():
            return True
        if its_namespace != namespace() or (owner and OwnerLock.alive(self._owners, owner)):
            return False
        point = unquote_to_bytes(where)
        left[point] -= 1
        return left[point] < 0


@functools.cache
def boot() -> str:
    """What tells this start of the machine from all others; "" where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def namespace() -> str:
    """This process's mount namespace; "" where there is no such thing."""
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""


def _name(where: str, tree: Digest) -> str:
    return f"m:{where} {tree}"

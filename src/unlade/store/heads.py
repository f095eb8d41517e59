"""Heads: the first bytes of layers whose format had to be looked at, kept so that it need not be again.

Planning an artifact may ask for the first bytes of a layer (is it a tar?). A tree keeps no blob beside it, so
a second delivery of the same artifact would have to ask the registry: it could not work offline (V2, never)
and would cost a round trip. Only heads that were seen again in verified content are kept: one registry's lie
must not decide how another's content is planned. They go when no record knows the layer any more.
"""

from __future__ import annotations

from collections.abc import Mapping

from unlade.model import Digest
from unlade.store.database import Database


class Heads:
    """The heads of one store; thread-safe. Derived: losing one costs a request."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def remember(self, heads: Mapping[Digest, bytes]) -> None:
        """Keep first bytes of verified content; a longer head replaces a shorter one."""
        if not heads:
            return
        with self._database.write(durable=False) as connection:
            connection.executemany(
                "INSERT INTO heads VALUES (?, ?) ON CONFLICT (digest) DO UPDATE SET head = excluded.head"
                " WHERE length(excluded.head) > length(head)",
                [(str(digest), head) for digest, head in heads.items()],
            )

    def get(self, digest: Digest, count: int, size: int) -> bytes | None:
        """The first `count` bytes of a layer of this size; None unless all of them are known."""
        with self._database.read() as connection:
            row = connection.execute("SELECT head FROM heads WHERE digest = ?", (str(digest),)).fetchone()
        if row is None or len(row[0]) < min(count, size):
            return None
        return bytes(row[0][:count])

    def end_unknown(self) -> None:
        """Drop the heads of layers that no manifest in the store names."""
        with self._database.write(durable=False) as connection:
            connection.execute(
                "DELETE FROM heads WHERE NOT EXISTS (SELECT 1 FROM edges WHERE child = 'b:' || heads.digest)"
            )

"""Grants: which credential was allowed to pull what, remembered for a stated time (V5).

Content of a private repository that one tenant brought into the store is not another's to read. Who asks
for cached content must have pulled it with the same credential from the same repository within the time of
the grant; everyone else is sent to the registry to ask again. Knowing a digest grants nothing. Only a
fingerprint of the credential is kept. A power loss may forget a grant: the registry is asked once more.
"""

from __future__ import annotations

import time

from unlade.model import Digest
from unlade.store.database import Database


class Grants:
    """The grants of one store; thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def remember(self, repository: str, digest: Digest, fingerprint: str, *, ttl: float) -> None:
        """The registry just let this credential read this content: true for `ttl` seconds."""
        with self._database.write(durable=False) as connection:
            connection.execute(
                "INSERT OR REPLACE INTO grants VALUES (?, ?, ?, ?)",
                (repository, str(digest), fingerprint, time.time() + ttl),
            )

    def allows(self, repository: str, digest: Digest, fingerprint: str) -> bool:
        """Whether this credential may read this content without the registry being asked."""
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT expires FROM grants WHERE repository = ? AND digest = ? AND fingerprint = ?",
                (repository, str(digest), fingerprint),
            ).fetchone()
        return row is not None and row[0] > time.time()

    def revoke(self, repository: str, *, fingerprint: str | None = None) -> None:
        """Forget every grant of a repository, or only one credential's; durable, because it forbids."""
        with self._database.write() as connection:
            connection.execute(
                "DELETE FROM grants WHERE repository = ? AND (?2 IS NULL OR fingerprint = ?2)",
                (repository, fingerprint),
            )

    def end_expired(self, now: float) -> None:
        """Drop what is no longer true."""
        with self._database.write(durable=False) as connection:
            connection.execute("DELETE FROM grants WHERE expires <= ?", (now,))

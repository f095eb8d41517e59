"""Requests below a repository, as `client` and `referrers` make them: one place for scopes, paths and caps.

A call is one request to one host: which host is `routes`' choice, how it travels `session`'s business, what
the answer means the caller's. Bodies that are wanted whole are read here, within a cap, and asked for again
when they break on the way.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from unlade.model import MAX_MANIFEST_BYTES, Deadline, Digest, Reference
from unlade.model.mediatypes import ACCEPT
from unlade.registry.auth import Scope
from unlade.registry.errors import WrongContent
from unlade.registry.hosts import Host
from unlade.registry.origins import Url
from unlade.registry.retry import retrying
from unlade.registry.session import Session
from unlade.registry.transport import Answer, Document

ACCEPT_MANIFESTS: Final = {"Accept": ", ".join(ACCEPT)}
OK: Final = frozenset({200})
READ: Final = ("pull",)
WRITE: Final = ("pull", "push")


class Calls:
    """Requests of one session; thread-safe."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def put(
        self,
        host: Host,
        ref: Reference,
        raw: bytes,
        media_type: str,
        target: str,
        digest: Digest,
        deadline: Deadline,
    ) -> Answer:
        """Store a manifest under a tag or digest; raises WrongContent when it was stored as another."""
        purpose = f"push {ref.name}@{digest}" if ":" in target else f"push {ref.name}:{target}"
        answer = self.send(
            host,
            "PUT",
            ref,
            f"manifests/{target}",
            purpose,
            deadline,
            actions=WRITE,
            expect=frozenset({200, 201, 202}),
            headers={"Content-Type": media_type},
            body=raw,
        )
        answer.discard()
        stored = answer.headers.get("Docker-Content-Digest")
        if stored is not None and stored != str(digest) and stored.startswith(f"{digest.algorithm}:"):
            raise WrongContent(f"{purpose}: the registry stored it as {stored[:140]!r}, not {digest}")
        return answer

    def manifest(
        self,
        host: Host,
        ref: Reference,
        wanted: str,
        purpose: str,
        deadline: Deadline,
        attempts: int | None = None,
    ) -> Document:
        """A manifest's bytes, not verified."""
        path, headers = f"manifests/{wanted}", dict(ACCEPT_MANIFESTS)
        return self.read(host, ref, path, purpose, deadline, attempts=attempts, headers=headers)

    def read(
        self,
        host: Host,
        ref: Reference,
        what: str | Url,
        purpose: str,
        deadline: Deadline,
        *,
        attempts: int | None = None,
        headers: dict[str, str] | None = None,
        limit: int = MAX_MANIFEST_BYTES,
    ) -> Document:
        """A whole body within a cap; one that breaks on the way is asked for again."""

        def once() -> Document:
            with self.send(host, "GET", ref, what, purpose, deadline, attempts=1, headers=headers) as answer:
                return Document(answer.read(limit), answer.headers)

        tries = attempts or self._session.config.attempts
        return retrying(once, config=self._session.config, attempts=tries, deadline=deadline)

    def send(
        self,
        host: Host,
        method: str,
        ref: Reference,
        what: str | Url,
        purpose: str,
        deadline: Deadline,
        *,
        attempts: int | None = None,
        actions: tuple[str, ...] = READ,
        expect: frozenset[int] = OK,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """`what` is a path below the repository, or the URL of a further page."""
        url = host.url(f"{ref.repository}/{what}") if isinstance(what, str) else what
        if host.mirror:
            # How a mirror of several registries knows which one is meant (containerd's convention).
            separator = "&" if "?" in url.target else "?"
            url = Url(url.origin, f"{url.target}{separator}ns={quote(ref.registry, safe='')}")
        return self._session.send(
            host,
            method,
            url,
            purpose=purpose,
            scope=Scope(ref.repository, actions),
            expect=expect,
            deadline=deadline,
            headers=headers,
            body=body,
            attempts=attempts,
        )

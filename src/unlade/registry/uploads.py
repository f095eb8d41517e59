"""Sending blobs (distribution-spec, "Pushing a blob"): in one piece, in resumable chunks, or mounted.

One PUT is what every registry handles best, so it is the default; chunks are for links that break. A
location may be of another host (storage): then no credential goes there. Nothing is trusted about it: plain
HTTP only where allowlisted, no metadata address. The registry checks the digest; the caller's content is
checked for its length, because a file that shrank while being sent would otherwise hang the request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, Protocol

from unlade.errors import RegistryError
from unlade.model import Deadline, Digest, Reference
from unlade.registry.auth import Scope
from unlade.registry.errors import BadResponse, HTTPFailure, WrongContent
from unlade.registry.hosts import Host
from unlade.registry.origins import Url, check_next, parse_url
from unlade.registry.retry import retrying
from unlade.registry.routes import Routes
from unlade.registry.session import Session
from unlade.registry.transport import Answer

# Small enough that one blocking send ends in time on a thin link, large enough to cost few system calls.
_BLOCK: Final = 256 << 10
# Above any real chunk minimum (Docker Hub, ECR: 5-10 MiB); a larger demand is a mistake or an attack.
_MAX_CHUNK_MINIMUM: Final = 1 << 30
# A registry answers the last request of an upload after it has read the content again and moved it to its
# place, on object storage by copying: a minute, and more the larger it is.
_COMMIT_SECONDS: Final = 120.0
_COMMIT_RATE: Final = 5 << 20
_RANGE: Final = re.compile(r"(?:bytes=)?0-(\d{1,19})", re.ASCII)


class Content(Protocol):
    """What a blob is read from: a file, or anything with read and close."""

    def read(self, size: int, /) -> bytes | None:
        """The next bytes; empty at the end."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


Source = Callable[[int], Content]


class Uploads:
    """Uploads to the writable host of a registry; thread-safe."""

    def __init__(self, session: Session, routes: Routes) -> None:
        self._session = session
        self._routes = routes

    def mount(self, ref: Reference, digest: Digest, source: Reference, deadline: Deadline) -> bool:
        """Ask the registry to share a blob of another repository; False when it would rather have it sent."""
        if source.registry != ref.registry or source.repository == ref.repository:
            return False
        host = self._routes.writer(ref.registry)
        scope = Scope(ref.repository, ("pull", "push"), source.repository)
        url = host.url(f"{ref.repository}/blobs/uploads/?mount={digest}&from={source.repository}")
        purpose = f"mount {source.name}@{digest} into {ref.name}"
        try:
            answer = self._session.send(
                host,
                "POST",
                url,
                purpose=purpose,
                scope=scope,
                expect=frozenset({201, 202}),
                deadline=deadline,
                headers={"Content-Length": "0"},
            )
        except HTTPFailure as error:
            if error.retryable:
                raise
            # Not here, not from there, or not with this account: sending it is the way that always works.
            return False
        answer.discard()
        if answer.status == 201:
            return True
        # The registry opened an upload instead. It would expire by itself; closing it is a courtesy.
        with suppress(RegistryError):
            self._cancel(host, ref, self.location(host, answer, url), purpose, deadline)
        return False

    def upload(
        self,
        ref: Reference,
        digest: Digest,
        size: int,
        source: Source,
        *,
        chunk_size: int | None,
        deadline: Deadline,
        on_sent: Callable[[int], None],
    ) -> None:
        """Send a blob; `source(offset)` opens the content there, as often as needed. Idempotent."""
        host = self._routes.writer(ref.registry)
        one = _Upload(self, host, ref, digest, size, source, deadline, on_sent)
        send = one.whole if chunk_size is None or chunk_size >= size else (lambda: one.chunked(chunk_size))
        # A broken upload starts over with a new session; within chunks, `chunked` continues by itself.
        retrying(send, config=self._session.config, attempts=self._session.config.attempts, deadline=deadline)

    def _cancel(self, host: Host, ref: Reference, url: Url, purpose: str, deadline: Deadline) -> None:
        self.request(host, ref, "DELETE", url, {200, 202, 204, 404}, purpose, deadline).discard()

    def location(self, host: Host, answer: Answer, asked: Url) -> Url:
        """Where to go on, checked; raises UnsafeRedirect, PlainHTTPRefused, BadResponse."""
        text = answer.headers.get("Location")
        if not text:
            raise BadResponse(f"{asked.redacted} did not say where to send the content")
        url = parse_url(text, base=asked)
        check_next(host.origin, url, self._session.config.plain_http)
        return url

    def request(
        self,
        host: Host,
        ref: Reference,
        method: str,
        url: Url,
        expect: set[int],
        purpose: str,
        deadline: Deadline,
        *,
        headers: dict[str, str] | None = None,
        body: Any = None,
        answer_within: float | None = None,
    ) -> Answer:
        """One step of an upload, tried once: whoever drives the upload knows where to continue."""
        return self._session.send(
            host,
            method,
            url,
            purpose=purpose,
            scope=Scope(ref.repository, ("pull", "push")),
            expect=frozenset(expect),
            deadline=deadline,
            headers=headers,
            body=body,
            attempts=1,
            answer_within=answer_within,
        )


class _Upload:
    """One blob on its way up."""

    def __init__(
        self,
        uploads: Uploads,
        host: Host,
        ref: Reference,
        digest: Digest,
        size: int,
        source: Source,
        deadline: Deadline,
        on_sent: Callable[[int], None],
    ) -> None:
        self._uploads, self._host, self._ref = uploads, host, ref
        self._digest, self._size, self._source = digest, size, source
        self._deadline, self._on_sent = deadline, on_sent
        self._purpose = f"push {ref.name}@{digest}"

    def whole(self) -> None:
        """POST for a location, then one PUT."""
        location, _ = self._start()
        self._finish(location, 0, self._size)

    def chunked(self, chunk_size: int) -> None:
        """PATCH by PATCH, asking the registry where it stands after a failure; then a PUT without a body."""
        location, minimum = self._start()
        chunk = max(chunk_size, minimum)
        position, failures = 0, 0
        while position < self._size:
            end = min(position + chunk, self._size)
            try:
                location = self._patch(location, position, end)
                position, failures = end, 0
            except RegistryError as error:
                failures += 1
                behind = isinstance(error, HTTPFailure) and error.status == 416
                if failures >= 3 or not (error.retryable or behind):
                    raise
                location, position = self._status(location)
        self._finish(location, self._size, self._size)

    def _start(self) -> tuple[Url, int]:
        url = self._host.url(f"{self._ref.repository}/blobs/uploads/")
        answer = self._send("POST", url, {202}, {"Content-Length": "0"})
        minimum = answer.headers.get("OCI-Chunk-Min-Length", "0")
        if not (minimum.isascii() and minimum.isdigit() and len(minimum) < 15):
            minimum = "0"
        if int(minimum) > _MAX_CHUNK_MINIMUM:
            raise BadResponse(f"{self._purpose}: the registry wants chunks of {minimum} bytes")
        return self._uploads.location(self._host, answer, url), int(minimum)

    def _patch(self, location: Url, start: int, end: int) -> Url:
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(end - start),
            "Content-Range": f"{start}-{end - 1}",
        }
        answer = self._send("PATCH", location, {202}, headers, lambda: self._blocks(start, end))
        return self._uploads.location(self._host, answer, location)

    def _status(self, location: Url) -> tuple[Url, int]:
        """Where the registry stands, and where to go on."""
        answer = self._send("GET", location, {204})
        match = _RANGE.fullmatch(answer.headers.get("Range", ""))
        # `0-0` is what registries say both for nothing and for one byte: nothing is the safe reading only
        # when that byte can be sent again, which a chunk that starts at 0 does.
        position = int(match[1]) + 1 if match and match[1] != "0" else 0
        if position > self._size:
            raise BadResponse(f"{self._purpose}: the registry claims to have more than was sent")
        if "Location" in answer.headers:
            location = self._uploads.location(self._host, answer, location)
        return location, position

    def _finish(self, location: Url, start: int, end: int) -> None:
        separator = "&" if "?" in location.target else "?"
        url = Url(
            location.origin,
            f"{location.target}{separator}digest={self._digest.algorithm}%3A{self._digest.hex}",
        )
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(end - start)}
        patience = _COMMIT_SECONDS + self._size / _COMMIT_RATE
        answer = self._send("PUT", url, {201, 204}, headers, lambda: self._blocks(start, end), patience)
        stored = answer.headers.get("Docker-Content-Digest")
        if stored is not None and stored != str(self._digest):
            raise WrongContent(f"{self._purpose}: the registry stored it as {stored[:140]!r}")
        self._on_sent(self._size)

    def _send(
        self,
        method: str,
        url: Url,
        expect: set[int],
        headers: dict[str, str] | None = None,
        body: Any = None,
        answer_within: float | None = None,
    ) -> Answer:
        answer = self._uploads.request(
            self._host,
            self._ref,
            method,
            url,
            expect,
            self._purpose,
            self._deadline,
            headers=headers,
            body=body,
            answer_within=answer_within,
        )
        answer.discard()
        return answer

    def _blocks(self, start: int, end: int) -> Iterator[bytes]:
        if start == end:
            return
        content = self._source(start)
        try:
            position = start
            while position < end:
                self._deadline.check()
                block = content.read(min(_BLOCK, end - position))
                if not block:
                    raise WrongContent(
                        f"{self._purpose}: the content ended at byte {position} of {self._size}",
                        next_step="it changed while it was being pushed; push it again",
                    )
                yield block
                position += len(block)
                self._on_sent(position)
        finally:
            content.close()

"""A small HTTP/1.1 server on loopback whose answers can be made to go wrong on purpose.

Owns sockets, threads, the request log and the fault hooks; knows nothing of registries (`registry.py` and
`tokens.py` subclass `FakeServer` and implement `answer`). Invariant: every request that reached us is in
`requests`, with what was really sent back, whatever a hook did to it. An exception inside a handler is kept
and raised again when the server is closed, so that a bug of the fake never looks like a fault of the client.
Binds 127.0.0.1 by default; Linux answers on all of 127.0.0.0/8, which gives tests as many "hosts" as needed.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(slots=True)
class Request:
    """One request as received; `status` and `sent` (body bytes) are filled in as it is answered."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: Message
    body: bytes = b""
    connection: int = 0
    at: float = 0.0
    status: int = 0
    sent: int = 0

    @property
    def authorization(self) -> str | None:
        """The Authorization header, or None."""
        return self.headers.get("Authorization")

    def first(self, name: str) -> str | None:
        """The first value of a query parameter, or None."""
        values = self.query.get(name)
        return values[0] if values else None


@dataclass(slots=True)
class FileSlice:
    """Part of a file as a body: gigabytes are served by sendfile and never held in memory."""

    path: str
    offset: int
    length: int


@dataclass(slots=True)
class Response:
    """An answer, with the ways in which it may misbehave."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | FileSlice | Iterator[bytes] = b""
    # Content-Length to declare instead of the true one; an iterator without it is sent chunked.
    length: int | None = None
    # Close the connection after this many body bytes: in order, or with a reset that may overtake them.
    cut_after: int | None = None
    reset: bool = False
    # (bytes, seconds): send the body in such pieces with such pauses.
    drip: tuple[int, float] | None = None
    # Seconds to wait before the status line, and between the bytes of status line and headers.
    delay: float = 0.0
    drip_head: float = 0.0
    # These bytes are sent instead of a well-formed answer, then the connection is closed.
    raw: bytes | None = None
    # Sent after `raw`, again and again, until the client has had enough.
    raw_flood: bytes = b""
    # Close the connection after the answer.
    close: bool = False
    # For hooks that run before the body is read: how much of the request's body to take before answering.
    read_body: int | None = None

    @classmethod
    def drop(cls, *, read_body: int | None = None) -> Response:
        """Close the connection without an answer."""
        return cls(raw=b"", read_body=read_body)


Hook = Callable[[Request], "Response | None"]
Alteration = Callable[[Request, Response], "Response | None"]


@dataclass(slots=True)
class _Scripted:
    hook: Any
    left: int | None
    early: bool = False


class FakeServer:
    """A context manager; `host` is "127.0.0.1:PORT", `url` has the scheme. Subclasses implement `answer`."""

    def __init__(
        self, *, address: str = "127.0.0.1", name: str | None = None, tls: ssl.SSLContext | None = None
    ):
        self.requests: list[Request] = []
        self.connections = 0
        self._faults: list[_Scripted] = []
        self._alterations: list[_Scripted] = []
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._open: set[socket.socket] = set()
        self._crashes: list[BaseException] = []
        fake = self

        class Handler(_Handler):
            server_ref = fake

        self._server = _Server((address, 0), Handler)
        self._server.tls = tls
        self._server.crashes = self._crashes
        self.port: int = self._server.server_address[1]
        self.host = f"{name or address}:{self.port}"
        self.url = f"{'https' if tls else 'http'}://{self.host}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def answer(self, request: Request) -> Response:
        """The plain behaviour: what a well-behaved server would say."""
        return Response(404)

    def fault(self, hook: Hook, *, times: int | None = None, early: bool = False) -> None:
        """Ask `hook` before answering; a Response from it replaces the plain one, `times` times at most.

        With `early`, it is asked before the request's body has been read (see Response.read_body).
        """
        with self._lock:
            self._faults.append(_Scripted(hook, times, early))

    def alter(self, hook: Alteration, *, times: int | None = None) -> None:
        """Let `hook` change (or replace) the plain behaviour's response, `times` times at most."""
        with self._lock:
            self._alterations.append(_Scripted(hook, times))

    def clear_faults(self) -> None:
        """Behave well from now on."""
        with self._lock:
            self._faults.clear()
            self._alterations.clear()

    def clear_log(self) -> None:
        """Forget the requests seen so far."""
        with self._lock:
            self.requests.clear()

    def seen(self, method: str | None = None, contains: str = "") -> list[Request]:
        """The requests so far, by method and by a part of their path."""
        with self._lock:
            return [r for r in self.requests if method in (None, r.method) and contains in r.path]

    def drop_connections(self) -> None:
        """Cut every connection that is open now."""
        with self._lock:
            for sock in list(self._open):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop, cut what is open, and raise what went wrong inside the fake itself."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._server.shutdown()
        self._thread.join()
        self.drop_connections()
        self._server.server_close()
        if self._crashes:
            raise self._crashes[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _scripted(self, request: Request, *, early: bool) -> Response | None:
        for scripted in self._armed(self._faults):
            if scripted.early is early and (response := self._play(scripted, request)) is not None:
                return response
        return None

    def _respond(self, request: Request) -> Response:
        response = self._scripted(request, early=False)
        if response is not None:
            return response
        response = self.answer(request)
        for scripted in self._armed(self._alterations):
            response = self._play(scripted, request, response) or response
        return response

    def _armed(self, scripts: list[_Scripted]) -> list[_Scripted]:
        with self._lock:
            return [scripted for scripted in scripts if scripted.left != 0]

    def _play(self, scripted: _Scripted, *args: object) -> Response | None:
        # Counted before the call and given back after: hooks run without the lock, because some block.
        with self._lock:
            if scripted.left == 0:
                return None
            if scripted.left is not None:
                scripted.left -= 1
        response: Response | None = scripted.hook(*args)
        if response is None and scripted.left is not None:
            with self._lock:
                scripted.left += 1
        return response


class _Server(ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False
    request_queue_size = 256  # a hundred deliveries connect at once in the single-flight tests
    tls: ssl.SSLContext | None = None
    crashes: list[BaseException]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connection errors are the point of this server; anything else is a bug of a fake, and kept."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, (OSError, ValueError)):
            self.crashes.append(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_ref: FakeServer
    server: _Server

    def setup(self) -> None:
        fake = self.server_ref
        if self.server.tls is not None:
            # Not in the accept loop: a client that stalls its handshake blocks only its own thread.
            self.request.settimeout(10)
            self.request = self.server.tls.wrap_socket(self.request, server_side=True)
            self.request.settimeout(None)
        super().setup()
        with fake._lock:
            fake.connections += 1
            self.number = fake.connections
            fake._open.add(self.connection)

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()
        with self.server_ref._lock:
            self.server_ref._open.discard(self.connection)
        with contextlib.suppress(OSError):
            self.connection.close()

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().handle()

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline:
            self.close_connection = True
            return
        if not self.parse_request():
            return
        fake = self.server_ref
        split = urlsplit(self.path)
        request = Request(
            self.command,
            unquote(split.path),
            parse_qs(split.query, keep_blank_values=True),
            self.headers,
            connection=self.number,
            at=time.monotonic(),
        )
        with fake._lock:
            fake.requests.append(request)
        try:
            response = fake._scripted(request, early=True)
            if response is not None:
                if response.read_body:
                    request.body = self.rfile.read(response.read_body)
                response.close = True
            else:
                request.body = self._read_body()
                response = fake._respond(request)
        except OSError:
            raise
        except Exception as error:
            fake._crashes.append(error)
            response = Response(500, close=True)
        request.status = response.status
        self._send(request, response)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: the request log is `requests`."""

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, request: Request, response: Response) -> None:
        stopping = self.server_ref._stopping
        if response.delay:
            stopping.wait(response.delay)
        if response.raw is not None:
            if response.raw:
                self.close_connection = True
                self.wfile.write(response.raw)
                while response.raw_flood and not stopping.is_set():
                    self.wfile.write(response.raw_flood)
            else:
                self._reset()
            return
        if response.close:
            self.close_connection = True
        body = response.body
        if isinstance(body, bytes):
            true_length: int | None = len(body)
        else:
            true_length = body.length if isinstance(body, FileSlice) else None
        length = response.length if response.length is not None else true_length
        head = io.BytesIO()
        head.write(f"HTTP/1.1 {response.status} Fake\r\n".encode())
        for name, value in response.headers.items():
            head.write(f"{name}: {value}\r\n".encode("latin-1"))
        chunked = length is None
        if chunked:
            head.write(b"Transfer-Encoding: chunked\r\n")
        elif response.status != 304 and not (response.status == 204 and not length):
            head.write(f"Content-Length: {length}\r\n".encode())
        if self.close_connection:
            head.write(b"Connection: close\r\n")
        head.write(b"\r\n")
        if response.drip_head:
            for byte in head.getvalue():
                self.wfile.write(bytes([byte]))
                if stopping.wait(response.drip_head):
                    return
            head = io.BytesIO()
        if request.method == "HEAD" or not body:
            self.wfile.write(head.getvalue())
            if response.cut_after is not None or (length and request.method != "HEAD"):
                self._reset()
            return
        if (
            isinstance(body, bytes)
            and len(body) < 65536
            and response.drip is None
            and response.cut_after is None
        ):
            self.wfile.write(head.getvalue() + body)
            request.sent = len(body)
        else:
            self.wfile.write(head.getvalue())
            if isinstance(body, FileSlice) and response.drip is None and response.cut_after is None:
                self._send_file(request, body)
            elif self._send_pieces(request, response, chunked):
                return
        if chunked:
            self.wfile.write(b"0\r\n\r\n")
        elif length != request.sent:
            # The declared length was a lie: the connection cannot be used again.
            self.close_connection = True

    def _send_pieces(self, request: Request, response: Response, chunked: bool) -> bool:
        """Piece by piece; True when the connection was cut."""
        size, pause = response.drip or (262144, 0.0)
        left = response.cut_after
        for whole in _pieces(response.body, size):
            piece = whole if left is None else whole[:left]
            if piece:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
                request.sent += len(piece)
            if left is not None:
                left -= len(piece)
                if left <= 0 and response.reset:
                    # A moment, so that most of what was sent is read before the reset throws away the rest.
                    self.server_ref._stopping.wait(0.05)
                    self._reset()
                    return True
                if left <= 0:
                    # What was sent must arrive: end the stream in order, then close.
                    with contextlib.suppress(OSError):
                        self.connection.shutdown(socket.SHUT_WR)
                    self.close_connection = True
                    return True
            if pause and self.server_ref._stopping.wait(pause):
                return True
        return False

    def _send_file(self, request: Request, part: FileSlice) -> None:
        with open(part.path, "rb") as file:
            if isinstance(self.connection, ssl.SSLSocket):
                for piece in _pieces(part, 1 << 20):
                    self.wfile.write(piece)
                    request.sent += len(piece)
                return
            self.wfile.flush()
            offset, end = part.offset, part.offset + part.length
            while offset < end:
                done = os.sendfile(
                    self.connection.fileno(), file.fileno(), offset, min(end - offset, 1 << 22)
                )
                if not done:
                    break
                offset += done
                request.sent += done

    def _reset(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            # Linger zero: close() sends a reset, as a crashed server or a middlebox would.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


def _pieces(body: bytes | FileSlice | Iterator[bytes], size: int) -> Iterator[bytes]:
    if isinstance(body, bytes):
        for start in range(0, len(body), size):
            yield body[start : start + size]
    elif isinstance(body, FileSlice):
        with open(body.path, "rb") as file:
            file.seek(body.offset)
            left = body.length
            while left and (piece := file.read(min(size, left))):
                left -= len(piece)
                yield piece
    else:
        yield from body

"""One HTTP exchange: proxies, trust, timeouts, and the translation of every transport error.

Knows nothing of registries: no retries, no redirects, no authentication (see `session`), and leaves sockets
to `connections`. Invariant: whatever a server or the network does, the caller gets an `Answer` or one of our
errors, within the exchange's `Patience`. Bodies are read from the socket straight into the caller's buffer.
The receive buffer is left to the kernel: setting SO_RCVBUF would turn off its autotuning, whose limit is
higher than what an unprivileged process may ask for.
"""

from __future__ import annotations

import binascii
import contextlib
import functools
import http.client
import re
import socket
import ssl
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self, cast
from urllib.parse import quote, unquote_to_bytes, urlsplit

import msgspec

from unlade.errors import RegistryError, UnladeError
from unlade.model import Deadline
from unlade.registry.config import RegistryConfig
from unlade.registry.connections import (
    ConnectFailed,
    Connection,
    Contexts,
    IdleConnections,
    Proxy,
    Route,
    dial,
)
from unlade.registry.errors import (
    BadResponse,
    InvalidHosts,
    ResponseTooLarge,
    TLSFailure,
    Truncated,
    Unreachable,
)
from unlade.registry.hosts import TLSSettings
from unlade.registry.origins import Origin, Url, ip_literal
from unlade.registry.patience import Patience, PatientResponse

# An unread rest up to this is drained to keep the connection; beyond it, a new handshake is cheaper.
_DRAIN: Final = 64 << 10
# What a request target may hold as it is (RFC 3986, section 3.3 and 3.4), besides letters and digits.
_TARGET: Final = "/?:@!$&'()*+,;=-._~%"
_FOLD: Final = re.compile(r"\r\n|\r|\n")

Body = bytes | Callable[[], Iterable[bytes]]


class Headers(Mapping[str, str]):
    """An answer's headers: names in any case, repeated ones joined by a comma (RFC 9110, section 5.3)."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._values: dict[str, str] = {}
        for name, text in pairs:
            # A value may go over several lines, which was once allowed.
            value = " ".join(line.strip(" \t") for line in _FOLD.split(text))
            key = name.lower()
            before = self._values.get(key)
            self._values[key] = value if before is None else f"{before}, {value}"

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Answer:
    """A status, headers and a body to be read once; a context manager.

    The connection returns to its pool when the body has been read to its end, and is closed otherwise.
    """

    def __init__(
        self,
        response: PatientResponse,
        url: Url,
        patience: Patience,
        connection: Connection,
        idle: IdleConnections,
    ) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = Headers(response.msg.items())
        self.url = url
        self._http = response
        self._patience = patience
        self._connection = connection
        self._idle = idle
        self._length: int | None = None if response.chunked else response.length
        # Whether the end of the body can be told from a broken connection.
        self.framed = bool(self._http.chunked) or self._length is not None
        self._left = self._length
        self._done = False
        patience.await_body()
        if self._left == 0:
            self._finish()

    @property
    def length(self) -> int | None:
        """The declared length of the body, None when there is none."""
        return self._length

    def readinto(self, view: memoryview) -> int:
        """Fill (part of) the view: at most one receive; 0 at the end. Raises Truncated and Unreachable."""
        if self._done or not view:
            return 0
        self._patience.enter()
        got = 0
        try:
            got = self._receive(view)
            self._patience.leave(got)
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.close()
            raise _translate(error, self.url) from error
        except UnladeError:
            self.close()
            raise
        if not got:
            if self._left:
                left = self._left
                self.close()
                raise Truncated(
                    f"{self.url.redacted} ended {left} bytes early", next_step="try again; it continues there"
                )
            self._finish()
            return 0
        if self._left is not None:
            self._left -= got
            if not self._left:
                self._finish()
        return got

    def _receive(self, view: memoryview) -> int:
        if self._http.chunked:
            piece = self._http.read1(len(view))
            view[: len(piece)] = piece
            return len(piece)
        if self._left is not None and len(view) > self._left:
            view = view[: self._left]
        # One receive per call: nothing that arrived is lost when the next receive fails.
        got: int = cast("Any", self._http.fp).readinto1(view)
        return got

    def read(self, limit: int) -> bytes:
        """The whole body; raises ResponseTooLarge beyond `limit` bytes, before they are held."""
        if self._length is not None and self._length > limit:
            self.close()
            raise ResponseTooLarge(
                f"{self.url.redacted} announces {self._length} bytes where at most {limit} are allowed"
            )
        data = bytearray()
        buffer = memoryview(bytearray(min(64 << 10, limit + 1)))
        while got := self.readinto(buffer):
            data += buffer[:got]
            if len(data) > limit:
                self.close()
                raise ResponseTooLarge(f"{self.url.redacted} sent more than the {limit} bytes allowed")
        return bytes(data)

    def discard(self) -> None:
        """Throw the body away, keeping the connection when that is cheap."""
        if not self._done and self._left is not None and self._left <= _DRAIN:
            with contextlib.suppress(RegistryError):
                self.read(_DRAIN)
        self.close()

    def close(self) -> None:
        """Close the connection unless the body was read to its end; idempotent."""
        if not self._done:
            self._done = True
            self._http.close()
            self._connection.close()

    def _finish(self) -> None:
        self._done = True
        self._http.close()
        if self._http.excess:
            # More than the answer: what follows would be taken for the next one.
            self._connection.close()
        else:
            self._idle.keep(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Document(msgspec.Struct, frozen=True):
    """A whole answer, read within a cap."""

    raw: bytes
    headers: Mapping[str, str]

    @property
    def media_type(self) -> str:
        """Content-Type in lower case, without parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()


class Transport:
    """Connections, shared by all threads; `close` when done."""

    def __init__(self, config: RegistryConfig) -> None:
        self._config = config
        self._idle = IdleConnections(config.idle_connections)
        self._contexts: dict[TLSSettings, ssl.SSLContext] = {}
        self._lock = threading.Lock()

    def exchange(
        self,
        method: str,
        url: Url,
        *,
        tls: TLSSettings,
        headers: Mapping[str, str],
        body: Body | None = None,
        dial_timeout: float | None = None,
        answer_within: float | None = None,
        deadline: Deadline,
    ) -> Answer:
        """Send one request and return when the headers of its answer are here.

        A callable body is asked for its blocks once; `headers` then carries Content-Length. Raises
        Unreachable, TLSFailure, BadResponse, DeadlineExceeded.
        """
        deadline.check()
        patience = Patience(self._config, deadline, url.redacted)
        left = deadline.remaining()
        connect = dial_timeout or self._config.connect_timeout
        answer = answer_within or self._config.answer_timeout
        if left is not None:
            connect, answer = max(min(connect, left), 0.01), max(min(answer, left), 0.01)
        origin = url.origin
        route = Route(origin, tls if origin.scheme == "https" else None, self._proxy(origin))
        target = quote(url.target, safe=_TARGET)
        headers = {"Accept-Encoding": "identity", "User-Agent": self._config.user_agent, **headers}
        if route.proxy is not None and route.tls is None:
            # A proxy is told the whole URL; over TLS it only carries bytes.
            target = f"{origin}{target}"
            if route.proxy.authorization is not None:
                headers["Proxy-Authorization"] = route.proxy.authorization
        content = body() if callable(body) else body
        connection = None
        try:
            connection = self._idle.take(route)
            if connection is None:
                # For a proxy's answer to CONNECT, the only one that is read before the request is sent.
                patience.await_answer(connect)
                connection = dial(route, self._trust(route), connect, patience)
            connection.ask(method, target, headers, content)
            patience.await_answer(answer)
            response = connection.answer(patience)
            return Answer(response, url, patience, connection, self._idle)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if not isinstance(error, (OSError, ValueError, http.client.HTTPException)):
                raise
            # The deadline caused it when it is over: a connect that was cut short is not the registry's
            # fault.
            deadline.check()
            raise _translate(error, url, route.proxy) from error
        finally:
            if isinstance(content, Generator):
                content.close()  # lets go of the file it reads, also when it was not read to its end

    def close(self) -> None:
        """Close every idle connection."""
        self._idle.close()

    def _trust(self, route: Route) -> Contexts:
        """The TLS contexts of a route. A proxy is verified by the system's authorities alone."""
        proxy = None
        if route.proxy is not None and route.proxy.origin.scheme == "https":
            proxy = self._context(TLSSettings(skip_verify=route.tls is not None and route.tls.skip_verify))
        return Contexts(None if route.tls is None else self._context(route.tls), proxy)

    def _context(self, tls: TLSSettings) -> ssl.SSLContext:
        with self._lock:
            context = self._contexts.get(tls)
            if context is None:
                context = self._contexts[tls] = _ssl_context(tls)
            return context

    def _proxy(self, origin: Origin) -> Proxy | None:
        address = ip_literal(origin.host)
        if origin.host == "localhost" or (address is not None and address.is_loopback):
            return None  # as Go programs do: a proxy for loopback is never meant
        proxies = self._config.proxies
        if proxies is not None:
            return _parse_proxy(proxies.get(origin.scheme))
        from urllib.request import (  # type: ignore[attr-defined] # the stubs lack the second
            getproxies_environment,
            proxy_bypass_environment,
        )

        found = getproxies_environment()
        if not found or proxy_bypass_environment(origin.authority, found):
            return None
        return _parse_proxy(found.get(origin.scheme))


@functools.lru_cache(8)  # two at a time, but for every request
def _parse_proxy(text: str | None) -> Proxy | None:
    """A proxy's URL as it is written into environments: the scheme may be left out."""
    if not text:
        return None
    try:
        split = urlsplit(text if "://" in text else f"http://{text}")
        host, port = split.hostname, split.port
    except ValueError:
        host, port = None, None
    if not host or split.scheme not in ("http", "https"):
        # Without the text, which may hold a password.
        raise InvalidHosts(
            "the proxy's URL cannot be used", next_step="write it as http://HOST:PORT or https://HOST:PORT"
        )
    user = split.netloc.rpartition("@")[0]
    shown = binascii.b2a_base64(unquote_to_bytes(user), newline=False).decode() if user else None
    if port is None:
        port = 443 if split.scheme == "https" else 80
    return Proxy(Origin(split.scheme, host, port), f"Basic {shown}" if shown else None)


def _ssl_context(tls: TLSSettings) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        for path in tls.ca_files:
            context.load_verify_locations(path)
        for cert, key in tls.client_certs:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidHosts(
            f"certificate file cannot be used: {error}",
            next_step="check the files named in certs.d or --ca-file",
        ) from error
    if tls.skip_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _translate(error: BaseException, url: Url, proxy: Proxy | None = None) -> RegistryError:
    """Our error for one of http.client's or the socket's."""
    where = url.origin
    if isinstance(error, ssl.SSLError):
        return _tls_failure(error, url)
    if isinstance(error, ConnectFailed):
        return _no_connection(error.__cause__ or error, where, proxy)
    if isinstance(error, (http.client.HTTPException, UnicodeError)) and not isinstance(error, OSError):
        return BadResponse(
            f"{url.redacted} did not answer in HTTP: {_short(error)}",
            next_step="check that a registry answers at this address",
        )
    if not isinstance(error, OSError):
        return BadResponse(f"{url.redacted} answered outside the protocol: {_short(error)}")
    return Unreachable(f"the connection to {where} broke: {_short(error)}", next_step="try again")


def _no_connection(error: BaseException, where: Origin, proxy: Proxy | None) -> RegistryError:
    if proxy is not None:
        return Unreachable(
            f"no connection to {where}: the proxy {proxy.origin}: {_short(error)}",
            next_step="check the proxy's address and that it runs",
        )
    if isinstance(error, socket.gaierror):
        return Unreachable(
            f"host name {where.host} cannot be resolved", next_step="check the name and the DNS"
        )
    return Unreachable(
        f"no connection to {where}: {_short(error)}", next_step="check that the registry runs there"
    )


def _tls_failure(error: BaseException, url: Url) -> RegistryError:
    text = _short(error)
    if "WRONG_VERSION_NUMBER" in text or "HTTP_REQUEST" in text or "RECORD_LAYER_FAILURE" in text:
        step = f"if it has no TLS and is trusted: --plain-http or UNLADE_PLAIN_HTTP={url.origin.authority}"
    elif "EOF" in text or "TIMED" in text.upper():
        return Unreachable(f"the TLS connection to {url.origin} broke: {text}", next_step="try again")
    else:
        step = "trust its authority: put ca.crt into certs.d/HOST/, or pass a CA file"
    return TLSFailure(f"TLS to {url.origin} failed: {text}", next_step=step)


def _short(error: BaseException) -> str:
    """The reason in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200]

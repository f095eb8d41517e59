"""One HTTP exchange: pools, TLS, timeouts, and the translation of every transport error.

Owns urllib3: no other module of the project imports it. Knows nothing of registries: no retries, no
redirects, no authentication (see `session`). Invariant: whatever a server or the network does, the caller
gets an `Answer` or one of our errors, within the exchange's `Patience`. Bodies are read from the socket
straight into the caller's buffer. The receive buffer is left to the kernel: setting SO_RCVBUF would turn
off its autotuning, whose limit is higher than what an unprivileged process may ask for.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Self, cast
from urllib.parse import unquote

import msgspec
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util import Timeout, make_headers, parse_url

from unlade.errors import RegistryError, UnladeError
from unlade.model import Deadline
from unlade.registry import patience as patience_
from unlade.registry.config import RegistryConfig
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

# One blocking send of an upload block must end within this; with blocks of 256 KiB, 9 KB/s will do.
_SEND_TIMEOUT: Final = 30.0
# Distinct hosts (mirrors, CDNs) whose pools are kept at once.
_POOLS: Final = 64
# An unread rest up to this is drained to keep the connection; beyond it, a new handshake is cheaper.
_DRAIN: Final = 64 << 10

Body = bytes | Callable[[], Iterable[bytes]]


class Answer:
    """A status, headers and a body to be read once; a context manager.

    The connection returns to its pool when the body has been read to its end, and is closed otherwise.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, url: Url, patience: Patience) -> None:
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.url = url
        self._response = response
        self._patience = patience
        self._http = cast("http.client.HTTPResponse", cast("Any", response)._fp)
        self._length: int | None = None if self._http.chunked else self._http.length
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
        """Give the connection back, or close it when the body was not read; idempotent."""
        if not self._done:
            self._done = True
            self._http.close()
            self._response.close()
            self._response.release_conn()

    def _finish(self) -> None:
        self._done = True
        self._http.close()
        self._response.release_conn()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Patient(HTTPConnection):
    """What both kinds of connection do: answers are read, and blocks sent, under our limits."""

    response_class = PatientResponse

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(_SEND_TIMEOUT)

    def request(self, *args: Any, **kwargs: Any) -> None:
        if self.sock is not None:
            # urllib3 sends under the connect timeout, which is too short for a block on a thin uplink.
            self.timeout = _SEND_TIMEOUT
        super().request(*args, **kwargs)

    def getresponse(self) -> Any:
        patience = patience_.current()
        if patience is not None and isinstance(self.timeout, (int, float)):
            patience.await_answer(self.timeout)
        return super().getresponse()


class _PatientTLS(_Patient, HTTPSConnection):
    """The same over TLS: its methods come before urllib3's."""


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Patient


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _PatientTLS

    def _validate_conn(self, conn: Any) -> None:
        """Connect; without urllib3's warning when verification is off, which the caller asked for by name."""
        if conn.is_closed:
            conn.connect()


class Document(msgspec.Struct, frozen=True):
    """A whole answer, read within a cap."""

    raw: bytes
    headers: Mapping[str, str]

    @property
    def media_type(self) -> str:
        """Content-Type in lower case, without parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()


class _PoolKey(msgspec.Struct, frozen=True):
    tls: TLSSettings | None  # None: plain HTTP, which needs no trust store to be loaded
    proxy: str | None


class Transport:
    """Pools of connections, shared by all threads; `close` when done."""

    def __init__(self, config: RegistryConfig) -> None:
        self._config = config
        self._managers: dict[_PoolKey, urllib3.PoolManager] = {}
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
        proxy = self._proxy(origin)
        manager = self._manager(tls if origin.scheme == "https" else None, proxy)
        pool = manager.connection_from_host(origin.host, origin.port, origin.scheme)
        # For a proxy's answer to CONNECT, the only one that is read before the request is sent.
        patience.await_answer(connect)
        patience_.set_current(patience)
        content = body() if callable(body) else body
        try:
            response = pool.urlopen(
                method,
                # A proxy is told the whole URL; over TLS it only carries bytes.
                str(url) if proxy and origin.scheme == "http" else url.target,
                body=cast("Any", content),
                headers={"Accept-Encoding": "identity", "User-Agent": self._config.user_agent, **headers},
                retries=False,
                redirect=False,
                assert_same_host=False,
                timeout=Timeout(connect=connect, read=answer),
                preload_content=False,
                decode_content=False,
            )
        except (urllib3.exceptions.HTTPError, OSError, ValueError, http.client.HTTPException) as error:
            # The deadline caused it when it is over: a connect that was cut short is not the registry's
            # fault.
            deadline.check()
            raise _translate(error, url) from error
        finally:
            patience_.set_current(None)
            if isinstance(content, Generator):
                content.close()  # lets go of the file it reads, also when it was not read to its end
        return Answer(response, url, patience)

    def close(self) -> None:
        """Close every idle connection."""
        with self._lock:
            managers, self._managers = list(self._managers.values()), {}
        for manager in managers:
            manager.clear()

    def _manager(self, tls: TLSSettings | None, proxy: str | None) -> urllib3.PoolManager:
        key = _PoolKey(tls, proxy)
        with self._lock:
            manager = self._managers.get(key)
            if manager is None:
                manager = self._managers[key] = self._new_manager(tls, proxy)
            return manager

    def _new_manager(self, tls: TLSSettings | None, proxy: str | None) -> urllib3.PoolManager:
        options: dict[str, Any] = {
            "num_pools": _POOLS,
            "maxsize": self._config.idle_connections,
            "socket_options": [
                (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            ],
        }
        if tls is not None:
            options["ssl_context"] = _ssl_context(tls)
        if proxy:
            user = parse_url(proxy).auth
            headers = make_headers(proxy_basic_auth=unquote(user)) if user else None
            manager: urllib3.PoolManager = urllib3.ProxyManager(proxy, proxy_headers=headers, **options)
        else:
            manager = urllib3.PoolManager(**options)
        manager.pool_classes_by_scheme = {"http": _Pool, "https": _TLSPool}
        return manager

    def _proxy(self, origin: Origin) -> str | None:
        address = ip_literal(origin.host)
        if origin.host == "localhost" or (address is not None and address.is_loopback):
            return None  # as Go programs do: a proxy for loopback is never meant
        proxies = self._config.proxies
        if proxies is not None:
            return proxies.get(origin.scheme)
        from urllib.request import (  # type: ignore[attr-defined] # the stubs lack the second
            getproxies_environment,
            proxy_bypass_environment,
        )

        found = getproxies_environment()
        if not found or proxy_bypass_environment(origin.authority, found):
            return None
        return found.get(origin.scheme)


def _ssl_context(tls: TLSSettings) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
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


def _translate(error: BaseException, url: Url) -> RegistryError:
    """Our error for one of urllib3's, http.client's or the socket's."""
    where = url.origin
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, (ssl.SSLError, urllib3.exceptions.SSLError)):
            return _tls_failure(cause, url)
    if isinstance(error, urllib3.exceptions.NameResolutionError):
        return Unreachable(
            f"host name {where.host} cannot be resolved", next_step="check the name and the DNS"
        )
    if isinstance(error, (urllib3.exceptions.ConnectTimeoutError, urllib3.exceptions.NewConnectionError)):
        return Unreachable(
            f"no connection to {where}: {_short(error)}", next_step="check that the registry runs there"
        )
    for cause in causes:
        if isinstance(cause, http.client.RemoteDisconnected):
            break
        if isinstance(
            cause, (http.client.HTTPException, UnicodeError, urllib3.exceptions.LocationParseError)
        ):
            return BadResponse(
                f"{url.redacted} did not answer in HTTP: {_short(cause)}",
                next_step="check that a registry answers at this address",
            )
    if not any(isinstance(cause, (OSError, urllib3.exceptions.HTTPError)) for cause in causes):
        return BadResponse(f"{url.redacted} answered outside the protocol: {_short(error)}")
    return Unreachable(f"the connection to {where} broke: {_short(error)}", next_step="try again")


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it wraps (urllib3 keeps that in args or as the cause)."""
    found: list[BaseException] = []
    pending: list[BaseException | None] = [error]
    while pending and len(found) < 10:
        one = pending.pop()
        if one is None or one in found:
            continue
        found.append(one)
        pending += [arg for arg in one.args if isinstance(arg, BaseException)]
        pending.append(one.__cause__)
    return found


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
    """The innermost reason, in one line; urllib3's texts repeat the pool's representation."""
    inner = _causes(error)[-1]
    text = " ".join(str(inner).split()) or type(inner).__name__
    return text[:200]

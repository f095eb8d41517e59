"""Connections to origins, straight or through a proxy, and the idle ones that are kept for the next request.

Owns sockets: names, timeouts of connecting and sending, TLS and CONNECT. http.client speaks the protocol on
them (RFC 9112), `patience` reads them, `transport` asks for them and translates what is raised here.
Invariant: a connection is handed out to one thread at a time, and a kept one only if nothing has arrived on
it since: neither its end nor a byte that would be taken for the next answer. Host names go to the resolver
and into TLS as bytes: for a str, Python imports its tables for international names first, 10 ms of a pull.
"""

from __future__ import annotations

import errno
import functools
import http.client
import select
import socket
import ssl
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import msgspec

from unlade.registry.hosts import TLSSettings
from unlade.registry.origins import Origin
from unlade.registry.patience import Patience, PatientResponse

# One blocking send of an upload block must end within this; with blocks of 256 KiB, 9 KB/s will do.
_SEND_TIMEOUT: Final = 30.0
# Distinct routes (mirrors, CDNs) whose idle connections are kept at once.
_ROUTES: Final = 64
# The longest label of a host name (RFC 1035, section 2.3.4).
_LABEL: Final = 63


class ConnectFailed(OSError):
    """There is no connection, to the proxy where there is one; the cause says why."""


class Proxy(msgspec.Struct, frozen=True):
    """Where a proxy listens, and the Proxy-Authorization it is shown."""

    origin: Origin
    authorization: str | None = None

    def __repr__(self) -> str:
        return f"Proxy({self.origin})"  # without the password


class Route(msgspec.Struct, frozen=True):
    """Where a connection leads: those of equal routes are interchangeable."""

    origin: Origin
    tls: TLSSettings | None  # None: plain HTTP, which needs no trust store to be loaded
    proxy: Proxy | None = None


class Contexts(msgspec.Struct, frozen=True):
    """The TLS that a route needs: with the origin, and with a proxy of https://."""

    origin: ssl.SSLContext | None = None
    proxy: ssl.SSLContext | None = None


class Connection(http.client.HTTPConnection):
    """An open connection along a route; made by `dial`."""

    auto_open = 0  # http.client would connect again by itself, without TLS

    def __init__(self, route: Route, sock: socket.socket) -> None:
        super().__init__(route.origin.host, route.origin.port)
        self.route = route
        self.sock = sock
        self._cut = False

    def ask(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | Iterable[bytes] | None
    ) -> None:
        """Send a request; a body that is no bytes needs a Content-Length among the headers.

        A server that hangs up meanwhile may have answered before: that is for `answer` to find out.
        """
        self.sock.settimeout(_SEND_TIMEOUT)
        if not any(name.lower() == "host" for name in headers):
            headers = {"Host": _host_header(self.route.origin), **headers}
        try:
            self.request(method, target, body=body, headers=headers)
        except (BrokenPipeError, ConnectionResetError):
            self._cut = True
        except OSError as error:
            if error.errno != errno.EPROTOTYPE:  # what macOS says of a connection that is being closed
                raise
            self._cut = True

    def answer(self, patience: Patience) -> PatientResponse:
        """The status and headers of the answer; its body is read from it, under the same patience."""
        self.response_class = cast("Any", functools.partial(PatientResponse, patience))
        response = cast("PatientResponse", self.getresponse())
        # http.client takes the first of several lengths, others the last (RFC 9112, section 6.3).
        lengths = ",".join(response.msg.get_all("Content-Length", ())).split(",")
        if len({length.strip() for length in lengths}) > 1:
            response.close()
            raise http.client.HTTPException("it has more than one length")
        return response

    @property
    def reusable(self) -> bool:
        """Whether another request can be sent: open, and the last one was sent whole."""
        return self.sock is not None and not self._cut

    @property
    def quiet(self) -> bool:
        """Whether nothing has arrived: an end, an error or a byte that nobody asked for."""
        if isinstance(self.sock, ssl.SSLSocket) and self.sock.pending():
            return False
        ready = select.poll()
        ready.register(self.sock, select.POLLIN)
        return not ready.poll(0)


class IdleConnections:
    """Connections waiting for their next request, shared by all threads; the last used goes out first."""

    def __init__(self, per_route: int) -> None:
        self._per_route = per_route
        self._kept: OrderedDict[Route, list[Connection]] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False
        # A client that is dropped without `close` leaves no socket open.
        weakref.finalize(self, _close_all, self._kept).atexit = False

    def take(self, route: Route) -> Connection | None:
        """A connection of this route on which nothing has happened, or None."""
        while True:
            with self._lock:
                kept = self._kept.get(route)
                if not kept:
                    return None
                connection = kept.pop()
                if not kept:
                    del self._kept[route]
            if connection.quiet:
                return connection
            connection.close()

    def keep(self, connection: Connection) -> None:
        """Take a connection back after an answer that was read to its end, or close it."""
        surplus = [connection]
        with self._lock:
            if connection.reusable and not self._closed:
                kept = self._kept.setdefault(connection.route, [])
                self._kept.move_to_end(connection.route)
                kept.append(connection)
                # The one that has waited longest is the first that its server will close.
                surplus = [kept.pop(0)] if len(kept) > self._per_route else []
                if len(self._kept) > _ROUTES:
                    surplus += self._kept.popitem(last=False)[1]
        for one in surplus:
            one.close()

    def close(self) -> None:
        """Close what is kept, and keep nothing from now on."""
        with self._lock:
            self._closed = True
            kept = self._kept.copy()
            self._kept.clear()
        _close_all(kept)


def _close_all(kept: Mapping[Route, list[Connection]]) -> None:
    for connections in kept.values():
        for connection in connections:
            connection.close()


def dial(route: Route, contexts: Contexts, timeout: float, patience: Patience) -> Connection:
    """Connect along a route; raises ConnectFailed, ssl.SSLError, OSError and http.client's errors.

    `timeout` holds for each step; `patience` for what a proxy answers.
    """
    proxy = route.proxy
    peer = route.origin if proxy is None else proxy.origin
    try:
        sock = socket.create_connection((cast("str", _name(peer.host)), peer.port), timeout)
    except OSError as error:
        raise ConnectFailed(str(error)) from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if contexts.proxy is not None:
            sock = _secure(sock, contexts.proxy, peer.host)
        if contexts.origin is not None:
            if proxy is not None:
                _tunnel(sock, route.origin, proxy.authorization, patience)
                sock.settimeout(timeout)
            sock = _secure(sock, contexts.origin, route.origin.host)
        return Connection(route, sock)
    except BaseException:
        sock.close()
        raise


def _name(host: str) -> bytes | str:
    """What to look up: bytes, unless Python has to encode the name (or to refuse it)."""
    if host.isascii() and all(len(label) <= _LABEL for label in host.split(".")):
        return host.encode()
    return host


def _secure(sock: socket.socket, context: ssl.SSLContext, host: str) -> socket.socket:
    """TLS on a socket. A certificate names neither the zone of an address nor the dot after a name."""
    name = _name(host.partition("%")[0].rstrip("."))
    if isinstance(sock, ssl.SSLSocket):
        # TLS inside the TLS to a proxy, which ssl.SSLSocket cannot do.
        from urllib3.util.ssltransport import SSLTransport

        return cast("socket.socket", SSLTransport(sock, context, cast("str", name)))
    return context.wrap_socket(sock, server_hostname=name)


def _tunnel(sock: socket.socket, origin: Origin, authorization: str | None, patience: Patience) -> None:
    """Have a proxy connect us to an origin (RFC 9110, section 9.3.6)."""
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    head = f"CONNECT {host}:{origin.port} HTTP/1.1\r\nHost: {host}:{origin.port}\r\n"
    if authorization is not None:
        head += f"Proxy-Authorization: {authorization}\r\n"
    sock.sendall(f"{head}\r\n".encode("ascii"))
    response = PatientResponse(patience, sock, method="CONNECT")
    try:
        response.begin()
        if not 200 <= response.status < 300:
            raise OSError(f"Tunnel connection failed: {response.status} {response.reason}")
    finally:
        response.close()
    if response.excess:
        raise http.client.HTTPException("the proxy sent more than its answer to CONNECT")


def _host_header(origin: Origin) -> str:
    # As in TLS: the zone means something here only, and the dot after a name to the resolver only.
    host = origin.host.partition("%")[0].rstrip(".")
    return msgspec.structs.replace(origin, host=host).authority

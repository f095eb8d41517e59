"""Connections: which are used again, which never, and what is sent on them and through proxies."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.httpd import FakeServer, Request, Response
from tests.fakes.names import names
from tests.fakes.proxy import TunnelProxy
from tests.fakes.registry import FakeRegistry
from tests.fakes.scene import FAST
from tests.fakes.tls import Authority
from unlade.errors import InvalidInput
from unlade.model import Deadline
from unlade.registry.connections import Connection, IdleConnections, Route
from unlade.registry.errors import BadResponse, TLSFailure, Unreachable
from unlade.registry.hosts import TLSSettings
from unlade.registry.origins import Origin, parse_url
from unlade.registry.patience import Patience
from unlade.registry.transport import Answer, Transport, _parse_proxy

ROUTE = Route(Origin("http", "r.example.test", 80), None)


class Echo(FakeServer):
    """Answers with the path that was asked for."""

    def answer(self, request: Request) -> Response:
        return Response(200, body=request.path.encode())


@pytest.fixture
def server() -> Iterator[Echo]:
    with Echo() as running:
        yield running


@pytest.fixture
def transport() -> Iterator[Transport]:
    made = Transport(replace(FAST, idle_connections=2))
    yield made
    made.close()


def ask(transport: Transport, url: str, method: str = "GET", **options: Any) -> Answer:
    options = {"tls": TLSSettings(), "headers": {}, "deadline": Deadline.after(30), **options}
    return transport.exchange(method, parse_url(url), **options)


def get(transport: Transport, url: str, **options: Any) -> bytes:
    with ask(transport, url, **options) as answer:
        return answer.read(1 << 20)


def answered(raw: bytes, method: str = "GET") -> tuple[Answer, IdleConnections]:
    """What becomes of an answer of exactly these bytes, after which the connection stays open."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(raw)
        connection, idle = Connection(ROUTE, ours), IdleConnections(4)
        patience = Patience(FAST, Deadline.after(10), "it")
        patience.await_answer(5)
        connection.ask(method, "/", {}, None)
        answer = Answer(
            connection.answer(patience), parse_url("http://r.example.test/"), patience, connection, idle
        )
        with answer:
            answer.read(1000)
        kept = idle.take(ROUTE)
        if kept is not None:
            idle.keep(kept)
        return answer, idle


def test_a_connection_is_used_again(server: Echo, transport: Transport) -> None:
    for path in ("/a", "/b", "/c"):
        assert get(transport, server.url + path) == path.encode()
    assert server.connections == 1


def test_an_answer_that_was_not_read_ends_its_connection(server: Echo, transport: Transport) -> None:
    ask(transport, server.url + "/a").close()
    assert get(transport, server.url + "/b") == b"/b"
    assert server.connections == 2


def test_a_connection_that_the_server_closed_is_not_used(server: Echo, transport: Transport) -> None:
    assert get(transport, server.url + "/a") == b"/a"
    server.drop_connections()
    assert get(transport, server.url + "/b") == b"/b"
    assert server.connections == 2


@pytest.mark.parametrize(
    ("method", "raw", "again"),
    [
        ("GET", b"Content-Length: 2\r\n\r\nok", True),
        ("GET", b"Content-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\n", False),
        ("GET", b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", True),
        ("GET", b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\nHTTP/1.1", False),
        ("GET", b"Connection: close\r\nContent-Length: 2\r\n\r\nok", False),
        ("HEAD", b"Content-Length: 2\r\n\r\n", True),
        ("HEAD", b"Content-Length: 2\r\n\r\nok", False),
    ],
)
def test_bytes_that_nobody_asked_for_end_a_connection(method: str, raw: bytes, again: bool) -> None:
    _, idle = answered(b"HTTP/1.1 200 OK\r\n" + raw, method)
    # The other end is closed by now: a kept connection is found out when it is taken.
    assert bool(idle._kept) is again
    assert idle.take(ROUTE) is None


@pytest.mark.parametrize("late", [b"x", b""])
def test_an_idle_connection_on_which_something_happens_is_not_used(late: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        idle, connection = IdleConnections(4), Connection(ROUTE, ours)
        idle.keep(connection)
        assert idle.take(ROUTE) is connection
        idle.keep(connection)
        theirs.sendall(late) if late else theirs.shutdown(socket.SHUT_WR)
        assert idle.take(ROUTE) is None
        assert ours.fileno() == -1


def test_idle_connections_are_bounded_per_route(server: Echo, transport: Transport) -> None:
    for _ in range(2):
        with ExitStack() as stack:
            answers = [stack.enter_context(ask(transport, f"{server.url}/{n}")) for n in range(5)]
            assert [answer.read(10) for answer in answers] == [b"/0", b"/1", b"/2", b"/3", b"/4"]
    assert server.connections == 5 + 3


def test_routes_with_idle_connections_are_bounded() -> None:
    idle = IdleConnections(2)
    with ExitStack() as stack:
        routes = [Route(Origin("http", f"h{n}.test", 80), None) for n in range(65)]
        for route in routes:
            ours, theirs = socket.socketpair()
            stack.enter_context(theirs)
            idle.keep(Connection(route, ours))
        assert idle.take(routes[0]) is None
        last = idle.take(routes[-1])
        assert last is not None
        idle.close()
        assert idle.take(routes[1]) is None
        idle.keep(last)
        assert last.sock is None


def test_the_last_used_goes_out_first_and_the_oldest_is_closed() -> None:
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(3)]
        for _, theirs in pairs:
            stack.enter_context(theirs)
        idle, connections = IdleConnections(2), [Connection(ROUTE, ours) for ours, _ in pairs]
        for connection in connections:
            idle.keep(connection)
        assert connections[0].sock is None
        assert [idle.take(ROUTE), idle.take(ROUTE), idle.take(ROUTE)] == [
            connections[2],
            connections[1],
            None,
        ]
        for connection in connections:
            connection.close()


def test_threads_get_their_own_answers(server: Echo, transport: Transport) -> None:
    def run(thread: int) -> bool:
        paths = [f"/{thread}/{n}" for n in range(50)]
        return all(get(transport, server.url + path) == path.encode() for path in paths)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(run, range(8)))


@pytest.mark.parametrize("status", [401, 413])
@pytest.mark.parametrize("read", [0, 100_000])
def test_an_answer_before_the_body_was_sent_is_the_answer(
    server: Echo, transport: Transport, status: int, read: int
) -> None:
    server.fault(lambda q: Response(status, body=b"no", read_body=read), times=1, early=True)
    size, block = 64 << 20, bytes(256 << 10)
    answer = ask(
        transport,
        f"{server.url}/up",
        "PUT",
        headers={"Content-Length": str(size)},
        body=lambda: (block for _ in range(size // len(block))),
    )
    with answer:
        assert (answer.status, answer.read(10)) == (status, b"no")
    assert get(transport, server.url + "/b") == b"/b"
    assert server.connections == 2


@pytest.mark.parametrize(
    ("method", "head"),
    [
        ("HEAD", b"200 OK\r\nContent-Length: 7"),
        ("HEAD", b"200 OK\r\nTransfer-Encoding: chunked"),
        ("GET", b"204 No Content"),
        ("GET", b"304 Not Modified\r\nContent-Length: 7"),
    ],
)
def test_answers_without_a_body(method: str, head: bytes) -> None:
    answer, idle = answered(b"HTTP/1.1 " + head + b"\r\n\r\n", method)
    assert answer.headers.get("Content-Length", "7") == "7"
    assert idle._kept


def test_repeated_and_folded_headers() -> None:
    answer, _ = answered(
        b'HTTP/1.1 401 No\r\nWWW-Authenticate: Basic realm="a"\r\nX-Long: one\r\n  two\r\n'
        b'www-authenticate: Bearer realm="b"\r\nContent-Length: 0\r\n\r\n'
    )
    assert answer.headers["WWW-AUTHENTICATE"] == 'Basic realm="a", Bearer realm="b"'
    assert answer.headers.get("x-long") == "one two"
    assert "Www-Authenticate" in answer.headers
    assert "Location" not in answer.headers
    assert len(answer.headers) == len(list(answer.headers)) == 3


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 2\r\nContent-Length: 3\r\n",
        b"Content-Length: 2, 3\r\n",
        b"X: y\r\n" * 101,
        b"X: " + b"y" * 70_000 + b"\r\n",
    ],
)
def test_headers_outside_the_protocol(server: Echo, transport: Transport, head: bytes) -> None:
    server.fault(lambda q: Response(raw=b"HTTP/1.1 200 OK\r\n" + head + b"\r\nok"))
    with pytest.raises(BadResponse):
        get(transport, server.url + "/a")


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (Origin("http", "r.example.test", 80), b"r.example.test"),
        (Origin("http", "r.example.test.", 5000), b"r.example.test:5000"),
        (Origin("https", "fe80::1%eth0", 443), b"[fe80::1]"),
        (Origin("https", "::1", 5000), b"[::1]:5000"),
    ],
)
def test_the_host_header(origin: Origin, host: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        connection = Connection(Route(origin, None), ours)
        connection.ask("GET", "/v2/", {"Accept-Encoding": "a"}, None)
        connection.close()
        assert theirs.recv(1000) == b"GET /v2/ HTTP/1.1\r\nHost: %s\r\nAccept-Encoding: a\r\n\r\n" % host


@pytest.mark.parametrize("headers", [{"A": "b\r\nC: d"}, {"A\r\nB": "c"}, {"A": "b\nc"}])
def test_no_header_is_smuggled_into_a_request(
    server: Echo, transport: Transport, headers: dict[str, str]
) -> None:
    with pytest.raises(BadResponse):
        ask(transport, server.url + "/a", headers=headers)
    assert not server.requests


def test_a_target_is_sent_as_it_is_unless_a_url_may_not_hold_it(server: Echo, transport: Transport) -> None:
    assert get(transport, server.url + "/a%2fb%20c/{d}|<e>?x=%7e&y=a+b/c:d@e") == b"/a/b c/{d}|<e>"
    (request,) = server.requests
    assert request.query == {"x": ["~"], "y": ["a b/c:d@e"]}


def test_a_name_that_cannot_be_one_is_refused_and_one_that_is_unknown_is_unreachable(
    transport: Transport,
) -> None:
    with names({}):
        with pytest.raises(BadResponse):
            ask(transport, f"http://{'a' * 64}.example.test/")
        with pytest.raises(Unreachable, match=r"host name r\.example\.test cannot be resolved"):
            ask(transport, "http://r.example.test/")


def test_a_request_imports_neither_urllib3_nor_the_tables_of_international_names(server: Echo) -> None:
    code = (
        "import sys\n"
        "from unlade.registry.transport import *\n"
        "from unlade.registry.origins import parse_url\n"
        "url = parse_url(sys.argv[1])\n"
        "made = Transport(RegistryConfig())\n"
        "ask = dict(tls=TLSSettings(), headers={}, deadline=Deadline.after(30))\n"
        "made.exchange('GET', url, **ask).discard()\n"
        "print(*{'urllib3', 'encodings.idna', 'unicodedata'} & set(sys.modules))\n"
    )
    url = f"http://localhost:{server.port}/a"
    done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_dropped_transport_leaves_no_socket_open(server: Echo) -> None:
    transport = Transport(FAST)
    get(transport, server.url + "/a")
    del transport
    for _ in range(500):
        if not server._open:
            break
        threading.Event().wait(0.01)
    assert not server._open


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """An authority that the system trusts."""
    authority = Authority(str(tmp_path))
    monkeypatch.setenv("SSL_CERT_FILE", authority.ca)
    return authority


def through(proxy: str, **changes: Any) -> Transport:
    return Transport(replace(FAST, proxies={"http": proxy, "https": proxy}, **changes))


def test_a_plain_registry_behind_a_proxy_with_tls(trusted: Authority) -> None:
    with Echo(tls=trusted.server_context("127.0.0.1")) as proxy:
        transport = through(proxy.url.replace("://", "://me:p%40w@"))
        for _ in range(2):
            assert get(transport, "http://r.example.test:5000/v2/").endswith(b"/v2/")
        transport.close()
    assert proxy.connections == 1
    assert proxy.requests[1].headers["Host"] == "r.example.test:5000"
    assert proxy.requests[1].headers["Proxy-Authorization"] == "Basic bWU6cEB3"


def test_a_registry_with_tls_behind_a_proxy_with_tls(trusted: Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    private = Authority(str(tmp_path / "other"))
    data = bytes(range(256)) * 4000
    with (
        FakeRegistry(tls=private.server_context("r.example.test")) as server,
        TunnelProxy(("127.0.0.1", server.port), tls=trusted.server_context("127.0.0.1")) as proxy,
    ):
        server.fault(lambda q: Response(200, body=data))
        transport = through(proxy.url.replace("://", "://me:pw@"))
        tls = TLSSettings((private.ca,))
        for _ in range(2):
            assert get(transport, "https://r.example.test/v2/", tls=tls) == data
        with pytest.raises(TLSFailure):
            get(transport, "https://r.example.test/v2/")
        transport.close()
    assert len(proxy.heads) == 2
    assert proxy.heads[0].startswith("CONNECT r.example.test:443 HTTP/1.1\r\nHost: r.example.test:443\r\n")
    assert "Proxy-Authorization: Basic bWU6cHc=" in proxy.heads[0]
    assert "bWU6cHc=" not in repr(_parse_proxy("https://me:pw@h"))
    assert server.requests[0].headers["Host"] == "r.example.test"
    assert server.requests[0].headers["Proxy-Authorization"] is None


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_is_not_trusted_is_not_used(tmp_path: Path, scheme: str) -> None:
    authority = Authority(str(tmp_path))
    with TunnelProxy(("127.0.0.1", 1), tls=authority.server_context("127.0.0.1")) as proxy:
        transport = through(proxy.url)
        with pytest.raises(TLSFailure):
            # Trusting it for the registry does not make it the system's.
            get(transport, f"{scheme}://r.example.test/v2/", tls=TLSSettings((authority.ca,)))
    assert proxy.heads in ([], [""])


@pytest.mark.parametrize("url", ["socks5://127.0.0.1:1", "http://", "http://me:secret@h:port"])
def test_a_proxy_that_cannot_be_used_is_an_error_without_its_password(url: str) -> None:
    with pytest.raises(InvalidInput, match="proxy") as caught:
        get(through(url), "http://r.example.test/")
    assert "secret" not in f"{caught.value} {caught.value.next_step}"


def test_a_proxy_may_be_written_without_its_scheme(server: Echo) -> None:
    assert get(through(server.host), "http://r.example.test/v2/").endswith(b"/v2/")


def test_a_proxy_that_is_not_there_is_named_without_its_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    with pytest.raises(
        Unreachable, match=rf"r\.example\.test: the proxy http://127\.0\.0\.1:{port}: "
    ) as caught:
        get(through(f"http://me:secret@127.0.0.1:{port}"), "http://r.example.test/")
    assert "secret" not in str(caught.value)

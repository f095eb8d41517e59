"""A Kubernetes API server small enough to break on purpose: list, watch, create, patch, over loopback HTTP.

It keeps a log of changes with resource versions, serves pages with tokens and watches that replay from a
version, strips objects to their metadata when asked, holds deleted objects while they have finalizers, and
forgets history when told to (`compact`). Selectors are ignored. It is for injecting faults only: `fault` gets
every request and may answer in the server's place, cut the connection or wait; `cut_watches` ends every open
stream in the middle of a line. What the real API server does is tested on the real one.
"""

import base64
import json
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
_GROUP = r"^/(?:api/v1|apis/[a-z0-9.]+/v1[a-z0-9]*)"
_REST = r"/(?P<kind>[a-z]+)(?:/(?P<name>[^/]+)(?:/status)?)?$"
CLUSTER = re.compile(_GROUP + _REST)
NAMESPACED = re.compile(_GROUP + r"/namespaces/(?P<namespace>[^/]+)" + _REST)


@dataclass
class Answer:
    """What a fault says instead of the server."""

    status: int
    body: Object | bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class Cut(Exception):
    """Raised by a fault: the connection ends without an answer."""


@dataclass(frozen=True)
class Request:
    """One request as the server saw it."""

    verb: str
    path: str
    query: dict[str, str]
    body: Object | None
    accept: str
    authorization: str
    at: float

    @property
    def watch(self) -> bool:
        return "watch" in self.query


def status(code: int, reason: str, message: str = "") -> Answer:
    """A Kubernetes Status as an answer."""
    return Answer(
        code,
        {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message or reason},
    )


class FakeKubeApi:
    """The server; a context manager. `url` is where it listens."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.fault: Callable[[Request], Answer | None] = lambda _request: None
        self.bookmark_every = 0.2
        self._changed = threading.Condition()
        self._version = 100
        self._compacted = 0
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._history: list[tuple[int, str, str, Object]] = []
        self._generation = 0
        self.watches = 0  # opened so far; one that counts here is cut by `cut_watches`
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self.connections: set[socket.socket] = set()

    def __enter__(self) -> "FakeKubeApi":
        self.listen()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.refuse()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def listen(self) -> None:
        """Accepts connections, on the same port as before if there was one."""
        api = self

        class Handler(_Handler):
            fake = api

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def refuse(self) -> None:
        """Ends every connection and refuses new ones, as a stopped API server does."""
        self.cut_watches()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # --- what tests do to the cluster

    def put(self, kind: str, item: Object) -> Object:
        """Creates or replaces an object and tells the watches."""
        metadata = item.setdefault("metadata", {})
        metadata.setdefault("uid", str(uuid.uuid4()))
        key = (kind, metadata.get("namespace", ""), metadata["name"])
        with self._changed:
            verb = "MODIFIED" if key in self._objects else "ADDED"
            self._version += 1
            metadata["resourceVersion"] = str(self._version)
            self._objects[key] = json.loads(json.dumps(item))
            self._history.append((self._version, kind, verb, self._objects[key]))
            self._changed.notify_all()
        return item

    def delete(self, kind: str, namespace: str, name: str, *, silently: bool = False) -> None:
        """Removes an object; `silently` leaves no trace in the history, as a compaction would."""
        with self._changed:
            item = json.loads(json.dumps(self._objects.pop((kind, namespace, name))))
            self._version += 1
            item["metadata"]["resourceVersion"] = str(self._version)
            if not silently:
                self._history.append((self._version, kind, "DELETED", item))
            self._changed.notify_all()

    def all(self, kind: str) -> dict[str, Object]:
        """Every object of a kind by `namespace/name`."""
        with self._changed:
            return {
                f"{ns}/{name}": item for (k, ns, name), item in sorted(self._objects.items()) if k == kind
            }

    def compact(self) -> None:
        """Forgets all history: older watches and page tokens are answered with 410."""
        with self._changed:
            self._version += 1
            self._compacted = self._version
            self._history.clear()

    def cut_watches(self) -> None:
        """Ends every open watch in the middle of a line."""
        with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def count(self, verb: str, fragment: str = "", *, watch: bool | None = None) -> int:
        """How many requests there were of this verb, path fragment and kind."""
        return sum(
            r.verb == verb and fragment in r.path and (watch is None or r.watch == watch)
            for r in self.requests
        )

    # --- what the handler asks

    def page(self, kind: str, namespace: str | None, query: dict[str, str], partial: bool) -> Answer:
        limit = int(query.get("limit", "0"))
        with self._changed:
            version, start = self._version, ""
            if "continue" in query:
                version, start = json.loads(base64.b64decode(query["continue"]))
                if version < self._compacted:
                    return status(410, "Expired", "The provided continue parameter is too old")
            found = sorted(
                (f"{ns}/{name}", item)
                for (k, ns, name), item in self._objects.items()
                if k == kind and namespace in (None, ns) and f"{ns}/{name}" > start
            )
        metadata: Object = {"resourceVersion": str(version)}
        if limit and len(found) > limit:
            found = found[:limit]
            metadata["continue"] = base64.b64encode(json.dumps([version, found[-1][0]]).encode()).decode()
        items = [{"metadata": item["metadata"]} if partial else item for _key, item in found]
        return Answer(200, {"kind": "List", "metadata": metadata, "items": items})

    def changes(self, kind: str, since: int, partial: bool, seconds: float) -> Iterator[Object | None]:
        """Events of a watch; None asks the handler to cut the stream here."""
        with self._changed:
            generation = self._generation
            self.watches += 1
            if since < self._compacted:
                gone = status(410, "Expired", f"too old resource version: {since}").body
                yield {"type": "ERROR", "object": gone}
                return
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._changed:
                new = [entry for entry in self._history if entry[0] > since]
                current = self._version
                if not new:
                    self._changed.wait(self.bookmark_every)
                    new = [entry for entry in self._history if entry[0] > since]
                if generation != self._generation:
                    yield None
                    return
            for version, changed, verb, item in new:
                since = version
                if changed == kind:
                    yield {"type": verb, "object": {"metadata": item["metadata"]} if partial else item}
            if not new:
                yield {
                    "type": "BOOKMARK",
                    "object": {"metadata": {"resourceVersion": str(max(current, since))}},
                }

    def write(self, request: Request, kind: str, namespace: str, name: str | None) -> Answer:
        body = request.body or {}
        with self._changed:
            if request.verb == "POST":
                name = body["metadata"]["name"]
                if (kind, namespace, name) in self._objects:
                    return status(409, "AlreadyExists", f'{kind} "{name}" already exists')
                if namespace:
                    body["metadata"]["namespace"] = namespace
                return Answer(201, self.put(kind, body))
            old = self._objects.get((kind, namespace, name or ""))
            if old is None:
                return status(404, "NotFound", f'{kind} "{name}" not found')
            if request.verb == "GET":
                return Answer(200, old)
            sent = body.get("metadata", {}).get("resourceVersion")
            if request.verb == "PUT" and sent not in (None, old["metadata"]["resourceVersion"]):
                return status(409, "Conflict", "the object has been modified")
            if request.verb == "PUT":
                return Answer(200, self.put(kind, body))
            if request.verb == "DELETE":
                body = {"metadata": {"deletionTimestamp": "2026-11-15T00:00:00Z"}}
            new = merged(old, body)
            if "deletionTimestamp" in new["metadata"] and not new["metadata"].get("finalizers"):
                self.delete(kind, namespace, name or "")
                return Answer(200, new)
            return Answer(200, self.put(kind, new))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeKubeApi

    def setup(self) -> None:
        super().setup()
        self.fake.connections.add(self.connection)

    def finish(self) -> None:
        self.fake.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        accept = self.headers.get("Accept", "")
        authorization = self.headers.get("Authorization", "")
        request = Request(self.command, parts.path, query, body, accept, authorization, time.monotonic())
        self.fake.requests.append(request)
        try:
            answer = self.fake.fault(request) or self._answer(request)
        except Cut:
            self.close_connection = True
            return
        if answer is not None:
            data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            for name, value in {"Content-Type": "application/json", **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _answer(self, request: Request) -> Answer | None:
        partial = "PartialObjectMetadata" in request.accept
        found = NAMESPACED.match(request.path) or CLUSTER.match(request.path)
        if found is None:
            return status(404, "NotFound", request.path)
        groups = {"namespace": None, "name": None, **found.groupdict()}
        kind, namespace, name = str(groups["kind"]), groups["namespace"], groups["name"]
        if request.verb == "GET" and name is None:
            if not request.watch:
                return self.fake.page(kind, namespace, request.query, partial)
            self._stream(request, kind, partial)
            return None
        return self.fake.write(request, kind, namespace or "", name)

    def _stream(self, request: Request, kind: str, partial: bool) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        since = int(request.query["resourceVersion"])
        seconds = float(request.query.get("timeoutSeconds", "60"))
        try:
            for event in self.fake.changes(kind, since, partial, seconds):
                if event is None:
                    self._chunk(b'{"type":"ADDED","object":{"metad')
                    self.close_connection = True
                    self.connection.close()
                    return
                data = json.dumps(event).encode() + b"\n"
                self._chunk(data[: len(data) // 2])  # events arrive torn, as they do from afar
                self._chunk(data[len(data) // 2 :])
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Tests look at `requests`."""


def merged(old: Any, change: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(old, dict) or not isinstance(change, dict):
        return change
    new = {**old, **{key: merged(old.get(key), value) for key, value in change.items()}}
    return {key: value for key, value in new.items() if value is not None}


def wait_for(condition: Callable[[], bool], *, seconds: float = 10.0, what: str = "") -> None:
    """Waits until the condition holds; fails with `what` otherwise."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds} s: {what or condition}")

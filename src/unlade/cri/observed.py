"""Seen from outside: the service's numbers, and a small HTTP port for them and for probes (V20).

`/healthz` answers 200 while the process serves its socket; it never asks containerd, because a restart of
ours would not mend containerd. `/readyz` does ask it. `/metrics` is Prometheus' text. A registry of metrics
per service, not the library's global one: a process may hold several services.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter as Counting
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from unlade.containerd import ArtifactImage, HeldImage
from unlade.errors import UnladeError

# From an answer of containerd's to a large model on a slow link.
_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)

# Every handler's number is asked for in one look.
_FRESH: Final = 5.0

Check = Callable[[], str]


class Metrics:
    """All metrics of one service; thread-safe as the library is."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.calls = Histogram(
            "unlade_node_call_seconds",
            "Time of the kubelet's calls, by call and status; waiting for a turn is not in it",
            ["call", "code"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.waits = Histogram(
            "unlade_node_pull_wait_seconds",
            "Time that pulls waited for their turn",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.phases = Histogram(
            "unlade_node_pull_phase_seconds",
            "Time of pulls by phase: wait, resolve, fetch (and unpack), commit, register; containerd (of an"
            " image that is containerd's to pull)",
            ["phase", "handler"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.pulls = Counter(
            "unlade_node_pulls",
            "Pulls by what they came to: image (containerd's), artifact, cached (an artifact that was here)",
            ["result"],
            registry=self.registry,
        )
        self.fetched = Counter(
            "unlade_node_fetched_bytes", "Bytes of artifacts that were fetched", registry=self.registry
        )
        self.errors = Counter(
            "unlade_node_errors", "Calls that we refused, by our error code", ["code"], registry=self.registry
        )
        self._pulling = Gauge(
            "unlade_node_pulls_in_flight", "Pulls, running and waiting", ["state"], registry=self.registry
        )
        self._images = Gauge(
            "unlade_node_handler_images",
            "Images and artifacts of each runtime handler other than the default",
            ["handler"],
            registry=self.registry,
        )

    def watch_queue(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Read the queue of pulls whenever somebody looks."""
        self._pulling.labels("running").set_function(running)
        self._pulling.labels("waiting").set_function(waiting)

    def watch_handlers(self, names: Iterable[str], count: Callable[[str], float]) -> None:
        """Count the images of these handlers whenever somebody looks (R7)."""
        for name in names:
            self._images.labels(name).set_function(partial(count, name))

    def text(self) -> bytes:
        """The exposition format that Prometheus scrapes."""
        return generate_latest(self.registry)


class HandlerCounts:
    """How many images and artifacts each handler has; containerd is asked every few seconds at most."""

    def __init__(
        self,
        images: Callable[[], Sequence[ArtifactImage | HeldImage]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._images = images
        self._clock = clock
        self._lock = threading.Lock()
        self._until = -_FRESH
        self._counts: dict[str, int] = {}

    def __call__(self, handler: str) -> float:
        """The number for one handler; not a number while containerd does not tell."""
        with self._lock:
            if self._clock() >= self._until:
                try:
                    found = self._images()
                except UnladeError:
                    return math.nan
                self._counts = Counting(name for image in found for name in image.handlers)
                self._until = self._clock() + _FRESH
            return self._counts.get(handler, 0)


class Window:
    """The HTTP port; serves until closed. A check gives the reason why not, empty when all is well."""

    def __init__(self, host: str, port: int, metrics: Metrics, *, healthy: Check, ready: Check) -> None:
        """Binds at once (port 0: any free one); raises OSError when the address is taken."""
        checks = {"/healthz": healthy, "/readyz": ready}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 10.0  # a client that connects and says nothing must not keep a thread

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, metrics.text())
                elif path in checks:
                    reason = checks[path]()
                    self._answer(500 if reason else 200, f"{reason or 'ok'}\n".encode())
                else:
                    self._answer(404, b"not found\n")

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes every few seconds are not news."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="window", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

"""`/healthz`, `/readyz` and `/metrics` on one small HTTP port.

`/healthz` answers 200 while the process does what it should (its threads live, its lease loop moves) and
500 with the reasons otherwise: the kubelet restarts it then. `/readyz` answers 200 once the process can
do its job, as leader (caches synced) or as a standby (it reads the lease). Neither ever asks the API
server: an outage there must not make kubelets restart every controller.
"""

import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Check = Callable[[], Sequence[str]]


class HealthServer:
    """Serves until closed. A check returns the reasons why not, empty when all is well."""

    def __init__(
        self, host: str, port: int, *, healthy: Check, ready: Check, metrics: Callable[[], bytes]
    ) -> None:
        """Binds at once (port 0: any free one); raises OSError when the address is taken."""
        checks = {"/healthz": healthy, "/livez": healthy, "/readyz": ready}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 10.0  # a client that connects and says nothing must not keep a thread

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, metrics(), "text/plain; version=0.0.4; charset=utf-8")
                elif path in checks:
                    reasons = list(checks[path]())
                    text = "".join(f"{reason}\n" for reason in reasons) or "ok\n"
                    self._answer(500 if reasons else 200, text.encode(), "text/plain; charset=utf-8")
                else:
                    self._answer(404, b"not found\n", "text/plain; charset=utf-8")

            def _answer(self, status: int, body: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes every few seconds are not news."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

"""A TCP proxy in front of the API server, for the faults that a network makes.

It forwards bytes and nothing else: TLS goes through it. `cut` resets every connection, `refuse` also takes no
new ones, `resume` does again. The API server's certificate names 127.0.0.1, so a kubeconfig need only name
the proxy's port.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit


class Proxy:
    """Forwards to one address; a context manager."""

    def __init__(self, server: str) -> None:
        target = urlsplit(server)
        self._target = (target.hostname or "", target.port or 443)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self.port = 0
        self.accepted = 0
        self.resume()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refuse()

    def kubeconfig(self, original: Path) -> Path:
        """A copy of a kubeconfig that goes through the proxy."""
        config = json.loads(original.read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self.port}"
        path = original.with_suffix(f".{self.port}.kubeconfig")
        path.write_text(json.dumps(config))
        return path

    def cut(self) -> int:
        """Resets every open connection; how many there were."""
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            with suppress(OSError):
                # a linger of zero makes the close a reset, as a dying middlebox does it
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        return len(connections) // 2

    def refuse(self) -> None:
        """Resets every connection and refuses new ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    def resume(self) -> None:
        """Takes connections again, on the same port."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                inner, _address = listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                outer = socket.create_connection(self._target, timeout=10)
            except OSError:
                inner.close()
                continue
            outer.settimeout(None)
            with self._lock:
                self._connections |= {inner, outer}
            for source, sink in ((inner, outer), (outer, inner)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

"""An HTTP proxy for CONNECT only: what enterprises put between a client and registries with TLS."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class TunnelProxy:
    """Records the head of every CONNECT and relays bytes to `target`, whatever name was asked for.

    With `silent`, it accepts connections and never answers; with `refuse`, it answers with that status line.
    """

    def __init__(self, target: tuple[str, int], *, silent: bool = False, refuse: str = "") -> None:
        self.heads: list[str] = []
        self._target = target
        self._silent = silent
        self._refuse = refuse
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head and (piece := client.recv(4096)):
                head += piece
            self.heads.append(head.decode())
            if self._silent:
                return
            if self._refuse:
                client.sendall(f"HTTP/1.1 {self._refuse}\r\nContent-Length: 0\r\n\r\n".encode())
                return
            upstream = socket.create_connection(self._target)
            self._open.append(upstream)
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            thread = threading.Thread(target=_relay, args=(upstream, client), daemon=True)
            self._threads.append(thread)
            thread.start()
            _relay(client, upstream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._open:
            sock.close()


def _relay(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(65536):
            sink.sendall(piece)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)

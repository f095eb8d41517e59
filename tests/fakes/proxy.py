"""A proxy for CONNECT only, over HTTP or TLS: what enterprises put between a client and registries."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from types import TracebackType
from typing import Self


class TunnelProxy:
    """Records the head of every CONNECT and relays bytes to `target`, whatever name was asked for.

    With `silent`, it accepts connections and never answers; with `refuse`, it answers with that status line;
    with `tls`, its own connections are encrypted.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        silent: bool = False,
        refuse: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.heads: list[str] = []
        self._target = target
        self._silent = silent
        self._refuse = refuse
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"
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
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
                self._open.append(client)
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


def _relay(client: socket.socket, upstream: socket.socket) -> None:
    """Both ways in one thread, which TLS needs; the end of either is the end."""
    others = {client: upstream, upstream: client}
    with contextlib.suppress(OSError):
        while True:
            pending = isinstance(client, ssl.SSLSocket) and client.pending()
            for source in [client] if pending else select.select(list(others), [], [])[0]:
                piece = source.recv(65536)
                if not piece:
                    others[source].shutdown(socket.SHUT_RDWR)
                    return
                others[source].sendall(piece)

"""A slow link: relays TCP connections to a server, at so many bytes a second each."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

_PIECE = 16 << 10


class SlowLink:
    """Listens on `host`, any port; every connection gets the target's bytes at `rate` a second."""

    def __init__(self, target: tuple[str, int], *, rate: int, host: str = "127.0.0.1") -> None:
        self._target = target
        self._rate = rate
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self._open += [client, server]
            for source, sink, rate in ((client, server, 0), (server, client, self._rate)):
                thread = threading.Thread(target=_relay, args=(source, sink, rate), daemon=True)
                self._threads.append(thread)
                thread.start()

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


def _relay(source: socket.socket, sink: socket.socket, rate: int) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(_PIECE):
            sink.sendall(piece)
            if rate:
                time.sleep(len(piece) / rate)
        sink.shutdown(socket.SHUT_WR)

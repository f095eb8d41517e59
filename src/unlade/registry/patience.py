"""How long one exchange may take: the socket reader that a hostile or dead server cannot hold.

http.client reads through `io.BufferedReader`; we put our own raw reader below it. Every receive wakes up
once a second, looks at the caller's deadline (so `cancel` works while the server is silent), limits the
time until the headers are complete however slowly they drip, and judges the body's rate. What counts is
the useful bytes that a read brought (not chunk extensions or trailers, which a server can send for ever)
over the time spent in reads: a slow disk on our side is not a slow server.
"""

from __future__ import annotations

import http.client
import io
import select
import socket
import ssl
import time
from typing import Any, Final

from unlade.errors import UnladeError
from unlade.model import Deadline
from unlade.registry.config import RegistryConfig
from unlade.registry.errors import BadResponse, TooSlow

# How often a blocked read looks at the deadline: a cancel is seen within this time.
_TICK: Final = 1.0
# Small reads (headers, chunk sizes) come from this buffer; larger ones go past it, straight to the caller.
_BUFFER: Final = 64 << 10
# Chunks of one byte cost five more; a server that sends far more around the content than content is playing.
# The allowance is above what a single receive can bring before it is counted as content.
_PADDING: Final = 32 << 20
_PADDING_RATIO: Final = 64
# How much a read over TLS collects before it returns.
_GATHER: Final = 256 << 10


class Patience:
    """The limits of one exchange, and how much of them is used up."""

    __slots__ = (
        "_answer_by",
        "_entered",
        "_min_rate",
        "_raw",
        "_spent",
        "_total",
        "_useful",
        "_window",
        "deadline",
        "url",
    )

    def __init__(self, config: RegistryConfig, deadline: Deadline, url: str) -> None:
        self.deadline = deadline
        self.url = url
        self._min_rate = config.min_rate
        self._window = config.rate_window
        self._answer_by: float | None = None
        self._entered: float | None = None
        self._useful = 0
        self._spent = 0.0
        self._raw = 0
        self._total = 0

    def await_answer(self, seconds: float) -> None:
        """From now on, the headers must be complete within so many seconds."""
        self._answer_by = time.monotonic() + seconds

    def await_body(self) -> None:
        """The headers are here; from now on the rate counts."""
        self._answer_by = None

    def enter(self) -> None:
        """A read of the body begins."""
        self._entered = time.monotonic()

    def leave(self, useful: int) -> None:
        """It ends, and brought so many bytes of content."""
        assert self._entered is not None
        self._spent += time.monotonic() - self._entered
        self._useful += useful
        self._total += useful
        self._entered = None
        self._judge_rate()

    def tick(self) -> float:
        """The socket timeout for one receive."""
        left = self.deadline.remaining()
        tick = min(_TICK, self._window) if left is None else min(_TICK, self._window, left)
        return max(tick, 0.01)

    def judge(self, got: int) -> None:
        """After each receive, or a tick without one; raises TooSlow, BadResponse or DeadlineExceeded."""
        self.deadline.check()
        self._raw += got
        now = time.monotonic()
        if self._answer_by is not None:
            if now > self._answer_by:
                raise TooSlow(
                    f"no complete answer in time from {self.url}",
                    next_step="check the registry's health, or allow more time",
                )
        elif self._entered is not None:
            self._spent += now - self._entered
            self._entered = now
            self._judge_rate()
            if self._raw > _PADDING + _PADDING_RATIO * self._total:
                raise BadResponse(f"{self.url} pads its answer without an end")

    def _judge_rate(self) -> None:
        if self._spent < self._window:
            return
        if self._useful < self._min_rate * self._spent:
            raise TooSlow(
                f"{self.url} sends less than {self._min_rate} bytes a second",
                next_step="try again, or use a mirror",
            )
        # A new window: what was fast a minute ago does not excuse now.
        self._useful, self._spent = 0, 0.0


class _PatientSocket(io.RawIOBase):
    """Reads a socket under a Patience; keeps the socket alive as `socket.SocketIO` does."""

    def __init__(self, sock: socket.socket, holder: io.RawIOBase, patience: Patience) -> None:
        self._sock = sock
        # http.client closes the connection's socket before a `Connection: close` body is read; the SocketIO
        # it made holds a reference that defers the real close until this object is closed.
        self._holder = holder
        self._patience = patience
        self._tick = -1.0
        self._failed: BaseException | None = None
        self._over = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self._over:
            return None
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        got = self._receive(buffer)
        # TLS hands out one record of 16 KiB per call: too little to pass on one by one.
        if 0 < got < len(buffer) and isinstance(self._sock, ssl.SSLSocket):
            got = self._receive_more(self._sock, memoryview(buffer).cast("B"), got)
        return got

    def _receive(self, buffer: Any) -> int:
        patience = self._patience
        while True:
            tick = patience.tick()
            if tick != self._tick:
                self._sock.settimeout(tick)  # a system call, though it rarely changes
                self._tick = tick
            try:
                got = self._sock.recv_into(buffer)
            except TimeoutError:
                patience.judge(0)
                continue
            patience.judge(got)
            return got

    def _receive_more(self, sock: ssl.SSLSocket, view: memoryview, got: int) -> int:
        """Further records that are already here; an error is kept for the next call: no byte is lost."""
        enough = min(_GATHER, len(view))
        ready = select.poll()
        ready.register(sock, select.POLLIN)
        try:
            # Only what is here: after the last record of an answer nothing follows until we ask again.
            while got < enough and (sock.pending() or ready.poll(0)):
                more = self._receive(view[got:])
                if not more:
                    break
                got += more
        except (OSError, UnladeError) as error:
            self._failed = error
        return got

    def stop(self) -> None:
        """Receive nothing more: a reader above gets what it already has."""
        self._over = True

    def close(self) -> None:
        if not self.closed:
            self._holder.close()
        super().close()


class _Reader(io.BufferedReader):
    """A buffer that knows, once closed, whether something in it was never read."""

    def __init__(self, raw: _PatientSocket) -> None:
        super().__init__(raw, _BUFFER)
        self._patient = raw
        self.excess = False

    def close(self) -> None:
        if not self.closed:
            self._patient.stop()
            self.excess = bool(self.peek(1))
        super().close()


class PatientResponse(http.client.HTTPResponse):
    """An http.client response that reads under a Patience."""

    def __init__(self, patience: Patience, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._reader = _Reader(_PatientSocket(sock, self.fp.detach(), patience))
        self.fp = self._reader

    @property
    def excess(self) -> bool:
        """After `close`: whether bytes had arrived that are not part of the answer."""
        return self._reader.excess

"""Progress on stderr: bars on a terminal, a line per finished blob elsewhere, nothing when asked for.

Events come from any thread (unlade.transfer.progress). Bars are drawn by rich, which is imported only when
stderr is a terminal: its import alone costs as much as a small pull.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, TextIO

from unlade.cli.output import human, printable

if TYPE_CHECKING:
    from unlade.transfer.progress import ProgressEvent

# A log line for a long download: rare enough for a CI log, frequent enough to see that it lives.
_HEARTBEAT_SECONDS: Final = 10.0


class Watcher(Protocol):
    """What a command needs: call it with events, close it before printing results."""

    def __call__(self, event: ProgressEvent, /) -> None:
        """Show one event; quick, thread-safe, never raises."""

    def close(self) -> None:
        """Leave the terminal as it was; idempotent."""


def make_progress(*, quiet: bool, stream: TextIO | None = None) -> Watcher:
    """The watcher that suits stderr."""
    stream = stream or sys.stderr
    if quiet:
        return Silent()
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return Bars(stream)
    return Lines(stream)


class Silent:
    """Shows nothing."""

    def __call__(self, event: ProgressEvent, /) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


class Lines:
    """One line when a blob is done, and one every ten seconds while it is not."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._last: dict[object, float] = {}

    def __call__(self, event: ProgressEvent, /) -> None:
        """Print a line when there is news."""
        now = time.monotonic()
        with self._lock:
            if event.kind == "start":
                self._last[event.digest] = now
            elif event.kind == "present":
                self._print(event, "already there")
            elif event.kind == "done":
                self._print(event, f"{human(event.total)} done")
            elif event.kind == "resumed":
                self._print(event, f"resumed at {human(event.done)} of {human(event.total)}")
            elif event.kind == "bytes" and now - self._last.get(event.digest, now) >= _HEARTBEAT_SECONDS:
                self._last[event.digest] = now
                self._print(event, f"{human(event.done)} of {human(event.total)}")

    def _print(self, event: ProgressEvent, text: str) -> None:
        print(f"{name(event)}  {text}", file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to restore."""


class Bars:
    """One bar per blob in flight, drawn by rich; finished ones leave the screen."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        # Console reads NO_COLOR itself.
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream, highlight=False),
            transient=True,
        )
        self._tasks: dict[object, Any] = {}
        self._lock = threading.Lock()
        self._started = False

    def __call__(self, event: ProgressEvent, /) -> None:
        """Move a bar."""
        if event.kind == "planned":
            return
        with self._lock:
            if not self._started:
                self._progress.start()
                self._started = True
            if event.kind in ("done", "present", "failed"):
                task = self._tasks.pop(event.digest, None)
                if task is not None:
                    self._progress.remove_task(task)
                return
            task = self._tasks.get(event.digest)
            if task is None:
                task = self._progress.add_task(name(event), total=event.total)
                self._tasks[event.digest] = task
            self._progress.update(task, completed=event.done)

    def close(self) -> None:
        """Take the bars away."""
        with self._lock:
            if self._started:
                self._progress.stop()
                self._started = False


def name(event: ProgressEvent) -> str:
    """What a person calls the blob: its label where it has one, and the start of its digest."""
    short = event.digest.hex[:12]
    return f"{printable(event.label)} ({short})" if event.label else short

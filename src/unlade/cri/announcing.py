"""Long pulls told on their pods: one event after a while, then now and again (V18).

A pod that waits for a large model shows nothing between "Pulling" and "Pulled". Who may write events is the
cluster's to say, and which client writes them is none of this room's business: `PodEvents` is wired by the
command line. Looking never holds up a pull, and an event that fails is only an event less.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from unlade.cri.pulls import Phase, Pod, Pulls, State

_log = logging.getLogger(__name__)
REASON: Final = "PullProgress"
# Most pulls are over by then, and nobody wonders yet.
AFTER: Final = 15.0
# As often as a person looks again, and no more than an API server likes.
EVERY: Final = 30.0

_WORDS: Final[dict[Phase, str]] = {
    "wait": "waiting for its turn",
    "resolve": "asking the registry",
    "fetch": "fetching",
    "commit": "completing it in containerd",
    "register": "waiting for containerd to take it up",
    "containerd": "pulled by containerd",
}


class PodEvents(Protocol):
    """Writes events of pods; quick, thread-safe, never raises."""

    def tell(self, pod: Pod, reason: str, message: str) -> None:
        """An ordinary event about a pod."""
        ...


class Announcer:
    """Looks at the pulls on a thread of its own, from `start` to `close`."""

    def __init__(
        self,
        pulls: Pulls,
        events: PodEvents,
        *,
        after: float = AFTER,
        every: float = EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pulls = pulls
        self._events = events
        self._after = after
        self._every = every
        self._clock = clock
        self._told: dict[int, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """End; idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def look(self) -> None:
        """Tell what is due now."""
        now = self._clock()
        running: set[int] = set()

        def due(state: State) -> bool:
            running.add(state.number)
            last = self._told.get(state.number)
            waited = last is None or now - last >= self._every
            return state.pod is not None and state.seconds >= self._after and waited

        for state in self._pulls.states(due):
            if state.pod is not None:
                self._told[state.number] = now
                self._events.tell(state.pod, REASON, message(state))
        self._told = {number: at for number, at in self._told.items() if number in running}

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._after)):
            try:
                self.look()
            except Exception:
                _log.exception("progress was not told")


def message(state: State) -> str:
    """One sentence: the reference, what happens, how far, how fast, how long yet."""
    parts = [f"{state.reference}: {_WORDS[state.phase]}"]
    if state.done is not None and state.total:
        share = 100 * state.done // state.total
        parts.append(f"{_bytes(state.done)} of {_bytes(state.total)} ({share} %)")
    if state.rate:
        parts.append(f"{_bytes(state.rate)}/s")
    left = state.seconds_left
    parts.append(f"{state.seconds:.0f} s so far" if left is None else f"about {left:.0f} s left")
    return ", ".join(parts)


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"

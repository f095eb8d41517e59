"""Each pull while it runs: what for, which phase, how many bytes of how many, how fast (V18).

A pull goes through phases: `wait` for its turn, `resolve` at the registry, `fetch` (which unpacks at the same
time), `commit` in containerd, `register` until containerd's CRI knows the image. One that is containerd's own
is in `containerd` instead, and its bytes are those of containerd's ingests. Events come from any thread;
numbers are worked out when somebody looks. Nothing here outlives its pull, except in the metrics.

`server` begins and ends pulls, `images` says the phases, `watching` and `announcing` look.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

import grpc

from unlade.cri.api import images_pb2 as api
from unlade.cri.observed import Metrics
from unlade.errors import UnladeError
from unlade.model import Digest
from unlade.transfer import ProgressEvent

Phase = Literal["wait", "resolve", "fetch", "commit", "register", "containerd"]
# How many of these bytes containerd has: what it ingests now, and what it has whole.
Ingested = Callable[[Collection[Digest]], Mapping[Digest, int]]

# The rate is that of the last so many seconds: long enough to be calm, short enough to show a stall.
_WINDOW: Final = 10.0
# A sample for the rate at most this often; events come for every chunk.
_SAMPLE: Final = 0.25


@dataclass(frozen=True, slots=True)
class Pod:
    """The pod that a pull is for, as the kubelet names it."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class State:
    """A pull at one moment; None where nobody knows."""

    number: int
    reference: str
    handler: str
    pod: Pod | None
    phase: Phase
    seconds: float
    done: int | None
    total: int | None
    rate: float | None

    @property
    def seconds_left(self) -> float | None:
        """At the present rate; None while it is unknown or nothing moves."""
        if self.done is None or self.total is None or not self.rate:
            return None
        return (self.total - self.done) / self.rate


class Pull:
    """One pull; call it with progress events, from any thread."""

    def __init__(
        self,
        number: int,
        request: bytes,
        *,
        fetched: Callable[[int], None] = lambda _bytes: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        told = api.PullImageRequest.FromString(request)
        metadata = told.sandbox_config.metadata
        self.number = number
        self.reference: str = told.image.image
        self.handler: str = told.image.runtime_handler
        self.pod = Pod(metadata.namespace, metadata.name, metadata.uid) if metadata.name else None
        self.content = False  # whether any was asked for: then it is known to be an artifact
        self._fetched = fetched
        self._clock = clock
        self._lock = threading.Lock()
        self._began = self._entered = clock()
        self._phase: Phase = "wait"
        self._spent: dict[Phase, float] = {}
        self._done: dict[Digest, int] = {}
        self._sum = 0  # of what is done
        self._missing: set[Digest] = set()  # blobs that are not whole yet
        self._totals: dict[Digest, int] = {}
        self._samples: deque[tuple[float, int]] = deque()

    def enter(self, phase: Phase) -> None:
        """The next phase begins."""
        with self._lock:
            self._enter(phase)

    def __call__(self, event: ProgressEvent) -> None:
        """Take a progress event in."""
        if event.kind == "done":
            self._fetched(event.total)
        with self._lock:
            # Events come for every chunk of every blob: nothing here may grow with the number of blobs.
            self._totals[event.digest] = event.total
            whole = event.kind in ("done", "present")
            (self._missing.discard if whole else self._missing.add)(event.digest)
            if event.kind == "planned":
                return
            self.content = True
            if self._phase != "fetch":
                self._enter("fetch")
            done = event.total if whole else event.done
            self._sum += done - self._done.get(event.digest, 0)
            self._done[event.digest] = done
            self._sample()
            if not self._missing:
                self._enter("commit")

    def state(self, ingested: Ingested | None = None) -> State:
        """The pull now; `ingested` is asked about one that is containerd's."""
        with self._lock:
            # What is whole stays whole as long as the pull runs: it is not asked for again.
            asked = set(self._missing) if self._phase == "containerd" else set()
        if asked and ingested is not None:
            # What cannot be told is left out: the pull itself goes on.
            with suppress(UnladeError, grpc.RpcError):
                self._take(ingested(asked))
        with self._lock:
            now = self._clock()
            known = bool(self._totals) and (self._phase != "containerd" or bool(self._done))
            done = self._sum if known else None
            if known and self._phase in ("fetch", "containerd"):
                self._sample()
            return State(
                self.number,
                self.reference,
                self.handler,
                self.pod,
                self._phase,
                now - self._began,
                done,
                sum(self._totals.values()) if self._totals else None,
                self._rate(now),
            )

    def spent(self) -> dict[Phase, float]:
        """Seconds in each phase until now."""
        with self._lock:
            self._enter(self._phase)
            return dict(self._spent)

    def _take(self, found: Mapping[Digest, int]) -> None:
        """What containerd has of its blobs."""
        with self._lock:
            for digest, size in found.items():
                total = self._totals[digest]
                self._sum += min(size, total) - self._done.get(digest, 0)
                self._done[digest] = min(size, total)
                if size >= total:
                    self._missing.discard(digest)

    def _enter(self, phase: Phase) -> None:
        now = self._clock()
        self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._entered
        self._phase, self._entered = phase, now

    def _sample(self) -> None:
        now = self._clock()
        if self._samples and now - self._samples[-1][0] < _SAMPLE:
            return
        self._samples.append((now, self._sum))
        while now - self._samples[0][0] > _WINDOW:
            self._samples.popleft()

    def _rate(self, now: float) -> float | None:
        """Bytes a second between the oldest sample of the window and now."""
        if len(self._samples) < 2 or self._phase not in ("fetch", "containerd"):
            return None
        at, done = self._samples[0]
        return max(0.0, (self._sum - done) / max(now - at, _SAMPLE))


class Pulls:
    """The pulls that run or wait on this node; thread-safe."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._last = 0
        self._pulls: dict[int, Pull] = {}
        self.ingested: Ingested | None = None

    @contextmanager
    def begin(self, request: bytes) -> Iterator[Pull]:
        """A PullImage call, until the block ends."""
        with self._lock:
            self._last += 1
            pull = Pull(self._last, request, fetched=self._metrics.fetched.inc, clock=self._clock)
            self._pulls[pull.number] = pull
        try:
            yield pull
        finally:
            with self._lock:
                del self._pulls[pull.number]
            for phase, seconds in pull.spent().items():
                self._metrics.phases.labels(phase, pull.handler).observe(seconds)

    def states(self, due: Callable[[State], bool] = lambda _state: True) -> list[State]:
        """Every pull now that is `due`, the oldest first; containerd is asked about those alone."""
        with self._lock:
            pulls = list(self._pulls.values())
        return [pull.state(self.ingested) for pull in pulls if due(pull.state())]

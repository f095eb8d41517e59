"""Fetching for volumes: work that outlives the call that asked for it, a bounded number at once.

The kubelet waits two minutes for NodePublishVolume and a large model takes longer. So the work of one volume
is a job of its own: a call waits for it as long as it may, and when time is up says how far the job is; the
kubelet's next call finds it further on, or done. A job ends when it is done, when its volume is unpublished,
or when nobody has asked for it in ten minutes.

At most `parallel` jobs fetch at once; others wait for their turn. One that finds its tree in the store needs
no turn, and jobs for one tree share the turn of the first: fifty pods of one new model cost one download and
one place in the queue. What the first fetched is handed to the others only by their own credentials (V5).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from unlade.csi.holding import Holder
from unlade.csi.observed import Metrics
from unlade.csi.statuses import Busy
from unlade.delivery import Delivered, Engine, Found, Request
from unlade.errors import DeadlineExceeded, UnladeError
from unlade.model import Deadline, Digest
from unlade.planning import Plan
from unlade.transfer import ProgressEvent

_log = logging.getLogger(__name__)

# The kubelet's longest pause between two tries is two minutes, and a call of its lasts as long.
_ABANDONED: Final = 600.0
# A node has at most a few hundred pods; beyond this something is wrong and memory is worth more.
WAITING: Final = 512
# How often a waiter looks whether its caller is still there, or its work was cancelled.
_LOOK: Final = 0.5
# Of a call's time, kept for saying how far the job is.
_ANSWER_SHARE: Final = 0.1
_ANSWER_MOST: Final = 2.0

Alive = Callable[[], bool]


class StillFetching(DeadlineExceeded):
    """The call's time is over and the job goes on."""

    code = "still-fetching"


class Job:
    """The work for one volume."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.deadline = Deadline.never()
        self.done = threading.Event()
        self.asked = time.monotonic()
        self.waiting = 0
        self.delivered: Delivered | None = None
        self.error: Exception | None = None
        self.total = 0
        self.began = time.monotonic()
        self._bytes: dict[Digest, int] = {}

    def watch(self, event: ProgressEvent) -> None:
        """Follow the progress; ends the work when nobody has asked for it in a long time."""
        self._bytes[event.digest] = event.done
        if time.monotonic() - self.asked > _ABANDONED:
            self.deadline.cancel()

    def still(self) -> StillFetching:
        """How far it is."""
        done = sum(self._bytes.copy().values())
        seconds = round(time.monotonic() - self.began)
        how_far = f"{_size(done)} of {_size(self.total)}" if done else "waiting for its turn or the registry"
        return StillFetching(
            f"still fetching {self.what}: {how_far} after {seconds} s",
            next_step="nothing: it goes on, and the kubelet asks again",
        )


class Fetches:
    """All jobs of one driver; thread-safe."""

    def __init__(
        self,
        holder: Holder,
        metrics: Metrics,
        *,
        parallel: int,
        waiting: int = WAITING,
    ) -> None:
        self.capacity = parallel + waiting
        self._holder = holder
        self._metrics = metrics
        self._turns = threading.Semaphore(parallel)
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._leading: dict[Digest, threading.Event] = {}
        self._running = 0
        metrics.watch_fetches(lambda: self._running, lambda: len(self._jobs) - self._running)

    def ask(
        self,
        key: str,
        what: str,
        work: Callable[[Job], Delivered],
        *,
        seconds: float | None,
        alive: Alive,
        unheard: Callable[[UnladeError], None] = lambda _: None,
    ) -> Delivered:
        """The result of a volume's job, begun if there is none; raises its error, or StillFetching.

        `unheard` is told the error of a job that ends while no call waits for it.
        """
        share = 0.0 if seconds is None else min(_ANSWER_MOST, seconds * _ANSWER_SHARE)
        until = None if seconds is None else time.monotonic() + seconds - share
        job = self._job(key, what, work, unheard)
        try:
            while not job.done.wait(_LOOK if until is None else min(_LOOK, max(0.0, until - job.asked))):
                job.asked = time.monotonic()
                if (until is not None and job.asked >= until) or not alive():
                    raise job.still()
        finally:
            with self._lock:
                job.waiting -= 1
        with self._lock:
            if self._jobs.get(key) is job:
                del self._jobs[key]
        if job.error is not None:
            raise job.error
        assert job.delivered is not None
        return job.delivered

    def cancel(self, key: str) -> None:
        """End a volume's job, if there is one: at its next step, which is not waited for."""
        with self._lock:
            job = self._jobs.pop(key, None)
        if job is not None:
            job.deadline.cancel()

    def close(self) -> None:
        """End all jobs."""
        with self._lock:
            jobs, self._jobs = list(self._jobs.values()), {}
        for job in jobs:
            job.deadline.cancel()
        for job in jobs:
            job.done.wait(10.0)

    def fetch(self, engine: Engine, request: Request, job: Job) -> Delivered:
        """Deliver a request as a job: in its turn if it has to fetch, at once if not."""
        self._holder.forget_lost(request)
        plan, found = engine.plan(request, deadline=job.deadline)
        job.total = sum(step.layer.size for step in plan.active())
        key = engine.tree_key(plan)
        while True:
            # In this order: a tree is there a moment before the record that says where it came from, and
            # without that record every repository would have to prove that it has the content, too (V5).
            there = self._holder.trees.find(key) is not None
            if self._led(key, job.deadline):
                continue
            if there:
                return self._holder.deliver(
                    engine, plan, found, request, deadline=job.deadline, progress=job.watch
                )
            with self._leading_for(key) as first:
                if first:
                    return self._lead(engine, plan, found, request, job)

    def _lead(
        self, engine: Engine, plan: Plan, found: Sequence[Found], request: Request, job: Job
    ) -> Delivered:
        began = time.monotonic()
        with self._turn(job.deadline):
            self._metrics.waits.observe(time.monotonic() - began)
            with self._holder.room(job.total):
                delivered = self._holder.deliver(
                    engine, plan, found, request, deadline=job.deadline, progress=job.watch
                )
        self._metrics.fetched.inc(job.total)
        return delivered

    def _job(
        self,
        key: str,
        what: str,
        work: Callable[[Job], Delivered],
        unheard: Callable[[UnladeError], None],
    ) -> Job:
        with self._lock:
            job = self._jobs.get(key)
            if job is not None:
                job.asked = time.monotonic()
                job.waiting += 1
                return job
            self._forget_old()
            if len(self._jobs) >= self.capacity:
                raise Busy(
                    f"{len(self._jobs)} volumes are being fetched or wait for it on this node",
                    next_step="nothing: the kubelet asks again",
                )
            job = self._jobs[key] = Job(what)
            job.waiting = 1
        threading.Thread(
            target=self._run, args=(job, work, unheard), name=f"fetch {key}", daemon=True
        ).start()
        return job

    def _forget_old(self) -> None:
        """Results that nobody came for: what was fetched is in the store, an error is in the log."""
        now = time.monotonic()
        for key, job in list(self._jobs.items()):
            if job.done.is_set() and now - job.asked > _ABANDONED:
                del self._jobs[key]

    def _run(
        self, job: Job, work: Callable[[Job], Delivered], unheard: Callable[[UnladeError], None]
    ) -> None:
        try:
            job.delivered = work(job)
        except UnladeError as error:
            job.error = error
            if not job.waiting and not job.deadline.expired:
                _log.warning("fetching %s: %s", job.what, error.message)
                unheard(error)
        except Exception as error:
            _log.exception("fetching %s", job.what)
            job.error = error
        finally:
            job.done.set()

    def _led(self, key: Digest, deadline: Deadline) -> bool:
        """Whether another job was making this tree; returns when that one has ended, well or not."""
        with self._lock:
            other = self._leading.get(key)
        if other is None:
            return False
        while not other.wait(_LOOK):
            deadline.check()
        return True

    @contextmanager
    def _leading_for(self, key: Digest) -> Iterator[bool]:
        """Be the one that makes a tree, unless another is."""
        with self._lock:
            first = key not in self._leading
            mine = self._leading.setdefault(key, threading.Event())
        try:
            yield first
        finally:
            if first:
                with self._lock:
                    del self._leading[key]
                mine.set()

    @contextmanager
    def _turn(self, deadline: Deadline) -> Iterator[None]:
        while not self._turns.acquire(timeout=_LOOK):
            deadline.check()
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
            self._turns.release()


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"

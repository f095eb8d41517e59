"""Events about objects, few and useful, however often the same thing goes wrong.

A controller that retries says the same sentence many times. The recorder makes one Event object of it and
counts; it joins many different sentences with one reason about one object into one; and it lets each
object have a burst of `BURST` and then one every five minutes. The numbers are those of the Kubernetes
components, so that `kubectl describe` reads alike whoever wrote the event.

Sending happens on a thread of its own from a bounded queue: a controller never waits for an event, and an
API server that does not answer costs at most `PENDING` events. Spec: core/v1 Event.
"""

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from unlade.controllers.api import ApiError, ApiServer
from unlade.controllers.throttle import Backoff, TokenBucket

log = logging.getLogger(__name__)

REMEMBERED = 4096  # objects and sentences that are remembered; the least recently used is forgotten
BURST = 25  # events about one object at once …
REFILL = 1 / 300  # … and one more every five minutes
SIMILAR = 10  # so many sentences that differ only in their text become one
SIMILAR_SECONDS = 600.0  # … when they come within ten minutes of one another
PENDING = 1000  # events that may wait while the API server does not answer
TRIES = 12
NAME_LIMIT = 253 - 17  # room for the dot and sixteen hexadecimal digits of time
STRATEGIC = "application/strategic-merge-patch+json"

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Subject:
    """The object that an event is about."""

    kind: str
    namespace: str
    name: str
    uid: str
    resource_version: str = ""
    api_version: str = "v1"


@dataclass(frozen=True)
class Note:
    """One thing that a controller wants to say."""

    subject: Subject
    type: str
    reason: str
    message: str


class Remembered(Generic[K, V]):
    """A dictionary that forgets what was used least recently."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of this key, made when it is not there."""
        value = self._items.pop(key, None)
        if value is None:
            value = make()
        self._items[key] = value
        if len(self._items) > self._limit:
            self._items.popitem(last=False)
        return value


@dataclass
class _Similar:
    messages: set[str] = field(default_factory=set)
    at: float = 0.0


@dataclass
class _Sent:
    name: str = ""
    count: int = 0


class Recorder:
    """Sends events on a thread of its own. `start` once, `stop` lets at most `drain` seconds of work end."""

    def __init__(
        self,
        server: ApiServer,
        component: str,
        *,
        limit: TokenBucket,
        count: Callable[[str], None] = lambda _result: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._server = server
        self._component = component
        self._limit = limit
        self._count = count
        self._clock = clock
        self._now = now
        self._pending: queue.Queue[Note | None] = queue.Queue(PENDING)
        self._budgets: Remembered[Subject, TokenBucket] = Remembered(REMEMBERED)
        self._similar: Remembered[tuple[str, ...], _Similar] = Remembered(REMEMBERED)
        self._sent: Remembered[tuple[str, ...], _Sent] = Remembered(REMEMBERED)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        """Starts sending."""
        self._thread.start()

    def stop(self, drain: float = 2.0) -> None:
        """Sends what is pending for at most `drain` seconds, then ends. Idempotent."""
        if not self._thread.is_alive():
            return
        try:
            self._pending.put(None, timeout=drain)
        except queue.Full:
            log.debug("events are left unsent")
        self._thread.join(drain)
        self._stop.set()
        self._thread.join(drain)

    def warn(self, subject: Subject, reason: str, message: str) -> None:
        """Says that something is wrong with an object; returns at once."""
        self._queue(Note(subject, "Warning", reason, message))

    def inform(self, subject: Subject, reason: str, message: str) -> None:
        """Says that something happened to an object; returns at once."""
        self._queue(Note(subject, "Normal", reason, message))

    def _queue(self, note: Note) -> None:
        try:
            self._pending.put_nowait(note)
        except queue.Full:
            self._count("dropped")

    def _run(self) -> None:
        while not self._stop.is_set():
            note = self._pending.get()
            if note is None:
                return
            try:
                self._send(note)
            except Exception:
                log.exception("event about %s/%s was lost", note.subject.namespace, note.subject.name)
                self._count("failed")

    def _send(self, note: Note) -> None:
        subject = note.subject
        # the resource version changes with every status update: it is no part of who the object is
        who = Subject(subject.kind, subject.namespace, subject.name, subject.uid, "", subject.api_version)
        if not self._budgets.get(who, lambda: TokenBucket(REFILL, BURST, clock=self._clock)).try_take():
            self._count("filtered")
            return
        key, message = self._correlate(note)
        sent = self._sent.get(key, _Sent)
        backoff = Backoff(0.5, 10.0)
        for _try in range(TRIES):
            if not self._limit.wait(self._stop):
                return
            try:
                self._deliver(note, message, sent)
            except ApiError as error:
                if error.status == 404 and sent.count:
                    sent.count = 0  # the event outlived its time to live: say it anew
                    continue
                if not (error.unanswered or error.wants_patience):
                    # a namespace that is going away, or a right that is missing: it will not get better
                    log.info("event about %s/%s refused: %s", subject.namespace, subject.name, error)
                    self._count("refused")
                    return
                if self._stop.wait(max(backoff.next(), error.retry_after)):
                    return
            else:
                self._count("sent")
                return
        self._count("failed")

    def _correlate(self, note: Note) -> tuple[tuple[str, ...], str]:
        """Which sent event this note counts towards, and the text it should carry."""
        subject = note.subject
        group = (subject.kind, subject.namespace, subject.name, subject.uid, note.type, note.reason)
        similar = self._similar.get(group, _Similar)
        now = self._clock()
        if now - similar.at > SIMILAR_SECONDS:
            similar.messages.clear()
        similar.at = now
        if note.message in similar.messages or len(similar.messages) < SIMILAR - 1:
            similar.messages.add(note.message)
            return (*group, note.message), note.message
        return group, f"(combined from similar events): {note.message}"

    def _deliver(self, note: Note, message: str, sent: _Sent) -> None:
        now = self._now()
        stamp = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        path = f"/api/v1/namespaces/{note.subject.namespace}/events"
        if sent.count:
            patch = {"count": sent.count + 1, "lastTimestamp": stamp, "message": message}
            self._server.read("PATCH", f"{path}/{sent.name}", body=patch, content_type=STRATEGIC)
            sent.count += 1
            return
        name = f"{note.subject.name[:NAME_LIMIT]}.{int(now * 1e9):x}"
        self._server.read("POST", path, body=self._body(note, message, name, stamp))
        sent.name = name
        sent.count = 1

    def _body(self, note: Note, message: str, name: str, stamp: str) -> dict[str, Any]:
        subject = note.subject
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": subject.namespace},
            "involvedObject": {
                "apiVersion": subject.api_version,
                "kind": subject.kind,
                "namespace": subject.namespace,
                "name": subject.name,
                "uid": subject.uid,
                "resourceVersion": subject.resource_version,
            },
            "type": note.type,
            "reason": note.reason,
            "message": message,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }

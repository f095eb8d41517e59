"""List and watch of one kind of object into a cache of what a controller needs of it.

An informer lists in pages, applies each page as it comes (so that no second copy of the cache ever
exists), then watches from the list's resource version, with bookmarks, and re-lists only when the server
says that the version is too old (410, as an HTTP status or as an event in the stream). A cut stream, a
refused connection or a server that asks for patience is answered by watching again from the last version
seen: nothing is lost, because the server replays from there, and nothing is re-read.

Invariants: only the informer's own thread writes the cache; a handler runs on that thread after the cache
has the change; every change between two lists reaches a handler (what vanished unseen comes as a delete).
Handlers therefore must be quick: they put a key in a queue. `synced` is set once the first list is whole.

Spec: the Kubernetes API concepts "efficient detection of changes" and "retrieving large results sets in
chunks". Later controllers use this part as it is.
"""

import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import urllib3

from unlade.controllers.api import JSON, METADATA_ONLY, ApiError, ApiServer, unanswered
from unlade.controllers.objects import METADATA, STATUS, WATCH_EVENT, Manifest, MetadataOnly, Page
from unlade.controllers.throttle import Backoff

log = logging.getLogger(__name__)

PAGE = 500  # a page of pods is then two to five megabytes on the wire: little memory, few round trips
# The server ends a watch after a time drawn from here, so that a fleet's watches part and spread.
WATCH_SECONDS = (300, 600)
# Servers send a bookmark about every minute: silence for longer than two of them is a dead peer.
SILENCE = 150.0
FIRST_PAUSE = 0.1  # a restarting API server is back within seconds; the first tries should not be felt
MOST_PAUSE = 5.0  # one request every few seconds per informer is nothing to a server that struggles

M = TypeVar("M", bound=Manifest)
T = TypeVar("T")


@dataclass(frozen=True)
class Resource(Generic[M, T]):
    """What is listed, how it is decoded, and what of it is kept.

    `keep` gets each decoded object and returns what the cache shall hold, or None to hold nothing: an
    object that is of no interest then costs no memory at all.
    """

    name: str
    path: str
    manifest: type[M]
    keep: Callable[[M], T | None]
    selector: tuple[tuple[str, str], ...] = ()  # labelSelector and the like: what the server sends at all

    @property
    def metadata_only(self) -> bool:
        """Ask the server for metadata alone, which spares both sides the rest."""
        return issubclass(self.manifest, MetadataOnly)


@dataclass
class Handlers(Generic[T]):
    """Called on the informer's thread, after the cache changed.

    An object deleted and made again under the same name while no watch was open comes as an update:
    whoever cares compares UIDs.
    """

    added: Callable[[str, T], None] = lambda _key, _new: None
    updated: Callable[[str, T, T], None] = lambda _key, _old, _new: None
    deleted: Callable[[str, T], None] = lambda _key, _old: None


@dataclass
class InformerCounts:
    """What an informer did since it was made; read by metrics, written by its thread alone."""

    lists: int = 0
    pages: int = 0
    watches: int = 0
    events: int = 0
    bookmarks: int = 0
    expired: int = 0
    failures: int = 0


class Informer(Generic[M, T]):
    """A cache that follows the API server. `start` once; `stop` ends the thread and the open watch."""

    def __init__(
        self,
        server: ApiServer,
        resource: Resource[M, T],
        *,
        page: int = PAGE,
        watch_seconds: tuple[int, int] = WATCH_SECONDS,
        silence: float = SILENCE,
    ) -> None:
        self.resource = resource
        self.handlers: Handlers[T] = Handlers()
        self.counts = InformerCounts()
        self.synced = threading.Event()
        self._server = server
        self._page = page
        self._watch_seconds = watch_seconds
        self._silence = silence
        self._cache: dict[str, T] = {}
        self._version = ""  # the resource version reached; empty: a list is due
        self._stop = threading.Event()
        self._open: urllib3.BaseHTTPResponse | None = None
        self._open_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"informer-{resource.name}", daemon=True)
        self._pages = msgspec.json.Decoder(Page[resource.manifest])  # type: ignore[name-defined]
        self._objects = msgspec.json.Decoder(resource.manifest)

    def start(self) -> None:
        """Starts the thread; returns at once. Wait on `synced` before trusting an absence."""
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Ends the watch and the thread; the cache stays as it was. Idempotent."""
        self._stop.set()
        with self._open_lock:
            if self._open is not None:
                _wake(self._open)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def get(self, key: str) -> T | None:
        """What is kept of this object, as far as the informer has seen."""
        return self._cache.get(key)

    def keys(self) -> list[str]:
        """The keys of everything kept, now."""
        return list(self._cache)

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def alive(self) -> bool:
        """False once the thread has ended, which nothing but `stop` should cause."""
        return self._thread.is_alive()

    def _run(self) -> None:
        backoff = Backoff(FIRST_PAUSE, MOST_PAUSE)
        while not self._stop.is_set():
            before = self._progress()
            pause = 0.0
            try:
                if not self._version:
                    self._list()
                self._watch()
            except ApiError as error:
                if not self._stop.is_set():
                    self._note(error)
                pause = error.retry_after
            except Exception:
                # an object that breaks a handler or the decoder must not end the cache for good
                if not self._stop.is_set():
                    log.exception("informer %s: unexpected failure, listing again", self.resource.name)
                self.counts.failures += 1
                self._version = ""
            else:
                if self._progress() != before:
                    backoff.reset()
                    continue  # the ordinary end of a watch
            if self._progress() != before:
                backoff.reset()
            self._stop.wait(max(pause, backoff.next()))

    def _progress(self) -> tuple[int, int, int]:
        return self.counts.lists, self.counts.events, self.counts.bookmarks

    def _note(self, error: ApiError) -> None:
        if error.gone:
            log.info("informer %s: %s; listing again", self.resource.name, error)
            self.counts.expired += 1
            self._version = ""
        else:
            log.warning("informer %s: %s", self.resource.name, error)
            self.counts.failures += 1

    # --- list

    def _list(self) -> None:
        """Brings the cache to one consistent list of the server's, page by page.

        Without a resource version the read is the most recent one, so no page can be older than what
        the cache already holds, and pages may be applied as they come. A page token that expires (a list
        that takes longer than the server's compaction interval) starts over with larger pages.
        """
        size = self._page
        while True:
            try:
                version = self._list_pages(size)
                break
            except ApiError as error:
                if not error.gone or size == 0:
                    raise
                log.info("informer %s: page token expired, larger pages", self.resource.name)
                self.counts.expired += 1
                size = size * 4 if size < 8000 else 0
        self._version = version
        self.counts.lists += 1
        self.synced.set()
        log.info("informer %s: %d kept at version %s", self.resource.name, len(self._cache), version)

    def _list_pages(self, size: int) -> str:
        seen: set[str] = set()
        token = ""
        while True:
            if self._stop.is_set():
                raise ApiError("stopped")
            query = [*self.resource.selector, *([("limit", str(size))] if size else [])]
            if token:
                query.append(("continue", token))
            data = self._server.read("GET", self.resource.path, query=query, accept=self._accept("List"))
            page = self._pages.decode(data)
            del data  # the page's bytes and its objects need not stay together longer than this
            for item in page.items or ():
                key = item.metadata.key
                if self._apply(key, item):
                    seen.add(key)
            self.counts.pages += 1
            token = page.metadata.continue_token
            if not token:
                break
        for key in [key for key in self._cache if key not in seen]:
            self._delete(key)
        return page.metadata.resource_version

    # --- watch

    def _watch(self) -> None:
        """Follows the server from the version reached until it ends the stream; raises ApiError."""
        query = [
            *self.resource.selector,
            ("watch", "1"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", self._version),
            ("timeoutSeconds", str(random.randint(*self._watch_seconds))),  # noqa: S311 - spreads load
        ]
        answer = self._server.request(
            "GET",
            self.resource.path,
            query=query,
            accept=self._accept(""),
            read_timeout=self._silence,
        )
        self.counts.watches += 1
        with self._open_lock:
            self._open = answer
            if self._stop.is_set():
                _wake(answer)
        try:
            for line in lines(answer.stream(1 << 16)):
                self._event(line)
                if self._stop.is_set():
                    return
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise unanswered("WATCH", self.resource.path, error) from error
        finally:
            with self._open_lock:
                self._open = None
            answer.close()

    def _event(self, line: bytes) -> None:
        event = WATCH_EVENT.decode(line)
        if event.type == "ERROR":
            status = STATUS.decode(event.object)
            raise ApiError(status.message or status.reason, status=status.code, reason=status.reason)
        if event.type == "BOOKMARK":
            self._version = METADATA.decode(event.object).metadata.resource_version
            self.counts.bookmarks += 1
            return
        item = self._objects.decode(event.object)
        if event.type == "DELETED":
            self._delete(item.metadata.key)
        else:
            self._apply(item.metadata.key, item)
        self._version = item.metadata.resource_version
        self.counts.events += 1

    # --- the cache

    def _apply(self, key: str, item: M) -> bool:
        kept = self.resource.keep(item)
        if kept is None:
            self._delete(key)
            return False
        old = self._cache.get(key)
        self._cache[key] = kept
        if old is None:
            self.handlers.added(key, kept)
        else:
            self.handlers.updated(key, old, kept)
        return True

    def _delete(self, key: str) -> None:
        kept = self._cache.pop(key, None)
        if kept is not None:
            self.handlers.deleted(key, kept)

    def _accept(self, suffix: str) -> str:
        if self.resource.metadata_only:
            return METADATA_ONLY.format(kind="PartialObjectMetadata" + suffix)
        return JSON


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The whole lines in a stream of chunks; what follows the last newline is a torn event and dropped."""
    rest: list[bytes] = []
    for chunk in chunks:
        parts = chunk.split(b"\n")
        if len(parts) > 1:
            rest.append(parts[0])
            first = b"".join(rest)
            rest = []
            if first.strip():
                yield first
            yield from (part for part in parts[1:-1] if part.strip())
        if parts[-1]:
            rest.append(parts[-1])


def _wake(answer: urllib3.BaseHTTPResponse) -> None:
    """Ends a read that another thread is blocked in; the answer may be finished already."""
    try:
        answer.shutdown()
    except (OSError, ValueError, RuntimeError):
        log.debug("watch was over before it could be ended")

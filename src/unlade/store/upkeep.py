"""Upkeep of a store that nobody tends: its file system stays below a mark, least recently used goes first.

A node whose images are containerd's has the kubelet to do this. A node whose content is in a directory store
has `Upkeep`: a thread that looks at the file system every few seconds and, when more than `high` percent of
it are used (by whomever), collects garbage and then drops image records, the one used longest ago first,
until at most `low` percent are. What is mounted or held by a lease is never dropped, nor does it count as
unused: a record whose tree is mounted was used just now. Dropping is decided in the transaction that drops,
so a mount that comes at the same moment either finds the tree held or finds no record and pulls again.

Polling alone loses against a fast network, so whoever knows how much will come asks for room first
(`room`). Room that cannot be made is refused before the disk is full: a node whose disk is full has worse
problems than one volume.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from unlade.errors import InvalidInput, UnladeError
from unlade.kernel import failpoints
from unlade.store.failure import NoSpace, explaining
from unlade.store.gc import GCReport, collect, collect_from
from unlade.store.images import ImageRecord, drop

if TYPE_CHECKING:
    from unlade.store.dirstore import DirStore

log = logging.getLogger(__name__)

# The kubelet's own marks for images.
HIGH_PERCENT: Final = 85.0
LOW_PERCENT: Final = 80.0
# One statvfs a time; a fast disk writes a few gigabytes meanwhile, which is what `room` is for.
POLL_SECONDS: Final = 10.0
# Never given away: file systems crawl when nearly full, and logs and other pods need some.
RESERVE_PERCENT: Final = 5.0


@dataclass(frozen=True, slots=True)
class Usage:
    """A file system: what is used, and what ordinary users could have at most (as df counts)."""

    used: int
    total: int

    @property
    def percent(self) -> float:
        return 100.0 * self.used / self.total if self.total else 0.0

    def room(self, percent: float) -> int:
        """Bytes until so many percent are used; negative beyond."""
        return int(self.total * percent / 100.0) - self.used


@dataclass(slots=True)
class Tidied:
    """One pass: what it found, what it dropped and what it left."""

    before: Usage
    after: Usage
    records: int = 0
    bytes: int = 0


class Upkeep:
    """Keeps one store's file system below a mark. `start` and `stop` the thread, or call `tidy`.

    `mounted` gives the mount points that exist now, one for each mount. Thread-safe.
    """

    def __init__(
        self,
        store: DirStore,
        *,
        mounted: Callable[[], Sequence[bytes]],
        high: float = HIGH_PERCENT,
        low: float = LOW_PERCENT,
        poll: float = POLL_SECONDS,
        usage: Callable[[], Usage] | None = None,
        told: Callable[[Tidied], None] = lambda _: None,
    ) -> None:
        if not 0 < low <= high <= 100 - RESERVE_PERCENT:
            raise InvalidInput(
                f"collecting from {high:g} % down to {low:g} % is not possible",
                next_step=f"give 0 < low <= high <= {100 - RESERVE_PERCENT:g}",
            )
        self.high = high
        self.low = low
        self._store = store
        self._mounted = mounted
        self._poll = poll
        self._usage = usage or self._statvfs
        self._told = told
        self._promised = 0
        self._lock = threading.Lock()
        self._tidying = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        """Begin to look after the store."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a pass under way ends first. Idempotent."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def usage(self) -> Usage:
        """The file system now, with what was promised to deliveries under way."""
        now = self._usage()
        with self._lock:
            return Usage(now.used + self._promised, now.total)

    @contextmanager
    def room(self, size: int) -> Iterator[None]:
        """Around a delivery that will write about so many bytes: collects for it; NoSpace when in vain."""
        if size > self.usage().room(self.high):
            self.tidy(extra=size)
        with self._lock:
            now = self._usage()
            left = Usage(now.used + self._promised, now.total).room(100 - RESERVE_PERCENT)
            if size > left:
                raise NoSpace(
                    f"{size} bytes are needed and {max(left, 0)} can be had: the rest is in use",
                    next_step="end pods that use other content on this node, or give the store a larger disk",
                )
            self._promised += size
        try:
            yield
        finally:
            with self._lock:
                self._promised -= size
            self._wake.set()

    def tidy(self, *, extra: int = 0) -> Tidied | None:
        """One pass, as if `extra` bytes were used already; None when there was nothing to do."""
        with self._tidying:
            before = self.usage()
            self._refresh_used()
            if before.room(self.high) >= extra:
                return None
            done = Tidied(before, before)
            self._add(done, collect(self._store, mounted=self._mounted()))
            for record in sorted(self._store.images.all(), key=lambda one: one.used):
                if self._enough(extra):
                    break
                if self._drop_unused(record):
                    done.records += 1
                    names = [f"b:{one.digest}" for one in (record.index, record.manifest) if one]
                    names += [f"t:{record.tree}"] if record.tree else []
                    self._add(done, collect_from(self._store, names))
            done.after = self.usage()
            if done.after.room(self.low) < extra:
                log.warning(
                    "%.0f %% of the store's file system are used, more than %g %%: nothing unused is left",
                    done.after.percent,
                    self.low,
                )
            self._told(done)
            return done

    def _enough(self, extra: int) -> bool:
        return self.usage().room(self.low) >= extra

    def _add(self, done: Tidied, report: GCReport) -> None:
        done.bytes += report.bytes

    def _drop_unused(self, record: ImageRecord) -> bool:
        with self._store.database.write() as connection:
            if record.tree is not None and _in_use(connection.execute(_HOLDERS, (f"t:{record.tree}",))):
                return False
            drop(connection, record.reference, record.handler)
        failpoints.reach("store.upkeep.dropped")
        self._store.images.project()
        return True

    def _refresh_used(self) -> None:
        """What is mounted or leased is in use now, however long ago it was asked for."""
        with self._store.database.read() as connection:
            used = {child[2:] for (child,) in connection.execute(_USED)}
        for record in self._store.images.all() if used else ():
            if str(record.tree) in used:
                self._store.images.touch(record.reference, record.handler)

    def _statvfs(self) -> Usage:
        with explaining("look at the store's file system"):
            now = os.statvfs(self._store.path)
        used = (now.f_blocks - now.f_bfree) * now.f_frsize
        return Usage(used, used + now.f_bavail * now.f_frsize)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.tidy()
            except UnladeError:
                log.exception("the store could not be tidied; next try in %g s", self._poll)
            self._wake.wait(self._poll)
            self._wake.clear()


# A record's own edge keeps its tree, too; a stack keeps its layers, and is held itself where it is used.
_HOLDERS: Final = "SELECT parent FROM edges WHERE child = ?"
_USED: Final = "SELECT child FROM edges WHERE parent BETWEEN 'l:' AND 'l;' OR parent BETWEEN 'm:' AND 'm;'"


def _in_use(parents: Iterator[tuple[str]]) -> bool:
    return any(name.startswith(("m:", "l:")) for (name,) in parents)

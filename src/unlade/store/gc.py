"""Garbage collection: what nothing refers to is removed, and only that.

Objects and roots (records, leases, mounts) form one acyclic graph: names are digests. An object is garbage
when no edge leads to it. The collector looks at a few objects at a time and removes those without an edge
in the same transaction that looked; what a removed object kept alive is looked at again. That gives exactly
what a mark from the roots would, without a mark: `garbage` computes it by a recursive query, and is used
for dry runs and to check this in tests.

Invariant: a root's edge is made only in a transaction that sees all it leads to (`hold`, `put`, `mounting`,
commit under a lease), and an object's record is removed only in one that sees no edge to it. So whoever
holds something keeps it, whoever comes too late finds it missing and makes it again, and nobody ever holds
what is gone. A blob that a pull has committed but not yet recorded is held by the pull's lease from birth. A
manifest may come before its layers: its edges keep them when they come, and a record waits for them.

A concurrent pull waits for at most one batch: `_BATCH` look-ups and one sync.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from unlade.kernel import failpoints
from unlade.model import Deadline, InvalidDigest
from unlade.store.failure import explaining
from unlade.store.layout import from_file_name
from unlade.store.removal import blob_lock, empty_trash, forget, free_names, hide_data

if TYPE_CHECKING:
    from collections.abc import Sequence
    from sqlite3 import Connection

    from unlade.store.dirstore import DirStore
    from unlade.store.images import ImageRecord

# Objects looked at in one read, and removed in one write. The write holds up everybody else for its
# look-ups and one sync: a few milliseconds. More per batch gains little, because the sync dominates.
_PAGE: Final = 500
_BATCH: Final = 64
# A batch ends early when it took this long: the machine is busy, and others wait.
_BATCH_SECONDS: Final = 0.005
# Between two writes: whoever waits for the database gets it before us, and we take half of it at most, so
# that on a busy machine, where a turn lasts until the scheduler comes round, others still get theirs.
_BREATH: Final = 0.001
# A partial blob that nobody continued for this long will not be continued.
PARTIAL_SECONDS: Final = 24 * 3600.0


@dataclass(slots=True)
class GCReport:
    """What was (or, in a dry run, would be) removed."""

    blobs: int = 0
    trees: int = 0
    bytes: int = 0
    leases: int = 0
    mounts: int = 0
    partials: int = 0
    strays: int = 0
    removed: list[str] = field(default_factory=list)


def collect(
    store: DirStore,
    *,
    keep_recent: float = 0.0,
    mounted: Sequence[bytes] | None = None,
    dry_run: bool = False,
    deadline: Deadline | None = None,
) -> GCReport:
    """Remove every object that nothing refers to, dead leases, old partials and files without a record.

    `keep_recent` spares objects younger than that many seconds. `mounted` are the mount points that
    exist now, one for each mount, to drop the records of mounts that do not; without it every record counts.
    """
    deadline = deadline or Deadline.never()
    now = time.time()
    report = GCReport()
    if dry_run:
        for name, size in garbage(store, newer_than=_before(keep_recent, now)):
            _count(report, name, size)
        return report
    report.leases = store.leases.end_dead(now)
    store.grants.end_expired(now)
    store.heads.end_unknown()
    if mounted is not None:
        report.mounts = len(store.mounts.reconcile(mounted))
    _sweep(store, _all_names(store, deadline), report, _before(keep_recent, now), deadline)
    _sweep_partials(store, report, now - PARTIAL_SECONDS)
    _sweep_strays(store, report, deadline)
    _sweep_locks(store)
    empty_trash(store.layout)
    return report


def collect_from(store: DirStore, names: Iterable[str], *, deadline: Deadline | None = None) -> GCReport:
    """Remove these objects, and what only they kept, where nothing else refers to them: `rmi` uses it."""
    report = GCReport()
    _sweep(store, names, report, None, deadline or Deadline.never())
    empty_trash(store.layout)
    return report


def remove_image(
    store: DirStore, reference: str, handler: str | None = None, *, deadline: Deadline | None = None
) -> tuple[list[ImageRecord], GCReport]:
    """Drop a tuple, or every tuple of a reference, and free what nothing else needs (R4)."""
    dropped = store.images.delete(reference, handler)
    names = []
    for record in dropped:
        names += [f"b:{descriptor.digest}" for descriptor in (record.index, record.manifest) if descriptor]
        names += [f"t:{record.tree}"] if record.tree else []
    return dropped, collect_from(store, names, deadline=deadline)


def garbage(store: DirStore, *, newer_than: float | None = None) -> list[tuple[str, int]]:
    """What a collection would remove now: every object that no live root reaches, with its size."""
    dead = [f"l:{lease.id}" for lease in store.leases.dead(time.time())]
    with store.database.read() as connection:
        return connection.execute(
            "WITH RECURSIVE live(name) AS ("
            "  SELECT child FROM edges WHERE parent NOT BETWEEN 'b:' AND 'b;'"
            "    AND parent NOT BETWEEN 't:' AND 't;' AND parent NOT IN (SELECT value FROM json_each(?2))"
            "  UNION SELECT name FROM objects WHERE created > ?1"
            "  UNION SELECT edges.child FROM live JOIN edges ON edges.parent = live.name"
            ") SELECT name, size FROM objects WHERE name NOT IN live ORDER BY name",
            (newer_than if newer_than is not None else float("inf"), json.dumps(dead)),
        ).fetchall()


def _before(keep_recent: float, now: float) -> float | None:
    return now - keep_recent if keep_recent else None


def _all_names(store: DirStore, deadline: Deadline) -> Iterable[str]:
    last = ""
    while True:
        deadline.check()
        with store.database.read() as connection:
            rows = connection.execute(
                "SELECT name FROM objects WHERE name > ? ORDER BY name LIMIT ?", (last, _PAGE)
            ).fetchall()
        if not rows:
            return
        yield from (row[0] for row in rows)
        last = rows[-1][0]


def _sweep(
    store: DirStore, names: Iterable[str], report: GCReport, before: float | None, deadline: Deadline
) -> None:
    again: deque[str] = deque()
    source = iter(names)
    while True:
        deadline.check()
        batch = [again.popleft() for _ in range(min(len(again), _PAGE))]
        for name in source:
            if len(batch) >= _PAGE:
                again.append(name)
                break
            batch.append(name)
        if not batch:
            return
        with store.database.read() as connection:
            # Readers hold nobody up; most of a store is not garbage and never gets further than this.
            suspects = _garbage_among(connection, batch, before)
        for start in range(0, len(suspects), _BATCH):
            started = time.monotonic()
            again.extend(_remove(store, suspects[start : start + _BATCH], report, before))
            time.sleep(max(_BREATH, time.monotonic() - started))


def _remove(store: DirStore, names: list[str], report: GCReport, before: float | None) -> list[str]:
    """Remove those of the names that are garbage now; returns what must be looked at (again)."""
    again: list[str] = []
    with free_names(store, names) as free:
        victims: list[str] = []
        with store.database.write() as connection:
            started = time.monotonic()
            for name in _garbage_among(connection, free, before):
                if time.monotonic() - started > _BATCH_SECONDS:
                    again.append(name)
                    continue
                size = connection.execute("SELECT size FROM objects WHERE name = ?", (name,)).fetchone()[0]
                children = connection.execute("SELECT child FROM edges WHERE parent = ?", (name,)).fetchall()
                again.extend(row[0] for row in children)
                forget(connection, name)
                victims.append(name)
                _count(report, name, size)
        failpoints.reach("store.gc.forgotten")
        for name in victims:
            hide_data(store.layout, name)
            failpoints.reach("store.gc.hidden")
    return again


def _garbage_among(connection: Connection, names: list[str], before: float | None) -> list[str]:
    rows = connection.execute(
        "SELECT name FROM json_each(?1) JOIN objects ON name = value"
        " WHERE (?2 IS NULL OR created <= ?2)"
        " AND NOT EXISTS (SELECT 1 FROM edges WHERE child = name)",
        (json.dumps(names), before),
    )
    # A name that came up twice is garbage once.
    return list(dict.fromkeys(row[0] for row in rows))


def _count(report: GCReport, name: str, size: int) -> None:
    report.removed.append(name[2:])
    report.bytes += size
    if name.startswith("b:"):
        report.blobs += 1
    else:
        report.trees += 1


def _sweep_partials(store: DirStore, report: GCReport, before: float) -> None:
    with explaining("remove old partial downloads"):
        for entry in _entries(store.layout.ingest):
            try:
                if entry.stat(follow_symlinks=False).st_mtime > before:
                    continue
                lock = blob_lock(from_file_name(entry.name))
            except FileNotFoundError:
                continue
            except InvalidDigest:
                lock = f"stray-{entry.name}"
            with store.locks.try_hold(lock) as held:
                if held:
                    os.unlink(entry.path)
                    report.partials += 1
                    failpoints.reach("store.gc.partial-removed")


def _sweep_strays(store: DirStore, report: GCReport, deadline: Deadline) -> None:
    """Files and directories whose record was never written, or is gone: a crash left them."""
    with explaining("remove files without a record"):
        for directory in store.layout.blob_directories():
            for page in _pages(directory, deadline):
                paths = {f"b:{directory.name}:{entry.name}": entry.path for entry in page}
                for name in _unrecorded(store, paths):
                    lock = "blob-" + name[2:].replace(":", "-", 1)
                    report.strays += _remove_stray(store, name, lock, paths[name])
        for page in _pages(store.layout.trees, deadline):
            paths = {"t:" + entry.name.replace("-", ":", 1): entry.path for entry in page}
            for name in _unrecorded(store, paths):
                lock = "tree-" + name[2:].replace(":", "-", 1)
                report.strays += _remove_stray(store, name, lock, paths[name])


def _sweep_locks(store: DirStore) -> None:
    """Names that a killed process held: the kernel let go of the locks, nobody removed the files."""
    for entry in list(_entries(store.layout.locks)):
        # To hold a name and let it go is what removes its file.
        with store.locks.try_hold(entry.name):
            pass


def _remove_stray(store: DirStore, name: str, lock: str, path: str) -> int:
    with store.locks.try_hold(lock) as held:
        # Looked at again under the lock: an ingest may have committed it in the meantime.
        if not held or _recorded(store, name):
            return 0
        removed = store.layout.discard(store.layout.root / path) is not None
        failpoints.reach("store.gc.stray-removed")
        return int(removed)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        yield from entries


def _pages(directory: Path, deadline: Deadline) -> Iterator[list[os.DirEntry[str]]]:
    entries = _entries(directory)
    while page := list(itertools.islice(entries, _PAGE)):
        deadline.check()
        yield page


def _unrecorded(store: DirStore, names: Iterable[str]) -> list[str]:
    with store.database.read() as connection:
        rows = connection.execute(
            "SELECT value FROM json_each(?) WHERE value NOT IN (SELECT name FROM objects)",
            (json.dumps(list(names)),),
        )
        return [row[0] for row in rows]


def _recorded(store: DirStore, name: str) -> bool:
    with store.database.read() as connection:
        return connection.execute("SELECT 1 FROM objects WHERE name = ?", (name,)).fetchone() is not None

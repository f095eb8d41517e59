"""Checking a store: every blob hashed, every record compared with what it names.

Content is immutable and named by its digest, so rot is always visible; what is rotten is moved to
quarantine and its record dropped, so that the next pull brings it anew. Records that are left without
their content are cut down to what is whole, or dropped. Leftovers of a crash that harm nobody (a partial
blob, a file without a record) are not problems: `collect` removes them. Trees are checked one room up, by
`unlade.tree.checking`, which calls this. Costs one read of every byte; nobody is held up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from unlade.kernel import failpoints
from unlade.model import Deadline, Digest
from unlade.store.content import BlobInfo
from unlade.store.failure import explaining
from unlade.store.images import ImageRecord, drop, image_name, keeps, missing_below
from unlade.store.layout import file_name
from unlade.store.removal import blob_lock, forget, tree_lock

if TYPE_CHECKING:
    from pathlib import Path

    from unlade.store.dirstore import DirStore

_CHUNK: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as its record says. `kind` is stable; `detail` says what to do about it."""

    kind: str
    subject: str
    detail: str
    repaired: bool = False


def check_database(store: DirStore) -> Iterator[Problem]:
    """sqlite's own check."""
    verdict = store.database.integrity()
    if verdict != "ok":
        yield Problem(
            "database", str(store.layout.database), f"{verdict}; move the store away and pull again"
        )


def check_blobs(store: DirStore, *, repair: bool, deadline: Deadline) -> Iterator[Problem]:
    """Hash every blob."""
    buffer = memoryview(bytearray(_CHUNK))
    for info in store.walk():
        wrong = _what_is_wrong(store.layout.blob(info.digest), info, buffer, deadline)
        # Deleted while we read: gone is not damaged.
        if wrong is None or store.stat(info.digest) is None:
            continue
        if repair:
            quarantine(store, f"b:{info.digest}")
        kind = "blob-missing" if wrong == "missing" else "blob-damaged"
        yield Problem(kind, str(info.digest), f"{wrong}; {_again(repair)}", repair)


def check_records(store: DirStore, *, repair: bool) -> Iterator[Problem]:
    """Every record against the objects it names, and index.json against the records."""
    for record in store.images.all():
        node = image_name(record.reference, record.handler)
        with store.database.snapshot() as connection:
            content_gone = (
                missing_below(connection, f"b:{record.manifest.digest}") if record.content else None
            )
            tree = f"t:{record.tree}" if record.tree else ""
            tree_gone = missing_below(connection, tree) if tree and keeps(connection, record, tree) else None
        missing = content_gone or tree_gone
        if missing and store.images.get(record.reference, record.handler) == record:
            if repair:
                _cut_down(store, record, content_gone is None, tree_gone is None)
            yield Problem(
                "record-incomplete", node[2:].strip(), f"{missing[2:]} is not there; {_again(repair)}", repair
            )
    if not store.layout.marker_is_right():
        if repair:
            with explaining("write oci-layout"):
                store.layout.write_marker()
        yield Problem(
            "layout-marker", str(store.path / "oci-layout"), "is not what readers look for", repaired=repair
        )
    if not repair:
        if not store.images.is_projected():
            yield Problem("index-stale", str(store.layout.index), "does not say what the records say")
    elif store.images.project():
        yield Problem("index-stale", str(store.layout.index), "written again", repaired=True)


def quarantine(store: DirStore, name: str) -> None:
    """Take a damaged object out of use: its record is dropped, its data kept for whoever wants to look.

    What refers to it is not asked: it refers to something that is not what it should be.
    """
    digest = Digest.parse(name[2:])
    blob = name.startswith("b:")
    path = store.layout.blob(digest) if blob else store.layout.tree(digest)
    with store.locks.hold(blob_lock(digest) if blob else tree_lock(digest)):
        with store.database.write() as connection:
            forget(connection, name)
        failpoints.reach("store.fsck.forgotten")
        kept = store.layout.quarantine / f"{name[0]}-{file_name(digest)}.{time.time_ns()}"
        with explaining(f"quarantine {digest}"):
            try:
                os.rename(path, kept)
            except FileNotFoundError:
                return
        failpoints.reach("store.fsck.quarantined")


def _what_is_wrong(path: Path, info: BlobInfo, buffer: memoryview, deadline: Deadline) -> str | None:
    hasher = info.digest.hasher()
    size = 0
    try:
        with open(path, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                deadline.check()
                hasher.update(buffer[:count])
                size += count
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if size != info.size:
        return f"has {size} bytes where {info.size} were recorded"
    return None if info.digest.matches(hasher) else "has other bytes than its digest says"


def _cut_down(store: DirStore, record: ImageRecord, content: bool, tree: bool) -> None:
    """Leave a record what is whole of it, or drop it when nothing is."""
    keep_content = record.content and content
    keep_tree = record.tree if tree else None
    node = image_name(record.reference, record.handler)
    with store.database.write() as connection:
        if not keep_content and keep_tree is None:
            drop(connection, record.reference, record.handler)
            return
        connection.execute(
            "UPDATE images SET content = ?, tree = ?, whole_index = 0 WHERE reference = ? AND handler = ?",
            (keep_content, str(keep_tree) if keep_tree else None, record.reference, record.handler),
        )
        if keep_tree is None:
            connection.execute("DELETE FROM edges WHERE parent = ? AND child = ?", (node, f"t:{record.tree}"))
    failpoints.reach("store.fsck.record-cut-down")


def _again(repair: bool) -> str:
    return "pull what needs it again" if repair else "run with --repair, then pull what needs it again"

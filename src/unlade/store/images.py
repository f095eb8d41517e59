"""Image records: which content a reference means to a runtime handler (R1, R4).

The key is the tuple (reference, handler). A record names the manifest and, where it was chosen from one,
the index: either digest finds it. It holds blobs (`content`), a tree, or both. A record is written in a
transaction that sees everything it names, so it is never valid over missing content. Dropping a tuple
leaves what others need. `index.json` is a projection of the records that hold blobs, for tools that read
the directory as an OCI image layout; it is derived, and rewritten when the store is opened if it is stale.
Costs: put, get and delete touch one record; the projection and `sizes` are linear in the records.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from sqlite3 import Connection
from typing import Any, Final

from unlade.errors import StoreError
from unlade.kernel import failpoints
from unlade.model import Descriptor, Digest, Platform, mediatypes, platform_to_json
from unlade.store.database import Database
from unlade.store.failure import explaining
from unlade.store.layout import Layout, replace_file
from unlade.store.locks import KeyLocks

HANDLER_ANNOTATION: Final = "unlade.dev/runtime-handler"
# `used` is for people and eviction: a minute's precision, so that a hot image costs no write per use.
_USED_PRECISION: Final = 60.0
_COLUMNS: Final = "reference, handler, manifest, index_descriptor, platform, tree, content, created, used"


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """What (reference, handler) means. `content`: all blobs below the manifest are in the store."""

    reference: str
    handler: str
    manifest: Descriptor
    index: Descriptor | None = None
    platform: Platform | None = None
    tree: Digest | None = None
    content: bool = False
    created: float = 0.0
    used: float = 0.0


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Bytes a record keeps: `unique` would be freed with it, `shared` are kept by others too."""

    reference: str
    handler: str
    unique: int
    shared: int


class IncompleteContent(StoreError):
    """A record would name content that is not in the store."""

    code = "incomplete-content"


class Images:
    """The image records of one store; thread-safe."""

    def __init__(self, database: Database, layout: Layout, locks: KeyLocks) -> None:
        self._database = database
        self._layout = layout
        self._locks = locks

    def put(self, record: ImageRecord, *, elsewhere: bool = False) -> ImageRecord:
        """Write a record, durable on return; raises IncompleteContent when something it names is missing.

        A record of the same manifest is joined with the one that is there: it keeps its blobs and,
        when the new one has none, its tree. Any other is replaced. `elsewhere`: its tree is in another
        store, such as containerd's, and this record does not keep it: whoever reads it looks there.
        """
        now = time.time()
        with self._database.write() as connection:
            before = _get(connection, record.reference, record.handler)
            if before and before.manifest.digest == record.manifest.digest:
                record = _joined(record, before)
            kept, whole_index = _check(connection, record, elsewhere=elsewhere)
            record = replace(record, created=before.created if before else now, used=now)
            node = image_name(record.reference, record.handler)
            connection.execute("DELETE FROM edges WHERE parent = ?", (node,))
            connection.executemany("INSERT INTO edges VALUES (?, ?)", [(node, name) for name in kept])
            connection.execute(
                "INSERT OR REPLACE INTO images (reference, handler, manifest, manifest_digest,"
                " index_descriptor, index_digest, platform, tree, content, whole_index, created, used)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    record.reference,
                    record.handler,
                    json.dumps(record.manifest.to_json()),
                    str(record.manifest.digest),
                    json.dumps(record.index.to_json()) if record.index else None,
                    str(record.index.digest) if record.index else None,
                    json.dumps(platform_to_json(record.platform)) if record.platform else None,
                    str(record.tree) if record.tree else None,
                    record.content,
                    whole_index,
                    record.created,
                    record.used,
                ),
            )
        failpoints.reach("store.image.recorded")
        self.project()
        return record

    def get(self, reference: str, handler: str = "") -> ImageRecord | None:
        """The record of a tuple."""
        with self._database.read() as connection:
            return _get(connection, reference, handler)

    def with_digest(self, digest: Digest) -> list[ImageRecord]:
        """Every record whose manifest or index has this digest."""
        with self._database.read() as connection:
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM images WHERE manifest_digest = ?1 OR index_digest = ?1"  # noqa: S608
                " ORDER BY reference, handler",
                (str(digest),),
            )
            return [_record(row) for row in rows]

    def sharing(self, tree: Digest, manifests: Iterable[Digest]) -> list[ImageRecord]:
        """Every record that has this tree, or one of these manifests."""
        digests = [str(one) for one in manifests]
        with self._database.read() as connection:
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM images WHERE tree = ?"  # noqa: S608
                f" OR manifest_digest IN ({', '.join('?' * len(digests))}) ORDER BY reference, handler",
                (str(tree), *digests),
            )
            return [_record(row) for row in rows]

    def all(self) -> list[ImageRecord]:
        """Every record, by reference and handler."""
        with self._database.read() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM images ORDER BY reference, handler")  # noqa: S608
            return [_record(row) for row in rows]

    def touch(self, reference: str, handler: str = "") -> None:
        """Note that a tuple was used just now; at most one write a minute."""
        now = time.time()
        with self._database.read() as connection:
            row = connection.execute(
                "SELECT used FROM images WHERE reference = ? AND handler = ?", (reference, handler)
            ).fetchone()
        if row and row[0] < now - _USED_PRECISION:
            with self._database.write(durable=False) as connection:
                connection.execute(
                    "UPDATE images SET used = ? WHERE reference = ? AND handler = ?",
                    (now, reference, handler),
                )

    def delete(self, reference: str, handler: str | None = None) -> list[ImageRecord]:
        """Drop one tuple, or with handler None every tuple of the reference; returns what was dropped.

        Content stays until it is collected, and as long as anything else needs it (R4).
        """
        with self._database.write() as connection:
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM images WHERE reference = ? AND (?2 IS NULL OR handler = ?2)",  # noqa: S608
                (reference, handler),
            ).fetchall()
            dropped = [_record(row) for row in rows]
            for record in dropped:
                drop(connection, record.reference, record.handler)
        failpoints.reach("store.image.dropped")
        if dropped:
            self.project()
        return dropped

    def sizes(self) -> dict[tuple[str, str], ImageSize]:
        """What each tuple keeps on disk; bytes that several keep are nobody's `unique` (R4)."""
        with self._database.read() as connection:
            rows = connection.execute(
                "WITH RECURSIVE reach(root, name) AS ("
                "  SELECT parent, child FROM edges WHERE parent >= 'i:' AND parent < 'i;'"
                "  UNION SELECT root, edges.child FROM reach JOIN edges ON edges.parent = reach.name"
                ") SELECT root, name, size FROM reach JOIN objects USING (name)"
            ).fetchall()
        users = Counter(name for _, name, _ in rows)
        unique: Counter[str] = Counter()
        shared: Counter[str] = Counter()
        for root, name, size in rows:
            (unique if users[name] == 1 else shared)[root] += size
        return {
            (record.reference, record.handler): ImageSize(
                record.reference, record.handler, unique[node], shared[node]
            )
            for record in self.all()
            for node in [image_name(record.reference, record.handler)]
        }

    def total_size(self) -> int:
        """Bytes of all objects in the store, each counted once."""
        with self._database.read() as connection:
            return int(connection.execute("SELECT coalesce(sum(size), 0) FROM objects").fetchone()[0])

    def project(self) -> bool:
        """Make index.json say what the records say; returns whether it was stale."""
        with self._locks.hold("index"), explaining("write index.json"):
            data = self._projection()
            if self._read_index() == data:
                return False
            replace_file(self._layout.index, data, temporary=self._layout.private / "index.json.new")
        failpoints.reach("store.image.projected")
        return True

    def is_projected(self) -> bool:
        """Whether index.json says what the records say."""
        with self._locks.hold("index"), explaining("read index.json"):
            return self._read_index() == self._projection()

    def _projection(self) -> bytes:
        with self._database.read() as connection:
            rows = connection.execute(
                f"SELECT whole_index, {_COLUMNS} FROM images WHERE content ORDER BY reference, handler"  # noqa: S608
            ).fetchall()
        entries = _projected((_record(row[1:]), bool(row[0])) for row in rows)
        document = {"schemaVersion": 2, "mediaType": mediatypes.OCI_INDEX, "manifests": entries}
        return json.dumps(document, indent=2).encode() + b"\n"

    def _read_index(self) -> bytes | None:
        try:
            return self._layout.index.read_bytes()
        except FileNotFoundError:
            return None


def image_name(reference: str, handler: str) -> str:
    """The name of a record in the graph."""
    return f"i:{handler} {reference}"


def drop(connection: Connection, reference: str, handler: str) -> None:
    """Inside a write transaction: delete a record and let go of what it kept."""
    connection.execute("DELETE FROM images WHERE reference = ? AND handler = ?", (reference, handler))
    connection.execute("DELETE FROM edges WHERE parent = ?", (image_name(reference, handler),))


def keeps(connection: Connection, record: ImageRecord, name: str) -> bool:
    """Whether the record keeps an object of this store alive; not so for a tree that is elsewhere."""
    node = image_name(record.reference, record.handler)
    query = "SELECT 1 FROM edges WHERE parent = ? AND child = ?"
    return connection.execute(query, (node, name)).fetchone() is not None


def missing_below(connection: Connection, name: str) -> str | None:
    """Something that an object needs, itself included, and that is not in the store; None when whole."""
    row = connection.execute(
        "WITH RECURSIVE reach(name) AS ("
        "  SELECT ? UNION SELECT edges.child FROM reach JOIN edges ON edges.parent = reach.name"
        ") SELECT name FROM reach WHERE name NOT IN (SELECT name FROM objects) LIMIT 1",
        (name,),
    ).fetchone()
    return row[0] if row else None


def _check(connection: Connection, record: ImageRecord, *, elsewhere: bool) -> tuple[list[str], bool]:
    """What the record keeps alive, and whether its index is whole; raises IncompleteContent."""
    if not record.content and record.tree is None:
        raise IncompleteContent(
            f"a record of {record.reference} would hold neither blobs nor a tree", next_step="pull it first"
        )
    kept = []
    if record.content:
        missing = missing_below(connection, f"b:{record.manifest.digest}")
        if missing:
            raise _incomplete(record, missing)
    if record.tree is not None and not elsewhere:
        missing = missing_below(connection, f"t:{record.tree}")
        if missing:
            raise _incomplete(record, missing)
        kept.append(f"t:{record.tree}")
    blobs = [f"b:{descriptor.digest}" for descriptor in (record.manifest, record.index) if descriptor]
    kept.extend(name for name in blobs if _exists(connection, name))
    whole = record.index is not None and missing_below(connection, f"b:{record.index.digest}") is None
    return list(dict.fromkeys(kept)), whole


def _exists(connection: Connection, name: str) -> bool:
    return connection.execute("SELECT 1 FROM objects WHERE name = ?", (name,)).fetchone() is not None


def _incomplete(record: ImageRecord, missing: str) -> IncompleteContent:
    return IncompleteContent(
        f"{missing[2:]}, which {record.reference} needs, is not in the store",
        next_step="pull it again, under a lease until it is recorded",
    )


def _joined(record: ImageRecord, before: ImageRecord) -> ImageRecord:
    return replace(
        record,
        index=record.index or before.index,
        platform=record.platform or before.platform,
        tree=record.tree or before.tree,
        content=record.content or before.content,
    )


def _get(connection: Connection, reference: str, handler: str) -> ImageRecord | None:
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM images WHERE reference = ? AND handler = ?",  # noqa: S608
        (reference, handler),
    ).fetchone()
    return _record(row) if row else None


def _record(row: Any) -> ImageRecord:
    reference, handler, manifest, index, platform, tree, content, created, used = row
    return ImageRecord(
        reference,
        handler,
        _descriptor(manifest),
        _descriptor(index) if index else None,
        _platform(platform) if platform else None,
        Digest.parse(tree) if tree else None,
        bool(content),
        created,
        used,
    )


def _descriptor(text: str) -> Descriptor:
    value = json.loads(text)
    return Descriptor(
        media_type=value["mediaType"],
        digest=Digest.parse(value["digest"]),
        size=value["size"],
        annotations=value.get("annotations", {}),
        artifact_type=value.get("artifactType", ""),
    )


def _platform(text: str) -> Platform:
    value = json.loads(text)
    return Platform(
        value["os"],
        value["architecture"],
        value.get("variant", ""),
        value.get("os.version", ""),
        tuple(value.get("os.features", ())),
    )


def _projected(records: Iterable[tuple[ImageRecord, bool]]) -> list[dict[str, Any]]:
    """Entries of index.json. A reference that means different content to another handler gets a name of
    its own there (`reference+handler`), because readers refuse a name that occurs twice."""
    entries: list[dict[str, Any]] = []
    seen: dict[str, str] = {}
    for record, whole_index in records:
        # An index of which only one platform is here would make readers stumble over the others.
        descriptor = record.index if whole_index and record.index else record.manifest
        entry = descriptor.to_json()
        name = record.reference
        if seen.get(name) == entry["digest"]:
            continue
        if name in seen:
            name = f"{name}+{record.handler}"
        seen[name] = entry["digest"]
        if record.platform and descriptor is record.manifest:
            entry["platform"] = platform_to_json(record.platform)
        annotations = {mediatypes.ANNOTATION_REF_NAME: name}
        if record.handler:
            annotations[HANDLER_ANNOTATION] = record.handler
        entry["annotations"] = {**entry.get("annotations", {}), **annotations}
        entries.append(entry)
    return entries

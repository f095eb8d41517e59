"""What is published where: one small file for each inline volume, so that nothing depends on this process.

A record is written, and synced, before the volume is mounted, and removed after it was unmounted: a crash
leaves a record without a mount (the kubelet publishes again, or unpublishes), never a mount without a
record. It holds the digests that the references meant when the pod started, so that a reboot or a container
restart never changes what is mounted. Nothing secret is in it.

`.../csi/volumes/<volume id>-<hash of the target>.json`; a file that cannot be read is set aside under another
name and told, because a driver that does not start helps nobody.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from pathlib import Path
from typing import Final

import msgspec

from unlade.kernel import failpoints
from unlade.store.failure import explaining
from unlade.store.layout import replace_file, sync_directory

_log = logging.getLogger(__name__)
_VERSION: Final = 1
_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_SUFFIX: Final = ".json"
_BROKEN: Final = ".broken"


class Source(msgspec.Struct, frozen=True):
    """One reference as the author wrote it (a referrer's own, where one was asked for), and what it meant."""

    reference: str
    digest: str


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One published volume. `wanted` is the fingerprint of the attributes."""

    volume_id: str
    target: str
    wanted: str
    sources: tuple[Source, ...]
    tree: str
    size: int = 0
    entries: int = 0
    sub_path: str = ""
    unpack: str = "auto"
    executable: bool = False
    context: str = ""
    handler: str = ""
    platform: str = ""
    pod: str = ""
    version: int = _VERSION


_DECODER = msgspec.json.Decoder(Record)
_ENCODER = msgspec.json.Encoder()


def key_of(volume_id: str, target: str) -> str:
    """The name of a volume at a target: plain enough for a file, different for different ones."""
    place = hashlib.sha256(target.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    if not _PLAIN_ID.fullmatch(volume_id):
        volume_id = "id-" + hashlib.sha256(volume_id.encode("utf-8", "surrogatepass")).hexdigest()[:40]
    return f"{volume_id}-{place}"


class Records:
    """The records below one directory, also held in memory; thread-safe. One process owns the directory."""

    def __init__(self, directory: Path) -> None:
        with explaining(f"use {directory}"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._lock = threading.Lock()
        self._known: dict[str, Record] = {}
        for path in sorted(directory.iterdir()):
            self._load(path)

    def get(self, key: str) -> Record | None:
        """The record of a key."""
        with self._lock:
            return self._known.get(key)

    def all(self) -> dict[str, Record]:
        """Every record by its key."""
        with self._lock:
            return dict(self._known)

    def put(self, key: str, record: Record) -> None:
        """Write a record, durable on return."""
        with explaining(f"record the volume {record.volume_id}"):
            replace_file(
                self._directory / f"{key}{_SUFFIX}",
                _ENCODER.encode(record),
                temporary=self._directory / f".{key}.new",
            )
        with self._lock:
            self._known[key] = record
        failpoints.reach("csi.record.written")

    def drop(self, key: str) -> None:
        """Remove a record, durable on return; idempotent."""
        with self._lock:
            known = self._known.pop(key, None)
        with explaining("forget a volume"):
            try:
                os.unlink(self._directory / f"{key}{_SUFFIX}")
            except FileNotFoundError:
                if known is None:
                    return
            failpoints.reach("csi.record.unlinked")
            sync_directory(self._directory)
        failpoints.reach("csi.record.dropped")

    def _load(self, path: Path) -> None:
        if path.name.startswith("."):
            path.unlink(missing_ok=True)  # a write that a crash cut short
            return
        if path.suffix != _SUFFIX:
            return
        try:
            record = _DECODER.decode(path.read_bytes())
            if record.version != _VERSION or key_of(record.volume_id, record.target) != path.stem:
                raise ValueError("not a record of this version and name")
        except (OSError, ValueError) as error:
            _log.error("the record %s cannot be used and is set aside: %s", path, error)
            path.rename(path.with_suffix(_BROKEN))
            return
        self._known[path.stem] = record

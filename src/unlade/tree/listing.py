"""What a tree holds, by name: computed from file lists, for fsck and for merged directories.

A file list tells what happened in order (unpack.filelist); this tells what is left in the end. The rules
are those of `merge`: a later record replaces an earlier one, what is no directory ends what stood below its
name, a whiteout ends a name and all below it, an opaque directory ends what lower layers have below it, and
a directory without an entry of its own keeps the attributes it has. A hard link becomes a record like its
target's, because the target may be replaced later and the link is not.

Endings are remembered with their time and applied when asked, so the cost is linear in the records,
however often a hostile archive turns a name from directory to file and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO

import msgspec

from unlade.unpack import filelist
from unlade.unpack.filelist import FileListWriter, FileRecord
from unlade.unpack.policy import Unpacked


class Listing:
    """Records by name, built from one list or from several layers."""

    def __init__(self) -> None:
        self._clock = 0
        self._records: dict[bytes, tuple[int, FileRecord]] = {}
        # All below this name that is older than this is gone.
        self._ended: dict[bytes, int] = {}
        # Names that have, or had, something below them; not all of them have records of their own.
        self._parents: set[bytes] = set()

    @classmethod
    def of(cls, lines: Iterable[bytes]) -> Listing:
        """The listing of a single list."""
        listing = cls()
        for record in filelist.read(lines):
            listing.add(record)
        return listing

    def add_layer(self, lines: Iterable[bytes], unpacked: Unpacked) -> None:
        """Apply the next layer up, unpacked with whiteouts recorded."""
        for name in unpacked.opaques:
            self._end_below(name)
        for name in (*unpacked.whiteouts, *unpacked.skipped):
            self._end_below(name)
            self._records.pop(name, None)
        implicit = frozenset(unpacked.implicit_dirs)
        for record in filelist.read(lines):
            if record.path in implicit:
                present = self.get(record.path)
                if present is not None and present.type == "d":
                    continue
            self.add(record)
        for name, target in unpacked.pending_links:
            self.add(FileRecord("h", name.decode("latin-1"), target=target.decode("latin-1")))

    def add(self, record: FileRecord) -> None:
        """Apply one record. A hard link to what is not (or not yet) listed stays one."""
        name = record.path
        if record.type == "h":
            target = self.get(record.link_target)
            if target is not None:
                record = msgspec.structs.replace(target, name=record.name)
        if record.type != "d" and name in self._parents:
            self._end_below(name)
        if record.type == "x":
            self._records.pop(name, None)
            return
        parent = name.rpartition(b"/")[0]
        while parent and parent not in self._parents:
            self._parents.add(parent)
            parent = parent.rpartition(b"/")[0]
        self._clock += 1
        self._records[name] = (self._clock, record)

    def get(self, name: bytes) -> FileRecord | None:
        """What stands at a name now."""
        found = self._records.get(name)
        return found[1] if found and self._lives(name, found[0]) else None

    def __iter__(self) -> Iterator[FileRecord]:
        return (record for name, (time, record) in self._records.items() if self._lives(name, time))

    def write(self, out: BinaryIO) -> None:
        """Write the result as a file list."""
        writer = FileListWriter(out)
        for record in self:
            writer.add(*msgspec.structs.astuple(record))
        writer.flush()

    def _end_below(self, name: bytes) -> None:
        self._clock += 1
        self._ended[name] = self._clock

    def _lives(self, name: bytes, time: int) -> bool:
        if not self._ended or not name:
            return True
        while name:
            name = name.rpartition(b"/")[0]
            if self._ended.get(name, 0) > time:
                return False
        return True

"""The list of what was written: one line of JSON per entry, with a checksum per regular file.

Written while unpacking, kept beside the tree, read by fsck to find rot without the blobs (design,
decision 2). A line is an array::

    [type, name, mode, uid, gid, mtime_ns, size, crc32, target]

`type` is one of f (file), d (directory), l (symbolic link), h (hard link), w (overlay whiteout), x (nothing:
an entry that is not made took the name). Names and targets are bytes; each byte is written as the character
of that number (Latin-1), which is lossless and leaves ASCII readable. Trailing fields that do not apply are
absent. Lines stand in the archive's order: a later line for a name replaces an earlier one, and a line that
is no directory ends everything below its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import BinaryIO, Final, Literal

import msgspec

from unlade.errors import StoreError

EntryType = Literal["f", "d", "l", "h", "w", "x"]

_FLUSH_LINES: Final = 512  # some 50 KB: one write(2) for many entries


class CorruptFileList(StoreError):
    """A file list that cannot be read back."""

    code = "corrupt-file-list"


class FileRecord(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One entry as it was written."""

    type: EntryType
    name: str
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    crc32: int = 0
    target: str = ""

    @property
    def path(self) -> bytes:
        """The name, relative to the destination."""
        return self.name.encode("latin-1")

    @property
    def link_target(self) -> bytes:
        """Where a link points; for a hard link a name relative to the destination."""
        return self.target.encode("latin-1")


# Made at import: msgspec must not meet a type for the first time in two threads at once.
_decode: Final = msgspec.json.Decoder(FileRecord).decode


class FileListWriter:
    """Collects records and writes them in batches; call `flush` at the end."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._lines: list[tuple[object, ...]] = []
        self._encoder = msgspec.json.Encoder()

    def add(self, *fields: object) -> None:
        """Add one record, its fields in the order of the line; names already as Latin-1 text."""
        self._lines.append(fields)
        if len(self._lines) >= _FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what was collected."""
        if self._lines:
            self._out.write(self._encoder.encode_lines(self._lines))
            self._lines.clear()


def read(source: Iterable[bytes]) -> Iterator[FileRecord]:
    """Every record in order, replaced ones included; raises CorruptFileList."""
    try:
        for line in source:
            yield _decode(line)
    except msgspec.DecodeError as error:
        raise CorruptFileList(
            f"the tree's file list cannot be read: {error}", next_step="remove the tree and pull it again"
        ) from error


def final(source: Iterable[bytes]) -> dict[bytes, FileRecord]:
    """What the tree holds in the end, by name: replaced entries and what was below them are gone."""
    kept: list[tuple[bytes, FileRecord]] = []
    seen: set[bytes] = set()
    ended: set[bytes] = set()  # names that are something else than a directory later in the list
    # Backwards, so that one pass decides each line: an archive may flip a name as often as it likes.
    for record in reversed(list(read(source))):
        path = record.path
        if path not in seen and not _below(path, ended):
            seen.add(path)
            if record.type != "x":
                kept.append((path, record))
        if record.type != "d":
            ended.add(path)
    return dict(reversed(kept))


def _below(path: bytes, names: set[bytes]) -> bool:
    at = path.rfind(b"/")
    while at > 0:
        if path[:at] in names:
            return True
        at = path.rfind(b"/", 0, at)
    return False

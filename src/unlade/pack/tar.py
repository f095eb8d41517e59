"""Tar headers and the layout of a whole archive, written so that equal listings give equal bytes.

The format is ustar with pax records only where a field does not fit (names over 100 bytes, sizes over 8
GiB), which every reader of layers understands. Nothing of the machine shows: no user names, no access
times, no device numbers, no padding to a record size. The invariant: `TarLayout.size` is known without
reading a file, and `chunks(offset)` yields the same bytes from any offset, so that an upload can be
resumed without a spooled copy.

Called by `layer` (to hash, compress, upload) and by the command line for a tar on standard output.
"""

from __future__ import annotations

import io
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO

from unlade.pack.listing import Entry, PackPolicy, SourceChanged, UnpackableSource, list_tree

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK = 512
# Two zero blocks end an archive; more would be padding for tape drives.
END = bytes(2 * BLOCK)
# One read of a file. Large enough that system calls vanish, small enough to keep many in flight.
READ_SIZE = 1 << 20
# The largest number eleven octal digits hold: beyond it a size travels in a pax record.
_MAX_OCTAL = 8**11 - 1
_MAX_ID = 8**7 - 1
_TYPES = {"file": b"0", "hardlink": b"1", "symlink": b"2", "dir": b"5"}
# The name of a pax header never becomes a file; a constant one keeps equal trees equal.
_PAX_NAME = b"PaxHeaders/entry"


def header(entry: Entry) -> bytes:
    """The blocks that stand before an entry's data: one, or three and more where pax records are needed."""
    records = _records(entry)
    own = _ustar(
        _name(entry)[:100],
        _TYPES[entry.kind],
        size=entry.size if entry.size <= _MAX_OCTAL else 0,
        mode=entry.mode,
        mtime=entry.mtime if 0 <= entry.mtime <= _MAX_OCTAL else 0,
        link=entry.link[:100],
        uid=entry.uid if entry.uid <= _MAX_ID else 0,
        gid=entry.gid if entry.gid <= _MAX_ID else 0,
    )
    if not records:
        return own
    return _ustar(_PAX_NAME, b"x", size=len(records)) + _padded(records) + own


def header_size(entry: Entry) -> int:
    """The length of `header`, without making it."""
    records = _records(entry)
    return 2 * BLOCK + _blocks(len(records)) if records else BLOCK


def _name(entry: Entry) -> bytes:
    return entry.name + b"/" if entry.kind == "dir" else entry.name


def _records(entry: Entry) -> bytes:
    """The pax records of what a ustar header has no room for; empty for nearly every entry."""
    name = _name(entry)
    records = b""
    if len(name) > 100:
        records += _record(b"path", name)
    if len(entry.link) > 100:
        records += _record(b"linkpath", entry.link)
    if entry.size > _MAX_OCTAL:
        records += _record(b"size", b"%d" % entry.size)
    if entry.mtime < 0 or entry.mtime > _MAX_OCTAL:
        records += _record(b"mtime", b"%d" % entry.mtime)
    if entry.uid > _MAX_ID:
        records += _record(b"uid", b"%d" % entry.uid)
    if entry.gid > _MAX_ID:
        records += _record(b"gid", b"%d" % entry.gid)
    return records


class TarLayout:
    """A tar that is not there yet: its size, and its bytes from any offset, read when asked."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries
        self._starts: list[int] = []
        position = 0
        for entry in entries:
            self._starts.append(position)
            position += header_size(entry) + _blocks(entry.size)
        self._end = position
        self.size = position + len(END)

    def chunks(self, offset: int = 0) -> Iterator[bytes]:
        """The archive's bytes from `offset` on; raises SourceChanged when a file is not what was listed."""
        if not 0 <= offset <= self.size:
            raise ValueError(f"offset {offset} is not within 0..{self.size}")
        first = max(bisect_right(self._starts, offset) - 1, 0)
        if offset >= self._end:
            yield END[offset - self._end :]
            return
        skip = offset - self._starts[first]
        for entry in self._entries[first:]:
            head = header(entry)
            if skip < len(head):
                yield head[skip:]
                skip = 0
            else:
                skip -= len(head)
            if entry.size:
                if skip < entry.size:
                    yield from _file_chunks(entry, skip)
                    skip = entry.size
                padding = bytes(_blocks(entry.size) - skip)
                if padding:
                    yield padding
            skip = 0
        yield END

    def open(self, offset: int = 0) -> BinaryIO:
        """A reader of the archive from `offset` on."""
        return io.BufferedReader(ChunkReader(self.chunks(offset)), READ_SIZE)


def write_tar(directory: str | bytes | os.PathLike[str], out: BinaryIO) -> int:
    """Write a tree as it is to a stream (modes, owners, times, links kept); the number of entries."""
    entries = list_tree(
        directory,
        PackPolicy(
            keep_modes=True, keep_times=True, keep_owners=True, hard_links=True, contained_links=False
        ),
    )
    for block in in_blocks(TarLayout(entries).chunks()):
        out.write(block)
    out.flush()
    return len(entries)


class ChunkReader(io.RawIOBase):
    """A stream over an iterator of byte strings; closing it closes the iterator."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill what one chunk can fill; 0 at the end."""
        target = memoryview(buffer).cast("B")
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        """Release the file that is open in the iterator, if one is."""
        close = getattr(self._chunks, "close", None)
        if close is not None:
            close()
        super().close()


def in_blocks(chunks: Iterable[bytes], size: int = READ_SIZE) -> Iterator[bytearray]:
    """The same bytes in pieces of exactly `size` (the last may be shorter): many small files, few calls."""
    block, filled = bytearray(size), 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            count = min(size - filled, len(rest))
            block[filled : filled + count] = rest[:count]
            rest = rest[count:]
            filled += count
            if filled == size:
                yield block
                # The last one is the receiver's, to keep as long as it likes.
                block, filled = bytearray(size), 0
    if filled:
        del block[filled:]
        yield block


def _file_chunks(entry: Entry, offset: int) -> Iterator[bytes]:
    try:
        # O_NOFOLLOW and the identity check: the listed file and no other is read, whatever happened since.
        fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError as error:
        raise UnpackableSource(
            f"{os.fsdecode(entry.path)}: {error.strerror}", next_step="make it readable or leave it out"
        ) from error
    except OSError as error:
        raise _changed(entry) from error
    try:
        info = os.fstat(fd)
        if (info.st_dev, info.st_ino, info.st_mtime_ns) != entry.identity or info.st_size != entry.size:
            raise _changed(entry)
        position = offset
        while position < entry.size:
            try:
                data = os.pread(fd, min(READ_SIZE, entry.size - position), position)
            except OSError as error:
                raise UnpackableSource(
                    f"{os.fsdecode(entry.path)} cannot be read: {error.strerror}",
                    next_step="check the disk it is on",
                ) from error
            if not data:
                raise _changed(entry)
            position += len(data)
            yield data
    finally:
        os.close(fd)


def _changed(entry: Entry) -> SourceChanged:
    return SourceChanged(
        f"{os.fsdecode(entry.path)} changed while it was read",
        next_step="push again when nothing writes to it",
    )


def _ustar(
    name: bytes,
    kind: bytes,
    *,
    size: int,
    mode: int = 0o644,
    mtime: int = 0,
    link: bytes = b"",
    uid: int = 0,
    gid: int = 0,
) -> bytes:
    raw = b"".join(
        (
            name.ljust(100, b"\0"),
            b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, uid, gid, size, mtime),
            b"        ",  # the checksum counts as spaces while it is taken
            kind,
            link.ljust(100, b"\0"),
            b"ustar\x0000",
            bytes(64),  # user and group names: they belong to a machine
            b"0000000\x000000000\0",
            bytes(167),
        )
    )
    return raw[:148] + b"%06o\0 " % sum(raw) + raw[156:]


def _record(key: bytes, value: bytes) -> bytes:
    """A pax record `LENGTH key=value\\n`, whose length counts its own digits."""
    bare = len(key) + len(value) + 3
    length = bare + len(str(bare))
    if len(str(length)) != len(str(bare)):
        length += 1
    return b"%d %s=%s\n" % (length, key, value)


def _blocks(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _padded(data: bytes) -> bytes:
    return data.ljust(_blocks(len(data)), b"\0")

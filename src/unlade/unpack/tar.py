"""The tar reader: header blocks in, one entry at a time out (POSIX pax and ustar, GNU, old V7, star).

It follows the format where archives are well formed and Go's archive/tar where they are ambiguous, because
that is what containerd and umoci read them with; anything malformed is refused, with bounded work: header
numbers are range-checked, extended headers capped, and a name or number is never guessed. Sparse files are
refused. Global pax headers are checked and then ignored, as Go does, unless they would rename entries.

`TarReader` holds the current entry in its attributes, without an object per entry: `advance` moves on, and
`piece` gives its content. The writer is the only caller. Names come out as the archive wrote them:
everything about them is still unsafe.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Final
from zlib import adler32

from unlade.unpack.refusals import LimitExceeded, MalformedArchive, UnsafeName, UnsupportedEntry, show

if TYPE_CHECKING:
    from unlade.unpack.policy import Limits
    from unlade.unpack.stream import Block, NextBlock

BLOCK: Final = 512

# Kinds, as the typeflag byte.
FILE: Final = ord("0")
HARD_LINK: Final = ord("1")
SYMLINK: Final = ord("2")
CHARACTER: Final = ord("3")
BLOCK_DEVICE: Final = ord("4")
DIRECTORY: Final = ord("5")
FIFO: Final = ord("6")
_OLD_FILE: Final = 0
_CONTIGUOUS: Final = ord("7")
_GNU_LONG_NAME: Final = ord("L")
_GNU_LONG_LINK: Final = ord("K")
_GNU_SPARSE: Final = ord("S")
_PAX: Final = ord("x")
_PAX_SOLARIS: Final = ord("X")
_PAX_GLOBAL: Final = ord("g")

# name mode uid gid size mtime checksum kind link magic, (user group devices), prefix, (nothing)
_HEADER: Final = struct.Struct("100s8s8s8s12s12s8sB100s8s80x155s12x")
# Modes, owners and times of one archive repeat: most are looked up, not parsed.
_REMEMBERED: Final = 4096
_ZEROS: Final = bytes(BLOCK)
_PAX_TIME: Final = re.compile(rb"(-?)([0-9]{1,18})(?:\.([0-9]{0,64}))?")
_PAX_RECORD_HEAD: Final = re.compile(rb"([0-9]{1,9}) ")
_XATTR: Final = b"SCHILY.xattr."
_RENAMING: Final = (b"path", b"linkpath", b"size")

_MAX_ID: Final = 2**32 - 2  # 2**32 - 1 means "leave as it is" to chown(2)
# The years 1 and 9999, inside what every file system can be asked for.
_MIN_TIME, _MAX_TIME = -62135596800, 253402300799


class TarReader:
    """Reads entries from blocks of a plain tar stream."""

    __slots__ = (
        "_at", "_block", "_headers", "_left", "_limits", "_meta_bytes", "_next", "_numbers", "_padding",
        "_size", "entries", "gid", "kind", "link", "mode", "mtime_ns", "name", "size", "uid", "xattrs",
    )  # fmt: skip

    def __init__(self, next_block: NextBlock, limits: Limits) -> None:
        self._next = next_block
        self._limits = limits
        self._block: Block = b""
        self._at = 0
        self._size = 0
        self._left = 0  # content of the current entry that was not taken yet
        self._padding = 0
        self._headers = 0  # extended ones included: they cost as much
        self.entries = 0
        self._meta_bytes = 0
        self._numbers: dict[bytes, int] = {}
        self.kind = 0
        self.name = b""
        self.link = b""
        self.mode = 0
        self.uid = 0
        self.gid = 0
        self.size = 0
        self.mtime_ns = 0
        self.xattrs: dict[bytes, bytes] | None = None

    def advance(self) -> bool:
        """Move to the next entry; False after the last, once the rest of the stream has been taken."""
        if self._left or self._padding:
            self._skip(self._left)
            padding, self._left, self._padding = self._padding, 0, 0
            if not self._skip_padding(padding):
                return False
        pax: dict[bytes, bytes] | None = None
        long_name = long_link = b""
        self._meta_bytes = 0
        kind = 0
        while True:
            at = self._at
            if self._size - at >= BLOCK:
                header = bytes(self._block[at : at + BLOCK])
                self._at = at + BLOCK
            else:
                header = self._take_header()
                if not header:
                    if pax is not None or long_name or long_link:
                        raise _malformed("the archive ends after an extended header")
                    return False
            name, mode, uid, gid, size, mtime, checksum, kind, link, magic, prefix = _HEADER.unpack(header)
            # Adler-32's lower half is the sum of the bytes (plus one, modulo 65521): the header checksum
            # at the speed of C. The checksum field itself counts as eight spaces.
            wanted = number(checksum)
            if adler32(header) & 0xFFFF != (wanted + sum(checksum) - 255) % 65521:
                if header == _ZEROS:
                    self._end(bool(pax is not None or long_name or long_link))
                    return False
                _check_sum(header, wanted)
            self._headers += 1
            if self._headers > self._limits.max_entries:
                raise LimitExceeded(
                    f"the archive has more than {self._limits.max_entries} entries",
                    next_step="raise the limit if you trust its publisher",
                )
            length = number(size)
            if length < 0:
                raise _malformed("a negative size")
            if kind in (_PAX, _PAX_GLOBAL, _PAX_SOLARIS):
                records = _pax_records(self._meta(length))
                if kind == _PAX_GLOBAL:
                    _check_global(records)
                    continue
                if pax is not None:
                    raise _malformed("two pax headers for one entry")
                pax = records
                continue
            if kind == _GNU_LONG_NAME:
                long_name = self._meta(length).partition(b"\0")[0]
                if not long_name:
                    raise _malformed("an empty GNU long name")
                continue
            if kind == _GNU_LONG_LINK:
                long_link = self._meta(length).partition(b"\0")[0]
                if not long_link:
                    raise _malformed("an empty GNU long link name")
                continue
            break

        name = name.partition(b"\0")[0]
        # POSIX magic, whatever the version: Go and GNU tar read its prefix as well.
        if prefix[0] and magic.startswith(b"ustar\0"):
            used = prefix[:131] if header[508:] == b"tar\0" else prefix
            name = used.partition(b"\0")[0] + b"/" + name
        self.name = long_name or name
        self.link = long_link or link.partition(b"\0")[0]
        self.mode = self._number(mode) & 0o7777
        self.uid = self._number(uid)
        self.gid = self._number(gid)
        self.mtime_ns = self._number(mtime) * 1_000_000_000
        self.xattrs = None
        if pax is not None:
            length = self._apply(pax, length)
            if long_name:
                self.name = long_name
            if long_link:
                self.link = long_link
        if not 0 <= self.uid <= _MAX_ID or not 0 <= self.gid <= _MAX_ID:
            raise _malformed(f"an owner out of range for {show(self.name)}")
        if not _MIN_TIME <= self.mtime_ns // 1_000_000_000 <= _MAX_TIME:
            raise _malformed(f"a time out of range for {show(self.name)}")

        if kind in (_OLD_FILE, _CONTIGUOUS, FILE):
            # Before ustar a directory was a file whose name ends in a slash.
            if self.name.endswith(b"/"):
                if length:
                    raise _malformed(f"{show(self.name)} is a directory with content")
                kind = DIRECTORY
            else:
                kind = FILE
        elif not HARD_LINK <= kind <= FIFO:
            raise _unsupported(kind, self.name)
        else:
            # Links, directories and devices have no content, whatever their size field says (as in Go).
            length = 0
        self.kind = kind
        if length > self._limits.max_bytes:
            raise LimitExceeded(f"{show(self.name)} claims {length} bytes")
        self.entries += 1
        self.size = self._left = length
        self._padding = -length % BLOCK
        return True

    def piece(self) -> Block:
        """The next piece of the current entry's content; call only while there is some left."""
        at = self._at
        available = self._size - at
        if available == 0:
            self._refill("inside a file")
            at, available = 0, self._size
        count = min(available, self._left)
        self._at = at + count
        self._left -= count
        return memoryview(self._block)[at : at + count]

    def _number(self, field: bytes) -> int:
        value = self._numbers.get(field)
        if value is None:
            if len(self._numbers) >= _REMEMBERED:
                self._numbers.clear()
            value = self._numbers[field] = number(field)
        return value

    def _refill(self, where: str) -> None:
        self._block = self._next()
        self._at = 0
        self._size = len(self._block)
        if not self._size:
            raise _malformed(f"the archive ends {where}")

    def _skip(self, count: int) -> None:
        while count > self._size - self._at:
            count -= self._size - self._at
            self._refill("inside a file")
        self._at += count

    def _skip_padding(self, count: int) -> bool:
        """False when the stream ends before it: umoci writes neither the last padding nor an end marker."""
        if count and self._at == self._size:
            self._block = self._next()
            self._at, self._size = 0, len(self._block)
            if not self._size:
                return False
        self._skip(count)
        return True

    def _take(self, count: int, where: str) -> bytes:
        parts = []
        while count:
            if self._at == self._size:
                self._refill(where)
            part = bytes(self._block[self._at : self._at + count])
            self._at += len(part)
            count -= len(part)
            parts.append(part)
        return b"".join(parts)

    def _take_header(self) -> bytes:
        """A header that spans blocks; empty at the end of the stream."""
        if self._at == self._size:
            self._block = self._next()
            self._at = 0
            self._size = len(self._block)
            if not self._size:
                return b""
        return self._take(BLOCK, "inside a header")

    def _end(self, dangling: bool) -> None:
        """After one block of zeros: a second must follow, or the end; then take whatever is left."""
        if dangling:
            raise _malformed("the archive ends after an extended header")
        second = self._take_header()
        if second not in (_ZEROS, b""):
            raise _malformed("a lone block of zeros between entries")
        while self._next():
            pass

    def _meta(self, length: int) -> bytes:
        """The content of an extended header."""
        self._meta_bytes += length
        if self._meta_bytes > self._limits.max_header_bytes:
            raise LimitExceeded(f"extended headers of more than {self._limits.max_header_bytes} bytes")
        data = self._take(length, "inside an extended header")
        self._skip(-length % BLOCK)
        return data

    def _apply(self, pax: dict[bytes, bytes], length: int) -> int:
        for key, value in pax.items():
            if key.startswith(_XATTR):
                if self.xattrs is None:
                    self.xattrs = {}
                self.xattrs[key[len(_XATTR) :]] = value
            elif not value:
                continue  # an empty value withdraws the record: the ustar field counts
            elif key == b"path":
                self.name = value
            elif key == b"linkpath":
                self.link = value
            elif key == b"size":
                length = _decimal(key, value)
            elif key == b"uid":
                self.uid = _decimal(key, value)
            elif key == b"gid":
                self.gid = _decimal(key, value)
            elif key == b"mtime":
                self.mtime_ns = _pax_time(value)
            elif key.startswith(b"GNU.sparse."):
                raise _unsupported(_GNU_SPARSE, self.name)
        return length


def number(field: bytes) -> int:
    """A numeric header field: octal text, or GNU's base-256 (which may be negative)."""
    text = field[:-1]
    # isdigit first: int() alone would take signs, underscores and blanks.
    if text.isdigit() and field[-1] in b"\0 ":
        try:
            return int(text, 8)
        except ValueError:
            raise _not_octal(text) from None
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        if field[0] & 0x40:
            value -= 1 << (8 * len(field) - 1)
        if not -(2**63) <= value < 2**63:
            raise _malformed("a base-256 number beyond 64 bits")
        return value
    text = field.strip(b" \0").partition(b"\0")[0]
    if not text:
        return 0
    if not text.isdigit() or b"8" in text or b"9" in text:
        raise _not_octal(text)
    return int(text, 8)


def _not_octal(text: bytes) -> MalformedArchive:
    return _malformed(f"this is no tar archive, or a damaged one: {show(text)} is no octal number")


def _check_sum(header: bytes, wanted: int) -> None:
    """The exact checksum, also the signed one that some old tools computed."""
    blanked = header[:148] + b" " * 8 + header[156:]
    unsigned = sum(blanked)
    signed = unsigned - 256 * sum(byte > 127 for byte in blanked)
    if wanted not in (unsigned, signed):
        raise _malformed("this is no tar archive, or a damaged one: a header's checksum is wrong")


def _pax_records(data: bytes) -> dict[bytes, bytes]:
    """The records `length key=value\\n` of a pax header; the last of equal keys counts."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        head = _PAX_RECORD_HEAD.match(data, at)
        if head is None:
            raise _malformed("a pax record without its length")
        end = at + int(head[1])
        equals = data.find(b"=", head.end(), end)
        if end > len(data) or equals <= head.end() or data[end - 1 : end] != b"\n" or end - 1 <= equals:
            raise _malformed("a pax record that does not fit its length")
        key, value = data[head.end() : equals], data[equals + 1 : end - 1]
        if b"\0" in key or (b"\0" in value and key in (b"path", b"linkpath", b"uname", b"gname")):
            raise UnsafeName(f"NUL in the pax record {show(key)}")
        records[key] = value
        at = end
    return records


def _check_global(records: dict[bytes, bytes]) -> None:
    for key in records:
        if key in _RENAMING or key.startswith(b"GNU.sparse.") or key.startswith(_XATTR):
            raise _malformed(f"a global pax header that sets {show(key)} for every entry")


def _decimal(key: bytes, value: bytes) -> int:
    if not value.isdigit() or len(value) > 19:
        raise _malformed(f"the pax record {show(key)} is no number in range")
    return int(value)


def _pax_time(value: bytes) -> int:
    match = _PAX_TIME.fullmatch(value)
    if match is None:
        raise _malformed("the pax record 'mtime' is no time")
    sign, seconds, fraction = match.groups()
    total = int(seconds) * 1_000_000_000 + int((fraction or b"").ljust(9, b"0")[:9])
    return -total if sign else total


def _malformed(what: str) -> MalformedArchive:
    return MalformedArchive(what, next_step="the publisher must make the archive again")


def _unsupported(kind: int, name: bytes) -> UnsupportedEntry:
    what = "a sparse file" if kind == _GNU_SPARSE else f"of an unknown type {chr(kind)!r}"
    return UnsupportedEntry(
        f"{show(name)} is {what}, which is not unpacked",
        next_step="the publisher must make a plain archive (tar without --sparse)",
    )

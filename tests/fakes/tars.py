"""Tar archives written by hand, well formed or not.

The standard library's writer refuses to write most of what an attacker would; this one writes any header.
`Tar` collects blocks; `bytes(tar)` is the archive. Entries are ustar unless a method says otherwise.
"""

from __future__ import annotations

import gzip
import io
import os
import struct
import sys
from collections.abc import Mapping
from typing import Any

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK = 512
USTAR = b"ustar\x0000"
GNU = b"ustar  \0"
V7 = bytes(8)


def octal(value: int, width: int) -> bytes:
    """A number as tar writes it: octal digits and a NUL."""
    return b"%0*o\0" % (width - 1, value)


def base256(value: int, width: int) -> bytes:
    """A number in GNU's binary form, negative ones included."""
    body = (value & ((1 << (8 * width)) - 1)).to_bytes(width, "big")
    return bytes([body[0] | 0x80]) + body[1:]


def header(
    name: bytes,
    *,
    kind: bytes = b"0",
    size: int | bytes = 0,
    mode: int | bytes = 0o644,
    uid: int | bytes = 0,
    gid: int | bytes = 0,
    mtime: int | bytes = 1_700_000_000,
    link: bytes = b"",
    magic: bytes = USTAR,
    prefix: bytes = b"",
    checksum: bytes | None = None,
) -> bytes:
    """One header block; numbers as int, or as the raw field."""

    def field(value: int | bytes, width: int) -> bytes:
        return value.ljust(width, b"\0") if isinstance(value, bytes) else octal(value, width)

    block = (
        name[:100].ljust(100, b"\0")
        + field(mode, 8)
        + field(uid, 8)
        + field(gid, 8)
        + field(size, 12)
        + field(mtime, 12)
        + b" " * 8
        + kind
        + link[:100].ljust(100, b"\0")
        + magic
        + bytes(32 + 32)
        + octal(0, 8) * 2
        + prefix[:155].ljust(155, b"\0")
        + bytes(12)
    )
    assert len(block) == BLOCK
    if checksum is None:
        checksum = b"%06o\0 " % sum(block)
    return block[:148] + checksum.ljust(8, b"\0") + block[156:]


def padded(data: bytes) -> bytes:
    """Content filled up to whole blocks."""
    return data + bytes(-len(data) % BLOCK)


def pax_record(key: bytes, value: bytes) -> bytes:
    """`length key=value` with a length that counts itself."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest)
    while len(str(length)) + len(rest) != length:
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


class Tar:
    """An archive in the making; every method returns self."""

    def __init__(self) -> None:
        self._out = io.BytesIO()

    def __bytes__(self) -> bytes:
        return self._out.getvalue() + bytes(2 * BLOCK)

    def unfinished(self) -> bytes:
        """The archive without its end marker."""
        return self._out.getvalue()

    def raw(self, data: bytes) -> Tar:
        """Any bytes."""
        self._out.write(data)
        return self

    def entry(self, name: bytes, content: bytes = b"", **fields: Any) -> Tar:
        """Any entry, fields as in `header`; long names and links by pax."""
        pax = dict(fields.pop("pax", None) or {})
        link = fields.get("link", b"")
        assert isinstance(link, bytes)
        if len(name) > 100:
            pax.setdefault(b"path", name)
        if len(link) > 100:
            pax.setdefault(b"linkpath", link)
        if pax:
            self.pax(pax)
        fields.setdefault("size", len(content))
        return self.raw(header(name, **fields) + padded(content))

    def file(self, name: bytes, content: bytes = b"", **fields: Any) -> Tar:
        """A regular file."""
        return self.entry(name, content, **fields)

    def dir(self, name: bytes, **fields: Any) -> Tar:
        """A directory."""
        return self.entry(name, **{"kind": b"5", "mode": 0o755, **fields})

    def symlink(self, name: bytes, target: bytes, **fields: Any) -> Tar:
        """A symbolic link."""
        return self.entry(name, **{"kind": b"2", "mode": 0o777, "link": target, **fields})

    def link(self, name: bytes, target: bytes, **fields: Any) -> Tar:
        """A hard link."""
        return self.entry(name, **{"kind": b"1", "link": target, **fields})

    def pax(self, records: Mapping[bytes, bytes], *, kind: bytes = b"x") -> Tar:
        """A pax header for the next entry, or (kind g) for all that follow."""
        data = b"".join(pax_record(key, value) for key, value in records.items())
        return self.raw(header(b"PaxHeaders/x", kind=kind, size=len(data)) + padded(data))

    def gnu_long(self, kind: bytes, value: bytes) -> Tar:
        """A GNU long name (L) or long link (K) for the next entry."""
        data = value + b"\0"
        return self.raw(header(b"././@LongLink", kind=kind, size=len(data), magic=GNU) + padded(data))


def gz(data: bytes) -> bytes:
    """One gzip member."""
    return gzip.compress(data, 6, mtime=0)


def zst(data: bytes, *, checksum: bool = False) -> bytes:
    """One zstd frame."""
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: int(checksum)})


def zstd_compressor(*, window_log: int) -> zstd.ZstdCompressor:
    """A fast compressor with a window of this size."""
    parameters = zstd.CompressionParameter
    return zstd.ZstdCompressor(
        options={int(parameters.window_log): window_log, int(parameters.compression_level): 1}
    )


def gz_zeros(size: int) -> bytes:
    """A gzip member that inflates to this many zeros, made without holding them."""
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=9, mtime=0) as member:
        left = size
        while left > 0:
            member.write(bytes(min(left, 1 << 20)))
            left -= 1 << 20
    return out.getvalue()


def zstd_header(window_log: int) -> bytes:
    """The start of a zstd frame that asks for a window of this size."""
    return struct.pack("<IBB", 0xFD2FB528, 0, (window_log - 10) << 3)


def snapshot(root: bytes | str) -> dict[bytes, tuple[object, ...]]:
    """Everything about a tree that an attack could change, by path; links are not followed."""
    found: dict[bytes, tuple[object, ...]] = {}
    root = os.fsencode(root)
    todo = [b""]
    while todo:
        path = todo.pop()
        full = os.path.join(root, path) if path else root
        info = os.lstat(full)
        content: object = None
        if os.path.islink(full):
            content = os.readlink(full)
        elif os.path.isfile(full):
            with open(full, "rb") as file:
                content = file.read()
        elif os.path.isdir(full):
            todo.extend(os.path.join(path, name) for name in os.listdir(full))
        found[path] = (info.st_mode, info.st_uid, info.st_gid, info.st_nlink, info.st_mtime_ns, content)
    return found

"""Tars as the tools write them: entries in their order, with their modes, plainly or compressed."""

from __future__ import annotations

import gzip as gzip_module
import io
import sys
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

if sys.version_info >= (3, 14):
    from compression import zstd as zstd_module
else:
    from backports import zstd as zstd_module


@dataclass(frozen=True)
class Entry:
    """One header, and the bytes after it."""

    name: str
    content: bytes = b""
    mode: int = 0o644
    kind: bytes = tarfile.REGTYPE
    target: str = ""
    mtime: int = 0
    uid: int = 0


def f(name: str, content: bytes | str = b"", mode: int = 0o644, *, mtime: int = 0, uid: int = 0) -> Entry:
    """A file."""
    data = content.encode() if isinstance(content, str) else content
    return Entry(name, data, mode, mtime=mtime, uid=uid)


def d(name: str, mode: int = 0o755, *, uid: int = 0) -> Entry:
    """A directory; the name stands as it is, because some tools write no slash after it."""
    return Entry(name, b"", mode, tarfile.DIRTYPE, uid=uid)


def s(name: str, target: str) -> Entry:
    """A symbolic link."""
    return Entry(name, b"", 0o777, tarfile.SYMTYPE, target)


def h(name: str, target: str) -> Entry:
    """A hard link."""
    return Entry(name, b"", 0o644, tarfile.LNKTYPE, target)


def tar(entries: Iterable[Entry]) -> bytes:
    """A pax archive: ustar headers, extended only where a field does not fit, as Go writes it."""
    out = io.BytesIO()
    for entry in entries:
        info = tarfile.TarInfo(entry.name)
        info.size, info.mode, info.type, info.linkname = (
            len(entry.content),
            entry.mode,
            entry.kind,
            entry.target,
        )
        info.mtime, info.uid = entry.mtime, entry.uid
        out.write(info.tobuf(tarfile.PAX_FORMAT))
        out.write(entry.content + bytes(-len(entry.content) % 512))
    return out.getvalue() + bytes(1024)


def gzip(data: bytes) -> bytes:
    """One gzip member without a name or time."""
    return gzip_module.compress(data, 6, mtime=0)


def helm_gzip(data: bytes) -> bytes:
    """Helm's gzip header: an extra field and the comment `Helm`."""
    extra = b"+aHR0cHM6Ly95b3V0dS5iZS96OVV6MWljandyTQo="
    header = b"\x1f\x8b\x08\x14" + bytes(5) + b"\xff" + len(extra).to_bytes(2, "little") + extra + b"Helm\0"
    deflate = zlib.compressobj(6, wbits=-15)
    body = deflate.compress(data) + deflate.flush()
    return header + body + zlib.crc32(data).to_bytes(4, "little") + (len(data) % 2**32).to_bytes(4, "little")


def zstd(data: bytes) -> bytes:
    """One zstd frame."""
    return zstd_module.compress(data)


def unzstd(data: bytes) -> bytes:
    """The reverse."""
    return zstd_module.decompress(data)

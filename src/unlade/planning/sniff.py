"""Is it a tar? Decided from the first bytes of a blob, never from its media type.

Media types lie: ORAS labels plain files `…layer.v1.tar` by default. So before an artifact's layer is
unpacked, its first kilobytes are looked at: plain, gzip or zstd around a tar header (ustar magic, or a V7
header whose checksum is right). Names of the first entries come along, because they tell how a packed
directory was packed. Called by the plan with a few kilobytes from the registry; output is bounded, nothing
is written, and a wrong guess costs no safety: unpacking checks every header itself.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable
from typing import Final

import msgspec

from unlade.model import Descriptor

# Enough for a gzip header, a deflate block header and the first tar headers.
PEEK_BYTES: Final = 16 << 10
# A zstd block is at most 128 KiB and comes out whole or not at all; with frame headers a little more.
ZSTD_PEEK_BYTES: Final = 136 << 10
# What is inflated from a peek at most: room for a long pax header and the entry after it.
_INFLATED: Final = 256 << 10
_BLOCK: Final = 512
# Names beyond the first few dozen decide nothing.
_MAX_NAMES: Final = 64
_ZERO: Final = bytes(_BLOCK)
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_SKIPPABLE: Final = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18", re.DOTALL)
_PAX_PATH: Final = re.compile(rb"\d+ path=([^\n]*)\n")


class Archive(msgspec.Struct, frozen=True):
    """A tar by its bytes; `names` are those of the first entries, as written."""

    compression: str
    names: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Only zero blocks: a tar of nothing, or a file of zeros."""
        return not self.names


def sniff(layer: Descriptor, peek: Callable[[Descriptor, int], bytes]) -> Archive | None:
    """What the first bytes of a layer are: an archive, or None. `peek` fetches at most that many bytes."""
    head = _head(layer, peek, PEEK_BYTES)
    archive = look(head)
    if archive is None and _is_zstd(head) and len(head) < layer.size:
        return look(_head(layer, peek, ZSTD_PEEK_BYTES))
    return archive


def look(head: bytes) -> Archive | None:
    """The same for bytes at hand."""
    if head.startswith(_GZIP):
        return _tar(_gunzip(head), "gzip")
    if _is_zstd(head):
        return _tar(_unzstd(head), "zstd")
    return _tar(head, "")


def _head(layer: Descriptor, peek: Callable[[Descriptor, int], bytes], count: int) -> bytes:
    if layer.data is not None:
        return layer.data[:count]
    if layer.size == 0:
        return b""
    count = min(count, layer.size)
    return peek(layer, count)[:count]


def _is_zstd(head: bytes) -> bool:
    return head.startswith(_ZSTD) or _SKIPPABLE.match(head) is not None


def _gunzip(head: bytes) -> bytes:
    out = b""
    # A few members only: some writers start with an empty one.
    for _ in range(4):
        inflater = zlib.decompressobj(wbits=31)
        try:
            out += inflater.decompress(head, _INFLATED - len(out))
        except zlib.error:
            break
        head = inflater.unused_data
        if not head or len(out) >= _INFLATED:
            break
    return out


def _unzstd(head: bytes) -> bytes:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    out = b""
    # Skippable frames (seek tables, signatures) may stand before the first real one.
    for _ in range(4):
        # The window a frame asks for is memory before a byte is seen: 2^27 is the format's recommended limit.
        inflater = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 27})
        try:
            out += inflater.decompress(head, _INFLATED - len(out))
        except zstd.ZstdError:
            break
        head = inflater.unused_data
        if not head or len(out) >= _INFLATED:
            break
    return out


def _tar(head: bytes, compression: str) -> Archive | None:
    first = head[:_BLOCK]
    if len(first) < _BLOCK:
        return None
    if first == _ZERO:
        # The end of a tar is two blocks of zeros; a shorter run of them is just a file.
        return Archive(compression, ()) if head[_BLOCK : 2 * _BLOCK] == _ZERO else None
    if not _is_header(first):
        return None
    return Archive(compression, _names(head) or ("?",))


def _is_header(block: bytes) -> bool:
    if block[257:262] == b"ustar":
        return True
    stored = _octal(block[148:156])
    if stored is None or not block[0]:
        return False
    unsigned = sum(block) - sum(block[148:156]) + 8 * 0x20
    # Old writers summed signed bytes; both are accepted everywhere.
    signed = unsigned - 256 * sum(1 for byte in block[:148] + block[156:] if byte > 127)
    return stored in (unsigned, signed)


def _octal(field: bytes) -> int | None:
    text = field.strip(b" \0")
    return int(text, 8) if re.fullmatch(rb"[0-7]{1,12}", text) else None


def _names(head: bytes) -> tuple[str, ...]:
    names: list[str] = []
    offset, long_name = 0, b""
    while offset + _BLOCK <= len(head) and len(names) < _MAX_NAMES:
        block = head[offset : offset + _BLOCK]
        size = _octal(block[124:136])
        # A size in base 256 is a file beyond 8 GiB: what follows it is out of reach anyway.
        if not _is_header(block):
            break
        body = head[offset + _BLOCK : offset + _BLOCK + (size or 0)]
        kind = block[156:157]
        if kind == b"x":
            found = _PAX_PATH.search(body)
            long_name = found[1] if found else long_name
        elif kind == b"L":
            long_name = body.rstrip(b"\0")
        elif kind not in (b"g", b"K"):
            names.append((long_name or _short_name(block)).decode("utf-8", "surrogateescape"))
            long_name = b""
        if size is None:
            break
        offset += _BLOCK + -(-size // _BLOCK) * _BLOCK
    return tuple(names)


def _short_name(block: bytes) -> bytes:
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name

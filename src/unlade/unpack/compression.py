"""From compressed bytes to plain ones: gzip (RFC 1952), zstd (RFC 8878) or nothing, told by the bytes.

A decoder is fed blocks of input and gives back blocks of output, none larger than `OUTPUT_BLOCK`, so that
the caller counts and stops before a bomb has cost anything. Every gzip member and zstd frame is checked to
its end: checksum, length, no truncation, and no junk after the last (zeros after a gzip stream are padding,
as tape tools leave it). gzip is inflated by isal where its wheel exists, else by zlib; the results are the
same. Media types are not asked: they are hints that often lie.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, Protocol, cast

from unlade.unpack.refusals import CorruptStream, LimitExceeded, MalformedArchive

try:
    from isal import igzip_lib

    HAS_ISAL = True
except ImportError:  # no wheel for this interpreter or machine
    HAS_ISAL = False

if TYPE_CHECKING:
    from unlade.unpack.policy import Limits

# Large enough that the threads seldom wait for one another (each hand-over takes the interpreter's lock),
# small enough that the blocks in flight are a few megabytes.
OUTPUT_BLOCK: Final = 1 << 20

SNIFF_BYTES: Final = 6
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = 0xFD2FB528
_ZSTD_SKIPPABLE: Final = 0x184D2A50  # sixteen magics, the last four bits vary
_FOREIGN: Final = {b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x04\x22\x4d\x18": "lz4", b"PK\x03\x04": "zip"}

# Name, comment and extra field of one gzip member: nobody uses more than a file name.
_MAX_GZIP_HEADER: Final = 128 << 10
_SMALL_SLICE: Final = 4 << 10
_LARGE_SLICE: Final = 512 << 10
# Block-wise gzip ends each of its files with one empty member; a thousand in a row serve nothing.
_MAX_EMPTY_UNITS: Final = 1024
_FHCRC, _FEXTRA, _FNAME, _FCOMMENT, _RESERVED = 2, 4, 8, 16, 0xE0


class Decoder(Protocol):
    """Turns a compressed stream into a plain one, piece by piece."""

    def feed(self, data: memoryview) -> Iterator[bytes | memoryview]:
        """Output blocks for more input; `data` may be overwritten once the iterator ends."""

    def finish(self) -> None:
        """Say that the input ended; raises CorruptStream when it ended too soon."""


def decoder_for(head: bytes, limits: Limits) -> Decoder:
    """The decoder that the first bytes of a stream ask for; raises MalformedArchive for foreign ones."""
    if head.startswith(_GZIP):
        return GzipDecoder() if HAS_ISAL else ZlibDecoder()
    if len(head) >= 4:
        magic = int.from_bytes(head[:4], "little")
        if magic == _ZSTD or magic & 0xFFFFFFF0 == _ZSTD_SKIPPABLE:
            return ZstdDecoder(limits.zstd_window_log)
    for signature, name in _FOREIGN.items():
        if head.startswith(signature):
            raise MalformedArchive(
                f"the layer is {name}, which no OCI layer type allows",
                next_step="the publisher must use gzip, zstd or no compression",
            )
    return PlainDecoder()


class PlainDecoder:
    """No compression: the input itself, copied because its buffer is used again."""

    def feed(self, data: memoryview) -> Iterator[bytes | memoryview]:
        """One block."""
        if data:
            yield bytes(data)

    def finish(self) -> None:
        """Nothing can be missing here; the tar reader knows where an archive ends."""


class _Unit(Protocol):
    """One gzip member or zstd frame being decompressed (the interface of bz2, lzma and zstd)."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes | memoryview, max_length: int = -1) -> bytes: ...


class _UnitDecoder:
    """A stream of units, one after the other.

    Input goes in by slices, because what a unit did not use is copied back: with whole buffers a stream of
    tiny members would cost quadratic time. The slice grows while one unit lasts and starts small after one.
    """

    _errors: tuple[type[Exception], ...]

    def __init__(self) -> None:
        self._unit: _Unit | None = None
        self._units = 0
        self._head = b""  # what is known of the next unit before it can begin
        self._empty = 0  # units without output in a row
        self._slice = _SMALL_SLICE

    def feed(self, data: memoryview) -> Iterator[bytes | memoryview]:
        """Blocks of output, across any number of units."""
        at = 0
        while at < len(data):
            if self._unit is None:
                at = self._begin(data, at)
                if self._unit is None:
                    return
            unit = self._unit
            end = min(len(data), at + self._slice)
            try:
                block = unit.decompress(data[at:end], OUTPUT_BLOCK)
                while block:
                    self._empty = 0
                    yield block
                    if unit.eof or unit.needs_input:
                        break
                    block = unit.decompress(b"", OUTPUT_BLOCK)
            except self._errors as error:
                raise self._explain(error) from error
            at = end
            if unit.eof:
                at -= len(unit.unused_data)
                self._unit = None
                self._slice = _SMALL_SLICE
                self._empty += 1
                if self._empty > _MAX_EMPTY_UNITS:
                    raise LimitExceeded("a compressed stream of empty pieces")
            else:
                self._slice = min(self._slice * 2, _LARGE_SLICE)

    def finish(self) -> None:
        """Raises CorruptStream inside a unit or its header."""
        if self._unit is not None or self._head or not self._units:
            raise _corrupt("the compressed stream ends too soon")

    def _begin(self, data: memoryview, at: int) -> int:
        raise NotImplementedError

    def _explain(self, error: Exception) -> CorruptStream | LimitExceeded:
        return _corrupt(str(error))


class GzipDecoder(_UnitDecoder):
    """gzip through isal; member headers are read here, because isal wants them in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self._errors = (cast("type[Exception]", igzip_lib.IsalError),)  # its stub calls it an instance
        self._padding = False

    def _begin(self, data: memoryview, at: int) -> int:
        if self._units and not self._head and (self._padding or data[at] == 0):
            self._padding = True
            _only_zeros(data[at:])
            return len(data)
        while at < len(data):
            before = len(self._head)
            self._head += data[at : at + 512]
            length = _gzip_header_length(self._head)
            if length is not None:
                self._head = b""
                self._units += 1
                # The header is read already; length and CRC at the end are isal's to verify.
                self._unit = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP_NO_HDR_VER)
                return at + length - before
            if len(self._head) > _MAX_GZIP_HEADER:
                raise LimitExceeded("a gzip header without end")
            at += 512
        return len(data)


class ZstdDecoder(_UnitDecoder):
    """zstd with a capped window: a frame that asks for more memory is refused before it gets any."""

    def __init__(self, window_log: int) -> None:
        super().__init__()
        # Imported here: most layers are gzip, and the worker's start is counted in milliseconds.
        from unlade.unpack import zstd

        self._errors = (zstd.ZstdError,)
        self._window_log = window_log
        self._zstd = zstd

    def _begin(self, data: memoryview, at: int) -> int:
        used = min(4 - len(self._head), len(data) - at)
        self._head += data[at : at + used]
        if len(self._head) == 4:
            magic = int.from_bytes(self._head, "little")
            if magic != _ZSTD and magic & 0xFFFFFFF0 != _ZSTD_SKIPPABLE:
                raise _corrupt("junk after the end of a zstd frame")
            parameter = self._zstd.DecompressionParameter.window_log_max
            self._unit = self._zstd.ZstdDecompressor(options={int(parameter): self._window_log})
            self._unit.decompress(self._head)
            self._units += 1
            self._head = b""
        return at + used

    def _explain(self, error: Exception) -> CorruptStream | LimitExceeded:
        if "memory" not in str(error):  # ZSTD_error_frameParameter_windowTooLarge has no code of its own here
            return _corrupt(str(error))
        return LimitExceeded(
            f"a zstd frame wants a window of more than 2^{self._window_log} bytes",
            next_step="the publisher must compress with a smaller window (zstd --long=27 at most)",
        )


class ZlibDecoder:
    """gzip through zlib, where isal is not available."""

    def __init__(self) -> None:
        self._member: zlib._Decompress | None = None
        self._members = 0
        self._padding = False

    def feed(self, data: memoryview) -> Iterator[bytes | memoryview]:
        """Blocks of inflated data, across any number of members."""
        at = 0
        while at < len(data):
            if self._member is None:
                if self._members and (self._padding or data[at] == 0):
                    self._padding = True
                    _only_zeros(data[at:])
                    return
                self._member = zlib.decompressobj(wbits=31)
                self._members += 1
            member = self._member
            end = min(len(data), at + _SMALL_SLICE)
            pending: bytes | memoryview = data[at:end]
            at = end
            while pending and not member.eof:
                try:
                    block = member.decompress(pending, OUTPUT_BLOCK)
                except zlib.error as error:
                    raise _corrupt(f"gzip: {error}") from error
                if block:
                    yield block
                pending = member.unconsumed_tail
            if member.eof:
                at -= len(member.unused_data)
                self._member = None

    def finish(self) -> None:
        """Raises CorruptStream inside a member."""
        if self._member is not None or not self._members:
            raise _corrupt("the compressed stream ends too soon")


def _only_zeros(data: memoryview) -> None:
    if bytes(data).strip(b"\0"):
        raise _corrupt("junk after the end of the gzip stream")


def _corrupt(what: str) -> CorruptStream:
    return CorruptStream(what, next_step="the blob itself is damaged; ask its publisher to push it again")


def _gzip_header_length(head: bytes) -> int | None:
    """How long a member's header is, None while it is incomplete; raises CorruptStream."""
    if not _GZIP.startswith(head[:2]):
        raise _corrupt("gzip: junk after the end of a member")
    if len(head) < 10:
        return None
    method, flags = head[2], head[3]
    if method != 8 or flags & _RESERVED:
        raise _corrupt("gzip: an unknown method or flag")
    at = 10
    if flags & _FEXTRA:
        if len(head) < at + 2:
            return None
        at += 2 + int(struct.unpack_from("<H", head, at)[0])
    for text in (_FNAME, _FCOMMENT):
        if flags & text:
            end = head.find(b"\0", at)
            if end < 0:
                return None
            at = end + 1
    if flags & _FHCRC:
        if len(head) < at + 2:
            return None
        if zlib.crc32(head[:at]) & 0xFFFF != struct.unpack_from("<H", head, at)[0]:
            raise _corrupt("gzip: the header's checksum is wrong")
        at += 2
    return at if len(head) >= at else None

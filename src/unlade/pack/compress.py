"""Compression whose output depends on the input alone.

gzip is written by us around zlib-ng's raw deflate (decision 0016): the header has no time, no name and no
operating system, which a library would stamp with the build's. The input is cut into blocks of a fixed
size, each deflated on its own thread with the 32 KiB before it as dictionary and joined by empty blocks, so
that the result is one ordinary gzip member that does not depend on how many threads there were. isal is
faster still, but its bytes vary with chunking and processor: it only inflates. zstd is deterministic for
one version of its library, not between versions: offered, not default.

Called by `layer`. Nothing here reads files or knows about tar.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Literal

from unlade.errors import InvalidInput

try:
    from zlib_ng import zlib_ng as deflating
except ImportError:
    import zlib as deflating  # type: ignore[no-redef]

Compression = Literal["gzip", "zstd", "none"]
# Nobody writes to a block once it is handed over.
Block = bytes | bytearray

# Level 6 costs up to a third more time for a third of a percent, level 4 saves little and adds two.
GZIP_LEVEL: Final = 5
# zstd's own default.
ZSTD_LEVEL: Final = 3
# Changing the block size changes every digest. 1 MiB loses under 0.1 % to the joints and feeds several
# threads.
BLOCK_SIZE: Final = 1 << 20
# How far deflate looks back: the dictionary each block starts with.
_WINDOW: Final = 1 << 15
# Magic, deflate, no flags, no time, no extra flags, operating system unknown.
_GZIP_HEADER: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
# More threads than this only wait for the disk; each holds two blocks.
_MAX_THREADS: Final = 8
# What `_probe()` gives with zlib-ng 2.2.5 at the default level, on any processor. A version that gives
# another is a version of our own that gives other digests, and the changelog's business.
_REFERENCE_PROBE: Final = "544730b54a5896817d310f54453cce13c86c24f3476117429900cbd69ffecdbd"


def media_suffix(compression: Compression) -> str:
    """What a tar's media type ends in under this compression."""
    return "" if compression == "none" else f"+{compression}"


def compress(chunks: Iterable[Block], compression: Compression, level: int | None = None) -> Iterator[Block]:
    """The compressed form of blocks of BLOCK_SIZE (the last may be shorter); lazy and bounded in memory."""
    if compression == "gzip":
        return _gzip(chunks, _checked(level, GZIP_LEVEL, 0, 9))
    if compression == "zstd":
        return _zstd(chunks, _checked(level, ZSTD_LEVEL, 1, 19))
    return iter(chunks)


def same_everywhere() -> bool:
    """Whether this machine deflates as others do; one without zlib-ng, or with another version, may not."""
    return _probe() == _REFERENCE_PROBE


def _checked(level: int | None, default: int, low: int, high: int) -> int:
    if level is None:
        return default
    if not low <= level <= high:
        raise InvalidInput(
            f"compression level {level} is out of range", next_step=f"use a level from {low} to {high}"
        )
    return level


def _gzip(blocks: Iterable[Block], level: int) -> Iterator[bytes]:
    yield _GZIP_HEADER
    crc = size = 0
    window = b""

    def jobs() -> Iterator[Callable[[], bytes]]:
        nonlocal crc, size, window
        for block in blocks:
            crc = deflating.crc32(block, crc)
            size += len(block)
            yield _Deflate(block, window, level)
            window = bytes(block[-_WINDOW:])

    yield from _in_order(jobs())
    # An empty final block ends the stream; then the checksum and the size as RFC 1952 has them.
    yield b"\x03\x00" + struct.pack("<II", crc, size & 0xFFFFFFFF)


class _Deflate:
    """One block's work; a class because it is called on another thread long after its loop went on."""

    __slots__ = ("block", "level", "window")

    def __init__(self, block: Block, window: bytes, level: int) -> None:
        self.block = block
        self.window = window
        self.level = level

    def __call__(self) -> bytes:
        dictionary: dict[str, Any] = {"zdict": self.window} if self.window else {}
        deflate = deflating.compressobj(self.level, deflating.DEFLATED, -15, 8, **dictionary)
        return bytes(deflate.compress(self.block) + deflate.flush(deflating.Z_SYNC_FLUSH))


def _in_order(jobs: Iterator[Callable[[], bytes]]) -> Iterator[bytes]:
    """Run jobs on threads, a bounded number ahead, and give their results in order."""
    threads = min(os.cpu_count() or 1, _MAX_THREADS)
    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="unlade-deflate") as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(job))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _zstd(blocks: Iterable[Block], level: int) -> Iterator[bytes]:
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]  # Python 3.14 has it
    except ImportError:
        from backports import zstd
    parameter = zstd.CompressionParameter
    # The frame's own checksum lets a reader notice rot; the digest covers it as well.
    compressor = zstd.ZstdCompressor(options={parameter.compression_level: level, parameter.checksum_flag: 1})
    for block in blocks:
        data = compressor.compress(block)
        if data:
            yield data
    yield compressor.flush()


def _probe() -> str:
    # Text-like, with matches near and far: enough to take every path of deflate that implementations
    # differ in.
    text = b"".join(b"%d %x layer/%d\n" % (n, n * 2654435761 % 4294967296, n % 97) for n in range(6000))
    blocks = [text[start : start + 65536] for start in range(0, len(text), 65536)]
    sha = hashlib.sha256()
    for piece in _gzip(blocks, GZIP_LEVEL):
        sha.update(piece)
    return sha.hexdigest()

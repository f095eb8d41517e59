"""Archives that cost their reader far more than their writer, as streams that are made while they are read.

Run one in a process of its own with `python -m tests.hostile.bombs NAME DIRECTORY`: it prints what became of
it, the time it took and the most memory the process ever had, as JSON.
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import time
from collections.abc import Callable, Iterator

from tests.fakes.tars import (
    BLOCK,
    Tar,
    gz,
    gz_zeros,
    header,
    padded,
    pax_record,
    zst,
    zstd_compressor,
    zstd_header,
)
from tests.figures import peak_memory
from unlade.errors import UnladeError
from unlade.unpack import Limits, UnpackPolicy, unpack

Stream = Iterator[bytes]

ZEROS = header(b"f", size=7 << 30)  # a file of 7 GiB, to be followed by zeros


class Reading:
    """An iterator of bytes as a source."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rest = memoryview(b"")

    def readinto(self, buffer: memoryview, /) -> int:
        while not self._rest:
            try:
                self._rest = memoryview(next(self._stream))
            except StopIteration:
                return 0
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _gzip_members() -> Stream:
    yield gz(ZEROS)
    member = gz_zeros(64 << 20)
    while True:
        yield member


def _gzip_one_member() -> Stream:
    yield gz(ZEROS)
    yield gz_zeros(1 << 30)


def _zstd_frames() -> Stream:
    yield zst(ZEROS)
    frame = zst(bytes(64 << 20))
    while True:
        yield frame


def _zstd_windows() -> Stream:
    yield zstd_header(31) + b"\0" * 64


def _zstd_window_just_too_large() -> Stream:
    yield zstd_header(28) + b"\0" * 64


def _zstd_single_segment() -> Stream:
    # Single-segment frames have no window field: the content size is the window.
    yield struct.pack("<IBQ", 0xFD2FB528, 0xE0, 1 << 40) + b"\0" * 64


def _zstd_largest_window() -> Stream:
    """Allowed: the window that other tools accept, filled to the last byte."""
    squeeze = zstd_compressor(window_log=27)
    chance = random.Random(1)
    yield squeeze.compress(header(b"f", size=192 << 20))
    for _ in range(192):
        yield squeeze.compress(chance.randbytes(1 << 10) * 1024)
    yield squeeze.compress(bytes(2 * BLOCK)) + squeeze.flush()


def _pax_without_end() -> Stream:
    data = b"".join(pax_record(b"k%d" % n, b"v") for n in range(60_000))
    while True:
        yield header(b"PaxHeaders/x", kind=b"g", size=len(data)) + padded(data)


def _endless(one: Callable[[int], bytes]) -> Stream:
    number = 0
    while True:
        yield b"".join(one(n) for n in range(number, number + 256))
        number += 256


def _whiteouts() -> Stream:
    return _endless(lambda n: header(b".wh.%d" % n))


def _parents() -> Stream:
    return _endless(lambda n: Tar().file(b"/".join([b"%d" % n + b"p" * 200] * 4) + b"/f").unfinished())


def _pending_links() -> Stream:
    return _endless(lambda n: header(b"l%d" % n, kind=b"1", link=b"lower/%d" % n))


def _symlinks() -> Stream:
    return _endless(lambda n: header(b"s%d" % n + b"x" * 80, kind=b"2", link=b"t"))


def _same_name() -> Stream:
    return _endless(lambda n: header(b"d", kind=b"5", mode=0o755))


def _tiny_members() -> Stream:
    """Each byte of an archive as a gzip member of its own."""
    for byte in Tar().file(b"f", b"x" * 30_000).unfinished():
        yield gz(bytes([byte]))


def _link_mazes() -> Stream:
    """Every entry through forty links with long ways around."""
    tar = Tar()
    tar.dir(b"d")
    around = b"d/.." + b"/d/.." * 300 + b"/"
    tar.symlink(b"l0", b"d")
    for number in range(1, 40):
        tar.symlink(b"l%d" % number, around + b"l%d" % (number - 1))
    yield tar.unfinished()
    yield from _endless(lambda n: header(b"l39/%d/f" % n))


def _flips() -> Stream:
    """A directory of many files, replaced again and again."""
    for number in range(60):
        yield Tar().file(b"x").dir(b"x").unfinished()
        yield b"".join(header(b"x/%d-%d" % (number, n)) for n in range(300))
    yield bytes(2 * BLOCK)


def _deep() -> Stream:
    return _endless(lambda n: Tar().dir(b"d/" * (n + 1)).unfinished())


# name -> stream, policy, expected: an error's code, or "" for success
BOMBS: dict[str, tuple[Callable[[], Stream], UnpackPolicy, str]] = {
    "gzip members": (_gzip_members, UnpackPolicy("artifact"), "limit-exceeded"),
    "gzip, one member": (_gzip_one_member, UnpackPolicy("artifact"), "limit-exceeded"),
    "zstd frames": (_zstd_frames, UnpackPolicy("artifact"), "limit-exceeded"),
    "zstd window of 2 GiB": (_zstd_windows, UnpackPolicy("artifact"), "limit-exceeded"),
    "zstd window of 256 MiB": (_zstd_window_just_too_large, UnpackPolicy("artifact"), "limit-exceeded"),
    "zstd single segment of 1 TiB": (_zstd_single_segment, UnpackPolicy("artifact"), "limit-exceeded"),
    "zstd window of 128 MiB": (_zstd_largest_window, UnpackPolicy("artifact"), ""),
    "pax without end": (
        _pax_without_end,
        UnpackPolicy("artifact", limits=Limits(max_bytes=256 << 20)),
        "limit-exceeded",
    ),
    "whiteouts": (_whiteouts, UnpackPolicy("image"), "limit-exceeded"),
    "parents without entries": (_parents, UnpackPolicy("artifact"), "limit-exceeded"),
    "pending links": (_pending_links, UnpackPolicy("image"), "limit-exceeded"),
    "symbolic links": (
        _symlinks,
        UnpackPolicy("artifact", limits=Limits(max_noted_bytes=4 << 20)),
        "limit-exceeded",
    ),
    "tiny gzip members": (_tiny_members, UnpackPolicy("artifact"), ""),
    "mazes of links": (_link_mazes, UnpackPolicy("image"), "limit-exceeded"),
    "flips": (_flips, UnpackPolicy("artifact"), ""),
    "deeper and deeper": (_deep, UnpackPolicy("artifact"), "limit-exceeded"),
    "a million entries": (_same_name, UnpackPolicy("artifact"), "limit-exceeded"),
}


def main(name: str, directory: str) -> None:
    """Run one bomb here."""
    stream, policy, _ = BOMBS[name]
    dirfd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    started = time.monotonic()
    code = ""
    try:
        unpack(Reading(stream()), dirfd, policy)
    except UnladeError as error:
        code = error.code
    print(json.dumps({"code": code, "seconds": time.monotonic() - started, "peak": peak_memory()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

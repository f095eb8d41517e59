"""gzip framing: what zlib accepts, isal gives the same bytes for, however the input is cut."""

from __future__ import annotations

from typing import Final

from tests.fakes.tars import gz
from unlade.errors import UnladeError
from unlade.unpack.compression import Decoder, GzipDecoder, ZlibDecoder

CORPUS: Final = [
    gz(b""),
    gz(b"some content " * 20),
    gz(b"a") + gz(b"b") + bytes(20),
    b"\x1f\x8b\x08\x1c\0\0\0\0\0\xff\x04\0extrname\0comment\0" + gz(b"x" * 100)[10:],
    gz(bytes(5000)),
    gz(bytes(range(256)) * 4) + b"junk",
]
_MOST: Final = 4 << 20


def one_input(data: bytes) -> None:
    """Decode it three ways."""
    if data[:2] != b"\x1f\x8b":
        data = b"\x1f\x8b" + data[2:]  # nothing else reaches this decoder
    whole = decode(GzipDecoder(), data, len(data))
    assert decode(GzipDecoder(), data, 7) == whole
    by_zlib = decode(ZlibDecoder(), data, len(data))
    # isal takes some incomplete Huffman codes that zlib refuses; the content's checksum holds for both.
    assert by_zlib is None or by_zlib == whole, "isal and zlib disagree"


def decode(decoder: Decoder, data: bytes, step: int) -> bytes | None:
    """What a decoder gives for this input, fed so many bytes at a time; None when it refuses."""
    out = bytearray()
    try:
        for at in range(0, len(data), step):
            for block in decoder.feed(memoryview(data)[at : at + step]):
                out += block
                if len(out) > _MOST:
                    return bytes(out[:_MOST])
        decoder.finish()
    except UnladeError:
        return None
    return bytes(out)

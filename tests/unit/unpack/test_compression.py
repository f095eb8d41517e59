"""Decoders: any way of cutting the input gives the same bytes, and isal's and zlib's answers agree."""

from __future__ import annotations

import gzip
import io
import random
from collections.abc import Callable

import pytest

from tests.fakes.tars import gz, zst
from unlade.unpack import CorruptStream, LimitExceeded, Limits, MalformedArchive
from unlade.unpack.compression import (
    OUTPUT_BLOCK,
    Decoder,
    GzipDecoder,
    PlainDecoder,
    ZlibDecoder,
    ZstdDecoder,
    decoder_for,
)

PLAIN = random.Random(5).randbytes(3000) * 700  # 2 MB: several output blocks, compressible
MAKERS: dict[str, tuple[Callable[[], Decoder], bytes]] = {
    "isal": (GzipDecoder, gz(PLAIN)),
    "zlib": (ZlibDecoder, gz(PLAIN)),
    "zstd": (lambda: ZstdDecoder(27), zst(PLAIN)),
    "plain": (PlainDecoder, PLAIN),
    "isal, members": (GzipDecoder, gz(PLAIN[:1000]) + gz(b"") + gz(PLAIN[1000:]) + bytes(77)),
    "zlib, members": (ZlibDecoder, gz(PLAIN[:1000]) + gz(b"") + gz(PLAIN[1000:]) + bytes(77)),
    "zstd, frames": (lambda: ZstdDecoder(27), zst(PLAIN[:1000]) + zst(b"") + zst(PLAIN[1000:])),
}


def decode(decoder: Decoder, data: bytes, step: int) -> bytes:
    out = io.BytesIO()
    for at in range(0, len(data), step):
        for block in decoder.feed(memoryview(data)[at : at + step]):
            assert 0 < len(block) <= max(OUTPUT_BLOCK, step)
            out.write(block)
    decoder.finish()
    return out.getvalue()


@pytest.mark.parametrize("step", [1, 7, 1000, 4096, 65_536, 1 << 22])
@pytest.mark.parametrize("name", MAKERS)
def test_any_cut_gives_the_same(name: str, step: int) -> None:
    make, data = MAKERS[name]
    if step == 1 and len(data) > 100_000:
        step = 997
    assert decode(make(), data, step) == PLAIN


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "plain"])
def test_every_truncation_is_noticed(name: str) -> None:
    make, _ = MAKERS[name]
    small = (zst if "zstd" in name else gz)(b"some content, " * 9)
    for at in range(len(small)):
        with pytest.raises(CorruptStream):
            decode(make(), small[:at], 5)


@pytest.mark.parametrize("make", [GzipDecoder, ZlibDecoder])
def test_every_flipped_bit_of_gzip_is_noticed_or_harmless(make: Callable[[], Decoder]) -> None:
    content = b"The quick brown fox jumps over the lazy dog. " * 3
    packed = gz(content)
    for bit in range(8 * len(packed)):
        broken = bytearray(packed)
        broken[bit // 8] ^= 1 << bit % 8
        try:
            assert decode(make(), bytes(broken), 64) == content  # time, system and flags of the header
        except (CorruptStream, LimitExceeded):
            continue


def test_isal_and_zlib_agree_on_headers() -> None:
    buffer = io.BytesIO()
    with gzip.GzipFile("some-name", "wb", fileobj=buffer, mtime=7) as member:
        member.write(PLAIN)
    for step in (3, 13, 1009, 1 << 20):
        assert decode(GzipDecoder(), buffer.getvalue(), step) == PLAIN
    assert decode(ZlibDecoder(), buffer.getvalue(), 1 << 16) == PLAIN


def test_the_first_bytes_decide() -> None:
    limits = Limits()
    assert isinstance(decoder_for(gz(b"")[:6], limits), GzipDecoder | ZlibDecoder)
    assert isinstance(decoder_for(zst(b"")[:6], limits), ZstdDecoder)
    assert isinstance(decoder_for(b"\x5a\x2a\x4d\x18\0\0", limits), ZstdDecoder)
    assert isinstance(decoder_for(b"a/file", limits), PlainDecoder)
    assert isinstance(decoder_for(b"", limits), PlainDecoder)
    with pytest.raises(MalformedArchive, match="xz"):
        decoder_for(b"\xfd7zXZ\0", limits)

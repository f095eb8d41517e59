"""Telling a tar by its first bytes."""

from __future__ import annotations

import io
import random
import tarfile
from typing import Literal

import pytest

from tests.corpus.archives import d, f, gzip, helm_gzip, tar, zstd
from unlade.model import Descriptor, Digest
from unlade.planning.sniff import PEEK_BYTES, ZSTD_PEEK_BYTES, Archive, look, sniff

TAR = tar([d("a/"), f("a/b", "content" * 100), f("c", "x")])


def described(data: bytes) -> Descriptor:
    return Descriptor(media_type="application/octet-stream", digest=Digest.of(data), size=len(data))


@pytest.mark.parametrize(
    ("data", "compression"),
    [
        (TAR, ""),
        (gzip(TAR), "gzip"),
        (helm_gzip(TAR), "gzip"),
        (zstd(TAR), "zstd"),
        (gzip(b"") + gzip(TAR), "gzip"),
    ],
)
def test_tars_in_every_wrapping(data: bytes, compression: str) -> None:
    assert look(data) == Archive(compression, ("a/", "a/b", "c"))


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["short", "n" * 150, "d/" * 60 + "end", "ünïcödé"])
def test_names_in_every_format(style: Literal[0, 1, 2], name: str) -> None:
    out = io.BytesIO()
    info = tarfile.TarInfo(name)
    try:
        out.write(info.tobuf(style))
    except ValueError:
        assert style == tarfile.USTAR_FORMAT, "only ustar has names it cannot hold"
        return
    archive = look(out.getvalue() + bytes(1024))
    assert archive is not None
    assert archive.names == (name,)


def test_a_v7_header_is_known_by_its_checksum() -> None:
    header = bytearray(512)
    header[:4] = b"file"
    header[100:108], header[108:116], header[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    header[124:136], header[136:148], header[148:156] = b"00000000000\0", b"00000000000\0", b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    assert look(bytes(header) + bytes(1024)) == Archive("", ("file",))
    header[0] = ord("g")
    assert look(bytes(header) + bytes(1024)) is None


def test_what_is_no_tar() -> None:
    noise = random.Random(7)
    assert look(b"") is None
    assert look(b"{}") is None
    assert look(b"text " * 1000) is None
    assert look(gzip(b"text " * 1000)) is None
    assert look(zstd(b"text " * 1000)) is None
    assert look(b"\x1f\x8b" + noise.randbytes(2000)) is None
    assert look(b"\x28\xb5\x2f\xfd" + noise.randbytes(2000)) is None
    assert look(TAR[:511]) is None
    for _ in range(200):
        assert look(noise.randbytes(4096)) is None


def test_zeros_are_an_empty_tar() -> None:
    for data in (bytes(1024), bytes(10240), gzip(bytes(10240)), zstd(bytes(10240))):
        archive = look(data)
        assert archive is not None
        assert archive.empty
    assert look(bytes(512)) is None
    assert look(bytes(1023)) is None


def test_a_truncated_gzip_still_tells() -> None:
    packed = gzip(tar([f("first", random.Random(1).randbytes(100_000))]))
    assert look(packed[:2000]) == Archive("gzip", ("first",))


def test_a_large_first_zstd_block_is_fetched_whole() -> None:
    packed = zstd(tar([f("first", random.Random(1).randbytes(300_000).hex())]))
    asked: list[int] = []

    def peek(layer: Descriptor, count: int) -> bytes:
        asked.append(count)
        return packed[:count]

    assert sniff(described(packed), peek) == Archive("zstd", ("first",))
    assert asked == [PEEK_BYTES, ZSTD_PEEK_BYTES]


def test_a_skippable_zstd_frame_may_come_first() -> None:
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
    assert look(skippable + zstd(TAR)) == Archive("zstd", ("a/", "a/b", "c"))


def test_no_more_is_asked_for_than_there_is() -> None:
    def peek(layer: Descriptor, count: int) -> bytes:
        assert count == 3
        return b"abc"

    assert sniff(described(b"abc"), peek) is None


def test_nothing_is_fetched_of_nothing_or_of_embedded_data() -> None:
    def peek(layer: Descriptor, count: int) -> bytes:
        raise AssertionError("fetched")

    assert sniff(described(b""), peek) is None
    embedded = Descriptor(media_type="x/y", digest=Digest.of(TAR), size=len(TAR), data=TAR)
    assert sniff(embedded, peek) is not None


def test_a_registry_that_sends_more_is_cut() -> None:
    assert sniff(described(b"abc"), lambda layer, count: TAR) is None


def test_a_bomb_is_bounded() -> None:
    """256 MiB of zeros behind a header: only a little of it is inflated."""
    bomb = gzip(tar([f("zeros", bytes(1 << 26))]))
    assert look(bomb) == Archive("gzip", ("zeros",))

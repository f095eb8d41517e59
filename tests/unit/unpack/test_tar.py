"""The tar reader against the standard library's writer, and its own arithmetic."""

from __future__ import annotations

import io
import random
import tarfile

import pytest

from tests.fakes.tars import Tar, base256, header, octal
from unlade.unpack import Limits, MalformedArchive
from unlade.unpack.tar import FILE, TarReader, number


def reader_of(data: bytes, cut: int = 700) -> TarReader:
    """A reader fed with blocks whose ends fall anywhere."""
    blocks = iter([data[at : at + cut] for at in range(0, len(data), cut)])
    return TarReader(lambda: next(blocks, b""), Limits())


@pytest.mark.parametrize("cut", [1, 100, 511, 512, 513, 1000, 1 << 20])
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_the_standard_library_writes(form: int, cut: int) -> None:
    chance = random.Random(form)
    buffer = io.BytesIO()
    written = []
    with tarfile.open(fileobj=buffer, mode="w", format=form) as out:
        for n in range(30):
            info = tarfile.TarInfo("dir/" * chance.randrange(4) + "n" * chance.randrange(1, 90) + str(n))
            info.size = chance.choice([0, 1, 512, 700])
            info.mode = chance.randrange(0o10000)
            info.uid, info.gid = chance.randrange(2**21), chance.randrange(2**21)
            info.mtime = chance.randrange(2**33)
            content = chance.randbytes(info.size)
            out.addfile(info, io.BytesIO(content))
            written.append((info.name.encode(), info.mode, info.uid, info.gid, info.mtime * 10**9, content))
    reader = reader_of(buffer.getvalue(), cut)
    read = []
    while reader.advance():
        assert reader.kind == FILE
        content = b""
        while len(content) < reader.size:
            content += bytes(reader.piece())
        read.append((reader.name, reader.mode, reader.uid, reader.gid, reader.mtime_ns, content))
    assert read == written


def test_content_that_is_not_taken_is_passed_over() -> None:
    reader = reader_of(bytes(Tar().file(b"a", b"x" * 3000).file(b"b", b"y").file(b"c", b"z" * 512)))
    names = []
    while reader.advance():
        names.append(reader.name)
    assert names == [b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (octal(0o644, 8), 0o644),
        (b"    644\0", 0o644),
        (b"644 \0\0\0\0", 0o644),
        (b"0000644 ", 0o644),
        (b"00000644", 0o644),
        (bytes(8), 0),
        (b"        ", 0),
        (b"644\0junk", 0o644),
        (base256(5, 8), 5),
        (base256(-5, 12), -5),
        (base256(2**62, 12), 2**62),
    ],
)
def test_numbers(field: bytes, value: int) -> None:
    assert number(field) == value


@pytest.mark.parametrize(
    "field", [b"+000064\0", b"0x1f\0\0\0\0", b"12_34\0\0\0", b"0000008\0", b"-1\0\0\0\0\0\0", b"\xc2\xb2" * 4]
)
def test_what_is_no_number(field: bytes) -> None:
    if field[0] & 0x80:
        assert number(field) < 0  # base-256 by its first bit
        return
    with pytest.raises(MalformedArchive):
        number(field)


def test_both_kinds_of_checksum_are_accepted() -> None:
    name = b"\xff\xfe\xfd"
    block = header(name)
    blanked = block[:148] + b" " * 8 + block[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in blanked)
    reader = reader_of(header(name, checksum=b"%06o\0 " % signed) + bytes(1024))
    assert reader.advance()
    assert reader.name == name


def test_star_prefixes_end_early() -> None:
    block = bytearray(header(b"name", prefix=b"prefix".ljust(131, b"\0") + b"123"))
    block[508:512] = b"tar\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    reader = reader_of(bytes(block) + bytes(1024))
    assert reader.advance()
    assert reader.name == b"prefix/name"

"""The file list: what was written, in the end, with checksums that find rot."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path

import pytest

from tests.fakes.tars import Tar
from unlade.unpack import UnpackPolicy, unpack
from unlade.unpack.filelist import CorruptFileList, FileListWriter, final, read


def listed(tar: Tar, directory: Path, policy: UnpackPolicy | None = None) -> io.BytesIO:
    out = io.BytesIO()
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        unpack(io.BytesIO(bytes(tar)), fd, policy or UnpackPolicy("artifact"), files_out=out)
    finally:
        os.close(fd)
    out.seek(0)
    return out


def test_every_kind(tmp_path: Path) -> None:
    tar = Tar().dir(b"d", mode=0o750, mtime=5).file(b"d/\xff\n", b"content", mode=0o640, mtime=6)
    tar.symlink(b"l", b"d/\xff\n", mtime=7).link(b"h", b"d/\xff\n")
    records = final(listed(tar, tmp_path))
    file, directory = records[b"d/\xff\n"], records[b"d"]
    assert (file.type, file.size, file.mode, file.mtime_ns) == ("f", 7, 0o640, 6 * 10**9)
    assert file.crc32 == zlib.crc32(b"content")
    assert (file.uid, file.gid) == (os.geteuid(), os.getegid())
    assert (directory.type, directory.mode) == ("d", 0o750)
    assert (records[b"l"].type, records[b"l"].link_target) == ("l", b"d/\xff\n")
    assert (records[b"h"].type, records[b"h"].link_target) == ("h", b"d/\xff\n")


def test_only_what_is_left_counts(tmp_path: Path) -> None:
    tar = (
        Tar()
        .dir(b"x")
        .file(b"x/a")
        .file(b"x/b")
        .file(b"x", b"1")
        .dir(b"x")
        .file(b"x/a", b"22")
        .file(b"y", b"333")
    )
    records = final(listed(tar, tmp_path))
    assert {name: record.size for name, record in records.items()} == {b"x": 0, b"x/a": 2, b"y": 3}
    found = {path.relative_to(tmp_path).as_posix().encode() for path in tmp_path.rglob("*")}
    assert found == set(records)


def test_names_stand_below_the_prefix(tmp_path: Path) -> None:
    records = final(listed(Tar().dir(b"./").file(b"f"), tmp_path, UnpackPolicy("artifact", prefix=b"a/b")))
    assert set(records) == {b"a/b", b"a/b/f"}


def test_links_are_listed_where_they_lead(tmp_path: Path) -> None:
    tar = Tar().dir(b"usr").symlink(b"u", b"usr").file(b"u/f")
    assert set(final(listed(tar, tmp_path, UnpackPolicy("image")))) == {b"usr", b"u", b"usr/f"}


def test_many_lines_in_batches() -> None:
    out = io.BytesIO()
    writer = FileListWriter(out)
    for number in range(3000):
        writer.add("f", str(number), 0o644)
    writer.flush()
    out.seek(0)
    assert [record.name for record in read(out)] == [str(number) for number in range(3000)]


@pytest.mark.parametrize(
    "line", [b"nonsense\n", b'["z","name"]\n', b'["f"]\n', b'{"type":"f"}\n', b'["f",1]\n']
)
def test_a_damaged_list_is_an_error(line: bytes) -> None:
    with pytest.raises(CorruptFileList):
        list(read([b'["f","ok"]\n', line]))

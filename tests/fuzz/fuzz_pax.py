"""Records of a pax header: an entry with checked fields or a typed error, in one piece or in many."""

from __future__ import annotations

from typing import Final

from tests.fakes.tars import Tar, header, padded, pax_record
from unlade.errors import UnladeError
from unlade.unpack import Limits
from unlade.unpack.tar import TarReader

CORPUS: Final = [
    pax_record(b"path", b"some/name") + pax_record(b"mtime", b"-1.25"),
    pax_record(b"size", b"3") + pax_record(b"uid", b"4294967294") + pax_record(b"gid", b"0"),
    pax_record(b"linkpath", b"x" * 200) + pax_record(b"SCHILY.xattr.user.k", b"a=b\n"),
    pax_record(b"GNU.sparse.major", b"1"),
    pax_record(b"path", b"") + pax_record(b"path", b"twice"),
    b"11 path=abc\n",
    b"9 a=b",
]
_LIMITS: Final = Limits(max_bytes=1 << 30, max_header_bytes=64 << 10)


def one_input(data: bytes) -> None:
    """As the header of a file."""
    made = Tar().raw(header(b"PaxHeaders/x", kind=b"x", size=len(data)) + padded(data)).file(b"f", b"abc")
    archive = bytes(made)
    whole = _read(archive, len(archive))
    assert whole == _read(archive, 333)


def _read(archive: bytes, cut: int) -> object:
    blocks = iter([archive[at : at + cut] for at in range(0, len(archive), cut)])
    reader = TarReader(lambda: next(blocks, b""), _LIMITS)
    try:
        assert reader.advance()
        assert 0 <= reader.uid < 2**32 - 1
        assert 0 <= reader.gid < 2**32 - 1
        assert 0 <= reader.size <= _LIMITS.max_bytes
        assert abs(reader.mtime_ns) < 2**63
        assert b"\0" not in reader.name
        return reader.name, reader.link, reader.uid, reader.gid, reader.size, reader.mtime_ns, reader.xattrs
    except UnladeError as error:
        return error.code

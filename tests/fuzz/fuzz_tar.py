"""Archives: a tree or a typed error, nothing outside the destination, and both ways of opening agree.

Checksums of blocks that look like headers are put right first, or hardly any input would get past them.
"""

from __future__ import annotations

import atexit
import io
import os
import shutil
import tempfile
from typing import Final

from tests.fakes.tars import GNU, V7, Tar, base256, gz, header, snapshot
from unlade.errors import UnladeError
from unlade.kernel.beneath import forced_walk
from unlade.kernel.files import remove_tree
from unlade.unpack import Limits, UnpackPolicy, unpack
from unlade.unpack.filelist import final

CORPUS: Final = [
    b"\0" + bytes(Tar().dir(b"d").file(b"d/f", b"content").symlink(b"l", b"d").link(b"h", b"d/f")),
    b"\1"
    + bytes(Tar().symlink(b"lib", b"usr/lib").file(b"lib/x", b"1").file(b"d/.wh.a").file(b"o/.wh..wh..opq")),
    b"\2"
    + bytes(Tar().file(b"../x").file(b"/abs").symlink(b"s", b"/").file(b"s/x").entry(b"dev", kind=b"3")),
    b"\3" + bytes(Tar().file(b"n" * 150, b"x", pax={b"mtime": b"1.5", b"SCHILY.xattr.user.a": b"b"})),
    b"\0"
    + bytes(
        Tar().gnu_long(b"L", b"long/" * 30 + b"f").file(b"f").gnu_long(b"K", b"k" * 120).symlink(b"l", b"k")
    ),
    b"\1"
    + bytes(
        Tar().raw(header(b"old/", kind=b"\0", magic=V7)).raw(header(b"f", size=base256(0, 12), magic=GNU))
    ),
    b"\1"
    + bytes(Tar().pax({b"comment": b"x"}, kind=b"g").file(b"f").file(b"f", b"2").dir(b"f").file(b"f/g")),
    b"\1"
    + bytes(Tar().link(b"h", b"lower").link(b"i", b"h").symlink(b"a", b"b").symlink(b"b", b"a").file(b"a/f")),
    b"\0" + gz(bytes(Tar().file(b"f", b"x" * 600))),
]
_LIMITS: Final = Limits(
    max_entries=64, max_bytes=1 << 20, max_depth=20, max_header_bytes=4096, max_noted_bytes=8192
)
# In memory where there is such a place: the file system is most of the cost.
_BASE: Final = tempfile.mkdtemp(
    prefix="unlade-fuzz-tar-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
)
atexit.register(shutil.rmtree, _BASE, ignore_errors=True)
os.mkdir(_BASE + "/outside")
with open(_BASE + "/outside/secret", "w") as _file:
    _file.write("secret")
_FD: Final = os.open(_BASE, os.O_RDONLY | os.O_DIRECTORY)
_OUTSIDE: Final = snapshot(_BASE + "/outside")


def one_input(data: bytes) -> None:
    """Unpack it by both rules, twice."""
    if not data:
        return
    archive = _with_checksums(data[1:])
    policy = UnpackPolicy(
        rules="image" if data[0] & 1 else "artifact",
        prefix=b"some/where" if data[0] & 2 else b"",
        xattrs=True,
        limits=_LIMITS,
    )
    outcome = _run(archive, policy)
    with forced_walk():
        assert _run(archive, policy) == outcome, "openat2 and the walk disagree"
    assert os.listdir(_FD) == ["outside"]
    assert snapshot(_BASE + "/outside") == _OUTSIDE


def _run(archive: bytes, policy: UnpackPolicy) -> object:
    os.mkdir("out", dir_fd=_FD)
    fd = os.open("out", os.O_RDONLY | os.O_DIRECTORY, dir_fd=_FD)
    listed = io.BytesIO()
    try:
        try:
            result = unpack(io.BytesIO(archive), fd, policy, files_out=listed)
        except UnladeError as error:
            return error.code, error.message
        listed.seek(0)
        for name, record in final(listed).items():
            # What the list says is there: a link that waits for a lower layer is all that may be missing.
            waiting = name in dict(result.pending_links)
            assert waiting or os.path.lexists(os.fsencode(_BASE) + b"/out/" + name), (name, record)
        return result
    finally:
        os.close(fd)
        remove_tree(_FD, b"out")


def _with_checksums(data: bytes) -> bytes:
    if data[:2] == b"\x1f\x8b":
        return data
    fixed = bytearray(data)
    for at in range(0, len(data) - 511, 512):
        if fixed[at + 257 : at + 262] == b"ustar" or (at == 0 and any(fixed[:512])):
            fixed[at + 148 : at + 156] = b" " * 8
            fixed[at + 148 : at + 156] = b"%06o\0 " % sum(fixed[at : at + 512])
    return bytes(fixed)

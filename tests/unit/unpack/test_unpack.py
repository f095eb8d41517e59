"""What entries become: content, kinds, modes, owners, times, links, attributes (artifact and image rules)."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tars import GNU, V7, Tar, base256, gz, header, zst
from unlade.errors import DeadlineExceeded
from unlade.kernel.beneath import forced_walk
from unlade.model import Deadline
from unlade.unpack import Limits, Unpacked, UnpackPolicy, unpack
from unlade.unpack.refusals import MalformedArchive, UnsafeLink, UnsafeName, UnsupportedEntry

ARTIFACT = UnpackPolicy(rules="artifact")
IMAGE = UnpackPolicy(rules="image")
TIME = 1_700_000_000


@pytest.fixture(params=["openat2", "walk"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "openat2":
        yield
        return
    with forced_walk():
        yield


class Destination:
    """A directory to unpack into, and ways to look at it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def unpack(self, archive: Tar | bytes, policy: UnpackPolicy = ARTIFACT, **options: Any) -> Unpacked:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return unpack(io.BytesIO(bytes(archive)), fd, policy, **options)
        finally:
            os.close(fd)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def stat(self, name: str) -> os.stat_result:
        return (self.path / name).lstat()

    def names(self) -> set[str]:
        return {str(found.relative_to(self.path)) for found in self.path.rglob("*")}


@pytest.fixture
def dest(tmp_path: Path) -> Destination:
    (tmp_path / "dest").mkdir()
    return Destination(tmp_path / "dest")


def test_files_directories_and_links(dest: Destination) -> None:
    tar = Tar().dir(b"a", mode=0o750, mtime=TIME).file(b"a/f", b"hello", mode=0o640, mtime=TIME + 1)
    tar.symlink(b"a/s", b"f", mtime=TIME + 2).link(b"a/h", b"a/f")
    result = dest.unpack(tar)
    assert dest.read("a/f") == b"hello"
    assert stat.S_IMODE(dest.stat("a").st_mode) == 0o750
    assert stat.S_IMODE(dest.stat("a/f").st_mode) == 0o640
    assert dest.stat("a").st_mtime == TIME
    assert dest.stat("a/f").st_mtime == TIME + 1
    assert dest.stat("a/s").st_mtime == TIME + 2
    assert os.readlink(dest.path / "a/s") == "f"
    assert dest.stat("a/h").st_ino == dest.stat("a/f").st_ino
    assert (result.entries, result.bytes) == (4, 5)
    assert result.diff_id.hex == hashlib.sha256(bytes(tar)).hexdigest()
    assert result.implicit_dirs == (b"",)


@pytest.mark.parametrize("compress", [bytes, gz, zst, lambda tar: gz(tar[:700]) + gz(tar[700:]) + bytes(40)])
def test_compression_is_told_by_the_bytes(dest: Destination, compress: Any) -> None:
    tar = bytes(Tar().file(b"f", b"x" * 5000))
    result = dest.unpack(compress(tar))
    assert dest.read("f") == b"x" * 5000
    assert result.diff_id.hex == hashlib.sha256(tar).hexdigest()


def test_a_large_archive_goes_through_the_threads(dest: Destination) -> None:
    tar = Tar()
    content = {f"d{n % 7}/f{n}": os.urandom(n * 97) for n in range(300)}
    for name, data in content.items():
        tar.file(name.encode(), data)
    read: list[int] = []
    blob = gz(bytes(tar))
    result = dest.unpack(blob, on_bytes=read.append)
    assert {name: dest.read(name) for name in content} == content
    assert sum(read) == len(blob)
    assert result.bytes == sum(map(len, content.values()))
    assert result.diff_id.hex == hashlib.sha256(bytes(tar)).hexdigest()


def test_parents_without_entries_are_noted_outermost_first(dest: Destination) -> None:
    result = dest.unpack(Tar().file(b"a/b/c/f").dir(b"a/b"))
    assert result.implicit_dirs == (b"", b"a", b"a/b/c")
    assert stat.S_IMODE(dest.stat("a").st_mode) == 0o755
    assert dest.stat("a").st_mtime == 0
    assert dest.stat("a/b").st_mtime == TIME


def test_directory_times_survive_later_entries(dest: Destination) -> None:
    tar = Tar().dir(b"d", mtime=5).dir(b"e", mtime=6)
    for n in range(300):  # more directories than are held open
        tar.dir(b"d/%d" % n, mtime=n).file(b"d/%d/f" % n)
    for n in range(0, 300, 3):
        tar.file(b"d/%d/late" % n)
    tar.dir(b"e", mtime=7)
    dest.unpack(tar)
    assert dest.stat("d").st_mtime == 5
    assert dest.stat("e").st_mtime == 7
    assert [dest.stat(f"d/{n}").st_mtime for n in range(300)] == list(range(300))


def test_the_root_entry_gives_its_attributes(dest: Destination) -> None:
    result = dest.unpack(Tar().dir(b"./", mode=0o711, mtime=TIME).file(b"./f"))
    assert stat.S_IMODE(dest.path.stat().st_mode) == 0o711
    assert dest.path.stat().st_mtime == TIME
    assert result.implicit_dirs == ()


def test_directories_closed_to_their_owner_are_closed_last(dest: Destination) -> None:
    dest.unpack(Tar().dir(b"d", mode=0o555).dir(b"d/e", mode=0o000).file(b"d/e/f", b"x").file(b"d/g", b"y"))
    assert stat.S_IMODE(dest.stat("d").st_mode) == 0o555
    assert stat.S_IMODE(dest.stat("d/e").st_mode) == 0
    (dest.path / "d/e").chmod(0o700)  # for the cleaning up, when not root
    assert dest.read("d/e/f") == b"x"
    (dest.path / "d").chmod(0o700)


def test_modes_do_not_depend_on_the_umask(dest: Destination) -> None:
    before = os.umask(0o077)
    try:
        dest.unpack(Tar().file(b"a/f", mode=0o666).dir(b"d", mode=0o1777))
    finally:
        os.umask(before)
    assert [stat.S_IMODE(dest.stat(name).st_mode) for name in ("a", "a/f", "d")] == [0o755, 0o666, 0o1777]


def test_set_id_bits_are_stripped(dest: Destination) -> None:
    dest.unpack(Tar().file(b"f", mode=0o6755).dir(b"d", mode=0o2775), UnpackPolicy("image", setid=True))
    assert [stat.S_IMODE(dest.stat(name).st_mode) for name in ("f", "d")] == [0o755, 0o775]


def test_the_last_entry_of_a_name_wins(dest: Destination, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"safe")
    tar = Tar().file(b"x", b"1").file(b"x", b"2").symlink(b"y", b"x").file(b"y", b"3")
    tar.dir(b"z").file(b"z/f").file(b"z", b"4").file(b"w").dir(b"w").file(b"w/f", b"5")
    result = dest.unpack(tar)
    assert (dest.read("x"), dest.read("y"), dest.read("z"), dest.read("w/f")) == (b"2", b"3", b"4", b"5")
    assert not (dest.path / "y").is_symlink()
    assert result.implicit_dirs == (b"",)
    assert outside.read_bytes() == b"safe"


def test_what_replaces_a_directory_takes_its_notes_along(dest: Destination) -> None:
    result = dest.unpack(Tar().file(b"a/b/f").file(b"a", b"now a file"))
    assert result.implicit_dirs == (b"",)
    assert dest.names() == {"a"}


@pytest.mark.parametrize("magic", [GNU, V7])
def test_other_dialects(dest: Destination, magic: bytes) -> None:
    tar = Tar().raw(header(b"dir/", kind=b"\0", magic=magic, mode=0o755))
    tar.raw(
        header(b"dir/f", kind=b"\0", size=base256(3, 12), mtime=base256(-5, 12), magic=magic)
        + b"abc".ljust(512, b"\0")
    )
    dest.unpack(tar)
    assert dest.read("dir/f") == b"abc"
    assert dest.stat("dir/f").st_mtime == -5


def test_long_names_in_every_form(dest: Destination) -> None:
    gnu, pax, split = (b"/".join([c * 60] * 3) for c in (b"g", b"p", b"s"))
    tar = Tar().gnu_long(b"L", gnu).gnu_long(b"K", b"g" * 60 + b"/t" * 80).symlink(b"cut", b"cut")
    tar.file(pax, b"pax").raw(header(split[122:], prefix=split[:121], size=0))
    dest.unpack(tar)
    assert {os.fsdecode(gnu), os.fsdecode(pax), os.fsdecode(split)} <= dest.names()
    assert os.readlink(dest.path / os.fsdecode(gnu)) == "g" * 60 + "/t" * 80


def test_pax_times_and_ids_and_sizes(dest: Destination) -> None:
    dest.unpack(
        Tar().file(b"f", b"abc", pax={b"mtime": b"1700000000.123456789", b"uid": b"1", b"size": b"3"}, size=0)
    )
    assert dest.stat("f").st_mtime_ns == 1_700_000_000_123_456_789
    assert dest.read("f") == b"abc"


def test_global_pax_headers_are_ignored(dest: Destination) -> None:
    result = dest.unpack(Tar().pax({b"comment": b"0123"}, kind=b"g").file(b"f", b"x", pax={b"uid": b"1"}))
    assert dest.names() == {"f"}
    assert result.entries == 1, "extended headers are no entries"


def test_names_that_are_not_utf8_are_kept(dest: Destination) -> None:
    dest.unpack(Tar().file(b"\xff\xfe", b"x").file("ä".encode()).file(b"new\nline"))
    assert set(os.listdir(os.fsencode(dest.path))) == {b"\xff\xfe", "ä".encode(), b"new\nline"}


def test_an_archive_without_its_end_marker_and_an_empty_one(dest: Destination) -> None:
    assert dest.unpack(Tar().file(b"f", b"x").unfinished()).entries == 1
    assert dest.unpack(b"").entries == 0
    assert dest.unpack(bytes(1024)).entries == 0


def test_bytes_after_the_end_are_hashed_and_ignored(dest: Destination) -> None:
    tar = bytes(Tar().file(b"f")) + b"anything at all" * 1000
    assert dest.unpack(tar).diff_id.hex == hashlib.sha256(tar).hexdigest()


def test_a_prefix(dest: Destination) -> None:
    tar = Tar().dir(b"./", mode=0o700).file(b"f", b"x").file(b"d/g").symlink(b"d/up", b"../../../top")
    result = dest.unpack(tar, UnpackPolicy("artifact", prefix=b"some/where"))
    assert {"some/where/f", "some/where/d/g", "some/where/d/up"} <= dest.names()
    assert result.implicit_dirs == (b"some/where/d",)
    assert stat.S_IMODE(dest.stat("some/where").st_mode) == 0o700
    with pytest.raises(UnsafeLink):
        dest.unpack(Tar().symlink(b"up", b"../../../out"), UnpackPolicy("artifact", prefix=b"some/where"))


def test_a_prefix_through_a_link_is_refused(dest: Destination) -> None:
    dest.unpack(Tar().dir(b"real").symlink(b"to", b"real"))
    with pytest.raises(UnsafeLink):
        dest.unpack(Tar().file(b"f"), UnpackPolicy("artifact", prefix=b"to"))


def test_whiteout_names_in_an_artifact_are_data(dest: Destination) -> None:
    result = dest.unpack(Tar().file(b".wh.x").file(b"d/.wh..wh..opq"))
    assert {".wh.x", "d/.wh..wh..opq"} <= dest.names()
    assert (result.whiteouts, result.opaques) == ((), ())


def test_the_deadline_is_checked(dest: Destination) -> None:
    deadline = Deadline.never()
    deadline.cancel()
    with pytest.raises(DeadlineExceeded):
        dest.unpack(Tar().file(b"f"), deadline=deadline)


def test_no_descriptor_is_left_open(dest: Destination) -> None:
    before = len(os.listdir("/proc/self/fd"))
    dest.unpack(Tar().file(b"a/b/f"))
    for bad in (Tar().file(b"../x"), Tar().file(b"a/b/c/d").link(b"h", b"nothing")):
        with pytest.raises((UnsafeName, UnsafeLink)):
            dest.unpack(bad)
    assert len(os.listdir("/proc/self/fd")) <= before


# Image rules ------------------------------------------------------------------------------------------


def test_absolute_names_are_re_rooted(dest: Destination) -> None:
    dest.unpack(Tar().file(b"/etc/f", b"x").link(b"/h", b"/etc/f").dir(b"/"), IMAGE)
    assert dest.read("etc/f") == b"x"
    assert dest.stat("h").st_nlink == 2


def test_links_on_the_way_resolve_inside_the_layer(dest: Destination) -> None:
    tar = Tar().dir(b"usr/lib").symlink(b"lib", b"usr/lib").file(b"lib/x", b"1")
    tar.symlink(b"abs", b"/usr/../../usr/lib").file(b"abs/y", b"2").symlink(b"lib/back", b"..").file(
        b"lib/back/z", b"3"
    )
    result = dest.unpack(tar, IMAGE)
    assert (dest.read("usr/lib/x"), dest.read("usr/lib/y"), dest.read("usr/z")) == (b"1", b"2", b"3")
    assert result.implicit_dirs == (b"", b"usr")


def test_a_link_to_nothing_is_made_real(dest: Destination) -> None:
    result = dest.unpack(Tar().symlink(b"lib", b"usr/lib").file(b"lib/x", b"1"), IMAGE)
    assert dest.read("usr/lib/x") == b"1"
    assert (dest.path / "lib").is_symlink()
    assert result.implicit_dirs == (b"", b"usr", b"usr/lib")


def test_a_directory_over_a_link_replaces_it(dest: Destination) -> None:
    dest.unpack(Tar().dir(b"real").symlink(b"d", b"real").dir(b"d").file(b"d/f"), IMAGE)
    assert dest.names() == {"real", "d", "d/f"}


def test_directory_times_hold_through_links(dest: Destination) -> None:
    tar = (
        Tar()
        .dir(b"usr/lib", mtime=5)
        .symlink(b"lib", b"usr/lib")
        .file(b"lib/x")
        .file(b"usr/lib/y")
        .file(b"./lib/z")
    )
    dest.unpack(tar, IMAGE)
    assert dest.stat("usr/lib").st_mtime == 5


def test_whiteouts_are_recorded_by_resolved_name(dest: Destination) -> None:
    tar = Tar().file(b"a/.wh.b").file(b".wh.c").file(b"o/.wh..wh..opq").file(b".wh..wh..opq")
    tar.dir(b"usr/lib").symlink(b"lib", b"usr/lib").file(b"lib/.wh.d").file(b".wh..wh.plnk/1.2").file(b"keep")
    result = dest.unpack(tar, IMAGE)
    assert result.whiteouts == (b"a/b", b"c", b"usr/lib/d")
    assert result.opaques == (b"o", b"")
    assert dest.names() == {"a", "o", "usr", "usr/lib", "lib", "keep"}
    assert result.implicit_dirs == (b"", b"a", b"o", b"usr")


def test_hard_links_to_lower_layers_are_pending(dest: Destination) -> None:
    tar = Tar().link(b"d/h", b"lower/f").link(b"again", b"d/h").link(b"gone", b"lower/f").file(b"gone", b"x")
    result = dest.unpack(tar, IMAGE)
    assert result.pending_links == ((b"d/h", b"lower/f"), (b"again", b"d/h"))
    assert dest.names() == {"d", "gone"}


def test_a_pending_link_that_became_a_directory_is_none(dest: Destination) -> None:
    tar = (
        Tar()
        .link(b"a", b"lower")
        .file(b"a/f")
        .link(b"d/b", b"lower")
        .file(b"d")
        .link(b"c", b"lower")
        .dir(b"c")
    )
    result = dest.unpack(tar, IMAGE)
    assert result.pending_links == ()
    assert result.whiteouts == (b"c",)
    assert dest.names() == {"a", "a/f", "d", "c"}


def test_devices_and_fifos_only_hide(dest: Destination) -> None:
    tar = Tar().entry(b"dev/null", kind=b"3").entry(b"dev/sda", kind=b"4").entry(b"pipe", kind=b"6")
    result = dest.unpack(tar, IMAGE)
    assert result.skipped == result.whiteouts == (b"dev/null", b"dev/sda", b"pipe")
    assert dest.names() == {"dev"}


def test_hard_link_to_a_symlink_links_the_link(dest: Destination) -> None:
    dest.unpack(Tar().symlink(b"s", b"/nowhere").link(b"h", b"s"), IMAGE)
    assert os.readlink(dest.path / "h") == "/nowhere"


@pytest.mark.parametrize(
    ("tar", "error"),
    [
        (Tar().file(b"f").file(b"f/below"), MalformedArchive),
        (Tar().entry(b"s", kind=b"S"), UnsupportedEntry),
        (Tar().file(b"s", pax={b"GNU.sparse.major": b"1"}), UnsupportedEntry),
        (Tar().dir(b"d").link(b"h", b"d"), UnsafeLink),
        (Tar().file(b"h").link(b"h", b"h"), UnsafeLink),
        (Tar().entry(b"v", kind=b"V"), UnsupportedEntry),
    ],
)
@pytest.mark.parametrize("policy", [ARTIFACT, IMAGE], ids=["artifact", "image"])
def test_refused_by_both_rules(
    dest: Destination, tar: Tar, error: type[Exception], policy: UnpackPolicy
) -> None:
    with pytest.raises(error):
        dest.unpack(tar, policy)


def test_limits_can_be_raised(dest: Destination) -> None:
    deep = b"/".join([b"d"] * 200)
    dest.unpack(Tar().file(deep), UnpackPolicy("artifact", limits=Limits(max_depth=250)))
    assert (dest.path / os.fsdecode(deep)).is_file()

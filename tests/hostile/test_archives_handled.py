"""Hostile or odd archives that are not refused but made harmless, as the threat table says row by row.

Each runs with openat2 and with the component walk; whatever happens, nothing outside changes.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tars import Tar, gz, header, padded, snapshot, zst
from unlade.kernel.beneath import forced_walk, open_beneath
from unlade.unpack import (
    CannotWrite,
    LimitExceeded,
    Limits,
    Unpacked,
    UnpackPolicy,
    UnsafeLink,
    UnsafeName,
    unpack,
    write_file,
)

ARTIFACT = UnpackPolicy(rules="artifact", xattrs=True, setid=True)
IMAGE = UnpackPolicy(rules="image", xattrs=True, setid=True)
KEEP = UnpackPolicy(rules="image", owners="keep", xattrs=True, setid=True)


@pytest.fixture(params=["openat2", "walk"], autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "openat2":
        yield
        return
    with forced_walk():
        yield


class Yard:
    """A destination and its neighbour; `unpack` checks the neighbour every time."""

    def __init__(self, base: Path) -> None:
        self.out = base / "out"
        self.outside = base / "outside"
        self.out.mkdir()
        self.outside.mkdir()
        (self.outside / "secret").write_text("secret")
        (self.outside / "secret").chmod(0o600)
        os.utime(self.outside / "secret", (1, 1))

    def unpack(self, archive: Tar | bytes, policy: UnpackPolicy) -> Unpacked:
        before = snapshot(str(self.outside))
        fd = os.open(self.out, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return unpack(io.BytesIO(bytes(archive)), fd, policy)
        finally:
            os.close(fd)
            assert snapshot(str(self.outside)) == before

    def mode(self, name: str) -> int:
        return stat.S_IMODE((self.out / name).lstat().st_mode)


@pytest.fixture
def yard(tmp_path: Path) -> Yard:
    return Yard(tmp_path)


@pytest.mark.parametrize("policy", [ARTIFACT, IMAGE], ids=["artifact", "image"])
def test_link_then_file_of_one_name(yard: Yard, policy: UnpackPolicy) -> None:
    yard.unpack(Tar().dir(b"d").symlink(b"x", b"d").file(b"x", b"new").file(b"x", b"newer"), policy)
    assert (yard.out / "x").read_bytes() == b"newer"
    assert not (yard.out / "x").is_symlink()


def test_a_link_to_outside_then_a_file_of_its_name(yard: Yard) -> None:
    tar = Tar().symlink(b"x", os.fsencode(yard.outside / "secret")).file(b"x", b"new", mode=0o777)
    yard.unpack(tar, IMAGE)
    assert (yard.out / "x").read_bytes() == b"new"


def test_a_hard_link_is_broken_not_written_through(yard: Yard) -> None:
    yard.unpack(Tar().file(b"a", b"first").link(b"b", b"a").file(b"b", b"second"), ARTIFACT)
    assert ((yard.out / "a").read_bytes(), (yard.out / "b").read_bytes()) == (b"first", b"second")


@pytest.mark.parametrize("kind", [b"0", b"1", b"5", b"2"])
def test_no_mode_or_time_passes_through_a_link(yard: Yard, kind: bytes) -> None:
    """CVE-2021-32760: metadata of a later entry of the same name lands on the link's target."""
    secret = os.fsencode(yard.outside / "secret")
    tar = Tar().symlink(b"x", secret).link(b"h", b"x", mode=0o777, mtime=99)
    tar.entry(b"x", kind=kind, link=b"h" if kind == b"1" else secret, mode=0o777, mtime=99)
    yard.unpack(tar, IMAGE)
    assert os.readlink(yard.out / "h") == os.fsdecode(secret)


def test_image_links_to_the_host_resolve_inside_the_layer(yard: Yard) -> None:
    outside = os.fsencode(yard.outside)
    tar = Tar().symlink(b"abs", outside).file(b"abs/x", b"1")
    tar.symlink(b"up", b"../" * 30 + outside[1:]).file(b"up/y", b"2").symlink(b"r", b"/").file(b"r/z", b"3")
    tar.symlink(b"l1", b"l2").symlink(b"l2", b"l3/..").dir(b"deep/er").symlink(b"l3", b"deep/er").file(
        b"l1/w", b"4"
    )
    yard.unpack(tar, IMAGE)
    inside = str(yard.outside)[1:]
    found = {name: (yard.out / name).read_bytes() for name in (f"{inside}/x", f"{inside}/y", "z", "deep/w")}
    assert found == {f"{inside}/x": b"1", f"{inside}/y": b"2", "z": b"3", "deep/w": b"4"}


def test_absolute_and_dotted_names_of_images_are_re_rooted(yard: Yard) -> None:
    yard.unpack(Tar().file(os.fsencode(yard.outside) + b"/x", b"1").file(b"//.//y", b"2"), IMAGE)
    assert (yard.out / str(yard.outside)[1:] / "x").read_bytes() == b"1"
    assert (yard.out / "y").read_bytes() == b"2"


def test_file_directory_flips(yard: Yard) -> None:
    tar = Tar()
    for number in range(50):
        tar.file(b"x", b"%d" % number).dir(b"x").file(b"x/%d" % number).file(b"x/y/z")
    yard.unpack(tar, ARTIFACT)
    assert sorted(os.listdir(yard.out / "x")) == ["49", "y"]


def test_twins_by_case_and_normal_form_stay_two(yard: Yard) -> None:
    names = ["A", "a", "\u00e4", "a\u0308", "\ufb01", "fi"]
    tar = Tar()
    for name in names:
        tar.file(name.encode(), name.encode())
    yard.unpack(tar, ARTIFACT)
    assert {name: (yard.out / name).read_text() for name in names} == {name: name for name in names}


def test_odd_names_keep_their_bytes(yard: Yard) -> None:
    names = [b"\xff\xfe", b"new\nline", b"esc\x1b[31m", b"...", b"..a", b"-", b"\xc0\xaf", b"\\..\\x", b"C:x"]
    tar = Tar()
    for name in names:
        tar.file(name)
    yard.unpack(tar, ARTIFACT)
    assert sorted(os.listdir(os.fsencode(yard.out))) == sorted(names)


@pytest.mark.parametrize("policy", [ARTIFACT, IMAGE], ids=["artifact", "image"])
def test_set_id_bits_without_the_owner_are_stripped(yard: Yard, policy: UnpackPolicy) -> None:
    yard.unpack(Tar().file(b"f", mode=0o6777).dir(b"d", mode=0o6777).dir(b"./", mode=0o6755), policy)
    assert (yard.mode("f"), yard.mode("d"), yard.mode(".")) == (0o777, 0o777, 0o755)


@pytest.mark.root
def test_set_id_bits_with_the_owner_are_policy(yard: Yard) -> None:
    tar = Tar().file(b"f", mode=0o6755, uid=1000).dir(b"d", mode=0o2755, gid=7).file(b"d/g", gid=3)
    yard.unpack(tar, KEEP)
    assert (yard.mode("f"), yard.mode("d")) == (0o6755, 0o2755)
    assert (yard.out / "d/g").stat().st_gid == 3
    yard.unpack(tar, UnpackPolicy(rules="image", owners="keep"))
    assert (yard.mode("f"), yard.mode("d")) == (0o755, 0o755)


CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")  # cap_net_raw+ep, version 2


@pytest.mark.root
def test_capabilities_are_policy(yard: Yard) -> None:
    tar = Tar().file(b"f", b"x", pax={b"SCHILY.xattr.security.capability": CAPABILITY}, uid=1000)
    yard.unpack(tar, KEEP)
    assert os.getxattr(yard.out / "f", "security.capability") == CAPABILITY
    for policy in (ARTIFACT, IMAGE, UnpackPolicy(rules="image", owners="keep", xattrs=True)):
        yard.unpack(tar, policy)
        assert "security.capability" not in os.listxattr(yard.out / "f")


@pytest.mark.parametrize("policy", [ARTIFACT, IMAGE, KEEP], ids=["artifact", "image", "owners kept"])
@pytest.mark.parametrize(
    "key",
    ["trusted.overlay.opaque", "trusted.overlay.redirect", "user.overlay.opaque", "user.overlay.metacopy",
     "trusted.overlay.whiteout", "system.posix_acl_default", "security.selinux", "security.ima"],
)  # fmt: skip
def test_forged_attributes_are_dropped(yard: Yard, policy: UnpackPolicy, key: str) -> None:
    if policy is KEEP and os.geteuid() != 0:
        pytest.skip("owners are kept by root only")
    pax = {b"SCHILY.xattr." + key.encode(): b"y"}
    yard.unpack(Tar().dir(b"d", pax=pax).file(b"f", pax=pax).symlink(b"l", b"f", pax=pax), policy)
    for name in ("d", "f", "l"):
        assert key not in os.listxattr(yard.out / name, follow_symlinks=False)


@pytest.mark.parametrize("size", [5000, 70_000])
def test_an_attribute_that_is_too_large_is_refused(yard: Yard, size: int) -> None:
    try:
        yard.unpack(Tar().file(b"f", pax={b"SCHILY.xattr.user.note": b"x" * size}), ARTIFACT)
    except LimitExceeded:
        return
    assert len(os.getxattr(yard.out / "f", "user.note")) == size  # this file system had room for it


def test_plain_attributes_are_kept(yard: Yard) -> None:
    yard.unpack(Tar().file(b"f", pax={b"SCHILY.xattr.user.note": b"a=b\n\0c"}), ARTIFACT)
    assert os.getxattr(yard.out / "f", "user.note") == b"a=b\n\0c"


@pytest.mark.parametrize("kind", [b"3", b"4", b"6"])
def test_devices_of_images_are_not_made(yard: Yard, kind: bytes) -> None:
    result = yard.unpack(Tar().file(b"x", b"before").entry(b"x", kind=kind).entry(b"y", kind=kind), IMAGE)
    assert os.listdir(yard.out) == []
    assert result.skipped == (b"x", b"y")


@pytest.mark.root
def test_overlay_form(yard: Yard) -> None:
    tar = Tar().file(b"d/.wh.gone").file(b"d/.wh.kept").file(b"d/kept", b"x").file(b".wh.dir").dir(b"dir")
    tar.file(b"dir/new").file(b"o/.wh..wh..opq").file(b"o/sibling").file(b"o/.wh..wh..opq")
    tar.entry(b"dev", kind=b"3")
    yard.unpack(tar, UnpackPolicy(rules="image", whiteouts="overlay", owners="keep", xattrs=True))
    gone = (yard.out / "d/gone").lstat()
    assert stat.S_ISCHR(gone.st_mode)
    assert gone.st_rdev == 0
    assert stat.S_ISCHR((yard.out / "dev").lstat().st_mode)
    assert (yard.out / "d/kept").read_bytes() == b"x"
    opaque = {name for name in ("d", "dir", "o") if "trusted.overlay.opaque" in os.listxattr(yard.out / name)}
    assert opaque == {"dir", "o"}


def test_opaque_markers_cost_linear_time(yard: Yard) -> None:
    def cost(count: int) -> float:
        tar = Tar()
        for number in range(count):
            tar.file(b"o%d/f" % (number % 50)).file(b"o%d/.wh..wh..opq" % (number % 50)).file(
                b"o1/.wh.%d" % number
            )
        archive = bytes(tar)
        started = time.process_time()
        result = yard.unpack(archive, IMAGE)
        assert len(result.opaques) == 50
        assert len(result.whiteouts) == count
        return time.process_time() - started

    cost(100)
    small, large = cost(500), cost(5000)
    assert large < 10 * small * 3, "ten times the markers must not cost a hundred times the time"


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tar: gz(tar[:512]) + gz(tar[512:600]) + gz(tar[600:]),
        lambda tar: gz(tar) + gz(b""),
        lambda tar: gz(tar) + bytes(1000),
        lambda tar: b"\x1f\x8b\x08\x1c\0\0\0\0\0\xff\x04\0extrname\0comment\0" + gz(tar)[10:],
        lambda tar: zst(tar[:700]) + zst(tar[700:]),
        lambda tar: b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zst(tar) + b"\x5f\x2a\x4d\x18\0\0\0\0",
    ],
    ids=["members", "empty member", "padding", "header fields", "frames", "skippable frames"],
)
def test_unusual_but_valid_compression(yard: Yard, wrap: Callable[[bytes], bytes]) -> None:
    plain = bytes(Tar().file(b"f", bytes(range(256)) * 20))
    result = yard.unpack(wrap(plain), ARTIFACT)
    assert (yard.out / "f").read_bytes() == bytes(range(256)) * 20
    assert result.diff_id == yard.unpack(plain, ARTIFACT).diff_id


def test_sizes_of_entries_without_content_are_ignored(yard: Yard) -> None:
    """As in Go: a link's or directory's size field counts for nothing, so no entry can hide in it."""
    hidden = header(b"hidden", size=3) + padded(b"abc")
    tar = Tar().raw(header(b"d/", kind=b"5", size=1024, mode=0o755)).raw(hidden).file(b"f", b"x")
    yard.unpack(tar, ARTIFACT)
    assert sorted(os.listdir(yard.out)) == ["d", "f", "hidden"]


def test_a_million_entries_may_be_refused_cheaply(yard: Yard) -> None:
    class Endless:
        """The same header for ever: no attacker needs a large file for this."""

        def __init__(self) -> None:
            self._block = header(b"f") * 256
            self.given = 0

        def readinto(self, buffer: Any) -> int:
            count = min(len(buffer), len(self._block))
            buffer[:count] = self._block[:count]
            self.given += count
            return count

    source = Endless()
    fd = os.open(yard.out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(LimitExceeded):
            unpack(source, fd, UnpackPolicy("artifact", limits=Limits(max_entries=20_000)))
    finally:
        os.close(fd)
    assert source.given < 20_000 * 512 + (32 << 20)


# Titles: raw blobs that become files ------------------------------------------------------------------


@pytest.mark.parametrize(
    "title",
    ["..", ".", "", "/x", "/etc/passwd", "../x", "a/../b", "a/..", "a//b", "a/", "./a", "a/./b", "a\0b",
     "x" * 256, "d/" * 200 + "f", "y/" * 2100, "a/../../outside/secret", "\ud800"],
)  # fmt: skip
def test_titles_that_are_no_plain_path_are_refused(yard: Yard, title: str) -> None:
    fd = os.open(yard.out, os.O_RDONLY | os.O_DIRECTORY)
    before = snapshot(str(yard.outside))
    try:
        with pytest.raises(UnsafeName):
            write_file(fd, title)
    finally:
        os.close(fd)
    assert os.listdir(yard.out) == []
    assert snapshot(str(yard.outside)) == before


def test_titles_through_links_and_duplicates(yard: Yard) -> None:
    (yard.out / "link").symlink_to(yard.outside)
    (yard.out / "file").symlink_to(yard.outside / "secret")
    fd = os.open(yard.out, os.O_RDONLY | os.O_DIRECTORY)
    before = snapshot(str(yard.outside))
    try:
        with pytest.raises(UnsafeLink):
            write_file(fd, "link/x")
        for content in (b"1", b"2"):  # the higher index wins, and never through what was there
            out = write_file(fd, "file", 0o4755)
            os.write(out, content)
            os.close(out)
        with pytest.raises(UnsafeLink):
            write_file(fd, "file/below")
        os.close(write_file(fd, "a/b/c"))
        with pytest.raises(UnsafeName):
            write_file(fd, "a/b")
    finally:
        os.close(fd)
    assert (yard.out / "file").read_bytes() == b"2"
    assert yard.mode("file") == 0o755
    assert snapshot(str(yard.outside)) == before


# subPath: a part of a delivered tree ------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [b"l", b"l/x", b"chain", b"chain/secret", b"../outside", b"up/secret", b"/", b"ok/../.."]
)
def test_a_part_of_a_tree_is_never_outside_it(yard: Yard, path: bytes) -> None:
    (yard.out / "ok").mkdir()
    (yard.out / "l").symlink_to(yard.outside)
    (yard.out / "chain").symlink_to("l")
    (yard.out / "up").symlink_to("../outside")
    fd = os.open(yard.out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for links in ("refuse", "beneath"):
            with pytest.raises(OSError, match=r"."):
                os.close(open_beneath(fd, path, os.O_RDONLY, links=links))
        os.close(open_beneath(fd, b"ok", os.O_RDONLY))
    finally:
        os.close(fd)


def test_a_full_disk_is_no_attack(yard: Yard) -> None:
    """What the file system refuses is the store's error, and worth another try."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CannotWrite):
            yard.unpack(Tar().file(b"f", b"x" * 5000), ARTIFACT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)

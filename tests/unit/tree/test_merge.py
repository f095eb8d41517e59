"""Merging by renames, case by case; the random stacks are in test_overlay and in tests/property."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unlade.errors import DeadlineExceeded
from unlade.model import Deadline, DiffID, Digest
from unlade.tree import DanglingLink, merge_into
from unlade.unpack.policy import Unpacked

NO_DIFF = DiffID(Digest.of(b""))
NOBODY = 65534


class Pair:
    """A merged directory and a layer."""

    def __init__(self, root: Path) -> None:
        self.dst, self.src = root / "dst", root / "src"
        for directory in (self.dst, self.src):
            directory.mkdir()
        self.fds = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (self.dst, self.src)]

    def merge(
        self,
        *,
        whiteouts: tuple[bytes, ...] = (),
        opaques: tuple[bytes, ...] = (),
        links: tuple[tuple[bytes, bytes], ...] = (),
        implicit: tuple[bytes, ...] = (b"",),
        deadline: Deadline | None = None,
    ) -> None:
        told = Unpacked(
            0, 0, NO_DIFF, whiteouts=whiteouts, opaques=opaques, pending_links=links, implicit_dirs=implicit
        )
        merge_into(self.fds[0], self.fds[1], told, deadline=deadline)

    def names(self) -> set[str]:
        return {str(path.relative_to(self.dst)) for path in self.dst.rglob("*")}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    for fd in made.fds:
        os.close(fd)


def fill(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.write_text(root.name)


def test_files_are_moved_and_not_copied(pair: Pair) -> None:
    fill(pair.src, "a", "new/dir/b")
    inode = (pair.src / "new/dir/b").stat().st_ino
    pair.merge()
    assert pair.names() == {"a", "new", "new/dir", "new/dir/b"}
    assert (pair.dst / "new/dir/b").stat().st_ino == inode


def test_directories_join_and_take_the_layers_attributes(pair: Pair) -> None:
    fill(pair.dst, "d/low", "implicit/low")
    fill(pair.src, "d/high", "implicit/high")
    os.utime(pair.dst / "implicit", (7, 7))
    (pair.src / "d").chmod(0o1750)
    os.utime(pair.src / "d", (5, 5))
    os.setxattr(pair.dst / "d", "user.old", b"1")
    os.setxattr(pair.src / "d", "user.new", b"2")
    pair.merge(implicit=(b"", b"implicit"))
    assert pair.names() == {"d", "d/low", "d/high", "implicit", "implicit/low", "implicit/high"}
    info = (pair.dst / "d").stat()
    assert (info.st_mode & 0o7777, info.st_mtime) == (0o1750, 5)
    assert os.listxattr(pair.dst / "d") == ["user.new"]
    assert (pair.dst / "implicit").stat().st_mtime == 7


def test_kinds_replace_each_other(pair: Pair) -> None:
    fill(pair.dst, "file-to-dir", "dir-to-file/below", "dir-to-link/below", "same")
    fill(pair.src, "file-to-dir/below", "dir-to-file", "same")
    (pair.src / "dir-to-link").symlink_to("same")
    pair.merge()
    assert pair.names() == {"file-to-dir", "file-to-dir/below", "dir-to-file", "dir-to-link", "same"}
    assert (pair.dst / "same").read_text() == "src"


def test_a_link_is_replaced_and_never_followed(pair: Pair, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    fill(outside, "sentinel")
    (pair.dst / "link").symlink_to(outside)
    fill(pair.src, "link/evil")
    pair.merge(whiteouts=(b"link/sentinel",), implicit=(b"", b"link"))
    assert os.listdir(outside) == ["sentinel"]
    assert not (pair.dst / "link").is_symlink()
    assert pair.names() == {"link", "link/evil"}


def test_whiteouts_and_opaque_directories_hide_the_lower_only(pair: Pair, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    fill(outside, "sentinel")
    fill(pair.dst, "gone/below", "keep/gone", "keep/stays", "opaque/low", "again")
    (pair.dst / "opaque/link").symlink_to(outside)
    (pair.dst / "through").symlink_to(outside)
    os.utime(pair.dst / "keep", (7, 7))
    fill(pair.src, "opaque/high", "again")
    hidden = (b"gone", b"keep/gone", b"again", b"missing", b"missing/deep", b"through/sentinel")
    pair.merge(whiteouts=hidden, opaques=(b"opaque", b"no-such"))
    assert pair.names() == {"keep", "keep/stays", "opaque", "opaque/high", "again", "through"}
    assert (pair.dst / "again").read_text() == "src"
    assert (pair.dst / "keep").stat().st_mtime == 7
    assert os.listdir(outside) == ["sentinel"]


def test_hard_links_to_what_is_there(pair: Pair) -> None:
    fill(pair.dst, "target", "taken/by/a/directory", "dir/inner")
    os.utime(pair.dst / "dir", (7, 7))
    (pair.dst / "symlink").symlink_to("target")
    links = (
        (b"name", b"target"),
        (b"taken", b"target"),
        (b"dir/name", b"dir/inner"),
        (b"soft", b"symlink"),
        (b"target", b"target"),
    )
    pair.merge(links=links)
    assert os.path.samefile(pair.dst / "name", pair.dst / "target")
    assert os.path.samefile(pair.dst / "taken", pair.dst / "target")
    assert os.readlink(pair.dst / "soft") == "target"
    assert (pair.dst / "dir").stat().st_mtime == 7


@pytest.mark.parametrize("target", [b"missing", b"no/such", b"dir", b"link/inner"])
def test_hard_links_to_what_is_not_there(pair: Pair, target: bytes) -> None:
    fill(pair.dst, "dir/inner")
    (pair.dst / "link").symlink_to("dir")
    with pytest.raises(DanglingLink):
        pair.merge(links=((b"name", target),))


def test_it_stops_at_the_deadline(pair: Pair) -> None:
    fill(pair.src, "a")
    with pytest.raises(DeadlineExceeded):
        pair.merge(deadline=Deadline.after(0))


UNPRIVILEGED = """
import os, sys, tempfile
from pathlib import Path
from unlade.model import DiffID, Digest
from unlade.store import DirStore
from unlade.tree import DirTrees, fsck
from unlade.unpack.filelist import FileListWriter
from unlade.unpack.policy import Unpacked
import zlib

os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))

def part(scratch, name):
    for mode, directory in ((0o555, "read"), (0o111, "search"), (0, "none")):
        (scratch.path / directory / "sub").mkdir(parents=True)
        (scratch.path / directory / "sub" / name).write_bytes(b"text")
        info = (scratch.path / directory / "sub" / name).stat()
        writer = FileListWriter(scratch.files_out)
        writer.add("f", f"{directory}/sub/{name}", 0, info.st_uid, info.st_gid, info.st_mtime_ns, 4,
                   zlib.crc32(b"text"))
        (scratch.path / directory / "sub" / name).chmod(0)
        for path in (directory + "/sub", directory):
            os.utime(scratch.path / path, (5, 5))
            writer.add("d", path, mode, info.st_uid, info.st_gid, 5 * 10**9)
        (scratch.path / directory / "sub").chmod(mode)
        (scratch.path / directory).chmod(mode)
        writer.flush()

key = Digest.of(b"tree")
with DirStore(sys.argv[1]) as store:
    trees = DirTrees(store)
    with trees.stage(key) as staging:
        for number, name in enumerate(("one", "two", "three")):
            scratch = staging.scratch()
            part(scratch, name)
            hidden = (b"none/sub/one",) if number == 2 else ()
            staging.merge(scratch, Unpacked(1, 4, DiffID(key), whiteouts=hidden, implicit_dirs=(b"",)))
        tree = staging.commit(size=4)
    assert fsck(store) == [], fsck(store)
    for mode, directory in ((0o555, "read"), (0o111, "search"), (0, "none")):
        info = (tree.path / directory).stat()
        assert (info.st_mode & 0o7777, info.st_mtime) == (mode, 5), directory
    assert sorted(os.listdir(tree.path / "read" / "sub")) == ["one", "three", "two"]
    trees.delete(key)
    assert os.listdir(store.layout.trash) == []
print("done")
"""


@pytest.mark.root
def test_an_unprivileged_owner_merges_checks_and_removes_closed_directories(tmp_path: Path) -> None:
    """Started as root only to become nobody after the imports."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(home / "store"), str(NOBODY)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr

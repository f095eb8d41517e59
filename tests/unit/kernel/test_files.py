"""Renames, removals and attributes by descriptor."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from unlade.kernel import files, libc


@pytest.fixture
def here(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def test_rename_new_replaces_nothing(here: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    with pytest.raises(FileExistsError):
        files.rename_new(here, b"a", here, b"b")
    files.rename_new(here, b"a", here, b"c")
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]


def test_rename_new_without_the_system_call(
    here: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libc, "supported", False)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(FileExistsError):
        files.rename_new(here, b"a", here, b"b")
    files.rename_new(here, b"a", here, b"c")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        files.exchange(here, b"b", here, b"c")
    files.syncfs(here)
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]


def test_exchange(here: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").mkdir()
    files.exchange(here, b"a", here, b"b")
    assert (tmp_path / "b").read_text() == "a"
    with pytest.raises(FileNotFoundError):
        files.exchange(here, b"a", here, b"missing")


def test_syncfs_reports_a_bad_descriptor(here: int) -> None:
    files.syncfs(here)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        files.syncfs(-1)


def test_remove_tree_follows_nothing(here: int, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/keep").write_text("x")
    (tmp_path / "tree/a/b").mkdir(parents=True)
    (tmp_path / "tree/a/f").write_text("x")
    (tmp_path / "tree/a/link").symlink_to(tmp_path / "outside")
    (tmp_path / "link").symlink_to("outside")
    files.remove_tree(here, b"tree")
    files.remove_tree(here, b"link")
    files.remove_tree(here, b"missing")
    assert sorted(os.listdir(tmp_path)) == ["outside"]
    assert os.listdir(tmp_path / "outside") == ["keep"]


def test_remove_tree_opens_what_is_closed(here: int, tmp_path: Path) -> None:
    (tmp_path / "tree/a/b").mkdir(parents=True)
    (tmp_path / "tree/a/b/f").write_text("x")
    for path, mode in (("tree/a/b", 0o000), ("tree/a", 0o111), ("tree", 0o555)):
        (tmp_path / path).chmod(mode)
    files.remove_tree(here, b"tree")
    assert os.listdir(tmp_path) == []


def test_remove_tree_goes_deep_without_leaking(here: int, tmp_path: Path) -> None:
    fd = os.dup(here)
    for _ in range(200):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    before = len(os.listdir("/proc/self/fd"))
    files.remove_tree(here, b"d")
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


def test_link_attributes_stay_on_the_link(here: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    files.set_link_xattr(here, b"file", b"user.note", b"1")
    assert os.getxattr(tmp_path / "file", "user.note") == b"1"
    with pytest.raises(PermissionError):  # links have no user.* attributes, and the file got none either
        files.set_link_xattr(here, b"link", b"user.other", b"2")
    assert os.listxattr(tmp_path / "file") == ["user.note"]


def test_the_umask_is_read_and_left_alone() -> None:
    before = os.umask(0o027)
    try:
        assert files.current_umask() == 0o027
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


@pytest.mark.parametrize("known", [True, False])
def test_an_early_writer_writes_everything_and_begins_at_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(files, "_EARLY_BYTES", 10)
    if not known:
        monkeypatch.setattr(libc, "supported", False)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, b"there")
        writer = files.EarlyWriter(fd, 5)
        for number in range(100):
            writer.write(b"%07d" % number)
        assert os.pread(fd, 10_000, 0) == b"there" + b"".join(b"%07d" % number for number in range(100))
    finally:
        os.close(fd)


def test_an_early_writer_passes_errors_of_writing_on(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        with pytest.raises(BrokenPipeError):
            files.EarlyWriter(writing).write(b"x")
    finally:
        os.close(writing)

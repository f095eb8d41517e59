"""A few files are synced one by one, many by one call."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from unlade.kernel import files
from unlade.tree import sync


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which file was synced, and how, beside really syncing it."""
    made: list[str] = []
    plain, whole = os.fsync, files.syncfs

    def fsync(fd: int) -> None:
        made.append(os.readlink(f"/proc/self/fd/{fd}"))
        plain(fd)

    def syncfs(fd: int) -> None:
        made.append("syncfs")
        whole(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(sync, "syncfs", syncfs)
    return made


def run(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync.sync_tree(fd)
    finally:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_few_files_one_by_one_and_directories_after_what_they_name(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "dir" / "sub").mkdir(parents=True)
    (tmp_path / "dir" / "sub" / "file").touch()
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "fifo")
    run(tmp_path)
    below = [Path(call).relative_to(tmp_path) for call in calls]
    assert below == [Path("dir/sub/file"), Path("dir/sub"), Path("dir"), Path()]


def test_many_files_by_one_call(tmp_path: Path, calls: list[str]) -> None:
    for number in range(20):
        (tmp_path / str(number)).touch()
    run(tmp_path)
    assert calls == ["syncfs"]


LARGE = 1 << 30


def write_back_threads() -> int:
    return sum(thread.name == "unlade-write-back" for thread in threading.enumerate())


def test_the_disk_begins_while_a_large_archive_is_unpacked(
    tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "_EARLY_PAUSE", 0.001)
    before = len(os.listdir("/proc/self/fd"))
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with sync.written_early(fd, LARGE):
            with sync.written_early(fd, LARGE), sync.written_early(fd, 1):
                assert write_back_threads() == 1
            until = time.monotonic() + 30
            while len(calls) < 3 and time.monotonic() < until:
                time.sleep(0.001)
            assert write_back_threads() == 1
        assert calls.count("syncfs") >= 3
        assert write_back_threads() == 0
    finally:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_small_archive_starts_no_thread(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with sync.written_early(fd, 1 << 20):
            assert write_back_threads() == 0
    finally:
        os.close(fd)


def test_an_error_on_the_way_is_left_to_the_sync_that_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def syncfs(fd: int) -> None:
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sync, "syncfs", syncfs)
    monkeypatch.setattr(sync, "_EARLY_PAUSE", 0.001)
    for number in range(20):
        (tmp_path / str(number)).touch()
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with sync.written_early(fd, LARGE):
            assert failed.wait(30)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            sync.sync_tree(fd)
    finally:
        os.close(fd)

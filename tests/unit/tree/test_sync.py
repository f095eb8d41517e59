"""A few files are synced one by one, many by one call."""

from __future__ import annotations

import os
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

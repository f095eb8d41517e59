"""Targets as a kubelet wants them: made with the mount, gone with it, whatever stood there before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unlade.errors import MountError
from unlade.mount import MountOptions, find, is_mount_point, mount_layers, unpublish

pytestmark = pytest.mark.root


@pytest.fixture
def content(tmp_path: Path) -> str:
    path = tmp_path / "content"
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "file").write_text("x")
    return str(path)


def test_a_target_is_made_and_removed(content: str, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    for _ in range(2):
        mount_layers([content], target, make_target=True)
        assert is_mount_point(target)
        assert os.listdir(target) == ["sub"]
        unpublish(target)
        assert not os.path.lexists(target)
    unpublish(target)


def test_a_file_s_target_is_a_file(content: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    # Older kubelets make the directory themselves; an empty one gives way.
    target.mkdir()
    mount_layers([content], str(target), MountOptions(sub_path="sub/file"), make_target=True)
    assert target.read_text() == "x"
    unpublish(str(target))
    assert not target.exists()
    target.write_text("")
    mount_layers([content], str(target), make_target=True)
    assert target.is_dir()
    unpublish(str(target))


def test_what_is_not_ours_is_left(content: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").write_text("precious")
    with pytest.raises(MountError, match="must be a file"):
        mount_layers([content], str(target), MountOptions(sub_path="sub/file"), make_target=True)
    unpublish(str(target))
    assert (target / "kept").read_text() == "precious"
    link = tmp_path / "link"
    link.symlink_to(target)
    assert not is_mount_point(str(link))
    unpublish(str(link))
    assert (target / "kept").exists()


def test_a_parent_must_be_there(content: str, tmp_path: Path) -> None:
    with pytest.raises(MountError, match="parent"):
        mount_layers([content], str(tmp_path / "no" / "target"), make_target=True)


def test_stacked_mounts_go_together_and_busy_ones_at_once(content: str, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    for _ in range(3):
        mount_layers([content], target, make_target=True)
    held = os.open(os.path.join(target, "sub"), os.O_RDONLY)
    try:
        unpublish(target)
        assert not os.path.lexists(target)
        assert os.listdir(held) == ["file"]
    finally:
        os.close(held)


def test_a_part_of_an_overlay_leaves_no_mount_elsewhere(content: str, tmp_path: Path) -> None:
    target, upper, empty = tmp_path / "target", tmp_path / "upper", tmp_path / "empty"
    upper.mkdir()
    empty.mkdir()
    before = len(Path("/proc/self/mountinfo").read_bytes().splitlines())
    options = MountOptions(sub_path="sub", empty=str(empty))
    mount_layers([content, str(upper)], str(target), options, make_target=True)
    entry = find(os.fsencode(target))
    assert entry is not None
    assert entry.file_system == "overlay"
    assert os.listdir(target) == ["file"]
    assert len(Path("/proc/self/mountinfo").read_bytes().splitlines()) == before + 1
    unpublish(str(target))

"""Mounts are whole, flagged, and cannot be led out of their content (V8, V9, V10)."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from unlade.errors import MountError
from unlade.mount import MountOptions, NoSuchSubPath, find, mount_layers, unmount

pytestmark = pytest.mark.root


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "target"
    path.mkdir()
    yield path
    while find(os.fsencode(path)):
        unmount(str(path), lazy=True)


def layer(path: Path, **files: str) -> str:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_text(content)
    return str(path)


def flags(path: Path) -> frozenset[str]:
    entry = find(os.fsencode(path))
    assert entry is not None
    return entry.options


def test_one_directory_is_bound(tmp_path: Path, target: Path) -> None:
    mount_layers([layer(tmp_path / "a", f="1")], str(target))
    assert (target / "f").read_text() == "1"
    assert {"ro", "nosuid", "nodev", "noexec"} <= flags(target)
    with pytest.raises(OSError) as caught:
        (target / "g").write_text("")
    assert caught.value.errno == errno.EROFS


def test_exec_is_an_explicit_choice(tmp_path: Path, target: Path) -> None:
    mount_layers([layer(tmp_path / "a", f="1")], str(target), MountOptions(executable=True))
    assert "noexec" not in flags(target)
    assert {"ro", "nosuid", "nodev"} <= flags(target)


def test_120_layers_with_long_names(tmp_path: Path, target: Path) -> None:
    layers = [layer(tmp_path / f"{'x' * 100}-{n}", **{f"f{n}": str(n), "top": str(n)}) for n in range(120)]
    mount_layers(layers, str(target))
    assert len(os.listdir(target)) == 121
    assert (target / "top").read_text() == "119", "the highest layer wins"
    assert {"ro", "nosuid", "nodev", "noexec"} <= flags(target)


def test_layer_names_may_hold_colons_and_commas(tmp_path: Path, target: Path) -> None:
    mount_layers([layer(tmp_path / "a:b,c", f="1"), layer(tmp_path / "d\\e", g="2")], str(target))
    assert sorted(os.listdir(target)) == ["f", "g"]


def test_more_layers_than_the_kernel_stacks_is_a_clear_error(target: Path) -> None:
    with pytest.raises(MountError, match="501 layers"):
        mount_layers(["/nowhere"] * 501, str(target))


def test_a_sub_path_of_one_directory(tmp_path: Path, target: Path) -> None:
    (tmp_path / "a" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "a" / "sub" / "deep" / "f").write_text("1")
    mount_layers([str(tmp_path / "a")], str(target), MountOptions(sub_path="sub/deep"))
    assert os.listdir(target) == ["f"]
    assert {"ro", "nosuid", "nodev", "noexec"} <= flags(target)


def test_a_sub_path_of_several_layers(tmp_path: Path, target: Path) -> None:
    for name in "ab":
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / name).write_text(name)
    mount_layers([str(tmp_path / "a"), str(tmp_path / "b")], str(target), MountOptions(sub_path="sub"))
    assert sorted(os.listdir(target)) == ["a", "b"]
    assert {"ro", "nosuid", "nodev", "noexec"} <= flags(target)


def test_a_file_as_sub_path(tmp_path: Path) -> None:
    file = tmp_path / "target-file"
    file.touch()
    mount_layers([layer(tmp_path / "a", f="content")], str(file), MountOptions(sub_path="f"))
    try:
        assert file.read_text() == "content"
    finally:
        unmount(str(file))


@pytest.mark.parametrize("sub_path", ["", "sub", "sub/f"])
def test_a_sealed_mount_stays_read_only_whatever_a_runtime_does(tmp_path: Path, sub_path: str) -> None:
    """Container runtimes bind the volume again and set `rw`; what is shared is not written through it."""
    (tmp_path / "a" / "sub").mkdir(parents=True)
    (tmp_path / "a" / "sub" / "f").write_text("shared")
    (tmp_path / "empty").mkdir()
    places = [tmp_path / "volume", tmp_path / "inside"]
    for place in places:
        place.touch() if sub_path.endswith("f") else place.mkdir()
    options = MountOptions(sub_path=sub_path, empty=str(tmp_path / "empty"), sealed=True)
    mount_layers([str(tmp_path / "a")], str(places[0]), options)
    try:
        assert {"ro", "nosuid", "nodev", "noexec"} <= flags(places[0])
        subprocess.run(["mount", "--bind", *map(str, places)], check=True)
        subprocess.run(["mount", "-o", "remount,bind,rw", str(places[1])], check=True)
        file = {"": places[1] / "sub" / "f", "sub": places[1] / "f", "sub/f": places[1]}[sub_path]
        assert file.read_text() == "shared"
        with pytest.raises(OSError) as caught:
            file.write_text("changed")
        assert caught.value.errno == errno.EROFS
    finally:
        for place in reversed(places):
            subprocess.run(["umount", str(place)], check=False)


@pytest.mark.parametrize(
    "sub_path", ["../outside", "/etc", "link", "link/x", "missing", "inside/../../outside"]
)
def test_a_sub_path_never_leads_out(tmp_path: Path, target: Path, sub_path: str) -> None:
    layer(tmp_path / "outside", secret="s")
    root = tmp_path / "a"
    (root / "inside").mkdir(parents=True)
    (root / "link").symlink_to("../outside")
    with pytest.raises(NoSuchSubPath):
        mount_layers([str(root)], str(target), MountOptions(sub_path=sub_path))
    assert find(os.fsencode(target)) is None


def test_a_link_that_stays_inside_is_followed(tmp_path: Path, target: Path) -> None:
    root = tmp_path / "a"
    (root / "real").mkdir(parents=True)
    (root / "real" / "f").write_text("1")
    (root / "link").symlink_to("real")
    mount_layers([str(root)], str(target), MountOptions(sub_path="link"))
    assert os.listdir(target) == ["f"]


def test_a_target_that_is_a_link_is_refused(tmp_path: Path, target: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(target)
    with pytest.raises(MountError):
        mount_layers([layer(tmp_path / "a", f="1")], str(link))


def test_a_missing_target_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(MountError) as caught:
        mount_layers([layer(tmp_path / "a")], str(tmp_path / "none"))
    assert "mkdir" in caught.value.next_step


def test_a_label_without_selinux_is_an_error_not_a_silent_success(tmp_path: Path, target: Path) -> None:
    if os.path.exists("/sys/fs/selinux/enforce"):
        pytest.skip("SELinux is active here")
    with pytest.raises(MountError):
        mount_layers(
            [layer(tmp_path / "a", f="1")], str(target), MountOptions(context="system_u:object_r:x_t:s0")
        )
    assert find(os.fsencode(target)) is None


def test_unmounting_what_is_not_mounted(target: Path) -> None:
    with pytest.raises(MountError, match="nothing is mounted"):
        unmount(str(target))


def test_in_use_is_refused_unless_lazy(tmp_path: Path, target: Path) -> None:
    mount_layers([layer(tmp_path / "a", f="1")], str(target))
    with open(target / "f") as held:
        with pytest.raises(MountError) as caught:
            unmount(str(target))
        assert "in use" in caught.value.next_step
        unmount(str(target), lazy=True)
        assert held.read() == "1"
    assert find(os.fsencode(target)) is None

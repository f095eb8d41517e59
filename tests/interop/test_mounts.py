"""`unlade mount` as a user runs it: the tree of a real image, its flags, and what keeps it alive (V6, V8)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.peers import Peers
from tests.interop.real_registry import RealRegistry
from tests.interop.trees import sample_tree, snapshot

pytestmark = pytest.mark.root


@pytest.fixture
def point(tmp_path: Path) -> Iterator[Path]:
    """A mount point that is free again whatever happens."""
    path = tmp_path / "point"
    path.mkdir()
    yield path
    while os.path.ismount(path):
        subprocess.run(["umount", str(path)], check=True)


def options_of(path: Path) -> set[str]:
    done = subprocess.run(
        ["findmnt", "-n", "-o", "VFS-OPTIONS", "--mountpoint", str(path)],
        capture_output=True,
        check=True,
        text=True,
    )
    return set(done.stdout.strip().split(","))


def layered_image(registry: RealRegistry, peers: Peers, tmp_path: Path, layers: int) -> tuple[str, Path]:
    """An image of many layers, and its tree as umoci unpacks it."""
    tree = sample_tree(tmp_path / "tree")
    layout = tmp_path / "layout"
    peers.unlade("push", "--plain-http", "--image", tree, registry.reference("mounted/base"))
    ref = registry.reference("mounted/base")
    for number in range(1, layers):
        archive = tmp_path / f"{number}.tar"
        extra = tmp_path / f"extra{number}"
        extra.mkdir()
        (extra / f"layer-{number}").write_text(str(number))
        (extra / "docs").mkdir()
        (extra / "docs" / "changed").write_text(str(number))
        subprocess.run(["tar", "-C", str(extra), "-cf", str(archive), "."], check=True)
        target = registry.reference("mounted/layers", f"v{number}")
        peers.crane("append", "-b", ref, "-f", archive, "-t", target)
        ref = target
    peers.skopeo("copy", "--src-tls-verify=false", f"docker://{ref}", f"oci:{layout}:v1")
    peers.umoci("unpack", "--rootless", "--image", f"{layout}:v1", tmp_path / "bundle")
    return ref, tmp_path / "bundle" / "rootfs"


def test_mount_an_image(registry: RealRegistry, peers: Peers, tmp_path: Path, point: Path) -> None:
    ref, expected = layered_image(registry, peers, tmp_path, 5)
    peers.unlade("mount", "--plain-http", ref, point)
    assert snapshot(point) == snapshot(expected)
    assert {"ro", "nosuid", "nodev", "noexec"} <= options_of(point)
    with pytest.raises(OSError, match="Read-only"):
        (point / "new").write_text("x")
    # What is mounted outlives its record and every collection.
    peers.unlade("rmi", ref)
    peers.unlade("gc")
    assert snapshot(point) == snapshot(expected)
    peers.unlade("unmount", point)
    assert not os.path.ismount(point)
    assert json.loads(peers.unlade("gc", "-o", "json"))["trees"] > 0
    store = Path(peers.environment["UNLADE_STORE"])
    assert not list((store / ".unlade" / "trees").iterdir())


def test_mount_options(registry: RealRegistry, peers: Peers, tmp_path: Path, point: Path) -> None:
    tree = sample_tree(tmp_path / "tree")
    ref = registry.reference("mounted/artifact")
    peers.unlade("push", "--plain-http", tree, ref)
    peers.unlade("pull", "--plain-http", ref)
    peers.unlade("mount", "--pull", "never", "--exec", ref, point)
    assert "noexec" not in options_of(point)
    assert subprocess.run([str(point / "bin" / "run")], capture_output=True, check=True).stdout == b"ran\n"
    [record] = json.loads(peers.unlade("images", "-o", "json"))["images"]
    assert record["mounts"] == [str(point)]
    peers.unlade("unmount", point)
    # No registry is asked (it could not be, without --plain-http); a part may be mounted, even one file.
    peers.unlade("mount", "--pull", "never", "--sub-path", "docs", ref, point)
    assert sorted(os.listdir(point)) == sorted(os.listdir(tree / "docs"))
    peers.unlade("unmount", point)
    single = tmp_path / "single"
    single.touch()
    peers.unlade("mount", "--pull", "never", "--sub-path", "blob.bin", ref, single)
    try:
        assert single.read_bytes() == (tree / "blob.bin").read_bytes()
    finally:
        peers.unlade("unmount", single)
    missing = peers.unlade_error("mount", "--pull", "never", registry.reference("not/here"), point, expect=4)
    assert "unlade pull" in missing
    peers.unlade_error("mount", "--pull", "never", "--sub-path", "../..", ref, point, expect=3)
    assert not os.path.ismount(point)


def test_two_references_merged_in_a_mount(
    registry: RealRegistry, peers: Peers, tmp_path: Path, point: Path
) -> None:
    """V17."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
        (tmp_path / name / name).write_text(name)
        peers.unlade("push", "--plain-http", tmp_path / name, registry.reference(f"mounted/{name}"))
    references = [registry.reference("mounted/one"), registry.reference("mounted/two")]
    peers.unlade("mount", "--plain-http", *references, point)
    assert sorted(os.listdir(point)) == ["one", "two", "who"]
    assert (point / "who").read_text() == "two"
    peers.unlade("unmount", point)

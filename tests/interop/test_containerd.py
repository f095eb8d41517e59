"""What `push --image` makes, as containerd unpacks it: the same tree, under every compression (V7)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.peers import Peers
from tests.interop.real_registry import RealRegistry
from tests.interop.test_stacks_containerd import Containerd
from tests.interop.trees import sample_tree, snapshot

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    running = Containerd(tmp_path_factory.mktemp("ctd-pull"))
    try:
        yield running
    finally:
        running.close()


@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
def test_our_image_in_containerd(
    registry: RealRegistry, peers: Peers, tmp_path: Path, runtime: Containerd, compression: str
) -> None:
    tree = sample_tree(tmp_path / "tree")
    os.link(tree / "blob.bin", tree / "docs" / "hard-link")
    ref = registry.reference(f"containerd/{compression}")
    name = peers.unlade("push", "--plain-http", "--image", "--compression", compression, tree, ref).strip()
    pulled = runtime.ctr("images", "pull", "--plain-http", ref, check=False)
    assert pulled.returncode == 0, pulled.stderr.decode()
    listed = runtime.ctr("images", "ls").stdout.decode()
    assert name.rpartition("@")[2] in next(line for line in listed.splitlines() if line.startswith(ref))
    point = tmp_path / "point"
    point.mkdir()
    runtime.ctr("images", "mount", ref, str(point))
    try:
        assert snapshot(point) == snapshot(tree)
        assert (point / "blob.bin").samefile(point / "docs" / "hard-link")
    finally:
        runtime.release(point)

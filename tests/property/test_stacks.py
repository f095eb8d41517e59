"""Random stacks of layers give umoci's tree: content, type, mode, owner, time, links, attributes.

300 seeds in the full run (UNLADE_FULL=1), a sample of them otherwise. A failing seed is in the test's name.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.property.stacks import Generator, Stack, describe, write_layout
from unlade.tree.merge import merge_into
from unlade.unpack import UnpackPolicy, unpack

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is the reference here"),
]

SEEDS = range(300 if os.environ.get("UNLADE_FULL") else 60)
POLICY = UnpackPolicy(rules="image", whiteouts="record", owners="keep", xattrs=True, setid=True)


def ours(stack: Stack, directory: Path) -> Path:
    merged = directory / "merged"
    merged.mkdir(mode=0o755)
    target = os.open(merged, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number, layer in enumerate(stack.layers):
            scratch = directory / f"layer{number}"
            scratch.mkdir(mode=0o755)
            source = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
            try:
                merge_into(target, source, unpack(io.BytesIO(layer), source, POLICY))
            finally:
                os.close(source)
    finally:
        os.close(target)
    return merged


def umocis(stack: Stack, directory: Path) -> Path:
    layout, rootfs = directory / "layout", directory / "rootfs"
    write_layout(layout, stack.layers)
    done = subprocess.run(
        ["umoci", "raw", "unpack", "--image", f"{layout}:latest", str(rootfs)],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return rootfs


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_stack_gives_umocis_tree(seed: int, tmp_path: Path) -> None:
    stack = Generator(seed).stack()
    expected = describe(umocis(stack, tmp_path), stack.untimed)
    found = describe(ours(stack, tmp_path), stack.untimed)
    assert set(found) == set(expected)
    assert {path: found[path] for path in found if found[path] != expected[path]} == {
        path: expected[path] for path in found if found[path] != expected[path]
    }


def test_a_seed_gives_the_same_bytes() -> None:
    assert Generator(7).stack().layers == Generator(7).stack().layers

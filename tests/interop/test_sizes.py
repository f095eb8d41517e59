"""Large blobs on their way out and across: memory does not grow with them.

512 MiB by default, 4 GiB with UNLADE_FULL=1. Peak memory is the kernel's own figure for the process (wait4).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.figures import figure
from tests.interop.peers import Peers
from tests.interop.real_registry import RealRegistry

SIZE: Final = (4 << 30) if os.environ.get("UNLADE_FULL") else (512 << 20)
# A Python with the HTTP client and a few blocks in flight; the blob is at least twice as large.
LIMIT: Final = 200 << 20


def peak(peers: Peers, *arguments: str | Path) -> int:
    """Run our command to its end; its largest resident set in bytes."""
    with subprocess.Popen(
        [sys.executable, "-m", "unlade", *(str(argument) for argument in arguments)],
        env=peers.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said.decode()[-2000:]
    figure(f"push and copy, {SIZE >> 20} MiB blob: {arguments[0]}", usage.ru_maxrss >> 10, "MiB peak")
    return usage.ru_maxrss * 1024


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """A file that compresses neither to nothing nor badly, written a block at a time."""
    path = tmp_path / "big" / "weights.bin"
    path.parent.mkdir()
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for number in range(SIZE >> 20):
            file.write(number.to_bytes(8, "big") + block[8:])
    return path


@pytest.mark.slow
def test_push_and_copy_a_large_blob(
    registry: RealRegistry, other_registry: RealRegistry, peers: Peers, big: Path
) -> None:
    file = registry.reference("size/file")
    assert peak(peers, "push", "--plain-http", big, file) < LIMIT
    packed = registry.reference("size/packed")
    assert peak(peers, "push", "--plain-http", "--compression", "none", big.parent, packed) < LIMIT
    assert peak(peers, "copy", "--plain-http", file, other_registry.reference("size/file")) < LIMIT
    assert peers.crane("digest", other_registry.reference("size/file")) == peers.crane("digest", file)


@pytest.mark.slow
def test_compressed_push_and_layout(registry: RealRegistry, peers: Peers, big: Path, tmp_path: Path) -> None:
    ref = registry.reference("size/gzip")
    assert peak(peers, "push", "--plain-http", "--level", "1", big.parent, ref) < LIMIT
    assert peak(peers, "copy", "--plain-http", ref, f"oci:{tmp_path / 'layout'}:v1") < LIMIT

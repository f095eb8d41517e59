"""Freed memory that is kept: a second block of the same size costs no page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
from unlade.kernel import memory
if sys.argv[1] == "keep" and not memory.keep_freed(4 << 20, 32 << 20):
    sys.exit(3)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytes(bytearray(1 << 20))
before = faults()
for _ in range(50):
    blocks = [bytearray(1 << 20) for _ in range(4)]
    del blocks
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_kept_blocks_are_used_again_without_faults() -> None:
    kept = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "keep"], capture_output=True, text=True, check=False
    )
    if kept.returncode == 3:
        pytest.skip("not glibc")
    # 200 blocks of 256 pages; four of them are new.
    assert int(kept.stdout) < 4 * 256 * 2, kept.stderr

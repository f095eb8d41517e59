"""Stacks of layers with links, unpacked by the real containerd: ours is its tree (design, decision 9).

Where containerd refuses what umoci accepts (hard links to a lower layer's file), ours accepts it too; the
case list says so and this test holds containerd to it, so that a change there is noticed.
"""

from __future__ import annotations

import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.engines import binary
from tests.property.link_cases import LINK_CASES, LinkCase
from tests.property.stacks import Stack, write_layout
from tests.property.test_stacks_links import shape

pytestmark = pytest.mark.root

_CONFIG = """
version = 3
root = "{base}/root"
state = "{base}/state"
disabled_plugins = ["io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"]
[grpc]
  address = "{base}/c.sock"
[ttrpc]
  address = "{base}/c.sock.ttrpc"
"""


class Containerd:
    """A containerd of this test's own."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._count = 0
        config = base / "config.toml"
        config.write_text(_CONFIG.format(base=base))
        with (base / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [binary("containerd"), "-c", str(config)], stdout=log, stderr=log
            )
        end = time.monotonic() + 30
        while self.ctr("version", check=False).returncode:
            assert time.monotonic() < end, (base / "log").read_text()[-2000:]
            time.sleep(0.1)

    def ctr(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        command = [str(binary("ctr")), "--address", f"{self._base}/c.sock", *arguments]
        return subprocess.run(command, capture_output=True, check=check)

    def unpack(self, stack: Stack, directory: Path) -> Path | None:
        """Import and mount a stack; None when containerd refuses it."""
        layout, archive, point = directory / "layout", directory / "image.tar", directory / "mounted"
        write_layout(layout, stack.layers)
        with tarfile.open(archive, "w") as tar:
            for path in sorted(layout.rglob("*")):
                tar.add(path, path.relative_to(layout), recursive=False)
        self._count += 1
        name = f"example.test/stack:{self._count}"
        imported = self.ctr("images", "import", "--index-name", name, "--local", str(archive), check=False)
        if imported.returncode:
            return None
        point.mkdir()
        self.ctr("images", "mount", name, str(point))
        return point

    def release(self, point: Path) -> None:
        self.ctr("images", "unmount", str(point))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        # Its mount manager keeps a mount of its own behind each `ctr images mount`, and leaves it.
        for line in Path("/proc/self/mounts").read_text().splitlines():
            if line.split()[1].startswith(f"{self._base}/"):
                subprocess.run(["umount", line.split()[1]], check=True)


@pytest.fixture(scope="module")
def containerd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    running = Containerd(tmp_path_factory.mktemp("ctd"))
    try:
        yield running
    finally:
        running.close()


@pytest.mark.parametrize("case", LINK_CASES, ids=lambda case: case.name)
def test_links(case: LinkCase, containerd: Containerd, tmp_path: Path) -> None:
    point = containerd.unpack(Stack([bytes(case.lower), bytes(case.upper)]), tmp_path)
    if case.containerd == "refused":
        assert point is None
        return
    assert point is not None
    try:
        found = shape(point)
    finally:
        containerd.release(point)
    assert found == (case.ours if case.containerd is None else case.containerd)

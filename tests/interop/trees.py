"""Trees to push, and what two directories have in common: content, type, mode, links."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path


def sample_tree(root: Path, seed: int = 0) -> Path:
    """A tree with everything a push keeps: files, execute bits, links, empty and deep directories."""
    rng = random.Random(seed)
    root.mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "empty-file").touch()
    (root / "docs").mkdir()
    (root / "docs" / "read me.txt").write_text("hello, world\n")
    (root / "docs" / "naïve-ünïcode").write_text("ünïcode\n")
    (root / "bin").mkdir()
    (root / "bin" / "run").write_text("#!/bin/sh\necho ran\n")
    (root / "bin" / "run").chmod(0o755)
    (root / "bin" / "alias").symlink_to("run")
    (root / "dangling").symlink_to("docs/not-there")
    (root / "long").mkdir()
    (root / "long" / ("n" * 200)).write_text("long name")
    deep = root.joinpath(*(f"d{level}" for level in range(12)))
    deep.mkdir(parents=True)
    (deep / "leaf").write_bytes(rng.randbytes(100))
    (root / "blob.bin").write_bytes(rng.randbytes(300_000) + bytes(2_000_000))
    return root


def snapshot(root: Path) -> dict[str, tuple[object, ...]]:
    """Path → type, permission bits, content or target; what must be equal after a round trip."""
    found: dict[str, tuple[object, ...]] = {}
    for directory, directories, files in os.walk(root):
        for name in directories + files:
            path = Path(directory) / name
            info = path.lstat()
            kind, mode = stat.S_IFMT(info.st_mode), stat.S_IMODE(info.st_mode)
            key = str(path.relative_to(root))
            if stat.S_ISLNK(info.st_mode):
                found[key] = (kind, os.readlink(path))
            elif stat.S_ISREG(info.st_mode):
                found[key] = (kind, mode, path.read_bytes())
            else:
                found[key] = (kind, mode)
    return found

"""docs/packages.md, run as it is written: every `sh` block in order, every `text` block in its output."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.interop.real_registry import RealRegistry

DOCUMENT = Path(__file__).parents[3] / "docs" / "packages.md"


def test_walkthrough(registry: RealRegistry, other_registry: RealRegistry, tmp_path: Path) -> None:
    blocks = re.findall(r"```(sh|text)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert sum(kind == "sh" for kind, _ in blocks) >= 10
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "unlade").write_text(f'#!/bin/sh\nexec {sys.executable} -m unlade "$@"\n')
    (commands / "unlade").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{commands}:{os.environ['PATH']}",
        "UNLADE_STORE": str(tmp_path / "store"),
        "DEV": registry.host,
        "PROD": other_registry.host,
        "UNLADE_PLAIN_HTTP": f"{registry.host},{other_registry.host}",
    }
    work = tmp_path / "work"
    work.mkdir()
    printed = ""
    for number, (kind, body) in enumerate(blocks):
        if number == 0:
            # The addresses of the document; this test's registries have others.
            assert body.startswith("export DEV=")
            continue
        if kind == "text":
            for line in body.splitlines():
                assert line.strip() in printed, f"block {number}: {line!r} is not in:\n{printed}"
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", body],
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (
            f"block {number} ended with {done.returncode}:\n{body}\n{done.stdout}{done.stderr}"
        )
        printed = done.stdout

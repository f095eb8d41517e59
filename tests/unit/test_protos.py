"""The committed protobuf modules are what scripts/protos makes from our .proto files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_modules_are_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    subprocess.run(
        [ROOT / "scripts" / "protos"],
        env={**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable},
        check=True,
        capture_output=True,
    )
    made = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*_pb2.py*")}
    source = ROOT / "src"
    committed = {str(path.relative_to(source)): path.read_text() for path in source.rglob("*_pb2.py*")}
    committed = {name: text for name, text in committed.items() if "__pycache__" not in name}
    assert made
    assert made == committed, "run scripts/protos and commit what it changes"

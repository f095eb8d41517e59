"""Code in documents: it compiles, and every name it takes from the library is there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import unlade

ROOT = Path(__file__).parents[2]
BLOCKS = [
    (path.name, number, block)
    for path in (ROOT / "README.md", ROOT / "docs" / "library.md")
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.parametrize(("document", "number", "block"), BLOCKS)
def test_python_in_documents(document: str, number: int, block: str) -> None:
    found = 0
    for node in ast.walk(ast.parse(block, f"{document}#{number}")):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "unlade":
            assert hasattr(unlade, node.attr), node.attr
            found += 1
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), alias.name
                found += 1
    assert found


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 4

"""Decoders are made at import, never in a function.

msgspec 0.22 ends the process when two threads use a Struct type for the first time at once: it shows one
thread what the other has half built. `msgspec.json.Decoder(T)` at the top of a module is built by the one
thread that imports it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import unlade

SOURCES = sorted(Path(unlade.__file__).parent.rglob("*.py"))


def late_decodes(tree: ast.AST) -> list[int]:
    """Lines inside functions that name a type to decode to."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name = ast.unparse(node.func)
            typed = any(keyword.arg == "type" for keyword in node.keywords) or len(node.args) > 1
            if (name in ("msgspec.json.decode", "msgspec.convert") and typed) or name.endswith(".Decoder"):
                found.append(node.lineno)
    return found


def test_the_check_sees_them() -> None:
    bad = "import msgspec\ndef f(x):\n    return msgspec.json.decode(x, type=T)\n"
    assert late_decodes(ast.parse(bad)) == [3]
    assert late_decodes(ast.parse("D = msgspec.json.Decoder(T)\ndef f(x):\n    return D.decode(x)\n")) == []


# Made by the thread that makes the informer, for types it is told, before its own thread starts.
ALLOWED = {"controllers/informer.py"}


def test_no_decoder_is_made_while_threads_run() -> None:
    assert len(SOURCES) > 100
    home = Path(unlade.__file__).parent
    late = {str(path.relative_to(home)) for path in SOURCES if late_decodes(ast.parse(path.read_text()))}
    assert late == ALLOWED

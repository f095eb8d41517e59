"""Named points at which a test kills the process, or makes the disk fail.

Every durable step of the product calls `reach("room.what.happened")` with a literal name. Nothing happens
unless UNLADE_FAILPOINT is set when the module is imported::

    UNLADE_FAILPOINT=store.ingest.synced           SIGKILL the first time the point is reached
    UNLADE_FAILPOINT=store.ingest.synced:3         the third time
    UNLADE_FAILPOINT=store.ingest.synced:1=ENOSPC  raise OSError(ENOSPC) there instead

A kill is SIGKILL to ourselves: no handler, no `finally`, no flush, as when the kernel or an operator does
it. `names()` reads the names out of the package's source, so the list cannot fall behind the code. This
module imports nothing of ours and may be called from every room above the model.
"""

from __future__ import annotations

import ast
import errno
import os
import signal
from pathlib import Path
from typing import Final

VARIABLE: Final = "UNLADE_FAILPOINT"


class _Armed:
    """One armed point: counts down, then strikes."""

    def __init__(self, text: str) -> None:
        text, _, failure = text.partition("=")
        self.name, _, count = text.partition(":")
        self.left = int(count or 1)
        self.error = getattr(errno, failure) if failure else 0

    def strike(self) -> None:
        self.left -= 1
        if self.left != 0:
            return
        if self.error:
            raise OSError(self.error, f"{os.strerror(self.error)} (failpoint {self.name})")
        os.kill(os.getpid(), signal.SIGKILL)


_armed = _Armed(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def reach(name: str) -> None:
    """Say that this point was reached; costs one comparison when no failpoint is armed."""
    if _armed is not None and _armed.name == name:
        _armed.strike()


def names() -> list[str]:
    """Every failpoint of the installed package, sorted, read from its source."""
    found: set[str] = set()
    for source in Path(__file__).parent.parent.rglob("*.py"):
        text = source.read_text(encoding="utf-8")
        if "failpoints" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and _is_reach(node.func) and node.args:
                literal = node.args[0]
                if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                    found.add(literal.value)
    return sorted(found)


def _is_reach(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "reach"
        and isinstance(function.value, ast.Name)
        and function.value.id == "failpoints"
    )

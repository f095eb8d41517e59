"""Rooms whose names are imported when they are first used.

A command that fills a directory needs neither the store's database nor the mount calls, and half of what it
takes to deliver something small is importing Python modules. A room's `__init__` names its public things once
for the type checker and once, by module, for `lazily`; whoever imports such a name gets the module it lives
in and nothing else. Called at the end of an `__init__`; imports nothing of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(room: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562) that finds each public name in its home, and keeps it.

    `homes` has a room's modules, and the names of each with blanks between them.
    """
    found = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        home = found.get(name)
        if home is None:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        value = getattr(import_module(f"{room}.{home}"), name)
        setattr(sys.modules[room], name, value)
        return value

    return get

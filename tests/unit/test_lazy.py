"""Rooms give every name they promise, and a pull to a directory imports no more than it needs."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

ROOMS = (
    "unlade",
    "unlade.mount",
    "unlade.pack",
    "unlade.registry",
    "unlade.store",
    "unlade.tree",
    "unlade.unpack",
)
# What fills a directory needs none of these in its own process: the unpack process has a writer of its own.
NOT_NEEDED = (
    "sqlite3",
    "urllib3",
    "unlade.kernel.mounts",
    "unlade.mount.attach",
    "unlade.pack.publish",
    "unlade.registry.providers",
    "unlade.store.database",
    "unlade.tree.dirtrees",
    "unlade.unpack.writer",
)


@pytest.mark.parametrize("room", ROOMS)
def test_every_promised_name_is_there(room: str) -> None:
    module = importlib.import_module(room)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        module.nothing_of_the_kind  # noqa: B018 - the look-up is what is tested


def test_a_pull_to_a_directory_imports_what_it_needs() -> None:
    code = "import sys, unlade.cli.pull, unlade.cli.connect, unlade.delivery; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "unlade.delivery.engine" in loaded
    assert loaded.isdisjoint(NOT_NEEDED), loaded.intersection(NOT_NEEDED)

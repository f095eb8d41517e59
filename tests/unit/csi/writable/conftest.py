"""A node of one's own, and the promise that a test leaves no mount and no loop device."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from tests.unit.csi.writable.scene import Node, loops_of, mounts_below, node, put_model
from unlade.kernel import mounts


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    with FakeRegistry() as registry:
        put_model(registry)
        yield registry


@pytest.fixture
def here(tmp_path: Path, fake: FakeRegistry) -> Iterator[Node]:
    try:
        with node(tmp_path, fake.host) as made:
            yield made
    finally:
        for path in reversed(mounts_below(tmp_path)):
            mounts.detach(path, lazy=True)
            os.rmdir(path)  # takes away copies that others' new namespaces got
        end = time.monotonic() + 5
        while loops_of(tmp_path) and time.monotonic() < end:
            time.sleep(0.02)
    assert loops_of(tmp_path) == []

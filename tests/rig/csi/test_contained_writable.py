"""Writable volumes over snapshots of containerd's: the tests of `tests/unit/csi/writable`, and a reboot."""

from __future__ import annotations

import inspect
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.registry import FakeRegistry
from tests.rig.containerd.daemon import Daemon
from tests.unit.csi.crash_scenario import in_containerd
from tests.unit.csi.writable import test_volumes
from tests.unit.csi.writable.conftest import fake
from tests.unit.csi.writable.scene import MIB, MODEL, Node, loops_of, mounts_below, node
from unlade.containerd import leases
from unlade.kernel import mounts

pytestmark = pytest.mark.root
__all__ = ["fake"]

FULL = os.environ.get("UNLADE_FULL") == "1"
# Who holds a mount in another namespace does not depend on where content is, and is waited for long.
globals().update(
    {
        name: test
        for name, test in vars(test_volumes).items()
        if name.startswith("test_")
        and "here" in inspect.signature(test).parameters
        and (FULL or "namespace" not in name)
    }
)


@pytest.fixture
def contained(daemon: Daemon) -> str:
    return f"{daemon.address},writable-{secrets.token_hex(4)}"


@pytest.fixture
def here(tmp_path: Path, fake: FakeRegistry, contained: str) -> Iterator[Node]:
    try:
        with node(tmp_path, fake.host, contained=contained) as made:
            yield made
    finally:
        for path in reversed(mounts_below(tmp_path)):
            mounts.detach(path, lazy=True)
            os.rmdir(path)
        end = time.monotonic() + 5
        while loops_of(tmp_path) and time.monotonic() < end:
            time.sleep(0.02)
    assert loops_of(tmp_path) == []


def test_a_reboot_of_all_loses_nothing(
    daemon: Daemon, tmp_path: Path, fake: FakeRegistry, contained: str
) -> None:
    """Mounts, locks and containerd gone at once, the registry away: the same content, the same writes."""
    with node(tmp_path, fake.host, contained=contained) as before:
        volume = before.writable.create("pvc-1", 32 * MIB, before.parameters)
        target = before.target("a")
        before.writable.publish(volume.id, target)
        Path(target, "own").write_text("mine")
        os.sync()
    mounts.detach(target, lazy=True)
    os.rmdir(target)
    daemon.restart(kill=True)
    with node(tmp_path, "nowhere.invalid:1", contained=contained) as after:
        after.writable.recover()
        after.collect()
        after.writable.publish(volume.id, target)
        assert Path(target, "own").read_text() == "mine"
        assert Path(target, "config.json").read_bytes() == MODEL["config.json"]
        after.writable.unpublish(volume.id, target)
        after.writable.delete(volume.id)
        after.collect()
        assert after.trees() == set()


def test_no_lease_is_left_when_a_volume_goes(here: Node) -> None:
    volume = here.writable.create("pvc-1", 16 * MIB, here.parameters)
    with in_containerd(here.base, here.contained).connect() as containerd:
        assert len(leases.kept(containerd, "")) == 1
        here.writable.delete(volume.id)
        assert leases.kept(containerd, "") == []

"""The agent killed, the machine restarted, under a real kubelet: `test_faults.py` with content in containerd.

What the calls leave after a kill at each point is in `test_contained_crash.py`. These take minutes: they run
with UNLADE_FULL=1 alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rig.cluster import Rig
from rig.pods import Namespace
from tests.rig.csi import test_faults
from tests.rig.csi.agent import Agent
from tests.rig.csi.conftest import contained_by
from tests.rig.csi.test_faults import rig, test_the_machine_restarts
from unlade.kernel import failpoints

pytestmark = pytest.mark.skipif(os.environ.get("UNLADE_FULL") != "1", reason="run with UNLADE_FULL=1")
__all__ = ["rig", "test_the_machine_restarts"]

PUBLISH = (
    "containerd.lease.created",
    "containerd.snapshot.committed",
    "containerd.record.id",
    "store.image.recorded",
    "volume.lease.kept",
    "csi.publish.held",
    "csi.publish.mounted",
)
UNPUBLISH = ("csi.unpublish.unmounted", "volume.lease.ended", "csi.unpublish.released")


@pytest.fixture
def agent(rig: Rig, tmp_path: Path) -> Iterator[Agent]:
    made = Agent(rig, tmp_path, contained=contained_by(rig))
    yield made
    made.close()


def test_the_points_are_there() -> None:
    assert {*PUBLISH, *UNPUBLISH} <= set(failpoints.names())


@pytest.mark.parametrize("point", PUBLISH)
def test_killed_while_a_kubelet_publishes(
    rig: Rig, agent: Agent, namespace: Namespace, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_faults, "PUBLISH", PUBLISH)
    test_faults.test_killed_while_a_kubelet_publishes(rig, agent, namespace, point)


@pytest.mark.parametrize("point", UNPUBLISH)
def test_killed_while_a_kubelet_unpublishes(
    rig: Rig, agent: Agent, namespace: Namespace, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_faults, "UNPUBLISH", UNPUBLISH)
    test_faults.test_killed_while_a_kubelet_unpublishes(rig, agent, namespace, point)

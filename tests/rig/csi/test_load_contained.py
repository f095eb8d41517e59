"""Many volumes at once, content in containerd: `test_load.py` again. CI takes the warm publishes alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rig.cluster import Rig
from tests.rig.csi import test_load
from tests.rig.csi.agent import Agent
from tests.rig.csi.conftest import DEPLOY, contained_by

FULL = os.environ.get("UNLADE_FULL") == "1"

globals().update(
    {
        name: test
        for name, test in vars(test_load).items()
        if name.startswith("test_") and (FULL or name == "test_a_warm_publish_is_quick")
    }
)


@pytest.fixture(scope="module")
def agent(cluster: Rig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    cluster.kubectl("apply", "-f", str(DEPLOY / "csidriver.yaml"))
    made = Agent(cluster, tmp_path_factory.mktemp("load"), contained=contained_by(cluster))
    made.start()
    yield made
    made.close()

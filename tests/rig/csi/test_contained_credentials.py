"""V4 and V5 with content in containerd: the tests of `tests/unit/csi/test_credentials.py`, unchanged."""

from __future__ import annotations

import pytest

from tests.unit.csi.conftest import put
from tests.unit.csi.test_credentials import (
    fake,
    test_a_secret_per_namespace,
    test_pull_secrets_of_the_pod_and_the_node_s_own,
)

pytestmark = pytest.mark.root
__all__ = [
    "fake",
    "put",
    "test_a_secret_per_namespace",
    "test_pull_secrets_of_the_pod_and_the_node_s_own",
]

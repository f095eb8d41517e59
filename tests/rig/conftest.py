"""Fixtures for tests on the real cluster; docs/rig.md describes them for authors of tests.

`cluster` is one rig for the whole run, `namespace` a namespace per test in it. `two_nodes` and `make_rig`
start rigs of their own. When a test fails, the logs and events of every rig that was up are copied to
`artifacts/rig/<test>`, and the report names that directory.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rig.cluster import Rig
from rig.local_storage import LocalStorage
from rig.pods import Namespace
from rig.settings import Settings

# Rigs that are up now: what a failing test's report collects from.
_RUNNING: list[Rig] = []

MakeRig = Callable[..., Rig]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the shared cluster come last: it starts when first asked for, and does not idle."""
    items.sort(key=lambda item: "cluster" in getattr(item, "fixturenames", ()))


def _up(settings: Settings, kind: str) -> Rig:
    rig = Rig.up(f"{kind}-{secrets.token_hex(3)}", settings)
    _RUNNING.append(rig)
    return rig


def _down(rig: Rig) -> None:
    if rig in _RUNNING:
        _RUNNING.remove(rig)
        rig.down()


@pytest.fixture(scope="session")
def full() -> bool:
    """Whether counts and sizes are the full ones (`make full`) or sampled (CI)."""
    return os.environ.get("UNLADE_FULL") == "1"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Rig]:
    """A cluster with one node for the whole test run."""
    rig = _up(Settings(), "test")
    yield rig
    _down(rig)


@pytest.fixture
def namespace(cluster: Rig) -> Iterator[Namespace]:
    """A namespace of the shared cluster, deleted after the test."""
    made = Namespace(cluster)
    yield made
    made.delete()


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Rig]:
    """A cluster with two nodes, each with a containerd, a kubelet and a cgroup root of its own."""
    rig = _up(Settings(nodes=2), "two")
    yield rig
    _down(rig)


def _maker() -> Iterator[MakeRig]:
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        rig = _up(Settings(**settings), "own")
        made.append(rig)
        return rig

    yield make
    for rig in made:
        _down(rig)


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Start rigs with settings of the test's own: `make_rig(nodes=…, feature_gates=…, controllers=…)`."""
    yield from _maker()


@pytest.fixture(scope="module")
def make_module_rig() -> Iterator[MakeRig]:
    """As `make_rig`, for rigs that all tests of a module share."""
    yield from _maker()


@pytest.fixture
def local_storage(cluster: Rig) -> Iterator[LocalStorage]:
    """A storage class of local volumes that bind when the first pod is scheduled."""
    storage = LocalStorage(cluster)
    yield storage
    storage.delete()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep logs and events of every running rig when a test or its set-up fails."""
    report = yield
    if report.failed and call.when in ("setup", "call"):
        name = re.sub(r"[^\w.-]+", "_", item.nodeid.rpartition("tests/rig/")[2] or item.nodeid)
        base = Path(os.environ.get("UNLADE_RIG_ARTIFACTS", "artifacts/rig")).resolve() / name
        for rig in _RUNNING:
            target = base / rig.name
            rig.keep_artefacts(target)
            report.sections.append((f"rig {rig.name}", f"logs and events are in {target}"))
    return report

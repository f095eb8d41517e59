"""Every hostile archive is refused with its typed error, changes nothing outside, and leaves nothing.

Each case runs with openat2, with the component walk, and in a confined worker process.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast

import pytest

from tests.fakes.tars import snapshot
from tests.hostile.archive_cases import CASES, OUTSIDE, Case
from unlade.kernel.beneath import forced_walk
from unlade.kernel.files import remove_tree
from unlade.unpack import UnpackPolicy, WorkerPool, unpack


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1, start="spawn") as made, tempfile.TemporaryDirectory() as scratch:
        dirfd, devnull = os.open(scratch, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)
        made.unpack(devnull, dirfd, UnpackPolicy(rules="artifact")).result()
        os.close(dirfd)
        yield made


@pytest.fixture(scope="module", autouse=True)
def elsewhere() -> Iterator[None]:
    """The directory that archives name by its absolute path."""
    os.mkdir(OUTSIDE)
    with open(OUTSIDE + b"secret", "wb") as secret:
        secret.write(b"elsewhere")
    yield
    shutil.rmtree(OUTSIDE)


@pytest.fixture
def yard(tmp_path: Path) -> Path:
    """A destination's parent, with neighbours that must not change."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (outside / "secret").chmod(0o600)
    evil = tmp_path / "out-evil"
    evil.mkdir()
    (evil / "secret").write_text("neighbour")
    (tmp_path / "stagings").mkdir()
    return tmp_path


def test_the_list_is_as_long_as_promised() -> None:
    assert len(CASES) >= 120
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("way", ["openat2", "walk", "worker"])
@pytest.mark.parametrize(
    ("case", "rules"),
    [pytest.param(case, rules, id=f"{case.name}-{rules}") for case in CASES for rules in case.rules],
)
def test_refused(case: Case, rules: str, way: str, yard: Path, pool: WorkerPool) -> None:
    archive = case.build()
    policy = UnpackPolicy(rules=cast("Literal['image', 'artifact']", rules), xattrs=True, limits=case.limits)
    staging = yard / "stagings" / "out"
    staging.mkdir()
    neighbours = (OUTSIDE, os.fsencode(yard / "outside"), os.fsencode(yard / "out-evil"))
    before = [snapshot(neighbour) for neighbour in neighbours]
    open_before = len(os.listdir("/proc/self/fd"))
    dirfd = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    started = time.monotonic()
    try:
        with pytest.raises(case.error) as caught:
            if way == "worker":
                with tempfile.TemporaryFile() as file:
                    file.write(archive)
                    file.seek(0)
                    pool.unpack(file.fileno(), dirfd, policy).result()
            elif way == "walk":
                with forced_walk():
                    unpack(io.BytesIO(archive), dirfd, policy)
            else:
                unpack(io.BytesIO(archive), dirfd, policy)
    finally:
        os.close(dirfd)
    assert type(caught.value) is case.error
    assert not caught.value.retryable
    assert time.monotonic() - started < 10
    # Fewer is no leak: a worker of the test before may let go of its pipes meanwhile.
    assert len(os.listdir("/proc/self/fd")) <= open_before
    assert [snapshot(neighbour) for neighbour in neighbours] == before
    # What a caller does with the staging of a refused archive: nothing of it is left.
    parent = os.open(staging.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        remove_tree(parent, b"out")
    finally:
        os.close(parent)
    assert sorted(os.listdir(yard)) == ["out-evil", "outside", "stagings"]
    assert os.listdir(yard / "stagings") == []

"""The cases in which ours is containerd's tree and not umoci's, one by one (design, decision 9)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.property.link_cases import LINK_CASES, LinkCase, Shape
from tests.property.stacks import Stack
from tests.property.test_stacks import ours, umocis

pytestmark = pytest.mark.root


def shape(root: Path) -> Shape:
    """A tree as link targets, contents and directories."""
    found: Shape = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if not os.path.lexists(path):
            continue  # overlayfs lists a whiteout in a directory that has nothing below it, and opens nothing
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = None if path.is_dir() else path.read_bytes()
    return found


@pytest.mark.parametrize("case", LINK_CASES, ids=lambda case: case.name)
def test_ours(case: LinkCase, tmp_path: Path) -> None:
    assert shape(ours(Stack([bytes(case.lower), bytes(case.upper)]), tmp_path)) == case.ours


@pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is the reference here")
@pytest.mark.parametrize("case", LINK_CASES, ids=lambda case: case.name)
def test_umocis(case: LinkCase, tmp_path: Path) -> None:
    found = shape(umocis(Stack([bytes(case.lower), bytes(case.upper)]), tmp_path))
    assert found == (case.ours if case.umoci is None else case.umoci)

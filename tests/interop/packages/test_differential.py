"""The same updates by kpt on git and by us on a real registry: the trees are equal (P2).

400 seeds here, 2,300 with UNLADE_FULL=1; against the real kpt where it is installed, against its recorded
outcomes elsewhere. Compared are values, key order, document order and comments; not compared: blank lines,
columns, quoting of untouched text, and what docs/kpt-differences.md lists.
"""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.interop.packages import kpt, record
from tests.interop.packages.generator import Case, case
from tests.interop.real_registry import RealRegistry
from unlade.packages.fetching import get
from unlade.packages.location import LocalDirectory, parse_oci
from unlade.packages.publishing import copy
from unlade.packages.sources import Sources
from unlade.packages.update import update

FULL = bool(os.environ.get("UNLADE_FULL"))
BUNDLES = [
    record.SEEDS[start : start + record.BUNDLE] for start in range(0, len(record.SEEDS), record.BUNDLE)
]
if not FULL:
    # Three bundles of plain packages and one with sub-packages.
    BUNDLES = [*BUNDLES[:3], BUNDLES[-1]]


def update_with_ours(
    work: Path, cases: Sequence[Case], sources: Sources, registry: RealRegistry
) -> dict[int, kpt.Files]:
    """Push base and upstream as v1 and v2, get v1, lay local over it, update to v2."""
    name = f"bundle{cases[0].seed}"
    for tag, side in (("v1", "base"), ("v2", "upstream")):
        kpt.write(work / tag, kpt.bundle(cases, side))
        copy(LocalDirectory(str(work / tag)), parse_oci(f"oci://{registry.host}/{name}:{tag}"), sources)
    get(parse_oci(f"oci://{registry.host}/{name}:v1"), str(work / "local"), sources)
    kpt.overlay(work / "local", cases)
    update(str(work / "local"), sources, version="v2")
    return kpt.split(kpt.read(work / "local"), cases)


def without_set_comments(tree: object) -> object:
    """kpt drops the comment of an element that it adds to a set (finalizers); ours keeps it."""
    if isinstance(tree, list) and len(tree) == 4 and tree[0] == "finalizers":
        return [tree[0], tree[1], [[item[0], ""] for item in tree[2] or []], tree[3]]
    if isinstance(tree, list):
        return [without_set_comments(item) for item in tree]
    return (
        {name: without_set_comments(item) for name, item in tree.items()} if isinstance(tree, dict) else tree
    )


# kpt writes a list in local's flow style with the comments of its elements inside the brackets.
COMMENT_IN_FLOW = re.compile(r"[\[{][^\n]*, # ")


def without_comments(tree: object) -> object:
    """For files whose comments cannot be compared."""
    if isinstance(tree, list):
        return [without_comments(item) for item in tree]
    return "" if isinstance(tree, str) and tree.startswith("#") else tree


def second_level(files: kpt.Files, reference: kpt.Files) -> dict[str, object]:
    """Order and comments of a tree, as far as they can be compared with kpt's files."""
    found = kpt.normal(files, second=True)
    return {
        name: without_comments(tree)
        if COMMENT_IN_FLOW.search(reference.get(name, ""))
        else without_set_comments(tree)
        for name, tree in found.items()
    }


@pytest.fixture(scope="module")
def recording() -> dict[int, tuple[str, kpt.Files]]:
    return record.load()


@pytest.mark.parametrize("seeds", BUNDLES, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_same_tree_as_kpt(
    seeds: range,
    recording: dict[int, tuple[str, kpt.Files]],
    sources: Sources,
    registry: RealRegistry,
    tmp_path: Path,
) -> None:
    cases = [case(seed) for seed in seeds]
    theirs = {}
    for made in cases:
        mark, theirs[made.seed] = recording[made.seed]
        assert mark == record.fingerprint(made), "the recording is older than the generator: record again"
    if kpt.available():
        (tmp_path / "kpt").mkdir()
        live = kpt.update_with_kpt(tmp_path / "kpt", cases)
        shutil.rmtree(tmp_path / "kpt")
        assert live == theirs, "this kpt does other than the recorded one"
    ours = update_with_ours(tmp_path, cases, sources, registry)
    wrong = [made.seed for made in cases if kpt.normal(ours[made.seed]) != kpt.normal(theirs[made.seed])]
    assert wrong == []
    for made in cases:
        level = [second_level(side[made.seed], theirs[made.seed]) for side in (ours, theirs)]
        assert level[0] == level[1], made.seed


def test_the_recording_fits_the_generator(recording: dict[int, tuple[str, kpt.Files]]) -> None:
    assert set(recording) == set(record.SEEDS)
    for seed in record.SEEDS[:: 1 if FULL else 20]:
        assert recording[seed][0] == record.fingerprint(case(seed)), f"seed {seed}: record again"

"""The outcome table and kpt agree: what the table says about kpt is what kpt does."""

import shutil
from pathlib import Path

import pytest

from tests.interop.packages import kpt
from tests.interop.packages.generator import Case
from tests.unit.packages.outcomes import LAST, LINES, Files, Line
from unlade.packages.resources import marked_text

pytestmark = pytest.mark.skipif(kpt.available() is None, reason="kpt is not installed; outcomes are recorded")

SUB = "apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: sub\n"
MERGED = [line for line in [*LINES, LAST] if not line.error]
FAILING = [line for line in LINES if line.error]


def as_case(seed: int, line: Line) -> Case:
    sides = [{"Kptfile": SUB, **side} for side in (line.base, line.local, line.upstream)]
    return Case(seed, *sides)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """kpt's outcome of every line that merges, from one bundle."""
    work = tmp_path_factory.mktemp("kpt")
    cases = [as_case(seed, line) for seed, line in enumerate(MERGED)]
    found = kpt.update_with_kpt(work, cases)
    shutil.rmtree(work)
    return {line.number: found[seed] for seed, line in enumerate(MERGED)}


@pytest.mark.parametrize("line", MERGED, ids=lambda line: line.number)
def test_kpt_does_what_the_table_says(line: Line, outcomes: dict[str, Files]) -> None:
    expected = {"Kptfile": SUB, **(line.kpt if line.kpt is not None else line.outcome)}
    wanted = {
        name: marked_text(text) if name.endswith(".yaml") and "kind:" in text else text
        for name, text in expected.items()
    }
    found = outcomes[line.number]
    assert kpt.normal(found) == kpt.normal(wanted)
    if line.exact:
        assert kpt.normal(found, second=True)["a.yaml"] == kpt.normal(wanted, second=True)["a.yaml"]


@pytest.mark.parametrize("line", FAILING, ids=lambda line: line.number)
def test_kpt_fails_where_the_table_says(line: Line, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        kpt.update_with_kpt(tmp_path, [as_case(1, line)])

"""Every line of the outcome table on the merge itself (P2, P8)."""

import re
from pathlib import Path

import pytest

from tests.unit.packages.outcomes import DEPLOY, LAST, LINES, WIDGET, Files, Line
from unlade.errors import UnladeError
from unlade.packages.compare import canonical, plain
from unlade.packages.decisions import OnConflict
from unlade.packages.resources import marked_text, merge_file
from unlade.packages.snapshot import Snapshot, file_of
from unlade.packages.strategies import Merged, apply, marked
from unlade.packages.yamltext import parse_documents

ROOT = "apiVersion: kpt.dev/v1\nkind: Kptfile\nmetadata:\n  name: root\n"


def snapshot(files: Files) -> Snapshot:
    """One side below c/, a package without an upstream of its own, as kpt sees bundled cases."""
    made = {"Kptfile": file_of(ROOT), "c/Kptfile": file_of(ROOT.replace("root", "sub"))}
    return made | {f"c/{name}": file_of(text) for name, text in files.items()}


def merge(line: Line, policy: OnConflict = "kpt") -> Merged:
    sides = [snapshot(side) for side in (line.local, line.base, line.upstream)]
    merged = apply("resource-merge", *sides, policy=policy)
    merged.files = marked(merged.files)
    return merged


def values(files: Files) -> dict[str, object]:
    """Files as compared: resources by value and document order, others by text."""
    found: dict[str, object] = {}
    for name, text in files.items():
        if name.endswith((".yaml", "Kptfile")):
            roots = [doc.root for doc in parse_documents(marked_text(text))]
            found[name] = [plain(root) for root in roots if root is not None] or text
        else:
            found[name] = text
    return found


def outcome(merged: Merged) -> Files:
    found = {name[2:]: file.text for name, file in merged.files.items() if name.startswith("c/")}
    if found.get("Kptfile") == ROOT.replace("root", "sub"):
        del found["Kptfile"]
    return found


@pytest.mark.parametrize("line", [*LINES, LAST], ids=lambda line: line.number)
def test_outcome(line: Line) -> None:
    """P2: the outcome is the table's."""
    if line.error:
        with pytest.raises(UnladeError, match=line.error):
            merge(line)
        return
    found = outcome(merge(line))
    assert values(found) == values(line.outcome)
    if line.exact:
        trees = [
            [canonical(doc.root, flow_matters=True) for doc in parse_documents(text) if doc.root]
            for text in (found["a.yaml"], marked_text(line.outcome["a.yaml"]))
        ]
        assert trees[0] == trees[1], found["a.yaml"]


REPORTED = (
    "3",
    "4",
    "8",
    "13",
    "14",
    "15",
    "16",
    "21a",
    "22b",
    "24",
    "26",
    "28",
    "29",
    "33b",
    "35",
    "36",
    "38b",
    "44a",
    "44d",
    "44e",
)


@pytest.mark.parametrize(
    "line", [line for line in LINES if line.number in REPORTED], ids=lambda line: line.number
)
def test_a_lost_change_is_reported(line: Line) -> None:
    """P2: where a side's change does not survive, a conflict says so."""
    conflicts = merge(line).conflicts
    assert conflicts
    assert all(decision.where and decision.reason for decision in conflicts)


@pytest.mark.parametrize(
    "number",
    ["1", "2", "5a", "5b", "6", "10", "12a", "18", "21b", "22a", "23", "25", "27", "44b", "44c", "45"],
)
def test_a_change_on_one_side_is_no_conflict(number: str) -> None:
    line = next(line for line in LINES if line.number == number)
    assert merge(line).conflicts == []


def test_conflict_names_all_three_values() -> None:
    line = next(line for line in LINES if line.number == "3")
    [decision] = merge(line).conflicts
    assert (decision.base, decision.local, decision.upstream) == ("0", "L", "U")
    assert decision.path == "spec.a"
    assert decision.taken == "upstream"
    assert "base 0, local L, upstream U" in str(decision)


def field(text: str, *path: str) -> object:
    value = plain(parse_documents(text)[0].root)
    for step in path:
        assert isinstance(value, dict)
        value = value.get(step)
    return value


@pytest.mark.parametrize(
    ("number", "kept"),
    [("3", "L"), ("4", "L"), ("8", "L"), ("7", None)],
)
def test_on_conflict_local_keeps_local(number: str, kept: str | None) -> None:
    line = next(line for line in LINES if line.number == number)
    found = outcome(merge(line, "local"))
    assert field(found["a.yaml"], "spec", "a") == kept


def test_on_conflict_local_keeps_deleted_mappings_deleted() -> None:
    line = next(line for line in LINES if line.number == "16")
    assert field(outcome(merge(line, "local"))["a.yaml"], "spec", "m") is None


def test_on_conflict_local_keeps_an_edited_item_that_upstream_deleted() -> None:
    line = next(line for line in LINES if line.number == "24")
    containers = field(outcome(merge(line, "local"))["a.yaml"], "spec", "template", "spec", "containers")
    assert isinstance(containers, list)
    assert {"name": "d", "image": "d:L"} in containers


def test_on_conflict_upstream_takes_files_and_deletions() -> None:
    by_number = {line.number: line for line in LINES}
    assert outcome(merge(by_number["44a"], "upstream"))["t.txt"] == "U"
    assert "a.yaml" not in outcome(merge(by_number["33b"], "upstream"))
    assert "a.yaml" in outcome(merge(by_number["35"], "upstream"))


def test_markers_show_both_sides() -> None:
    line = next(line for line in LINES if line.number == "3")
    merged = apply(
        "resource-merge",
        *[snapshot(side) for side in (line.local, line.base, line.upstream)],
        policy="markers",
    )
    text = merged.files["c/a.yaml"].text
    assert "<<<<<<< local\n  a: L\n=======\n  a: U\n>>>>>>> upstream\n" in text
    assert text.startswith(WIDGET.split("metadata")[0])


def test_markers_for_a_deletion_have_an_empty_side() -> None:
    by_number = {line.number: line for line in LINES}
    sides = [snapshot(side) for side in (by_number["8"].local, by_number["8"].base, by_number["8"].upstream)]
    text = apply("resource-merge", *sides, policy="markers").files["c/a.yaml"].text
    assert "<<<<<<< local\n  a: L\n=======\n>>>>>>> upstream\n" in text
    sides = [snapshot(side) for side in (by_number["7"].local, by_number["7"].base, by_number["7"].upstream)]
    text = apply("resource-merge", *sides, policy="markers").files["c/a.yaml"].text
    assert "<<<<<<< local\n=======\n  a: U\n>>>>>>> upstream\n" in text


def marked_up(body: str, mine: str, theirs: str) -> tuple[str, list[str]]:
    """A file merged with markers, and what the report says was taken."""
    texts = [DEPLOY + body.format(value) for value in ("0", mine, theirs)]
    outcome = merge_file("a.yaml", texts[0], texts[1], texts[2], policy="markers")
    assert outcome.text is not None
    return outcome.text, [decision.taken for decision in outcome.decisions if decision.conflict]


def test_markers_behind_a_dash_get_lines_of_their_own() -> None:
    body = "spec:\n  template:\n    spec:\n      containers:\n      - image: {}\n        name: c\n"
    text, taken = marked_up(body, "L", "U")
    assert "      -\n<<<<<<< local\n        image: L\n=======\n        image: U\n>>>>>>> upstream\n" in text
    assert taken == ["markers"]


def test_inside_brackets_there_is_no_room_for_markers() -> None:
    text, taken = marked_up("spec: {{a: {}, b: 1}}\n", "L", "U")
    assert "spec: {a: U, b: 1}\n" in text
    assert taken == ["upstream"]


def test_every_difference_from_kpt_has_its_test() -> None:
    """docs/kpt-differences.md names tests; each exists, and each line that differs is named."""
    root = Path(__file__).parents[3]
    text = (root / "docs" / "kpt-differences.md").read_text()
    sources = "".join(path.read_text() for path in (root / "tests").glob("*/packages/*.py"))
    sources += (root / "tests" / "hostile" / "test_packages.py").read_text()
    for name in set(re.findall(r"`(test_\w+)", text)):
        assert f"def {name}(" in sources, name
    for line in [*LINES, LAST]:
        if line.kpt is not None:
            assert f"`test_outcome[{line.number}]`" in text, line.number

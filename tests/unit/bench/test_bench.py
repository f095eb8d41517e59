"""The harness tells the truth: ratios, verdicts, equal and unequal trees, costs, tables, the fluid model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import fleet, measure, plot, report, table
from bench.contenders import Contender
from bench.measure import Cost
from bench.trees import fingerprint
from bench.works import Probe, Race, Target


def costs(*seconds: float) -> list[Cost]:
    return [Cost(one, one / 2, 0.1, 1 << 20, 1 << 20) for one in seconds]


def test_ratios_are_of_medians_against_the_fastest_peer() -> None:
    race = Race(
        "work",
        [Contender("unlade", "", syncs=True), Contender("slow", ""), Contender("fast", "")],
        [Target(("slow", "fast"), 1.5), Target(("slow",), 9.0), Target(("absent",), 1.0)],
    )
    taken = {"unlade": costs(1, 1, 50), "slow": costs(8, 8, 8), "fast": costs(2, 2, 2)}
    result = report.race(race, "key", taken)
    first, second, third = result["verdicts"]
    assert (first["peer"], first["ratio"], first["met"]) == ("fast", 2.0, True)
    assert (second["ratio"], second["met"]) == (8.0, False)
    assert third["missing"]
    low, high = first["interval"]
    assert low <= 2.0 <= high
    text = report.verdicts([result])
    assert "1 of 3 targets met" in text
    assert result["rows"][0]["unsynced"] is None, "ours never runs without its syncs"


def test_a_probe_has_bounds() -> None:
    probe = Probe("probe", lambda _: {}, {"p50": 2.0})
    result = report.probe(
        probe, "key", [{"p50": 1.0, "p99": 9.0}, {"p50": 3.0, "p99": 9.0}, {"p50": 1.5, "p99": 9}]
    )
    assert result["figures"]["p50"] == 1.5
    assert result["verdicts"][0]["met"]


def test_trees_differ_in_anything_that_counts(tmp_path: Path) -> None:
    def tree(name: str) -> Path:
        root = tmp_path / name
        (root / "d").mkdir(parents=True)
        (root / "d" / "f").write_bytes(b"text")
        os.utime(root / "d" / "f", (1, 1))
        (root / "link").symlink_to("d/f")
        return root

    one = fingerprint(tree("one"))
    changes: list[Callable[[Path], object]] = [
        lambda root: (root / "d" / "f").chmod(0o600),
        lambda root: os.utime(root / "d" / "f", (2, 2)),
        lambda root: (root / "new").mkdir(),
        lambda root: shutil.copy(root / "d" / "f", root / "g"),
    ]
    for number, change in enumerate(changes):
        other = tree(f"other-{number}")
        assert fingerprint(other) == one
        change(other)
        assert fingerprint(other) != one
    linked, copied = tree("linked"), tree("copied")
    os.link(linked / "d" / "f", linked / "g")
    shutil.copy2(copied / "d" / "f", copied / "g")
    assert fingerprint(linked) != fingerprint(copied)
    assert fingerprint(linked, metadata=False) == fingerprint(copied, metadata=False)


def test_a_run_is_measured_and_a_failed_one_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "quiet", lambda: None)  # other tests' caches stay as they are
    cost = measure.run("sleep 0.3; head -c 1000000 /dev/zero > file", tmp_path, sync=False)
    assert cost.unsynced >= 0.3
    assert cost.seconds >= cost.unsynced
    assert cost.peak > 0
    with pytest.raises(measure.Failed):
        measure.run("false | cat", tmp_path, sync=False)
    told = measure.run(
        f"echo '{json.dumps({'seconds': 7.0, 'cpu': 3.0})}' > {measure.TOLD}", tmp_path, sync=False
    )
    assert (told.unsynced, told.cpu) == (7.0, 3.0)


def test_tables_replace_what_is_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nafter\n")
    table.put(page, "bench", "new")
    table.put(page, "bench", "newer")
    assert page.read_text() == "before\n<!-- bench:begin -->\nnewer\n<!-- bench:end -->\nafter\n"
    with pytest.raises(SystemExit):
        table.put(page, "other", "text")


def test_a_shared_link_is_shared_fairly() -> None:
    pool = fleet.Pool(10.0)
    pool.add(0.0, 1, 40.0, limit=2.0)  # cannot use its share
    pool.add(0.0, 2, 40.0, limit=100.0)
    assert pool.pop() == 2
    assert pool.now == pytest.approx(5.0)
    assert pool.pop() == 1
    assert pool.now == pytest.approx(20.0)
    assert pool.busiest == pytest.approx(10.0)
    assert pool.carried == 80.0


def test_the_fleet_keeps_to_what_links_allow() -> None:
    network, load = fleet.Network(), fleet.Load()
    alone = fleet.simulate("origin alone", 1000, network, load, 1)
    assert alone == fleet.simulate("origin alone", 1000, network, load, 1), "one seed, one result"
    assert alone["origin GB"] >= 1000 * load.model / 1e9
    assert alone["last pod s"] >= 1000 * load.model / network.origin
    warmed = fleet.simulate("mirrors, warmed", 1000, network, load, 1)
    assert warmed["mirrors"] == 4
    assert warmed["origin GB"] < 41
    assert warmed["last pod s"] >= 250 * load.model / network.mirror
    cold = fleet.simulate("mirrors, cold", 1000, network, load, 1)
    assert warmed["origin GB"] < cold["origin GB"] <= alone["origin GB"]


def test_plots_are_svg() -> None:
    verdict = {"peer": "a|b", "ratio": 2.0, "interval": [1.9, 2.1], "target": 1.5, "met": True}
    drawn = plot.ratios([{"work": "w<1>", "verdicts": [verdict]}], "title")
    assert drawn.startswith("<svg ")
    assert "w&lt;1&gt;" in drawn
    lines = plot.lines([("panel", {"a": [(100, 1), (1000, 10)], "b": [(100, 5), (1000, 6)]})], "x", "title")
    assert lines.count("<polyline") == 2

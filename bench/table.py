"""`python -m bench.table [results.json]`: the results of a run, put into the documents.

README.md gets the short table (ratios against targets), docs/performance.md the long one, docs/bench.svg the
plot, docs/bench.json the results themselves. Between two marks in a document everything is replaced; without
arguments the tables are made again from docs/bench.json.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench import plot, report

ROOT: Final = Path(__file__).resolve().parents[1]
KEPT: Final = ROOT / "docs" / "bench.json"


def document(results: Mapping[str, Any]) -> None:
    """Write results, plot and tables."""
    KEPT.write_text(json.dumps(results, indent=1) + "\n")
    title = f"A peer's time divided by ours (bars), and what is wanted (marks); {results['machine']['date']}"
    (ROOT / "docs" / "bench.svg").write_text(plot.ratios(results["results"], title))
    put(ROOT / "README.md", "bench", short(results))
    put(ROOT / "docs" / "performance.md", "bench", whole(results))


def put(path: Path, mark: str, text: str) -> None:
    """Replace what stands between `<!-- mark:begin -->` and `<!-- mark:end -->`."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    old = path.read_text()
    new, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{text}\n{end}", old, flags=re.DOTALL
    )
    if count != 1:
        sys.exit(f"{path} must hold {begin} and {end} once")
    path.write_text(new)


def origin(results: Mapping[str, Any]) -> str:
    """Where and when the figures were taken."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    size = "an eighth of the size (`make bench QUICK=1`)" if results["quick"] else "`make bench`"
    return (
        f"{machine['date']}, {size}, commit {machine['commit']}, {machine['machine']},"
        f" load {machine['load']} at the start; {versions}."
    )


def short(results: Mapping[str, Any]) -> str:
    """Ratios against targets: for the README."""
    lines = ["| work | measured | wanted | |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {result['work']} | {' | '.join(_cells(verdict))} |"
        for result in results["results"]
        for verdict in result["verdicts"]
    ]
    return "\n".join([*lines, "", origin(results)])


def whole(results: Mapping[str, Any]) -> str:
    """Everything: for docs/performance.md."""
    lines = [origin(results), ""]
    for result in results["results"]:
        lines += [f"### {result['work']}", ""]
        if "rows" in result:
            lines += [
                "| contender | durable s | unsynced s | CPU s | peak MB | MB written | rounds |",
                "| --- | --- | --- | --- | --- | --- | --- |",
            ]
            for row in result["rows"]:
                cells = [row["contender"], _number(row["seconds"]), _number(row["unsynced"])]
                cells += [_number(row["cpu"]), f"{row['peakMB']:.0f}", f"{row['writtenMB']:.0f}"]
                lines.append(f"| {' | '.join(_escaped(cell) for cell in [*cells, str(row['rounds'])])} |")
        else:
            unit = f" ({result['unit']})" if result["unit"] else ""
            lines += [f"| figure{unit} | median of {result['rounds']} |", "| --- | --- |"]
            lines += [f"| {name} | {value:.2f} |" for name, value in result["figures"].items()]
        lines.append("")
        lines += [
            f"- {_escaped(report.sentence(verdict))}: {report.verdict_word(verdict) or 'no target'}"
            for verdict in result["verdicts"]
        ]
        lines += [""] if result["verdicts"] else []
    return "\n".join(lines).rstrip()


def _cells(verdict: Mapping[str, Any]) -> list[str]:
    if verdict.get("missing"):
        return [_escaped(verdict["peer"]), "", "peer absent"]
    mark = report.verdict_word(verdict)
    if "what" in verdict:
        unit = f" {verdict['unit']}" if verdict["unit"] else ""
        return [f"{verdict['what']} {verdict['value']:g}{unit}", f"at most {verdict['most']:g}{unit}", mark]
    low, high = verdict["interval"]
    by = "" if verdict["ours"] == "unlade" else f" ({verdict['ours'].removeprefix('unlade ')})"
    measured = f"{verdict['ratio']:.2f} × {_escaped(verdict['peer'])}{by}, {low:.2f} to {high:.2f}"
    return [measured, "" if verdict["target"] is None else f"{verdict['target']:.2f} ×", mark]


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    document(json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else KEPT).read_text()))

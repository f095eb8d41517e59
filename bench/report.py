"""From costs to figures: medians, a bootstrap interval of each ratio, verdicts against targets, text."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bench.contenders import OURS
from bench.measure import Cost
from bench.works import Probe, Pusher, Race

_RESAMPLES: Final = 2000  # enough that the interval's ends move by less than a per cent
# A ratio this near to its target is a tie; clocks and disks do not tell more.
_CLOSE: Final = 0.005


def interval(peer: Sequence[float], ours: Sequence[float]) -> list[float]:
    """The middle 95 % of the ratio of medians under resampling; the same numbers give the same ends."""
    rng = random.Random(0)
    ratios = sorted(
        statistics.median(rng.choices(peer, k=len(peer))) / statistics.median(rng.choices(ours, k=len(ours)))
        for _ in range(_RESAMPLES)
    )
    return [round(ratios[int(_RESAMPLES * 0.025)], 2), round(ratios[int(_RESAMPLES * 0.975)], 2)]


def race(work: Race, key: str, costs: Mapping[str, Sequence[Cost]]) -> dict[str, Any]:
    """One work's rows and verdicts. Ratios: the peer's seconds by ours; above 1 ours is faster."""
    rows = []
    for contender in work.contenders:
        taken = costs[contender.name]
        row: dict[str, Any] = {
            "contender": contender.name,
            "rounds": len(taken),
            "seconds": round(statistics.median(cost.seconds for cost in taken), 3),
            "unsynced": round(statistics.median(cost.unsynced for cost in taken), 3),
            "cpu": round(statistics.median(cost.cpu for cost in taken), 3),
            "peakMB": round(max(cost.peak for cost in taken) / 2**20, 1),
            "writtenMB": round(statistics.median(cost.written for cost in taken) / 2**20, 1),
            "every": [round(cost.seconds, 3) for cost in taken],
        }
        if contender.syncs and contender.durable and not isinstance(contender, Pusher):
            row["unsynced"] = None  # it never runs without its syncs, except under the shim
        if not contender.durable:
            row["seconds"] = None
        if isinstance(contender, Pusher):
            row["sizeMB"] = round(statistics.median(contender.sizes) / 2**20, 2)
        rows.append(row)
    return {
        "work": work.name,
        "key": key,
        "note": work.note,
        "rows": rows,
        "verdicts": [*_verdicts(work, costs, rows), *_bytes(work, rows)],
    }


def _verdicts(
    work: Race, costs: Mapping[str, Sequence[Cost]], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    by_name = {row["contender"]: row for row in rows}
    found = []
    for target in work.targets:
        there = [by_name[name] for name in target.peers if name in by_name]
        if not there or target.ours not in by_name:
            found.append({"peer": " or ".join(target.peers), "target": target.ratio, "missing": True})
            continue
        peer = min(there, key=lambda row: float(row["seconds"]))
        name = peer["contender"]
        ratio = peer["seconds"] / by_name[target.ours]["seconds"]
        theirs = [cost.seconds for cost in costs[name]]
        ours = [cost.seconds for cost in costs[target.ours]]
        verdict = {
            "peer": name,
            "ours": target.ours,
            "ratio": round(ratio, 2),
            "interval": interval(theirs, ours),
            "target": target.ratio,
            "met": None if target.ratio is None else ratio >= target.ratio - _CLOSE,
        }
        free = by_name.get(f"{target.ours}, unsynced")
        if free is not None and peer["unsynced"] is not None:
            verdict["unsynced"] = round(peer["unsynced"] / free["unsynced"], 2)
        found.append(verdict)
    return found


def _bytes(work: Race, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bounds on bytes: a raw blob is written once; a push is as small as the peers'."""
    by_name = {row["contender"]: row for row in rows}
    ours = by_name[OURS]
    if work.name == "raw blob":
        least = min(row["writtenMB"] for name, row in by_name.items() if name.startswith("curl"))
        return [_at_most("bytes written, to curl's", ours["writtenMB"] / least, 1.02)] if least else []
    if "sizeMB" in ours and len(rows) > 1:
        fastest = min(rows[1:], key=lambda row: float(row["seconds"]))
        size = ours["sizeMB"] / fastest["sizeMB"]
        return [_at_most(f"compressed size, to that of {fastest['contender']}", size, 1.02)]
    return []


def _at_most(what: str, value: float, bound: float, unit: str = "") -> dict[str, Any]:
    return {"what": what, "value": round(value, 3), "most": bound, "unit": unit, "met": value <= bound}


def probe(work: Probe, key: str, found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """One probe's figures (medians over its rounds) and verdicts."""
    figures = {name: round(statistics.median(one[name] for one in found), 3) for name in found[0]}
    verdicts = [_at_most(name, figures[name], bound, work.unit) for name, bound in work.bounds.items()]
    return {
        "work": work.name,
        "key": key,
        "note": work.note,
        "rounds": len(found),
        "unit": work.unit,
        "figures": figures,
        "verdicts": verdicts,
    }


def text(result: Mapping[str, Any]) -> str:
    """One work for the terminal."""
    lines = [f"-- {result['work']}"]
    if "rows" in result:
        lines.append(
            f"{'':24} {'durable s':>10} {'unsynced s':>10} {'cpu s':>8} {'peak MB':>8} MB written rounds"
        )
        for row in result["rows"]:
            cells = [_seconds(row["seconds"]), _seconds(row["unsynced"]), f"{row['cpu']:.2f}"]
            lines.append(
                f"{row['contender']:24} {cells[0]:>10} {cells[1]:>10} {cells[2]:>8}"
                f" {row['peakMB']:8.0f} {row['writtenMB']:10.0f} {row['rounds']:6}"
            )
    else:
        lines += [
            f"{name:24} {value:10.2f} {result['unit']}".rstrip() for name, value in result["figures"].items()
        ]
    return "\n".join(lines)


def verdicts(results: Sequence[Mapping[str, Any]]) -> str:
    """Every ratio with its target, last: what a reader wants to see."""
    lines = [
        f"{verdict_word(one):8} {result['work']:32} {sentence(one)}"
        for result in results
        for one in result["verdicts"]
    ]
    judged = [one for result in results for one in result["verdicts"] if _judged(one)]
    met = sum(bool(one.get("met")) for one in judged)
    return "\n".join([*lines, f"{met} of {len(judged)} targets met"])


def sentence(verdict: Mapping[str, Any]) -> str:
    """One verdict in words."""
    if verdict.get("missing"):
        return f"{verdict['peer']} is not here"
    if "what" in verdict:
        unit = f" {verdict['unit']}" if verdict["unit"] else ""
        return f"{verdict['what']}: {verdict['value']:g}{unit}, at most {verdict['most']:g}{unit}"
    low, high = verdict["interval"]
    by = "" if verdict["ours"] == OURS else f" ({verdict['ours']})"
    unsynced = f"; nobody synced {verdict['unsynced']:.2f} ×" if "unsynced" in verdict else ""
    wanted = "" if verdict["target"] is None else f", wanted {verdict['target']:.2f}"
    return f"{verdict['ratio']:.2f} × {verdict['peer']}{by}, {low:.2f} to {high:.2f}{wanted}{unsynced}"


def verdict_word(verdict: Mapping[str, Any]) -> str:
    """met, not met, absent, or nothing where no target was set."""
    if verdict.get("missing"):
        return "absent"
    return "" if not _judged(verdict) else "met" if verdict["met"] else "not met"


def _judged(verdict: Mapping[str, Any]) -> bool:
    return bool(verdict.get("missing")) or verdict.get("met") is not None


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"

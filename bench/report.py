"""From costs to figures: medians, a bootstrap interval of each ratio, a table and JSON."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.measure import Cost
from bench.works import Work

_RESAMPLES = 2000  # enough that the interval's ends move by less than a per cent


def interval(peer: Sequence[float], ours: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the ratio of medians under resampling; seeded."""
    rng = random.Random(0)
    ratios = sorted(
        statistics.median(rng.choices(peer, k=len(peer))) / statistics.median(rng.choices(ours, k=len(ours)))
        for _ in range(_RESAMPLES)
    )
    return ratios[int(_RESAMPLES * 0.025)], ratios[int(_RESAMPLES * 0.975)]


def summary(work: Work, costs: Mapping[str, Sequence[Cost]]) -> list[dict[str, Any]]:
    """One row per contender; ratios are the peer's seconds divided by ours: above 1, ours is faster."""
    ours = [cost.seconds for cost in costs["unlade"]]
    rows = []
    for contender in work.contenders:
        taken = costs[contender.name]
        seconds = [cost.seconds for cost in taken]
        row: dict[str, Any] = {
            "work": work.name,
            "contender": contender.name,
            "rounds": len(taken),
            "seconds": round(statistics.median(seconds), 3),
            "cpu": round(statistics.median(cost.cpu for cost in taken), 3),
            "peakMB": round(max(cost.peak for cost in taken) / 2**20, 1),
            "writtenMB": round(statistics.median(cost.written for cost in taken) / 2**20, 1),
        }
        if contender.name != "unlade":
            low, high = interval(seconds, ours)
            row["ratio"] = round(statistics.median(seconds) / statistics.median(ours), 2)
            row["interval"] = [round(low, 2), round(high, 2)]
            row["target"] = work.targets.get(contender.name)
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, ratios last."""
    lines = [f"{'work':22} {'contender':22} {'s':>8} {'cpu s':>8} {'peak MB':>8} {'MB written':>10} ratio"]
    for row in rows:
        ratio = ""
        if "ratio" in row:
            low, high = row["interval"]
            wanted = f", wanted {row['target']:.2f}" if row["target"] else ""
            ratio = f"{row['ratio']:.2f} ({low:.2f} to {high:.2f}{wanted})"
        lines.append(
            f"{row['work']:22} {row['contender']:22} {row['seconds']:8.2f} {row['cpu']:8.2f}"
            f" {row['peakMB']:8.0f} {row['writtenMB']:10.0f} {ratio}"
        )
    return "\n".join(lines)

"""Plots for the docs as SVG written by hand: bars with targets, and lines over a logarithmic axis.

Text and lines take the reader's colour (`currentColor`), so that they can be read on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _LEFT, _ROW = 760, 330, 24
_COLOURS = ("#2a7ab9", "#c2571a", "#3a8f4d", "#8a5bb5")


def ratios(results: Sequence[Mapping[str, Any]], title: str) -> str:
    """Every ratio as a bar with its interval, and a mark where its target is."""
    rows = [
        (f"{result['work']}: {verdict['peer']}", verdict)
        for result in results
        for verdict in result["verdicts"]
        if verdict.get("target") is not None and "ratio" in verdict
    ]
    most = max([1.0, *(max(row["interval"][1], row["target"]) for _, row in rows)]) * 1.08
    scale = (_WIDTH - _LEFT - 60) / most
    height = 56 + _ROW * len(rows)
    parts = [_text(10, 18, title, bold=True)]
    for number in range(int(most) + 1):
        x = _LEFT + number * scale
        parts.append(_line(x, 30, x, height - 16, width=1.5 if number == 1 else 0.4))
        parts.append(_text(x, height - 4, f"{number} ×", anchor="middle", size=10))
    for number, (label, row) in enumerate(rows):
        y = 34 + _ROW * number
        colour = _COLOURS[2] if row["met"] else _COLOURS[1]
        parts.append(_text(_LEFT - 8, y + 13, label, anchor="end"))
        parts.append(
            f'<rect x="{_LEFT}" y="{y + 3}" width="{row["ratio"] * scale:.1f}" height="13" fill="{colour}"/>'
        )
        low, high = (_LEFT + end * scale for end in row["interval"])
        parts.append(_line(low, y + 9.5, high, y + 9.5))
        wanted = _LEFT + row["target"] * scale
        parts.append(_line(wanted, y, wanted, y + 19, width=2.5))
        parts.append(_text(max(high, wanted) + 6, y + 13, f"{row['ratio']:.2f}"))
    return _svg(_WIDTH, height, parts)


def lines(
    panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[float, float]]]]], x_label: str, title: str
) -> str:
    """Panels side by side, each with named series of (x, y), both axes logarithmic."""
    width, height, gap = 250, 250, 60
    parts = [_text(10, 18, title, bold=True)]
    for number, (name, series) in enumerate(panels):
        left, top = gap + number * (width + gap), 50
        points = [point for values in series.values() for point in values]
        xs, ys = [math.log10(x) for x, _ in points], [math.log10(max(y, 1e-3)) for _, y in points]
        x0, x1 = math.floor(min(xs)), math.ceil(max(xs))
        y0, y1 = math.floor(min(ys)), max(math.ceil(max(ys)), math.floor(min(ys)) + 1)

        def at(
            x: float,
            y: float,
            *,
            box: tuple[float, float, float, float] = (x0, x1, y0, y1),
            corner: tuple[int, int] = (left, top),
        ) -> tuple[float, float]:
            across = (math.log10(x) - box[0]) / (box[1] - box[0]) * width
            up = (math.log10(max(y, 1e-3)) - box[2]) / (box[3] - box[2]) * height
            return corner[0] + across, corner[1] + height - up

        parts.append(_text(left, top - 8, name))
        for power in range(x0, x1 + 1):
            x, _ = at(10**power, 10**y0)
            parts.append(_line(x, top, x, top + height, width=0.3))
            parts.append(_text(x, top + height + 14, f"{10**power:g}", anchor="middle", size=10))
        for power in range(y0, y1 + 1):
            _, y = at(10**x0, 10**power)
            parts.append(_line(left, y, left + width, y, width=0.3))
            parts.append(_text(left - 5, y + 4, f"{10.0**power:g}", anchor="end", size=10))
        for index, values in enumerate(series.values()):
            drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*value) for value in values))
            colour = _COLOURS[index % len(_COLOURS)]
            parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
            for x, y in (at(*value) for value in values):
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    whole = gap + len(panels) * (width + gap)
    names = list(panels[0][1])
    for index, name in enumerate(names):
        x, colour = gap + index * 190, _COLOURS[index % len(_COLOURS)]
        parts.append(_line(x, height + 92, x + 24, height + 92, width=3, colour=colour))
        parts.append(_text(x + 30, height + 96, name))
    parts.append(_text(whole - gap, height + 96, x_label, anchor="end", size=11))
    return _svg(whole, height + 110, parts)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" color="#777"'
    return f'{head} font-family="sans-serif" font-size="12">\n' + "\n".join(parts) + "\n</svg>\n"


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 12, bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="currentColor"{weight}>{escape(words)}</text>'


def _line(
    x: float, y: float, to_x: float, to_y: float, *, width: float = 1.2, colour: str = "currentColor"
) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-width="{width}"/>'

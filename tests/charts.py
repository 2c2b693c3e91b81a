"""Line charts as SVG, for documents. One picture holds several panels side by side over the same categories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import count

WIDTH, HEIGHT = 420, 250
"""Of a panel's plotting area, in pixels."""

LEFT, TOP, BELOW = 46, 34, 62
"""Room for the numbers, the title, and the categories."""

STYLES = ("#0b6e99", "#0b6e99;stroke-dasharray:5 4", "#c2571a", "#c2571a;stroke-dasharray:5 4")

SHEET = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.number { text-anchor: end }
.category { text-anchor: middle }
.grid { stroke: #d0d7de }
.line { fill: none; stroke-width: 2 }
"""


@dataclass(frozen=True)
class Line:
    """A name and a value for each category."""

    name: str
    values: Sequence[float]
    style: int = 0
    """Which of `STYLES`."""


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]


def draw(axis: str, categories: Sequence[str], panels: Sequence[Panel]) -> str:
    """The picture. `axis` names what the categories are values of."""
    legend = 18 * max(len(panel.lines) for panel in panels)
    wide = (LEFT + WIDTH + 24) * len(panels)
    high = TOP + HEIGHT + BELOW + legend
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">',
        f"<style>{SHEET}</style>",
        f'<rect width="{wide}" height="{high}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({LEFT + number * (LEFT + WIDTH + 24)},{TOP})">')
        parts += [*_frame(axis, categories, panel), *_lines(categories, panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def step(largest: float) -> float:
    """The distance of grid lines: 1, 2 or 5 times a power of ten, at most six of which reach `largest`."""
    return next(
        size
        for power in count(math.floor(math.log10(largest)) - 1)
        for size in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)
        if size * 6 >= largest
    )


def _top(panel: Panel) -> float:
    largest = max(max(line.values) for line in panel.lines)
    return math.ceil(largest / step(largest)) * step(largest)


def _across(number: int, categories: Sequence[str]) -> float:
    return WIDTH * (number + 0.5) / len(categories)


def _frame(axis: str, categories: Sequence[str], panel: Panel) -> list[str]:
    top = _top(panel)
    parts = [f'<text class="title" y="-14">{escape(panel.title)}</text>']
    for number in range(round(top / step(top)) + 1):
        value = number * step(top)
        y = HEIGHT * (1 - value / top)
        parts.append(f'<path class="grid" d="M0 {y:.1f}H{WIDTH}"/>')
        parts.append(f'<text class="number" x="-8" y="{y + 4:.1f}">{value:g}</text>')
    for number, category in enumerate(categories):
        x = _across(number, categories)
        parts.append(f'<text class="category" x="{x:.1f}" y="{HEIGHT + 18}">{escape(category)}</text>')
    parts.append(f'<text class="category" x="{WIDTH / 2:g}" y="{HEIGHT + 36}">{escape(axis)}</text>')
    return parts


def _lines(categories: Sequence[str], panel: Panel) -> list[str]:
    top, parts = _top(panel), []
    for place, line in enumerate(panel.lines):
        style = f'style="stroke:{STYLES[line.style]}"'
        points = " ".join(
            f"{_across(number, categories):.1f},{HEIGHT * (1 - value / top):.1f}"
            for number, value in enumerate(line.values)
        )
        y = HEIGHT + BELOW + 18 * place
        parts.append(f'<polyline class="line" {style} points="{points}"/>')
        parts.append(f'<path class="line" {style} d="M0 {y}h32"/>')
        parts.append(f'<text x="40" y="{y + 4}">{escape(line.name)}</text>')
    return parts

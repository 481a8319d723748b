"""Line charts as SVG, for a page that must open anywhere: no script, no font, no file beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 30, 26
"""Space around the curves, for the title and the axes."""
MOST_POINTS = 400
"""Of a curve; more are not seen, but make the page slow."""
NUM_TICKS = 4


class Curve(NamedTuple):
    """A named line; its place in the list gives it a colour."""

    name: str
    points: list[tuple[float, float]]


def chart(title: str, curves: Sequence[Curve]) -> str:
    """Draw curves over the steps; an empty text without any point."""
    drawn = [Curve(c.name, thin(c.points)) for c in curves if c.points]
    if not drawn:
        return ""
    xs = [x for curve in drawn for x, _ in curve.points]
    ys = [y for curve in drawn for _, y in curve.points]
    x_axis, y_axis = Axis.of(xs, LEFT, WIDTH - RIGHT), Axis.of(ys, HEIGHT - BOTTOM, TOP)
    label = escape(title, quote=True)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">']
    parts.append(f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>')
    for tick in y_axis.ticks():
        y = y_axis.place(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{y + 4:.1f}">{number(tick)}</text>')
    for tick in x_axis.ticks():
        x = x_axis.place(tick)
        parts.append(f'<text class="x" x="{x:.1f}" y="{HEIGHT - 8}">{number(tick)}</text>')
    for i, curve in enumerate(drawn):
        parts.append(_line(curve, i, x_axis, y_axis))
    parts += _legend([curve.name for curve in drawn])
    return "".join([*parts, "</svg>"])


class Axis(NamedTuple):
    """From values to places on the page."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float) -> Axis:
        """An axis that holds all values with a little room."""
        low, high = min(values), max(values)
        room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(low - room, high + room, begin, end)

    def place(self, value: float) -> float:
        """Where a value lies."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round numbers along the axis: 1, 2 or 5 times a power of ten apart."""
        rough = (self.high - self.low) / NUM_TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep the lowest and the highest point of each stretch, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return [*points]
    stretches = MOST_POINTS // 2
    kept: list[tuple[float, float]] = []
    for i in range(stretches):
        part = points[len(points) * i // stretches : len(points) * (i + 1) // stretches]
        pair = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(pair)
    return kept


def number(value: float) -> str:
    """A tick in few characters: 1.5k, 20M, 0.002."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    if abs(value) < 1e-12:
        return "0"
    return f"{value:.4g}" if abs(value) >= 1e-3 else f"{value:.2e}".replace("e-0", "e-")


def _line(curve: Curve, i: int, x_axis: Axis, y_axis: Axis) -> str:
    places = [(x_axis.place(x), y_axis.place(y)) for x, y in curve.points]
    if len(places) == 1:
        return f'<circle class="c{i}" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3"/>'
    return f'<polyline class="c{i}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'


def _legend(names: Sequence[str]) -> list[str]:
    """The names at the top right, each beside a dash of its colour; not for a single one."""
    if len(names) < 2:
        return []
    parts, right = [], WIDTH - RIGHT
    for i, name in reversed([*enumerate(names)]):
        left = right - 7 * len(name)
        parts.append(f'<text class="name" x="{left}" y="18">{escape(name)}</text>')
        parts.append(f'<path class="c{i}" d="M{left - 20} 14h14"/>')
        right = left - 32
    return parts

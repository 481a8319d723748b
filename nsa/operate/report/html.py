"""report.html: a verdict with the curves of the run, as one self-contained file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from nsa.config.describe import printable
from nsa.operate.report.evidence import Evidence
from nsa.operate.report.verdict import COLUMNS, FAIL, GO, NO_GO, NOT_MEASURED, PASS, Row, Verdict
from nsa.records import ValRow
from nsa.records.numbers import CHARTS, EVALUATED, SCALARS, Chart, curves_of

CLASSES = {PASS: "good", FAIL: "bad", NOT_MEASURED: "dim", GO: "good", NO_GO: "bad"}
STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --card: #fff; --ink: #1c2024; --dim: #60646c;
  --line: #e2e4e8; --good: #18794e; --bad: #c62a2f; --c0: #0b68cb; --c1: #ad5700; --c2: #6e40c9;
  --c3: #18794e; }
@media (prefers-color-scheme: dark) { :root { --page: #111315; --card: #191c1f; --ink: #e8eaed;
  --dim: #9ba1a8; --line: #2d3135; --good: #4cc38a; --bad: #ff6369; --c0: #6cb2ff; --c1: #f0a04b;
  --c2: #b794f6; --c3: #4cc38a; } }
body { margin: 0 auto; padding: 2rem 1.25rem; max-width: 75rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h1 b { margin-right: .6rem; }
h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 1rem 0; }
dt, .dim { color: var(--dim); } dd { margin: 0; overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .4rem .75rem; vertical-align: top;
  border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th { font-weight: 600; color: var(--dim); white-space: nowrap; }
td:nth-child(1), td:nth-child(2) { white-space: nowrap; font-weight: 600; }
td:nth-child(5) { font: 12.5px/1.6 ui-monospace, monospace; color: var(--dim);
  overflow-wrap: anywhere; min-width: 16rem; }
td small { display: block; font: 13px/1.5 system-ui, sans-serif; color: var(--ink); }
@media (max-width: 48rem) { thead { display: none; }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  td { display: block; border: 0; padding: .1rem .75rem; }
  td:nth-child(1), td:nth-child(2) { display: inline-block; }
  td:nth-child(3)::before { content: "value: "; color: var(--dim); }
  td:nth-child(4)::before { content: "limit: "; color: var(--dim); } }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem; }
svg { background: var(--card); border: 1px solid var(--line); border-radius: 8px; width: 100%; }
svg text { font: 12px system-ui, sans-serif; fill: var(--dim); }
svg .title { font-weight: 600; fill: var(--ink); } svg .y { text-anchor: end; }
svg .x { text-anchor: middle; } svg .grid { stroke: var(--line); }
svg polyline, svg path { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); }
circle.c0 { fill: var(--c0); } circle.c1 { fill: var(--c1); } circle.c2 { fill: var(--c2); }
"""


def page(verdict: Verdict, evidence: Evidence) -> str:
    """The whole page. Text from the run is escaped: run files are untrusted input."""
    tone = CLASSES.get(verdict.word, "dim")
    facts = "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in verdict.facts.items())
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    rows = "".join(_row(row) for row in verdict.rows)
    problems = "".join(f"<p>{_text(problem)}</p>" for problem in verdict.problems)
    charts = "".join(curves(evidence))
    title = f"{verdict.word}: {verdict.folder} at {verdict.at}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body>"
        f'<h1><b class="{tone}">{verdict.word}</b>{_text(verdict.folder)}</h1>'
        f"<p>{_text(verdict.summary())}</p>"
        f'<p class="dim">judged {_text(verdict.made)}</p><dl>{facts}</dl>'
        f'<h2>Criteria</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        + (f"<h2>Found in the folder</h2>{problems}" if problems else "")
        + (f'<h2>Curves, by step</h2><div class="charts">{charts}</div>' if charts else "")
        + "</body></html>\n"
    )


def curves(evidence: Evidence) -> list[str]:
    """The charts of the dashboard, as far as they have points, over the whole run."""
    points = evidence.curves()
    return [drawn for definition in CHARTS if (drawn := _chart(definition, points, evidence.vals))]


def _chart(definition: Chart, points: Mapping[str, list[Point]], vals: Sequence[ValRow]) -> str:
    lines = []
    for name, curve in curves_of(definition, SCALARS):
        line = [(step, value * curve.factor) for step, value in points[name]]
        if not curve.rare or any(value for _, value in line):
            lines.append(Curve(curve.label, line))
    for name, curve in curves_of(definition, EVALUATED):
        lines.append(Curve(curve.label, [(row.step, getattr(row, name)) for row in vals]))
    unit = f" ({definition.unit})" if definition.unit else ""
    return chart(f"{definition.title}{unit}", lines)


def _row(row: Row) -> str:
    advice = f"<small>{_text(row.advice)}</small>" if row.advice else ""
    return (
        f'<tr><td>{_text(row.name)}</td><td class="{CLASSES[row.verdict]}">{row.verdict}</td>'
        f"<td>{_text(row.value)}</td><td>{_text(row.limit)}</td>"
        f"<td>{_text(row.evidence)}{advice}</td></tr>"
    )


def _text(text: str) -> str:
    return escape(printable(text), quote=True)


# --- SVG line charts: no script, no web font, no second file ---

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 30, 26
"""Margins in pixels, for the title and the axes."""
MOST_POINTS = 400
"""Points drawn per curve; more are not visible and make the page slow."""
NUM_TICKS = 4


Point = tuple[float, float]


class Curve(NamedTuple):
    """A named line; its index selects the colour."""

    name: str
    points: list[Point]


def chart(title: str, curves: Sequence[Curve]) -> str:
    """Draw curves over steps; an empty string if there is no point."""
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
    """Linear map from data values to pixels."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float) -> Axis:
        """An axis that covers all values with a small margin."""
        low, high = min(values), max(values)
        # A constant curve has no range: use 5 % of its value, or 1 around zero.
        room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(low - room, high + room, begin, end)

    def place(self, value: float) -> float:
        """Pixel position of a value."""
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round tick values, 1, 2 or 5 times a power of ten apart."""
        rough = (self.high - self.low) / NUM_TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step) + 1)]


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Downsample; keep the minimum and maximum of each bucket, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return [*points]
    stretches = MOST_POINTS // 2
    kept: list[tuple[float, float]] = []
    for i in range(stretches):
        part = points[len(points) * i // stretches : len(points) * (i + 1) // stretches]
        # A set, because minimum and maximum may be the same point.
        pair = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(pair)
    return kept


def number(value: float) -> str:
    """A tick label in few characters: 1.5k, 20M, 0.002."""
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
    """Legend at the top right; none for a single curve."""
    if len(names) < 2:
        return []
    parts, right = [], WIDTH - RIGHT
    # Right to left; 7 pixels per character is an estimate for the 12 px font.
    for i, name in reversed([*enumerate(names)]):
        left = right - 7 * len(name)
        parts.append(f'<text class="name" x="{left}" y="18">{escape(name)}</text>')
        parts.append(f'<path class="c{i}" d="M{left - 20} 14h14"/>')
        right = left - 32
    return parts

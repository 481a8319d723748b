"""Draw the first table of docs/results/kernels.md: time of the attention against the length.

    python scripts/draw_speed.py

It writes docs/results/speed.png. The page has the figures, so that they stand in one place.
"""

from __future__ import annotations

import re
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
PAGE, PICTURE = RESULTS / "kernels.md", RESULTS / "speed.png"
# Colours that stay apart for colour-blind readers; ours is the heavy line.
STYLES: dict[str, dict[str, Any]] = {
    "ours": dict(color="#0072b2", marker="o", linewidth=2.4, zorder=3, label="nsa"),
    "peer": dict(color="#d55e00", marker="s", label="best public NSA"),
    "dense": dict(color="#333333", marker="^", label="dense, cuDNN"),
}
SHAPE = "Hq/Hkv/D"
"""The column that the table begins with."""


class Line(NamedTuple):
    """A row of the table: milliseconds by length."""

    shape: str
    name: str
    times: dict[int, float]


def main() -> int:
    lines = read_table(PAGE.read_text(encoding="utf-8"))
    draw(lines, PICTURE)
    print(f"{PICTURE}: {len(lines)} lines")
    return 0


def read_table(page: str) -> list[Line]:
    """The rows of the first table that begins with a column of shapes."""
    table = page[page.index(f"| {SHAPE} |") :].splitlines()
    head, _, *rows = takewhile(lambda row: row.startswith("|"), table)
    lengths = [int(cell) for cell in _cells(head)[2:]]
    lines: list[Line] = []
    for row in rows:
        shape, name, *cells = _cells(row)
        found = zip(lengths, (re.search(r"\d*\.?\d+", cell) for cell in cells), strict=True)
        times = {length: float(number[0]) for length, number in found if number}
        lines.append(Line(shape or lines[-1].shape, name, times))
    return lines


def draw(lines: list[Line], path: Path) -> None:
    """A column for each shape, both axes logarithmic."""
    # Only this needs it: the extra `plot`.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(line.shape for line in lines))
    figure = Figure(figsize=(3.6 * len(shapes), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(shapes), squeeze=False)[0]
    for ax, shape in zip(axes, shapes, strict=True):
        for line in lines:
            if line.shape == shape:
                ax.plot(*zip(*line.times.items(), strict=True), markersize=5, **STYLES[line.name])
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        lengths = sorted({length for line in lines for length in line.times})
        ax.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
        ax.minorticks_off()
        ax.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
        ax.grid(alpha=0.3)
        ax.set_title(
            "{} query and {} KV heads of {}".format(*re.findall(r"\d+", shape)), fontsize=10
        )
        ax.set_xlabel("tokens")
    axes[0].set_ylabel("forward + backward, ms")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, ncols=len(labels))
    figure.savefig(path, dpi=130)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


if __name__ == "__main__":
    sys.exit(main())

"""Draw the rows of the prefill benchmark: time against S on log axes, a column per shape.

`python bench/attention/plot.py RESULT.json PICTURE.png` draws what `bench_prefill.py --json` wrote.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without PYTHONPATH, too

from bench.attention.report import read_result
from nsa.config import StrictParser

# Colours that stay apart for colour-blind readers; ours is the heavy line.
STYLES: dict[str, dict[str, Any]] = {
    "nsa": dict(color="#0072b2", marker="o", linewidth=2.4, zorder=3, label="ours"),
    "nsa graph": dict(
        color="#56b4e9", marker=".", linestyle="--", zorder=3, label="ours, CUDA graph"
    ),
    "fla": dict(color="#d55e00", marker="s", label="fla (l=d=64, no window)"),
    "cudnn": dict(color="#333333", marker="^", label="dense, cuDNN"),
    "flash": dict(color="#999999", marker="v", label="dense, flash"),
    "math": dict(color="#cc79a7", marker="x", label="dense, math"),
}
PARTS = (("both", "forward + backward"), ("fwd", "forward"))
Point = tuple[int, float]


def main(argv: list[str] | None = None) -> int:
    """Draw a result file."""
    parser = StrictParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", help="written by bench_prefill.py --json")
    parser.add_argument("picture", help="the .png to write")
    args = parser.parse_args(argv)
    result = read_result(args.result)
    plot_rows(result["rows"], args.picture, title_of(result))
    return 0


def title_of(result: dict[str, Any]) -> str:
    """Device, versions and settings in a line."""
    spec = " ".join(f"{name}={size}" for name, size in result["spec"].items())
    return (
        f"{result['device']}, torch {result['torch']}, triton {result['triton']}, "
        f"{result['dtype']}, {spec}, selection {result['selection']}, {result['commit'][:12]}"
    )


def plot_rows(rows: Sequence[dict[str, Any]], path: str | Path, title: str) -> None:
    """Write the picture; a shape and batch with a single length becomes a column of points."""
    # Only a run that draws needs it: pip install 'nsa[plot]'.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = list(dict.fromkeys(_column(row) for row in rows))
    widths = [_width(rows, column) for column in columns]
    figure = Figure(figsize=(max(6.0, 1.2 + sum(widths)), 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    shared: dict[str, Any] = dict(sharex="col", sharey="row", width_ratios=widths)
    axes = figure.subplots(len(PARTS), len(columns), squeeze=False, **shared)
    for line, (part, part_title) in enumerate(PARTS):
        for place, column in enumerate(columns):
            ax = axes[line][place]
            for name, points in _curves(rows, column, part).items():
                ax.plot(*zip(*points, strict=True), markersize=5, **STYLES[name])
            _label_axes(ax, column, part_title, is_top=line == 0, is_first=place == 0)
    # A peer that cannot take the first shape appears in the legend all the same.
    found = {
        label: handle
        for ax in axes.flat
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    below: dict[str, Any] = dict(loc="outside lower center", frameon=False)
    figure.legend(found.values(), found.keys(), ncols=6 if len(columns) > 2 else 3, **below)
    width_chars = int(15 * figure.get_figwidth())
    figure.suptitle(textwrap.fill(title, width_chars), fontsize=8)
    figure.savefig(path, dpi=130)


def _column(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row[letter] for letter in ("Hq", "Hkv", "Dk", "Dv", "B"))


def _width(rows: Sequence[dict[str, Any]], column: tuple[int, ...]) -> float:
    """Inches for a column: less where there is nothing to join by a line."""
    return 3.4 if len({row["S"] for row in rows if _column(row) == column}) > 1 else 1.8


def _curves(
    rows: Sequence[dict[str, Any]], column: tuple[int, ...], part: str
) -> dict[str, list[Point]]:
    """(S, ms) of every implementation, in the order of STYLES; what was not measured is absent."""
    curves: dict[str, list[Point]] = {name: [] for name in STYLES}
    for row in sorted(rows, key=lambda row: row["S"]):
        times = {row["name"]: row.get(f"{part}_ms")}
        if row["name"] == "nsa":
            times["nsa graph"] = row.get(f"{part}_graph_ms")
        for name, ms in times.items():
            if _column(row) == column and isinstance(ms, float):
                curves[name].append((row["S"], ms))
    return {name: points for name, points in curves.items() if points}


def _label_axes(
    ax: Any, column: tuple[int, ...], part_title: str, *, is_top: bool, is_first: bool
) -> None:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lengths = sorted({int(x) for line in ax.get_lines() for x in line.get_xdata()})
    ax.set_xticks(lengths, [_short(length) for length in lengths])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
    ax.grid(alpha=0.3)
    if is_top:
        num_heads, num_groups, d_k, d_v, batch = column
        ax.set_title(f"Hq {num_heads}, Hkv {num_groups}\nDk {d_k}, Dv {d_v}, B {batch}", fontsize=9)
    else:
        ax.set_xlabel("S, tokens")
    if is_first:
        ax.set_ylabel(f"{part_title}, ms")


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


if __name__ == "__main__":
    sys.exit(main())

"""Draw the needle grids of results, and print their accuracies by length as a Markdown table.

`python studies/long_context/plot.py RESULT.json [RESULT.json ...] --out DIR` writes DIR/needle.png,
multi.png and passkey.png: context by depth, a row of panels for each model, a column for each
scaling of the positions. Lengths within those of training are the same in all columns. The
answers of several seeds are counted together.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without PYTHONPATH, too

import numpy as np

from nsa.config import BAD_INPUT, StrictParser
from nsa.evaluate.pictures import draw_shares, shares_of, short
from nsa.files import replacing, write_text
from studies.long_context.results import ROPES, Results, merge_grids, read_results

TABLE = "table.md"
MODEL_NAMES = {"nsa": "NSA", "dense": "dense"}
ROPE_NAMES = {"none": "positions as trained", "linear": "divided positions", "base": "larger base"}


def main(argv: list[str] | None = None) -> int:
    """Draw every task that the result has; print and write the table."""
    parser = StrictParser(prog="plot", description=(__doc__ or "").splitlines()[0])
    one = "a results.json, or its folder; of models or seeds that ran apart, those of each"
    parser.add_argument("result", type=Path, nargs="+", metavar="RESULT", help=one)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the pictures")
    args = parser.parse_args(argv)
    try:
        results = merge_grids([read_results(result) for result in args.result])
    except ValueError as error:
        print(f"plot: error: {error}", file=sys.stderr)
        return BAD_INPUT
    args.out.mkdir(parents=True, exist_ok=True)
    for task in dict.fromkeys(grid.task for grid in results.grids if grid.way == "forward"):
        draw(results, task, args.out / f"{task}.png")
        print(f"wrote {args.out / f'{task}.png'}")
    text = table(results)
    write_text(args.out / TABLE, text)
    print(text)
    return 0


def table(results: Results) -> str:
    """Right answers of all depths in percent: a line for each model, task, scaling and way."""
    lengths = sorted({grid.length for grid in results.grids})
    head = ["task", "model", "positions", "answers by", *map(short, lengths)]
    lines = [_line(head), _line(["---"] * 4 + ["---:"] * len(lengths))]
    names = dict.fromkeys((g.task, g.model, g.rope, g.way) for g in results.grids)
    for task, model, rope, way in sorted(names, key=_order):
        found = [results.find(model, task, rope, way, length) for length in lengths]
        cells = ["" if grid is None else f"{grid.accuracy:.1%}" for grid in found]
        lines.append(_line([task, MODEL_NAMES[model], ROPE_NAMES[rope], way, *cells]))
    return "\n".join(lines) + "\n"


def draw(results: Results, task: str, path: Path) -> None:
    """Write the grids of a task: a panel for each model and scaling."""
    # Only a run that draws needs it: pip install 'nsa[plot]'.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = {grid.model for grid in results.grids}
    models = [model for model in MODEL_NAMES if model in measured]
    figure = Figure(figsize=(4.4 * len(ROPES) + 0.8, 3.1 * len(models) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    shared: dict[str, Any] = dict(sharex=True, sharey=True)
    axes = figure.subplots(len(models), len(ROPES), squeeze=False, **shared)
    image = None
    for model, line in zip(models, axes, strict=True):
        for rope, ax in zip(ROPES, line, strict=True):
            drawn = _panel(ax, results, model, task, rope)
            image = drawn or image
    for ax in axes[-1]:
        ax.set_xlabel("tokens of context")
    for ax in axes[:, 0]:
        ax.set_ylabel("depth of the needle, %")
    if image is not None:
        figure.colorbar(image, ax=axes, label="right answers, %", shrink=0.8)
    figure.suptitle("\n".join(textwrap.wrap(_title(results, task), 110)), fontsize=9)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def _panel(ax: Any, results: Results, model: str, task: str, rope: str) -> Any:
    """Shares of right answers, with their numbers; the image, or None where there is no grid."""
    trained = _trained(results)
    grids = [
        grid
        for grid in results.grids
        if (grid.model, grid.task, grid.way) == (model, task, "forward")
        and grid.rope == ("none" if grid.length <= trained else rope)
    ]
    grids.sort(key=lambda grid: grid.length)
    ax.set_title(f"{MODEL_NAMES[model]}, {ROPE_NAMES[rope]}", fontsize=10)
    if not grids:
        ax.text(0.5, 0.5, "not measured", ha="center", va="center", transform=ax.transAxes)
        return None
    shares = np.stack(
        [shares_of(grid.right, grid.asked) for grid in grids], axis=1
    )  # [depths, lengths]
    image = draw_shares(ax, shares, [short(grid.length) for grid in grids], grids[0].depths)
    border = sum(grid.length <= trained for grid in grids) - 0.5
    if border < len(grids) - 1:
        ax.axvline(border, color="white", linewidth=2, linestyle="--")
    return image


def _title(results: Results, task: str) -> str:
    env = results.environment
    return (
        f"{task}: right answers by context and depth. Trained on {_trained(results)} "
        f"tokens (left of the dashed line), {_asked(results, task)} questions in each cell. "
        f"{env['device']}, torch {env['torch']}, {env['commit']}"
    )


def _asked(results: Results, task: str) -> str:
    """Questions for one depth of a length, as drawn; the least and the most where they differ."""
    drawn = [g for g in results.grids if (g.task, g.way) == (task, "forward")]
    counts = {count for grid in drawn for count in grid.asked}
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def _trained(results: Results) -> int:
    """Tokens of the longest rows of training."""
    return int(results.settings["stages"][-1]["seq_len"])


def _order(name: tuple[str, str, str, str]) -> tuple[str, str, int, str]:
    task, model, rope, way = name
    return task, way, ROPES.index(rope), model


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())

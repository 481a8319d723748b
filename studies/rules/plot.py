"""Writes the pages of the study, each with two pictures.

`python studies/rules/plot.py DIR --out PAGES` reads DIR/results.json and DIR/rules.json, and writes
PAGES/rules.md, rules-loss.png, rules-needles.png, and both results as rules-*.json. The arms that a
trained dense model became have a page of their own, convert.md, with pictures of its name.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without PYTHONPATH, too

import numpy as np

from nsa.config import BAD_INPUT, StrictParser
from nsa.evaluate.pictures import draw_shares, shares_of
from nsa.files import write_text
from studies.nsa_vs_dense.pictures import LEFT, OTHERS, finish, new_figure
from studies.nsa_vs_dense.results import NAME as RESULTS
from studies.nsa_vs_dense.results import read_results, write_results
from studies.rules.measure import NAME as MEASURES
from studies.rules.measure import read_measures
from studies.rules.page import (
    CONVERT,
    WIDE,
    Arm,
    arms_of_page,
    is_converted,
    length_of,
    shown_arms,
    write_page,
)

TITLES = {
    "rules": "Dense attention, NSA and the rules, on the same rows",
    CONVERT: "A dense model becomes sparse",
}
"""Of the page of each name."""
COLOURS = {"dense": "#333333", "nsa": "#0072b2", "infllm": "#d55e00", "moba": "#cc79a7"}
TASKS = {"needle": "one needle", "multi": "a needle at every depth"}


def main(argv: list[str] | None = None) -> int:
    """Write everything, and say what."""
    parser = StrictParser(prog="plot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --out of run.py")
    parser.add_argument("--out", type=Path, required=True, metavar="PAGES", help="of the pages")
    args = parser.parse_args(argv)
    try:
        results = read_results(args.folder / RESULTS)
        measures = read_measures(args.folder / MEASURES)
        known = [arm for arm in results["arms"] if arm["name"] in measures["arms"]]
        if not known:
            raise ValueError(f"{args.folder} has no arm that was measured; run run.py first")
    except ValueError as error:
        print(f"plot: error: {error}", file=sys.stderr)
        return BAD_INPUT
    args.out.mkdir(parents=True, exist_ok=True)
    for page in TITLES:
        if arms := arms_of_page(page, known):
            _write(page, arms, results, measures, args.out)
    write_results(args.out / "rules-results.json", _without_schema(results))
    write_text(args.out / "rules-measures.json", json.dumps(measures) + "\n")
    return 0


def _write(
    page: str, arms: list[Arm], results: dict[str, Any], measures: dict[str, Any], out: Path
) -> None:
    """The page of these arms and its two pictures."""
    pictures = [f"{page}-loss.png", f"{page}-needles.png"]
    drawn = [arm for arm in shown_arms(arms, measures) if page != CONVERT or is_converted(arm)]
    draw_losses(drawn, measures, out / pictures[0])
    draw_needles(drawn, measures, out / pictures[1])
    content = write_page(results | {"arms": arms}, measures, pictures, TITLES[page])
    write_text(out / f"{page}.md", content)
    for name in (f"{page}.md", *pictures):
        print(out / name)


def draw_losses(arms: list[Arm], measures: dict[str, Any], path: Path) -> None:
    """Held-out loss during training, and below it the recall of each layer, by length of a row."""
    groups = _groups(arms)
    figure = new_figure(6.0)
    panels = figure.subplots(2, len(groups), squeeze=False)
    for (top, low), members in zip(panels.T, groups, strict=True):
        for arm in members:
            style = {"color": _colour(arm["variant"]), "marker": "o", "markersize": 3}
            label = f"{arm['variant']}: {arm['held_out']['loss']:.3f}"
            top.plot(arm["val"]["step"], arm["val"]["loss"], label=label, linewidth=1.3, **style)
            layers = measures["arms"][arm["name"]]["recall"].get("own", [])
            low.plot([100 * layer[0] for layer in layers], linewidth=1.3, **style)
        chance = 100 * measures["chance"][members[0]["comparison"]]
        low.axhline(chance, color="#999999", linestyle=":", label="blocks drawn at random")
        top.set_title(f"rows of {length_of(members[0])} tokens: held-out loss", **LEFT)
        low.set_title("recall of the dense top blocks", **LEFT)
        top.set_xlabel("step (optimizer updates)")
        low.set_xlabel("layer")
        low.set_ylim(0, 100)
        low.xaxis.get_major_locator().set_params(integer=True)
        for axes in (top, low):
            axes.legend(frameon=False, fontsize=8)
    panels[0][0].set_ylabel("nats per token")
    panels[1][0].set_ylabel("%")
    finish(figure, path)


def draw_needles(arms: list[Arm], measures: dict[str, Any], path: Path) -> None:
    """Right answers at the length of a row, by depth and attention."""
    groups = _groups(arms)
    figure = new_figure(3.6 * len(TASKS))
    panels = figure.subplots(len(TASKS), len(groups), squeeze=False)
    image = None
    for line, (task, words) in zip(panels, TASKS.items(), strict=True):
        for axes, members in zip(line, groups, strict=True):
            grids = [_grid(measures["arms"][arm["name"]], task) for arm in members]
            shares = np.stack([shares_of(grid["right"], grid["asked"]) for grid in grids], axis=1)
            names = [_short(arm["variant"]) for arm in members]
            image = draw_shares(axes, shares, names, grids[0]["depths"])
            axes.tick_params(labelsize=8)
            axes.set_title(f"{words}, {grids[0]['length']} tokens", **LEFT)
        line[0].set_ylabel("depth of the needle, %")
    figure.colorbar(image, ax=panels.ravel().tolist(), label="right answers, %", shrink=0.8)
    finish(figure, path, grid=False)


def _groups(arms: list[Arm]) -> list[list[Arm]]:
    """The arms of each comparison, shorter rows first."""
    groups = [list(group) for _, group in groupby(arms, key=lambda arm: arm["comparison"])]
    return sorted(groups, key=lambda members: length_of(members[0]))


def _grid(found: dict[str, Any], task: str) -> dict[str, Any]:
    """That of the longest context."""
    grids = [grid for grid in found["grids"] if grid["task"] == task]
    longest: dict[str, Any] = max(grids, key=lambda grid: grid["length"])
    return longest


def _colour(variant: str) -> str:
    name = WIDE if variant.startswith(WIDE) else variant.split("-")[0]
    others = dict(zip((WIDE, "msa"), OTHERS, strict=False))
    return COLOURS.get(name) or others.get(name) or OTHERS[-1]


def _short(variant: str) -> str:
    return variant.replace("-", "\n")


def _without_schema(results: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in results.items() if key != "schema"}


if __name__ == "__main__":
    sys.exit(main())

"""Draws the pictures and writes the page of results.json, or of several that belong together.

`python studies/nsa_vs_dense/plot.py RESULTS.json [RESULTS.json ...] --out DIR [--arm NAME]
[--remarks FILE]`
"""

from __future__ import annotations

import argparse
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without PYTHONPATH, too

from nsa.config import StrictParser
from nsa.files import write_text
from studies.nsa_vs_dense import pictures
from studies.nsa_vs_dense.page import write_page
from studies.nsa_vs_dense.results import merge, read_results, write_results

PREFIX = "nsa_vs_dense"


def main(argv: list[str] | None = None) -> int:
    """Write everything, and say what."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        results = merge([read_results(Path(path)) for path in args.results])
        shown = choose_arm(results["arms"], args.arm)
        remarks = Path(args.remarks).read_text(encoding="utf-8") if args.remarks else ""
    except (OSError, ValueError) as error:
        parser.error(str(error))
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    files = draw_all(results["arms"], shown, out)
    page = out / f"{PREFIX}.md"
    write_text(page, write_page(results, files, shown["name"] if shown else None, remarks))
    write_results(out / f"{PREFIX}.json", results)
    for name in [page.name, f"{PREFIX}.json", *files.values()]:
        print(out / name)
    return 0


def choose_arm(arms: list[dict[str, Any]], name: str | None) -> dict[str, Any] | None:
    """The arm to look into: the named one, or the NSA arm with the longest rows."""
    if not arms:
        raise ValueError("no arm is finished; there is nothing to draw")
    with_choice = [arm for arm in arms if arm["selection"] and arm["selection"]["lags"]]
    if name is not None:
        found = [arm for arm in with_choice if arm["name"] == name]
        if not found:
            known = ", ".join(arm["name"] for arm in with_choice) or "none"
            raise ValueError(f"--arm {name!r} is no finished arm that selects; there are {known}")
        return found[0]
    usual = [arm for arm in with_choice if arm["variant"] == "nsa"] or with_choice
    return max(usual, key=lambda arm: arm["selection"]["seq_len"], default=None)


def draw_all(arms: list[dict[str, Any]], shown: dict[str, Any] | None, out: Path) -> dict[str, str]:
    """Draw, and return the file names by kind."""
    files: dict[str, str] = {}

    def draw(kind: str, how: Any, what: Any) -> None:
        files[kind] = f"{PREFIX}-{kind}.png"
        how(what, out / files[kind])

    for name, group in groupby(arms, key=lambda arm: arm["comparison"]):
        members = list(group)
        for part, those in split_diagnoses(members).items():
            draw(f"curves-{name}{part}", pictures.draw_curves, those)
            draw(f"positions-{name}{part}", pictures.draw_positions, those)
    if shown is not None:
        draw("gates", pictures.draw_gates, shown)
        draw("distances", pictures.draw_distances, shown)
        draw("overlap", pictures.draw_overlap, shown)
    return files


def split_diagnoses(arms: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The arms of a comparison by picture: diagnoses have their own, beside dense and NSA."""
    usual = [arm for arm in arms if arm["variant"] in pictures.COLOURS]
    others = [arm for arm in arms if arm not in usual]
    if not usual or not others:
        return {"": arms}
    seeds = {arm["seed"] for arm in others}
    twins = [arm for arm in usual if arm["variant"] in ("dense", "nsa") and arm["seed"] in seeds]
    return {"": usual, "-diagnosis": twins + others}


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="+", metavar="RESULTS.json", help="written by run.py")
    parser.add_argument("--out", required=True, metavar="DIR", help="for pictures and the page")
    parser.add_argument("--arm", metavar="NAME", help="to look into (NSA with the longest rows)")
    parser.add_argument("--remarks", metavar="FILE", help="Markdown for the page, by hand")
    return parser


if __name__ == "__main__":
    sys.exit(main())

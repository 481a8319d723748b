"""What the training benchmark prints and writes: a table by cell and variant, and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import results
from bench.training.cases import GOALS, Cell

VERSION = 1
"""Of the JSON: `environment`, then `cells`: cell, tokens, goal, rows (training/cell.py; `reason`
where a variant failed), best_nsa, best_dense, ratio, goal_met (null: nothing to compare with)."""
COLUMNS = (
    ("cell", 9),
    ("variant", 19),
    ("tokens/s", 11),
    ("step ms", 9),
    ("MFU", 7),
    ("peak GiB", 9),
    ("x dense", 8),
    ("first s", 8),
    ("loss", 8),
)


def new_result(command: list[str], commit_name: str | None) -> dict[str, Any]:
    """An empty result."""
    environment = results.describe_command(command, commit_name)
    return {"version": VERSION, "environment": environment, "cells": []}


def summarize(cell: Cell, rows: list[dict[str, Any]], *, tiny: bool) -> dict[str, Any]:
    """Add to the rows of a cell what follows from them: the ratio, and whether the goal is met."""
    dense = _best(rows, "dense")
    for row in rows:
        if dense is not None and "tokens_per_s" in row:
            row["ratio"] = row["tokens_per_s"] / dense["tokens_per_s"]
    ours = _best(rows, "nsa")
    goal = None if tiny else GOALS.get(cell)
    ratio = ours.get("ratio") if ours else None
    return {
        "cell": str(cell),
        "tokens": cell.tokens,
        "goal": str(goal) if goal else None,
        "rows": rows,
        "best_nsa": ours["variant"] if ours else None,
        "best_dense": dense["variant"] if dense else None,
        "ratio": ratio,
        "goal_met": goal.met(ours["tokens_per_s"], ratio) if goal and ours else None,
    }


def table(result: dict[str, Any]) -> str:
    """All rows, then a line for every cell that has a goal."""
    lines = ["".join(f"{name:>{width}}" for name, width in COLUMNS)]
    for cell in result["cells"]:
        lines += [_line(cell["cell"], row) for row in cell["rows"]]
    lines.append("")
    for cell in result["cells"]:
        if cell["goal"]:
            lines.append(_verdict(cell))
    return "\n".join(lines).rstrip()


def read_result(path: str | Path) -> dict[str, Any]:
    """Read a result of the training benchmark."""
    return results.read_json(path, VERSION, "bench_train.py")


def _best(rows: list[dict[str, Any]], attention: str) -> dict[str, Any] | None:
    measured = [row for row in rows if "tokens_per_s" in row]
    of_kind = [row for row in measured if row["variant"].split("-")[0] == attention]
    return max(of_kind, key=lambda row: row["tokens_per_s"], default=None)


def _line(cell: str, row: dict[str, Any]) -> str:
    start = f"{cell:>{COLUMNS[0][1]}}{row['variant']:>{COLUMNS[1][1]}}"
    if "tokens_per_s" not in row:
        return f"{start}  failed: {row['reason']}"
    values = (
        f"{row['tokens_per_s']:,.0f}",
        f"{row['step_ms']:.2f}",
        _shown(row["mfu"], lambda x: f"{x:.1%}"),
        _shown(row["peak_mib"], lambda x: f"{x / 1024:.1f}"),
        _shown(row.get("ratio"), lambda x: f"{x:.3f}"),
        f"{row['first_s']:.1f}",
        f"{row['loss']:.4f}",
    )
    cells = zip(values, COLUMNS[2:], strict=True)
    return start + "".join(f"{value:>{width}}" for value, (_, width) in cells)


def _verdict(cell: dict[str, Any]) -> str:
    verdict = {True: "ok", False: "miss", None: "not measured"}[cell["goal_met"]]
    fastest = f"{cell['best_nsa']} against {cell['best_dense']}"
    ratio = _shown(cell["ratio"], lambda x: f"{x:.3f}x")
    return f"{cell['cell']:>9}  goal {cell['goal']}: {verdict} ({fastest}: {ratio})"


def _shown(value: float | None, how: Any) -> str:
    return "-" if value is None else how(value)

"""What the decode benchmark prints and writes: a table, JSON, and a CSV of ours."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from bench.results import read_json, write_json
from nsa.files import write_text

VERSION = 1
"""Of the JSON: environment, `attention` (rows of ours and of dense attention at a cell: eager_ms,
graph_ms on a GPU, reads, cache_bytes; ours also reads_expected and the branches' cmp_ms, sel_ms,
win_ms, null where one kernel takes it with cmp_ms; or a reason), and `model` (tokens_per_s of whole
models)."""
CSV_HEADER = (
    *("S", "ms_total", "ms_cmp", "ms_sel", "ms_win", "reads_actual", "reads_expected"),
    *("B", "ms_dense", "ratio"),
)
"""ms_dense is the best dense attention of the same cell, ratio ms_total over it."""


def table(result: dict[str, Any]) -> str:
    """Both lists, as text."""
    lines = [
        f"{'Hq,Hkv,Dk,Dv':>16}{'B':>4}{'S':>8}{'name':>12}{'eager ms':>10}{'graph ms':>10}"
        f"{'reads':>8}{'formula':>8}{'cache MiB':>11}"
    ]
    for row in result["attention"]:
        shape = ",".join(str(row[letter]) for letter in ("Hq", "Hkv", "Dk", "Dv"))
        head = f"{shape:>16}{row['B']:>4}{row['S']:>8}{row['name']:>12}"
        if "reason" in row:
            lines.append(f"{head}  not measured: {row['reason']}")
            continue
        cells = f"{_ms(row.get('eager_ms')):>10}{_ms(row.get('graph_ms')):>10}{row['reads']:>8}"
        formula = str(row.get("reads_expected", row["reads"]))
        lines.append(f"{head}{cells}{formula:>8}{row['cache_bytes'] / 2**20:>11.1f}")
    for row in result["model"]:
        head = f"model {row['name']}, B={row['B']} S={row['S']}"
        speed = f"{row['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in row else row["reason"]
        lines.append(f"{head}: {speed}")
    return "\n".join(lines)


def csv_text(result: dict[str, Any]) -> str:
    """A line for each cell, under CSV_HEADER."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_HEADER)
    for row in result["attention"]:
        if row["name"] != "nsa" or "reason" in row:
            continue
        dense = [best_ms(x) for x in result["attention"] if x["name"] != "nsa" and same(x, row)]
        rivals = [x for x in dense if x is not None]
        total = best_ms(row)
        assert total is not None
        times = [row[name] for name in ("cmp_ms", "sel_ms", "win_ms")]
        branches = ["" if ms is None else f"{ms:.4f}" for ms in times]
        beside = [f"{min(rivals):.4f}", f"{total / min(rivals):.3f}"] if rivals else ["", ""]
        reads = [row["reads"], row["reads_expected"]]
        writer.writerow([row["S"], f"{total:.4f}", *branches, *reads, row["B"], *beside])
    return out.getvalue()


def best_ms(row: dict[str, Any]) -> float | None:
    """The faster of both ways; None where neither was measured."""
    times = [row.get(name) for name in ("eager_ms", "graph_ms")]
    return min((x for x in times if isinstance(x, float)), default=None)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows are of one cell."""
    return all(one[name] == other[name] for name in ("Hq", "Hkv", "Dk", "Dv", "B", "S"))


def write(result: dict[str, Any], json_path: str | None, csv_path: str | None) -> None:
    """Write what was asked for; each file appears when it is complete."""
    if json_path:
        write_json(json_path, result)
    if csv_path:
        write_text(Path(csv_path), csv_text(result))


def read_result(path: str | Path) -> dict[str, Any]:
    """Read what `write` wrote."""
    return read_json(path, VERSION, "bench_decode.py")


def _ms(value: float | str | None) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "-"

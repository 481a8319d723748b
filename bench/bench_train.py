"""Training benchmark: full steps of NSA and of the dense twin: tokens/s, MFU, memory, ratio.

`python bench/bench_train.py [--cells 2048x16,8192x4] [--variants nsa,dense-compiled] [--json FILE]`
trains the production model (bf16 with fp32 weights, GPT-2 vocabulary, random tokens) with full
updates: forward, backward, clipping, AdamW. A variant is nsa or dense (SDPA pinned to cuDNN):
eager, compiled (torch.compile), captured as one CUDA graph, or both. The variants of a cell run in
turns, so that clock drift affects all of them. A variant that fails has a line with its reason.
`--device cpu --tiny` rehearses it without a GPU. The table comes last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch

from bench.results import write_json
from bench.training.cases import (
    GOALS,
    NAMES,
    TINY_CELLS,
    Cell,
    Variant,
    parse_cells,
    parse_variants,
)
from bench.training.cell import Task
from bench.training.report import new_result, summarize, table
from nsa.config import StrictParser

CHILD = Path(__file__).resolve().with_name("training") / "cell.py"


def main(argv: list[str] | None = None) -> int:
    """Measure every cell, print the table; 1 if a variant of ours failed, 0 otherwise."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        cells, variants = _plan(args)
    except ValueError as error:
        parser.error(str(error))
    start = time.perf_counter()
    given = sys.argv[1:] if argv is None else argv
    result = new_result(["python", "bench/bench_train.py", *given], args.commit)
    for cell in cells:
        rows = measure_cell(cell, variants, args, result["environment"])
        result["cells"].append(summarize(cell, rows, tiny=args.tiny))
        # After every cell: a run that is stopped leaves what it had.
        print(table({"cells": result["cells"][-1:]}), flush=True)
        if args.json:
            write_json(args.json, result)
    print(", ".join(f"{name} {value}" for name, value in result["environment"].items()))
    print(f"{time.perf_counter() - start:.0f} s in all\n")
    print(table(result), flush=True)
    rows = [row for cell in result["cells"] for row in cell["rows"]]
    return int(any("reason" in row and row["variant"].startswith("nsa") for row in rows))


def measure_cell(
    cell: Cell, variants: list[Variant], args: argparse.Namespace, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """Rows of all variants, in their order; processes that end early are started again without
    the variant that was running."""
    found: dict[str, dict[str, Any]] = {}
    while left := [variant.name for variant in variants if variant.name not in found]:
        task = Task(
            length=cell.length,
            batch=cell.batch,
            variants=left,
            steps=args.steps,
            warmup=args.warmup,
            device=args.device,
            tiny=args.tiny,
        )
        ending, events = run_process(task, args.cell_timeout)
        running = left[0]
        for event in events:
            kind = event.pop("kind")
            if kind == "environment":
                environment |= event
            elif kind == "begin":
                running = event["variant"]
            else:
                found[event["variant"]] = event
        if ending:
            found.setdefault(running, {"variant": running, "reason": ending})
    return [found[variant.name] for variant in variants]


def run_process(task: Task, timeout_s: float) -> tuple[str, list[dict[str, Any]]]:
    """Measure in a separate process: the error (empty: none), and the events it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        path.touch()
        command = [sys.executable, str(CHILD), json.dumps(asdict(task)), str(path)]
        try:
            code = subprocess.run(command, timeout=timeout_s).returncode
            ending = f"the process ended with code {code}" if code else ""
        except subprocess.TimeoutExpired:
            ending = f"the cell took more than {timeout_s:g} s (--cell-timeout)"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return ending, [json.loads(line) for line in lines if line.endswith("\n")]


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--cells", metavar="SxB,...", help=f"lengths x batches ({_default_cells(False)})"
    )
    parser.add_argument(
        "--variants", default=",".join(NAMES), metavar="NAME,...", help="variants to measure (all)"
    )
    parser.add_argument("--steps", type=int, default=20, help="timed updates per variant (20)")
    parser.add_argument("--warmup", type=int, default=5, help="warm-up updates (5)")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, for a rehearsal")
    parser.add_argument("--commit", metavar="NAME", help="commit to record if git is not available")
    parser.add_argument("--cell-timeout", type=float, default=540.0, metavar="SECONDS")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    return parser


def _plan(args: argparse.Namespace) -> tuple[list[Cell], list[Variant]]:
    """Cells and variants; refuses what could only fail later."""
    for flag in ("steps", "warmup"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag} {getattr(args, flag)} is below 1; use 1 or more")
    if args.device == "cpu" and not args.tiny:
        raise ValueError("the production model takes hours on a cpu; add --tiny to rehearse")
    if args.json and not Path(args.json).absolute().parent.is_dir():
        raise ValueError(f"--json {args.json} is in a folder that does not exist; create it first")
    cells = parse_cells(args.cells or _default_cells(args.tiny))
    return cells, parse_variants(args.variants)


def _default_cells(tiny: bool) -> str:
    return TINY_CELLS if tiny else ",".join(map(str, GOALS))


if __name__ == "__main__":
    sys.exit(main())

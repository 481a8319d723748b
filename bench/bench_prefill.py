"""Prefill benchmark: attention forward and backward, against dense SDPA and another NSA.

`python bench/bench_prefill.py [--config FILE | --shape Hq,Hkv,Dk,Dv ... | --preset speed]`.
Ours is mean compression of raw K/V plus nsa_attention; bench/attention/peers.py says what the
others are and how they differ. flash-linear-attention compresses with l = d = l' = 64 and runs
without a window.
The last line is JSON; a peer that cannot run has a row with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch
from torch import Tensor

import nsa
from bench.attention import measure, report, selections
from bench.attention.cases import PRESETS, Case, Shape, grid, parse_shape
from bench.attention.peers import DENSE_MAX_LENGTH, PEERS
from bench.attention.plot import plot_rows, title_of
from bench.results import write_json
from nsa.config import StrictParser, load_config
from nsa.ops import plan_attention

DEFAULT_SHAPE = Shape(12, 2, 64, 64)
DEFAULT_LENGTHS = [4096, 8192, 16384]
PEERS_OF = {"cuda": ("cudnn", "flash", "fla"), "cpu": ("math", "fla")}


def main(argv: list[str] | None = None) -> int:
    """Measure every case, print a table, the kernels and a JSON line; 1 if ours failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        cases, setup = _plan(args)
    except ValueError as error:
        parser.error(str(error))
    start = time.perf_counter()
    torch.use_deterministic_algorithms(args.deterministic)
    result = report.environment(setup, _selection_name(args))
    _print_head(result, cases, setup)
    rows = _measure(cases, setup, result, args.json)
    if args.plot:
        plot_rows(result["rows"], args.plot, title_of(result))
    failed = [row for row in rows if row.name == "nsa" and row.reason]
    for case in [] if failed else _profiled(cases, args):
        result["kernels"].append(measure.kernel_breakdown(case, setup))
        print(report.kernel_lines(result["kernels"][-1]), flush=True)
    print(f"{time.perf_counter() - start:.0f} s in all")
    if args.json:
        write_json(args.json, result)
    print(json.dumps(result))
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(description=(__doc__ or "").splitlines()[0])
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--config", metavar="FILE", help="config with the heads and block sizes")
    shapes.add_argument("--shape", nargs="+", action="extend", metavar="Hq,Hkv,Dk,Dv")
    shapes.add_argument("--preset", choices=list(PRESETS), help="fixed list of shapes and lengths")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="S")
    parser.add_argument("--batch", type=int, help="sequences per call (1)")
    parser.add_argument("--repeats", type=int, help="timed calls (9, fewer for long sequences)")
    parser.add_argument("--backend", default="auto", help="backend of compress and nsa_attention")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=PEERS,
        help="implementations to compare with (all of the device)",
    )
    dense = f"also measure dense attention above S={DENSE_MAX_LENGTH}"
    parser.add_argument("--dense-long", action="store_true", help=dense)
    parser.add_argument(
        "--selection",
        default="random",
        metavar="random|clustered|FILE",
        help="random: chosen from random q and k; clustered: neighbours share their blocks; FILE: "
        "recorded from a model (bench/attention/selections.py)",
    )
    parser.add_argument(
        "--selection-layer",
        type=int,
        default=0,
        metavar="N",
        help="layer of a FILE recorded from a full model; with --batch, the first layer (0)",
    )
    parser.add_argument(
        "--profile",
        choices=["longest", "all", "none"],
        default="longest",
        help="cases to list kernels for; longest: the longest case of every shape (CUDA only)",
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="use torch.use_deterministic_algorithms"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the JSON to this file")
    parser.add_argument("--plot", metavar="FILE.png", help="plot time over S")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    return parser


def _plan(args: argparse.Namespace) -> tuple[list[Case], measure.Setup]:
    """Cases and setup; invalid arguments are rejected here, before anything is measured."""
    _check(args)
    shapes, spec = _shapes_and_spec(args)
    select, spec, recorded_length = _selection(args, spec)
    default_lengths = [recorded_length] if recorded_length else DEFAULT_LENGTHS
    if args.preset:
        cases = PRESETS[args.preset](args.repeats)
    else:
        cases = grid(shapes, args.lengths or default_lengths, args.batch or 1, args.repeats)
    setup = measure.Setup(
        device=args.device,
        dtype=torch.bfloat16 if args.device == "cuda" else torch.float32,
        backend=args.backend,
        spec=spec,
        peer_names=tuple(PEERS_OF[args.device] if args.peers is None else args.peers),
        dense_long=args.dense_long,
        select=select,
    )
    for case in cases:
        plan_attention(setup.device, setup.dtype, setup.backend, (case.shape.Dk, case.shape.Dv))
        if recorded_length:
            select(case)
    return cases, setup


def _check(args: argparse.Namespace) -> None:
    """Reject contradictory flags, and output files that could not be written at the end."""
    if args.preset and (args.lengths or args.batch):
        raise ValueError(
            f"--preset {args.preset} fixes lengths and batches; drop --lengths and --batch, "
            f"or use --shape instead"
        )
    if args.preset and args.device == "cpu":
        raise ValueError(
            "--preset needs a CUDA device, the run is on cpu; use --shape and --lengths"
        )
    numbers = {"--lengths": args.lengths, "--batch": [args.batch], "--repeats": [args.repeats]}
    for flag, values in numbers.items():
        if any(value is not None and value < 1 for value in values or []):
            raise ValueError(f"{flag} {values} has a number below 1; use whole numbers >= 1")
    for flag, path in {"--json": args.json, "--plot": args.plot}.items():
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{flag} {path} is in a folder that does not exist; create it first")
    if args.plot and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib; pip install -c constraints.txt -e '.[plot]'")


def _shapes_and_spec(args: argparse.Namespace) -> tuple[list[Shape], nsa.BlockSpec]:
    if not args.config:
        shapes = [parse_shape(text) for text in args.shape or []]
        return shapes or [DEFAULT_SHAPE], nsa.BlockSpec()
    cfg = load_config(args.config)
    shape = Shape(cfg.model.n_heads, cfg.model.n_kv_groups, cfg.model.d_k, cfg.model.d_v)
    return [shape], nsa.BlockSpec(cfg.nsa.l, cfg.nsa.d, cfg.nsa.l_sel, cfg.nsa.n_sel, cfg.nsa.w)


def _selection(
    args: argparse.Namespace, spec: nsa.BlockSpec
) -> tuple[Callable[[Case], Tensor | None], nsa.BlockSpec, int | None]:
    """Where selections come from, the block sizes, and the length of a recorded selection."""
    if args.selection_layer and args.selection in ("random", "clustered"):
        raise ValueError(
            f"--selection-layer {args.selection_layer} with --selection {args.selection}; only a "
            f"FILE has layers: use one, or drop --selection-layer"
        )
    if args.selection == "random":
        return lambda case: None, spec, None
    if args.selection == "clustered":
        return partial(selections.clustered, spec=spec), spec, None
    recorded, recorded_spec = selections.read_selection(args.selection)
    if args.config and recorded_spec != spec:
        raise ValueError(
            f"{args.selection} was recorded with {recorded_spec}, {args.config} has {spec}; "
            f"both must be equal: change the config or leave it out"
        )
    if not 0 <= args.selection_layer < len(recorded):
        raise ValueError(
            f"--selection-layer {args.selection_layer}: {args.selection} has the layers 0 to "
            f"{len(recorded) - 1}; choose one of them"
        )
    recorded = recorded[args.selection_layer :]
    return partial(selections.recorded, recorded), recorded_spec, recorded.shape[1]


def _selection_name(args: argparse.Namespace) -> str:
    layer = f" from layer {args.selection_layer}" if args.selection_layer else ""
    return f"{args.selection}{layer}"


def _print_head(result: dict[str, Any], cases: list[Case], setup: measure.Setup) -> None:
    print(", ".join(f"{name} {value}" for name, value in result.items()))
    dims = {(case.shape.Dk, case.shape.Dv) for case in cases}
    for plan in {plan_attention(setup.device, setup.dtype, setup.backend, dim) for dim in dims}:
        print(plan)
    print(report.LEGEND)
    print(report.table_head(), flush=True)


def _measure(
    cases: list[Case], setup: measure.Setup, result: dict[str, Any], path: str | None
) -> list[measure.Row]:
    """Measure and print case by case; a stopped run leaves its results so far under `path`."""
    rows: list[measure.Row] = []
    result |= {"notes": {}, "rows": [], "kernels": []}
    for case in cases:
        for row in measure.measure_case(case, setup):
            print(report.table_line(row), flush=True)
            rows.append(row)
            result["rows"].append(measure.as_json(row))
            result["notes"] |= {row.name: row.note} if row.note else {}
        if path:
            write_json(path, result)
    for name, note in result["notes"].items():
        print(f"{name}: {note}")
    return rows


def _profiled(cases: list[Case], args: argparse.Namespace) -> list[Case]:
    """Cases whose kernels are listed; after all timing, which the profiler would disturb."""
    if args.device != "cuda" or args.profile == "none":
        return []
    longest = {(case.shape, case.batch): case for case in sorted(cases, key=lambda c: c.length)}
    return cases if args.profile == "all" else list(longest.values())


if __name__ == "__main__":
    sys.exit(main())

"""Decode benchmark: a step of NSA against dense SDPA, and full models in tokens per second.

`python bench/bench_decode.py [--config FILE | --shape Hq,Hkv,Dk,Dv ...] [--lengths S ...]`. A step
appends one token per sequence to caches of S - 1 tokens, and attends. Reads are counted from the
keys that were used, and compared with the formula. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch

from bench.attention.cases import Shape, parse_shape
from bench.decoding import report as decode_report
from bench.decoding.cell import (
    BACKENDS,
    Cell,
    measure_dense,
    measure_model,
    measure_ours,
    memory_given_back,
)
from bench.results import commit
from bench.timing import first_line
from nsa.config import StrictParser, load_config
from nsa.config.env import check_environment
from nsa.ops import BlockSpec

LENGTHS = {"cuda": [1024, 2048, 8192, 32768, 65536, 131072], "cpu": [1024, 4096]}
BATCHES = {"cuda": [1, 32], "cpu": [1]}
DENSE = {"cuda": ["cudnn", "flash", "cudnn-rows", "flash-rows"], "cpu": ["any-rows"]}
SHAPES = [Shape(64, 4, 128, 128), Shape(12, 2, 64, 64)]
MODEL = "configs/m7c_125m_2xa100_production.yaml"


def main(argv: list[str] | None = None) -> int:
    """Measure every cell, print a table and a JSON line; 1 if reads differ from the formula."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        check_environment()
        shapes, spec = _check(args)
        models = _models(args)
    except ValueError as error:
        parser.error(str(error))
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    result: dict[str, Any] = {"version": decode_report.VERSION, **_environment(args, spec, dtype)}
    result |= {"attention": [], "model": []}
    for shape in shapes:
        for batch in args.batch or BATCHES[args.device]:
            for length in args.lengths or LENGTHS[args.device]:
                cell = Cell(shape, spec, batch, length, args.repeats, args.device, dtype)
                result["attention"] += _measure(cell, args.dense or DENSE[args.device])
                decode_report.write(result, args.json, args.csv)
    for config in models:
        for batch in args.batch or BATCHES[args.device]:
            for length in args.lengths or LENGTHS[args.device]:
                result["model"].append(_measure_model(config, batch, length, args, dtype))
                decode_report.write(result, args.json, args.csv)
    print(decode_report.table(result))
    print(json.dumps(result))
    ours = [row for row in result["attention"] if row["name"] == "nsa"]
    good = [row for row in ours if row.get("reads") == row.get("reads_expected", -1)]
    return 0 if len(good) == len(ours) else 1


def _measure(cell: Cell, dense: list[str]) -> list[dict[str, Any]]:
    """Ours, then dense attention; an out-of-memory error becomes a row with that reason."""
    rows = []
    with memory_given_back(cell.device):
        try:
            rows.append(measure_ours(cell))
        except torch.OutOfMemoryError as error:
            rows.append({"name": "nsa", **cell.where, "reason": first_line(error)})
    for name in dense:
        with memory_given_back(cell.device):
            rows.append(measure_dense(cell, name))
    return rows


def _measure_model(
    config: Any, batch: int, length: int, args: argparse.Namespace, dtype: torch.dtype
) -> dict[str, Any]:
    with memory_given_back(args.device):
        try:
            return measure_model(config, batch, length, args.repeats, args.device, dtype)
        except torch.OutOfMemoryError as error:
            name = config.model.attention
            return {"name": name, "B": batch, "S": length, "reason": first_line(error)}


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(description=(__doc__ or "").splitlines()[0])
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument("--config", metavar="FILE", help="config with the heads and block sizes")
    shapes.add_argument("--shape", nargs="+", action="extend", metavar="Hq,Hkv,Dk,Dv")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        metavar="S",
        help="sequence lengths, including the new token",
    )
    parser.add_argument(
        "--batch", type=int, nargs="+", metavar="B", help="sequences per step (cuda: 1 32; cpu: 1)"
    )
    parser.add_argument("--repeats", type=int, default=20, metavar="N", help="timed steps (20)")
    parser.add_argument(
        "--dense", nargs="+", choices=list(BACKENDS), help="dense SDPA backends (all of the device)"
    )
    model = f"config of a full model to time, with its dense twin; none: skip (cuda: {MODEL})"
    parser.add_argument("--model", metavar="FILE|none", help=model)
    parser.add_argument("--json", metavar="FILE", help="also write the JSON to this file")
    parser.add_argument("--csv", metavar="FILE", help="write our rows as CSV")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    return parser


def _check(args: argparse.Namespace) -> tuple[list[Shape], BlockSpec]:
    """Heads and block sizes; invalid arguments are rejected before anything is measured."""
    numbers = {"--lengths": args.lengths, "--batch": args.batch, "--repeats": [args.repeats]}
    for flag, values in numbers.items():
        if any(value < 1 for value in values or []):
            raise ValueError(f"{flag} {values} has a number below 1; use whole numbers >= 1")
    for flag, path in {"--json": args.json, "--csv": args.csv}.items():
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{flag} {path} is in a folder that does not exist; create it first")
    if not args.config:
        return [parse_shape(text) for text in args.shape or []] or SHAPES, BlockSpec()
    cfg = load_config(args.config)
    shape = Shape(cfg.model.n_heads, cfg.model.n_kv_groups, cfg.model.d_k, cfg.model.d_v)
    return [shape], BlockSpec(cfg.nsa.l, cfg.nsa.d, cfg.nsa.l_sel, cfg.nsa.n_sel, cfg.nsa.w)


def _models(args: argparse.Namespace) -> list[Any]:
    """The config of the model and of its dense twin."""
    path = args.model or (MODEL if args.device == "cuda" else "none")
    if path == "none":
        return []
    return [load_config(path, [f"model.attention={kind}"]) for kind in ("nsa", "dense")]


def _environment(args: argparse.Namespace, spec: BlockSpec, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": commit(),
        "dtype": str(dtype).removeprefix("torch."),
        "spec": {name: getattr(spec, name) for name in ("l", "d", "l_sel", "n_sel", "w")},
    }


if __name__ == "__main__":
    sys.exit(main())

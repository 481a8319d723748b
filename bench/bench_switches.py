"""Times the operator with constants of `nsa/ops` set to other values, in turns in one run.

`python bench/bench_switches.py --shape 12,2,64,64 --lengths 4096 16384 [--batch 1] [--json FILE]
--variant triton.problem.ONE_PASS_FROM=0 triton.problem.COMPRESSED_FROM=4096 [--kernels]`

A variant is one or more MODULE.NAME=VALUE, with spaces between them; modules are those of nsa/ops,
values are Python literals. The first row is the code as it is. A round times every variant once, so
that what the machine does in the meantime meets all of them. Times are those of forward and
backward: CUDA graphs on a GPU, eager calls on a CPU. The error is the largest difference of a
gradient from the first row's over its largest value. `--kernels` adds the device time of kernels.

`--launches 10000` times nothing: it calls every variant so often and compares every hundredth
result with its first, bit for bit. Nothing is captured then: `--launches 1` is meant for
compute-sanitizer.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch
from torch import Tensor

import nsa
from bench import timing
from bench.attention import peers
from bench.attention.cases import Case, make_inputs, parse_shape
from bench.results import describe_command, describe_machine, write_json
from nsa.config import StrictParser
from nsa.config.describe import text_table

VERSION = 1
"""Of the JSON: `environment`, and `rows`: shape, B, S, variant, error, and either ms, ratio and
kernels or launches, others (compared results that had other bits) and spread (their largest
difference)."""
AS_IT_IS = "as it is"
CASE = ("Hq,Hkv,Dk,Dv", "B", "S", "variant", "error")
TIMES, REPEATED = ("ms", "ratio"), ("launches", "others", "spread")
COMPARED = 100
"""Launches between two that are compared."""


class Setting:
    """A constant of a module, and the value that it takes."""

    def __init__(self, text: str) -> None:
        name, _, value = text.partition("=")
        path, _, self.name = name.rpartition(".")
        try:
            self.module = importlib.import_module(f"nsa.ops.{path}")
            self.before = getattr(self.module, self.name)
            self.value = ast.literal_eval(value)
        except (ImportError, AttributeError, ValueError, SyntaxError) as error:
            raise ValueError(
                f"--variant {text!r} cannot be set: {timing.first_line(error)}; use MODULE.NAME="
                f"LITERAL with a module of nsa/ops, as in triton.problem.BY_BLOCK_BEYOND=4"
            ) from error
        if isinstance(self.value, set):
            self.value = frozenset(self.value)


def main(argv: list[str] | None = None) -> int:
    """Measure every case with every variant, print a table and a JSON line."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        shapes = [parse_shape(text) for text in args.shape]
        variants = {text: [Setting(word) for word in text.split()] for text in args.variant}
    except ValueError as error:
        parser.error(str(error))
    given = sys.argv[1:] if argv is None else argv
    command = ["python", "bench/bench_switches.py", *given]
    result: dict[str, Any] = {
        "version": VERSION,
        "environment": describe_command(command, args.commit) | describe_machine(args.device),
        "rows": [],
    }
    for shape in shapes:
        for length in args.lengths:
            case = Case(shape, args.batch, length, args.repeats)
            result["rows"] += measure(case, {AS_IT_IS: [], **variants}, args)
            if args.json:  # after every case: a run that is stopped leaves what it had
                write_json(args.json, result)
    print(table(result["rows"]))
    print(json.dumps(result))
    return 0


def measure(
    case: Case, variants: dict[str, list[Setting]], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for every variant of a case."""
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    inputs = make_inputs(case, dtype, args.device)
    attention = peers.build_nsa(inputs, nsa.BlockSpec(), None, args.backend)
    grad = torch.randn_like(attention.call())

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention.call(), attention.leaves, grad)

    rows: list[dict[str, Any]] = []
    clocks: list[Callable[[], float]] = []
    wanted: tuple[Tensor, ...] = ()
    for name, settings in variants.items():
        with changed(settings):
            found = both()
            wanted = wanted or found
            error = max(_difference(*pair) for pair in zip(found, wanted, strict=True))
            where = {"shape": ",".join(map(str, case.shape)), "B": case.batch, "S": case.length}
            rows.append({**where, "variant": name, "error": error})
            if args.launches:
                rows[-1] |= repeat(both, args.launches)
            else:
                clocks.append(_clock(both, settings, args.device))
    if args.launches:
        return rows
    rounds = [[clock() for clock in clocks] for _ in range(case.repeats)]
    times = [statistics.median(column) for column in zip(*rounds, strict=True)]
    for row, ms, settings in zip(rows, times, variants.values(), strict=True):
        row |= {"ms": ms, "ratio": ms / times[0], "kernels": {}}
        if args.kernels:  # after all that is timed
            with changed(settings):
                row["kernels"] = timing.kernel_ms(both)
    return rows


def repeat(function: Callable[[], tuple[Tensor, ...]], launches: int) -> dict[str, Any]:
    """Call it so often; how many of the compared results had other bits than the first, and by how
    much they differed."""
    first = function()
    others, spread = 0, 0.0
    for i in range(1, launches):
        found = function()
        if i % COMPARED and i + 1 < launches:
            continue
        if not all(torch.equal(*pair) for pair in zip(found, first, strict=True)):
            others += 1
            spread = max(spread, *(_difference(*pair) for pair in zip(found, first, strict=True)))
    return {"launches": launches, "others": others, "spread": spread}


@contextmanager
def changed(settings: list[Setting]) -> Iterator[None]:
    """The constants with their other values, and no plan or recorded call that knew the old."""
    for one in settings:
        setattr(one.module, one.name, one.value)
    _forget()
    try:
        yield
    finally:
        for one in settings:
            setattr(one.module, one.name, one.before)
        _forget()


def table(rows: list[dict[str, Any]]) -> str:
    repeated = "launches" in rows[0]
    lines = [(*CASE, *(REPEATED if repeated else TIMES))]
    for row in rows:
        where = (row["shape"], str(row["B"]), str(row["S"]), row["variant"], f"{row['error']:.1e}")
        if repeated:
            found = str(row["launches"]), str(row["others"]), f"{row['spread']:.1e}"
            lines.append((*where, *found))
            continue
        lines.append((*where, f"{row['ms']:.3f}", f"{row['ratio']:.3f}"))
        for name, ms in row["kernels"].items():
            lines.append(("", "", "", f"  {name[:60]}", "", f"{ms:.3f}", ""))
    return text_table(lines, right=range(4, len(lines[0])))


def _clock(
    function: Callable[[], object], settings: list[Setting], device: str
) -> Callable[[], float]:
    """Milliseconds of one call or replay, each time it is called."""
    if device == "cuda":
        graph, results = timing.captured(function)
        return partial(_replay_ms, graph, results)

    def run() -> float:
        with changed(settings):
            return timing.median_ms(function, 1, device)

    return run


def _replay_ms(graph: torch.cuda.CUDAGraph, results: object) -> float:
    """One replay, which overwrites the results."""
    del results
    return timing.median_ms(graph.replay, 1, "cuda")


def _difference(found: Tensor, wanted: Tensor) -> float:
    largest = wanted.float().abs().max().clamp(min=1e-30)
    return float((found.float() - wanted.float()).abs().max() / largest)


def _forget() -> None:
    """Drop cached problems and recorded calls of the Triton kernels."""
    module = sys.modules.get("nsa.ops.triton.problem")
    if module is not None:
        module.forget()


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=["12,2,64,64"], metavar="Hq,Hkv,Dk,Dv")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384], metavar="S")
    parser.add_argument("--batch", type=int, default=1, help="sequences per call (1)")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds (9)")
    parser.add_argument("--variant", nargs="+", action="extend", default=[], metavar="M.NAME=VALUE")
    parser.add_argument("--backend", default="auto", help="backend of compress and nsa_attention")
    parser.add_argument("--kernels", action="store_true", help="also the device time of kernels")
    parser.add_argument("--launches", type=int, default=0, help="calls to compare, not to time")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument("--commit", metavar="NAME", help="commit to record if git is not available")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

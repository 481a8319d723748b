"""The torch path against dense causal SDPA on the CPU: time in one run, and peak memory.

`python bench/bench_torch.py [--lengths 4096 8192] [--repeats 5]`; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch
from torch import Tensor

import nsa
from bench.attention.cases import Case, Shape, make_inputs
from bench.attention.peers import call_dense, call_nsa
from nsa.config.load import StrictParser

SHAPE = Shape(8, 2, 64, 64)


def main(argv: list[str] | None = None) -> int:
    """Measure time here and memory in fresh processes, print a table and a JSON line."""
    args = _parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.peak_of:
        print(_peak_mib(args.peak_of, args.lengths[0]))
        return 0
    rows = [_measure(length, args) for length in args.lengths]
    print(f"torch {torch.__version__}, {args.threads} threads, {SHAPE}")
    print(f"{'S':>6} {'dense ms':>9} {'nsa ms':>8} {'ratio':>6} {'dense MiB':>10} {'nsa MiB':>8}")
    for row in rows:
        print(
            f"{row['S']:>6} {row['dense_ms']:>9.0f} {row['nsa_ms']:>8.0f} {row['ratio']:>6.2f} "
            f"{row['dense_mib']:>10.0f} {row['nsa_mib']:>8.0f}"
        )
    print(json.dumps({"torch": torch.__version__, "threads": args.threads, "rows": rows}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak-of", choices=["dense", "nsa"], help=argparse.SUPPRESS)
    return parser


def _measure(length: int, args: argparse.Namespace) -> dict[str, float]:
    """Forward and backward of the whole attention, alternating with dense; medians."""
    inputs = _inputs(length)
    dense, ours = [], []
    for _ in range(args.repeats + 1):
        dense.append(_seconds(call_dense, inputs))
        ours.append(_seconds(_ours, inputs))
    dense_s, ours_s = statistics.median(dense[1:]), statistics.median(ours[1:])
    return {
        "S": length,
        "dense_ms": dense_s * 1e3,
        "nsa_ms": ours_s * 1e3,
        "ratio": ours_s / dense_s,
        "dense_mib": _peak_in_new_process("dense", length, args),
        "nsa_mib": _peak_in_new_process("nsa", length, args),
    }


def _inputs(length: int) -> list[Tensor]:
    """q, six raw K/V, gates; all with gradients."""
    return make_inputs(Case(SHAPE, 1, length, repeats=1), torch.float32, "cpu")


def _ours(inputs: list[Tensor]) -> Tensor:
    """Mean compression of raw K/V, then all three branches."""
    return call_nsa(inputs, nsa.BlockSpec(), backend="torch")


def _seconds(attention: Callable[[list[Tensor]], Tensor], inputs: list[Tensor]) -> float:
    for x in inputs:
        x.grad = None
    start = time.perf_counter()
    out = attention(inputs)
    out.backward(torch.ones_like(out))
    return time.perf_counter() - start


def _peak_in_new_process(what: str, length: int, args: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--peak-of", what, "--lengths", str(length)]
    command += ["--threads", str(args.threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _peak_mib(what: str, length: int) -> float:
    """Memory that one forward and backward adds to the inputs at its peak (Linux)."""
    inputs = _inputs(length)
    before = _status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    _seconds(call_dense if what == "dense" else _ours, inputs)
    return _status_mib("VmHWM") - before


def _status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"/proc/self/status has no {field}; peak memory needs Linux")


if __name__ == "__main__":
    sys.exit(main())

"""The whole attention, forward and backward, against dense causal SDPA, side by side in one run.

`python bench/bench_prefill.py [--config FILE | --shape Hq,Hkv,Dk,Dv] [--lengths 4096 8192]`.
Ours is mean compression of raw K/V plus nsa_attention; dense is SDPA with the backends named.
Times are medians of eager calls in ms; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa
from nsa.config import StrictParser, load_config
from nsa.ops import plan_attention

DENSE = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
}


class Shape(NamedTuple):
    """Heads and head dims."""

    Hq: int
    Hkv: int
    Dk: int
    Dv: int


def main(argv: list[str] | None = None) -> int:
    """Measure every length, print a table and a JSON line."""
    args = _parser().parse_args(argv)
    shape, spec = _shape_and_spec(args)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"{device}, torch {torch.__version__}, {dtype}, {shape}, {spec}")
    print(plan_attention(args.device, dtype, args.backend, (shape.Dk, shape.Dv)))
    rows = [_measure(length, shape, spec, dtype, args) for length in args.lengths]
    for row in rows:
        print("  ".join(f"{name} {value:.5g}" for name, value in row.items()))
    print(
        json.dumps({"device": device, "torch": torch.__version__, **shape._asdict(), "rows": rows})
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = StrictParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", metavar="FILE", help="take heads and blocks from a config")
    parser.add_argument("--shape", default="12,2,64,64", help="Hq,Hkv,Dk,Dv without a config")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--backend", default="auto", help="of nsa_attention")
    parser.add_argument("--dense", nargs="+", choices=list(DENSE), default=None)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default)
    return parser


def _shape_and_spec(args: argparse.Namespace) -> tuple[Shape, nsa.BlockSpec]:
    if not args.config:
        return Shape(*(int(part) for part in args.shape.split(","))), nsa.BlockSpec()
    cfg = load_config(args.config)
    sizes = Shape(cfg.model.n_heads, cfg.model.n_kv_groups, cfg.model.d_k, cfg.model.d_v)
    return sizes, nsa.BlockSpec(cfg.nsa.l, cfg.nsa.d, cfg.nsa.l_sel, cfg.nsa.n_sel, cfg.nsa.w)


def _measure(
    length: int, shape: Shape, spec: nsa.BlockSpec, dtype: torch.dtype, args: argparse.Namespace
) -> dict[str, float]:
    inputs = _inputs(length, shape, dtype, args.device)

    def ours() -> Tensor:
        q, k_raw, v_raw, k_sel, v_sel, k_win, v_win, gates = inputs
        k_cmp = nsa.compress(k_raw, spec, backend=args.backend)
        v_cmp = nsa.compress(v_raw, spec, backend=args.backend)
        tensors = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
        return nsa.nsa_attention(*tensors, spec, backend=args.backend)

    def dense() -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in inputs[:3])
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    row = {"S": float(length), **_times("nsa", ours, inputs, args)}
    if args.device == "cuda":
        row["nsa_peak_gb"] = _peak_gb(ours)
    for name in args.dense or (["cudnn", "flash"] if args.device == "cuda" else ["math"]):
        with sdpa_kernel(DENSE[name]):
            row |= _times(name, dense, inputs, args)
    return row


def _inputs(length: int, shape: Shape, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, six raw K/V, gates (fp32); all with gradients."""
    torch.manual_seed(0)
    kv = 3 * [(shape.Hkv, shape.Dk), (shape.Hkv, shape.Dv)]
    sizes = [(1, length, *size) for size in [(shape.Hq, shape.Dk), *kv]]
    tensors = [torch.randn(size, device=device).to(dtype) for size in sizes]
    tensors.append(torch.randn(1, length, shape.Hq, 3, device=device).softmax(dim=-1))
    return [x.requires_grad_() for x in tensors]


def _times(
    name: str, attention: Callable[[], Tensor], inputs: list[Tensor], args: argparse.Namespace
) -> dict[str, float]:
    grad = torch.randn_like(attention())

    def both() -> None:
        torch.autograd.grad(attention(), inputs, grad, allow_unused=True)

    with torch.no_grad():
        forward = _median_ms(attention, args)
    return {f"{name}_fwd_ms": forward, f"{name}_both_ms": _median_ms(both, args)}


def _median_ms(function: Callable[[], object], args: argparse.Namespace) -> float:
    times = []
    for _ in range(args.repeats + 2):
        if args.device == "cpu":
            start = time.perf_counter()
            function()
            times.append((time.perf_counter() - start) * 1e3)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def _peak_gb(attention: Callable[[], Tensor]) -> float:
    """Memory that a forward and backward adds to the inputs at its peak."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention()
    out.backward(torch.ones_like(out))
    return (torch.cuda.max_memory_allocated() - before) / 1e9


if __name__ == "__main__":
    sys.exit(main())

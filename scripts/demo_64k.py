"""A long context through NSA: chunked prefill with scaled positions, then one decode step.

`python scripts/demo_64k.py --S 65536 --prefill_tile 4096 --rope_scale 8.0 --use_fa2 1` prints the
device, the shapes and `prefill_time_ms=... reads_total=...`. The input is made tile by tile, so
memory is that of the cache and of one tile; it is estimated before anything is allocated. On a GPU
everything runs twice: the first pass compiles kernels and is reported separately.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import argparse

import torch

from nsa import BlockSpec, NSAAttention
from nsa.config import BAD_INPUT, StrictParser
from nsa.config.env import check_environment
from nsa.model import NSACache

NO_FA2 = "no effect: prefill through a cache has its own tiles and uses no FlashAttention kernel"


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; exit code 1 if the counted reads differ from the formula."""
    args = _parser().parse_args(arguments)
    try:
        check_environment()
        spec = BlockSpec(l=args.l, d=args.d, l_sel=args.l_sel, n_sel=args.n_sel, w=args.w)
        device = _device(args.device)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        needed = _check(args, spec, device, dtype)
        attn = _attention(args, device, dtype)
    except ValueError as error:  # bad input, by the convention of this package
        print(f"demo_64k: error: {error}", file=sys.stderr)
        return BAD_INPUT
    first_ms = 0.0
    if device.type == "cuda":
        first_ms = _read(attn, attn.new_cache(args.B, args.S), args)
    cache = attn.new_cache(args.B, args.S)
    elapsed_ms = _read(attn, cache, args)
    reads = cache.last_reads.sum(dim=-1)  # [B, Hkv]
    reads_total, expected = int(reads.max()), spec.num_reads(args.S)
    flash = f"use_fa2={args.use_fa2}" + (f" ({NO_FA2})" if args.use_fa2 else "")
    print("-- demo_64k summary --")
    print(f"device: {device} ({_name(device)}), {str(dtype).removeprefix('torch.')}")
    print(
        f"B={args.B} S={args.S} dim={args.dim} heads={args.heads} G={args.groups} dk={args.dk} "
        f"dv={args.dv}"
    )
    print(f"l={spec.l} d={spec.d} l_sel={spec.l_sel} n_sel={spec.n_sel} w={spec.w}")
    print(f"rope_scale={args.rope_scale} prefill_tile={args.prefill_tile} {flash}")
    print(f"cache_mib={cache.nbytes() / 2**20:.1f} memory_estimate_mib={needed / 2**20:.1f}")
    if device.type == "cuda":
        print(f"peak_mib={torch.cuda.max_memory_allocated(device) / 2**20:.1f}")
        print(f"first_time_ms={first_ms:.2f} (includes compilation)")
    print(f"expected reads of the last token: {expected} per KV head")
    print(f"prefill_time_ms={elapsed_ms:.2f} reads_total={reads_total}")
    return 0 if (reads == expected).all() else 1


def memory_bytes(args: argparse.Namespace, spec: BlockSpec, size: int) -> int:
    """The cache, and what a tile of queries holds: nothing of S x S, nor of S x dim."""
    token = args.groups * (args.dk + args.dv)
    cached = args.S + spec.num_cmp(args.S) + min(spec.w, args.S) + spec.l
    tile = min(args.prefill_tile or args.S, args.S)
    width = 4 * args.dim + 2 * (args.heads * (args.dk + args.dv) + 3 * token)
    logits = 4 * 128 * args.heads * (spec.num_cmp(args.S) + spec.w + spec.n_sel * spec.l_sel)
    fetched = 128 * spec.n_sel * spec.l_sel * token * (size + 4)
    return args.B * (cached * token * size + tile * width * 4 + 4 * logits + fetched)


def _parser() -> StrictParser:
    parser = StrictParser(prog="demo_64k", description=(__doc__ or "").splitlines()[0])
    sizes = dict(S=65536, B=1, dim=512, heads=8, groups=2, dk=64, dv=64)
    blocks = dict(l=32, d=16, l_sel=64, n_sel=8, w=4096)
    for name, default in {**sizes, **blocks}.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help="(%(default)s)"
        )
    scale = "positions are divided by this (8)"
    parser.add_argument("--rope_scale", type=float, default=8.0, metavar="X", help=scale)
    tile = "tokens per prefill chunk; 0: all at once (4096)"
    parser.add_argument("--prefill_tile", type=int, default=4096, metavar="N", help=tile)
    parser.add_argument("--use_fa2", type=int, choices=(0, 1), default=1, help=NO_FA2)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    return parser


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name} is not known; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda") or (device.index or 0) >= torch.cuda.device_count() > 0:
        raise ValueError(f"--device {name} does not exist here; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this machine has no CUDA device; use cpu")
    return device


def _check(
    args: argparse.Namespace, spec: BlockSpec, device: torch.device, dtype: torch.dtype
) -> int:
    """Refuse sizes below 1 and what cannot fit; the estimate of memory in bytes."""
    for name in ("S", "B"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} is below 1; use 1 or more")
    if args.prefill_tile < 0:
        raise ValueError(
            f"--prefill_tile {args.prefill_tile} is below 0; use 0 for the whole prompt, or more"
        )
    needed = memory_bytes(args, spec, dtype.itemsize)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        raise ValueError(
            f"S={args.S} and B={args.B} need about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} "
            f"GiB are free on {device}; use a smaller --S, --B or --prefill_tile"
        )
    return needed


def _attention(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> NSAAttention:
    torch.manual_seed(0)
    sizes = (args.dim, args.heads, args.groups, args.dk, args.dv)
    blocks = (args.l, args.d, args.l_sel, args.n_sel, args.w)
    attn = NSAAttention(*sizes, *blocks, rope_scale=args.rope_scale)
    return attn.to(device=device, dtype=dtype).eval()


def _read(attn: NSAAttention, cache: NSACache, args: argparse.Namespace) -> float:
    """All tokens but one by prefill, the last by a decode step, which counts its reads; ms."""
    weight = attn.qkv.weight
    tile = args.prefill_tile or args.S
    generator = torch.Generator(weight.device).manual_seed(0)

    def tokens(num: int) -> torch.Tensor:  # [B, num, dim]
        size = (args.B, num, args.dim)
        return torch.randn(size, generator=generator, device=weight.device, dtype=weight.dtype)

    _synchronize(weight.device)
    start = time.perf_counter()
    while (left := args.S - 1 - cache.length) > 0:
        attn.prefill(tokens(min(tile, left)), cache)
    attn.step(tokens(1), cache)
    _synchronize(weight.device)
    return (time.perf_counter() - start) * 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_name(device) if is_gpu else f"{torch.get_num_threads()} threads"


if __name__ == "__main__":
    sys.exit(main())

"""Seconds of the first forward and backward pass on a GPU, and of the first at other lengths.

`python bench/bench_first_call.py [--shapes 12/2/64,64/4/128] [--lengths 4096,10000] [--json FILE]`

Each row is a process of its own, whose time starts after its imports and after a matrix product
(CUDA is up). `one by one` compiles each kernel when it is launched, into an empty cache; `ahead`
is what the operator does: it compiles all of them on threads first; `from the cache` is a new
process after that. The loss is a scalar: a backward pass from a tensor makes torch import sympy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

from nsa.config import StrictParser
from nsa.config.describe import text_table
from nsa.config.env import changed
from nsa.config.load import REPOSITORY
from nsa.records.env import git_commit

SHAPES = "12/2/64,64/4/128,32/8/128"
LENGTHS = "4096,8192,10000,32768"
WAYS = ("one by one", "ahead", "from the cache")


def main() -> int:
    args = _parse()
    if args.child:
        print(json.dumps(_measure(args.child, args.shapes, _numbers(args.lengths))))
        return 0
    lengths = _numbers(args.lengths)
    rows = [("Hq/Hkv/D", "kernels", *(f"{n}, s" for n in lengths))]
    results = []
    for shape in args.shapes.split(","):
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            for way, cache in zip(WAYS, (first, second, second), strict=True):
                found = _in_child(way, shape, args.lengths, cache)
                results.append(found)
                rows.append((shape, way, *(f"{s:.2f}" for s in found["seconds"])))
    print(text_table(rows, right=range(2, len(rows[0]))))
    text = json.dumps({"commit": git_commit(REPOSITORY), "results": results})
    print(text)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0


def _parse() -> Any:
    parser = StrictParser(description=__doc__)
    parser.add_argument("--shapes", default=SHAPES, help=f"heads/KV heads/dim; default: {SHAPES}")
    parser.add_argument("--lengths", default=LENGTHS, help=f"in this order; default: {LENGTHS}")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--child", choices=WAYS, help="measure here, in this way")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _in_child(way: str, shape: str, lengths: str, cache: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", way, "--shapes", shape, "--lengths", lengths]
    environ = changed({"TRITON_CACHE_DIR": cache})
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(way: str, shape: str, lengths: list[int]) -> dict[str, Any]:
    import torch
    import triton

    from nsa.ops.triton import operators

    if way == "one by one":
        operators._compile_once = lambda *_: None
    heads = tuple(_numbers(shape.replace("/", ",")))
    square = torch.ones(8, 8, device="cuda")
    torch.cuda.synchronize((square @ square).device)
    seconds = []
    for length in lengths:
        began = time.perf_counter()
        _forward_backward(length, *heads)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {
        "way": way,
        "shape": shape,
        "lengths": lengths,
        "seconds": seconds,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cpus": len(os.sched_getaffinity(0)),
    }


def _forward_backward(length: int, num_heads: int, num_groups: int, dim: int) -> None:
    import torch

    from nsa import BlockSpec, compress, nsa_attention

    def new(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16).requires_grad_()

    spec = BlockSpec()
    q, gates = new(1, length, num_heads, dim), new(1, length, num_heads, 3)
    k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = (new(1, length, num_groups, dim) for _ in range(6))
    out = nsa_attention(
        q, compress(k_cmp, spec), compress(v_cmp, spec), k_sel, v_sel, k_win, v_win, gates, spec
    )
    out.float().square().mean().backward()


if __name__ == "__main__":
    sys.exit(main())

"""Times `nsa.sparse_attention` with a given index, and dense attention beside it.

`python bench/bench_sparse.py [--rows 64/4/128:128:16:65536,...] [--rules 64/4/128:65536]
[--json FILE]`

A row is Hq/Hkv/D:block:n:S. Neighbouring queries share their blocks, as the selections of trained
models do (bench/attention/selections.py). The time is that of a CUDA graph on a GPU, of an eager
call on a CPU; packing, sorting and inverting the index is inside it. Each row also says how far its
output is from the torch path on its first tokens: a fast wrong kernel is no use. `--rules` also
times the index of each rule, and the KL loss of msa, forward and backward: a fast attention behind
a slow score is no use either.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without PYTHONPATH, too

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa
from bench.attention.cases import Case, Shape
from bench.attention.selections import clustered
from bench.timing import graph_ms, median_ms
from nsa.config import StrictParser
from nsa.config.describe import text_table
from nsa.config.load import REPOSITORY
from nsa.model.rules import MSARule, Span, make_rule
from nsa.records.env import git_commit

ROWS = (
    "64/4/128:128:16:65536,64/4/128:64:16:65536,32/8/128:128:16:65536,32/8/128:128:16:16384,"
    "12/2/64:64:16:65536"
)
RULES = (("nsa", "", 64), ("pooled", "infllm", 64), ("pooled", "moba", 64), ("msa", "", 128))
"""Rule, pool, block."""
WIDTH = 1024
"""Of the input that an indexer reads."""
CHECKED = 2048
"""Tokens of a row that are compared with the torch path."""
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


class Row(NamedTuple):
    """Sizes of a call."""

    shape: Shape
    block: int
    n: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Row:
        heads, block, n, length = text.split(":")
        num_heads, num_groups, dim = (int(x) for x in heads.split("/"))
        return cls(Shape(num_heads, num_groups, dim, dim), int(block), int(n), int(length))


def main() -> int:
    args = _parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = args.backend or ("triton" if device == "cuda" else "torch")
    head = ("Hq/Hkv/D", "block", "n", "S", "forward, ms", "both, ms", "dense, ms", "ratio", "error")
    table, results = [head], []
    for text in args.rows.split(","):
        found = measure(Row.parse(text), backend, device, args.repeats)
        results.append({"row": text, **found})
        times = (_number(found[name]) for name in ("forward_ms", "both_ms", "dense_ms"))
        ratio = _ratio(found["dense_ms"], found["both_ms"])
        table.append((*text.split(":"), *times, ratio, f"{found['error']:.1e}"))
        print(text_table([head, table[-1]], right=range(1, len(head))), flush=True)
    print(text_table(table, right=range(1, len(head))))
    rules = [rule_times(text, device, args.repeats) for text in args.rules.split(",") if text]
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    facts = {"device": where, "torch": torch.__version__, "commit": git_commit(REPOSITORY)}
    result = json.dumps({**facts, "backend": backend, "results": results, "rules": rules})
    print(result)
    if args.json:
        Path(args.json).write_text(result + "\n", encoding="utf-8")
    return 0


def measure(row: Row, backend: str, device: str, repeats: int) -> dict[str, Any]:
    """Times of one row, and its error."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)

    def new(heads: int) -> Tensor:
        size = (1, row.length, heads, row.shape.Dk)
        return torch.randn(size, device=device, dtype=dtype).requires_grad_()

    q, k, v = new(row.shape.Hq), new(row.shape.Hkv), new(row.shape.Hkv)
    spec = nsa.BlockSpec(row.block, row.block, row.block, row.n, 1)
    index = clustered(Case(row.shape, 1, row.length, repeats), spec).to(device)
    dout = torch.randn_like(q)

    def sparse(backend: str = backend) -> Tensor:
        return nsa.sparse_attention(q, k, v, index, block=row.block, backend=backend)

    def dense() -> Tensor:
        q_heads, *kv = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(FUSED) if device == "cuda" else sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                q_heads, kv[0], kv[1], is_causal=True, enable_gqa=True
            )

    def both(forward: Callable[[], Tensor], grad: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), (q, k, v), grad)

    clock = _clock(device, repeats)
    with torch.no_grad():
        forward_ms = clock(sparse)
    return {
        "forward_ms": forward_ms,
        "both_ms": clock(both(sparse, dout)),
        "dense_ms": clock(both(dense, dout.transpose(1, 2))),
        "error": _error(row, (q, k, v, index), backend),
    }


def rule_times(text: str, device: str, repeats: int) -> dict[str, Any]:
    """Milliseconds of each rule's index for heads and a length, Hq/Hkv/D:S, and of msa's KL."""
    heads, length = text.split(":")
    num_heads, num_groups, dim = (int(x) for x in heads.split("/"))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)

    def new(*size: int) -> Tensor:
        return torch.randn(1, int(length), *size, device=device, dtype=dtype)

    q, k, x = new(num_heads, dim), new(num_groups, dim), new(WIDTH)
    table, found = [("rule", "block", "ms")], {}
    for name, pool, block in RULES:
        spec = nsa.BlockSpec(l_sel=block, num_first=1, num_local=2)
        rule = make_rule(
            name, spec, pool=pool, pool_block=512, dim=WIDTH, num_groups=num_groups, d_index=dim,
            rope_base=10000.0, rope_scale=1.0,
        )  # fmt: skip
        assert rule is not None
        rule.to(device, dtype)
        for backend in ("auto", "triton") if device == "cuda" else ("auto",):
            rule.backend = backend
            label = " ".join(word for word in (name, pool, backend) if word != "auto").strip()
            with torch.no_grad():
                # Not a graph: packing and host decisions of a rule are part of its time.
                ms = median_ms(partial(rule.index, q, k, x), repeats, device)
            found[label] = ms
            table.append((label, str(block), f"{ms:.2f}"))
        if isinstance(rule, MSARule):
            ms = median_ms(_kl_step(rule, q, k, x), repeats, device)
            found["msa KL"] = ms
            table.append(("msa KL, both", str(block), f"{ms:.2f}"))
    print(text_table(table, right=range(1, 3)), flush=True)
    return {"shape": text, "ms": found}


def _kl_step(rule: MSARule, q: Tensor, k: Tensor, x: Tensor) -> Callable[[], object]:
    """The loss of an indexer after an attention, and its gradient."""
    with torch.no_grad():
        index = rule.index(q, k, x)
        _, lse = nsa.sparse_attention(q, k, k, index, block=rule.spec.l_sel, return_lse=True)

    def run() -> None:
        asked, keys = rule.queries(q, x, Span()), rule.summarize(k, x, Span())
        rule.loss(q, k, index, lse, asked, keys).backward()

    return run


def _clock(device: str, repeats: int) -> Callable[[Callable[[], object]], float | str]:
    if device == "cuda":
        return lambda function: graph_ms(function, repeats)
    return lambda function: median_ms(function, repeats, device)


def _error(row: Row, tensors: tuple[Tensor, ...], backend: str) -> float:
    """Largest difference of the first outputs from the torch path in fp32, over their largest."""
    with torch.no_grad():
        q, k, v, index = (x[:, :CHECKED] for x in tensors)
        out = nsa.sparse_attention(q, k, v, index, block=row.block, backend=backend)
        wide_q, wide_k, wide_v = (x.float() for x in (q, k, v))
        wanted = nsa.sparse_attention(
            wide_q, wide_k, wide_v, index, block=row.block, backend="torch"
        )
    return float((out.float() - wanted).abs().max() / wanted.abs().max())


def _ratio(dense: float | str, ours: float | str) -> str:
    known = not isinstance(dense, str) and not isinstance(ours, str)
    return f"{dense / ours:.1f}x" if known else "-"  # type: ignore[operator]


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}"


def _parse() -> Any:
    parser = StrictParser(description=__doc__)
    parser.add_argument("--rows", default=ROWS, help=f"Hq/Hkv/D:block:n:S,...; default: {ROWS}")
    parser.add_argument("--rules", default="", help="also time the rules: Hq/Hkv/D:S,...")
    parser.add_argument("--backend", default="", help="triton on a GPU, torch on a CPU")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls; default: 5")
    parser.add_argument("--json", help="also write the result to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

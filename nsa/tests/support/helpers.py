"""Inputs, comparisons and paths that many tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import BlockSpec, NSAAttention, nsa_attention
from nsa.ops import reference
from nsa.ops.eager import attention, rows

BACKENDS = ("reference", "torch")
ZERO = 1e-12
"""What float64 leaves of a gradient that is 0 is below this."""
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


@dataclass(frozen=True)
class Case:
    """One shape: sizes, block sizes, and the lengths of packed documents (none: one document)."""

    spec: BlockSpec
    S: int
    B: int = 1
    Hkv: int = 2
    G: int = 2
    Dk: int = 8
    Dv: int = 8
    docs: tuple[int, ...] = ()

    def __str__(self) -> str:
        s = self.spec
        docs = f"-docs{'+'.join(map(str, self.docs))}" if self.docs else ""
        return (
            f"B{self.B}-S{self.S}-Hkv{self.Hkv}-G{self.G}-Dk{self.Dk}-Dv{self.Dv}"
            f"-l{s.l}-d{s.d}-ls{s.l_sel}-n{s.n_sel}-w{s.w}{docs}"
        )

    @property
    def doc_lens(self) -> list[int]:
        return list(self.docs) or [self.S]

    @property
    def cu_seqlens(self) -> Tensor | None:
        if not self.docs:
            return None
        return torch.tensor([0, *self.docs]).cumsum(0).to(torch.int32)


def make_inputs(
    case: Case, dtype: torch.dtype = torch.float64, seed: int = 0, *, grad: bool = False
) -> dict[str, Tensor]:
    """Random tensors of nsa_attention; gates are of ordinary size, some below 0 and some 0."""
    generator = torch.Generator().manual_seed(seed)
    num_cmp = sum(case.spec.num_cmp(length) for length in case.doc_lens)

    def normal(*size: int) -> Tensor:
        x = torch.randn(*size, generator=generator, dtype=torch.float64)
        return x.to(dtype)

    heads = case.Hkv * case.G
    tensors = {
        "q": normal(case.B, case.S, heads, case.Dk),
        "k_cmp": normal(case.B, num_cmp, case.Hkv, case.Dk),
        "v_cmp": normal(case.B, num_cmp, case.Hkv, case.Dv),
        "k_sel": normal(case.B, case.S, case.Hkv, case.Dk),
        "v_sel": normal(case.B, case.S, case.Hkv, case.Dv),
        "k_win": normal(case.B, case.S, case.Hkv, case.Dk),
        "v_win": normal(case.B, case.S, case.Hkv, case.Dv),
        "gates": normal(case.B, case.S, heads, 3).softmax(dim=-1),
    }
    signs = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.0], dtype=dtype)
    gates = tensors["gates"]
    tensors["gates"] = gates * signs[torch.randint(5, gates.shape, generator=generator)]
    return {name: x.requires_grad_(grad) for name, x in tensors.items()}


def careless_selection(case: Case) -> Tensor:  # [B, S, Hkv, n_sel] int32
    """Blocks named by lot: repeated, in no order, some of the future, some places empty."""
    generator = torch.Generator().manual_seed(7)
    num_blocks = case.spec.num_blocks(max(case.doc_lens))
    size = (case.B, case.S, case.Hkv, case.spec.n_sel)
    return torch.randint(-1, num_blocks, size, generator=generator, dtype=torch.int32)


def run(case: Case, inputs: dict[str, Any], backend: str, **options: Any) -> Any:
    """nsa_attention on a case; with return_selection=True a pair."""
    return nsa_attention(
        **inputs, spec=case.spec, cu_seqlens=case.cu_seqlens, backend=backend, **options
    )


def run_with_gradients(
    case: Case, inputs: dict[str, Tensor], backend: str, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and the gradients of a fixed weighted sum of it for every input."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    out = run(case, leaves, backend, **options)
    index = torch.arange(out.numel(), dtype=torch.float64, device=out.device)
    weight = torch.cos(index * 0.7).view_as(out)
    out.backward(weight.to(out.dtype))
    return out.detach(), {name: x.grad for name, x in leaves.items() if x.grad is not None}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value (0 for empty tensors).

    Where everything expected is 0, as the gradient of q with a single key, rounding is all that a
    path has to show, and the difference is taken over 1e-2.
    """
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    return difference / (scale if scale > ZERO else 1e-2)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str = "output") -> None:
    """Same shape, and a relative error of at most `tolerance`; prints both kinds of error."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} against {expected.shape}"
    assert actual.isfinite().all(), f"{what} is not finite"
    error = relative_error(actual, expected)
    absolute = (actual.double() - expected.double()).abs().max().item() if actual.numel() else 0.0
    assert error <= tolerance, (
        f"{what}: relative error {error:.3g} (absolute {absolute:.3g}) above {tolerance:.3g}"
    )


def assert_fair_selection(case: Case, inputs: dict[str, Tensor], selection: Tensor) -> float:
    """Hold a rounded path's selection to the oracle's scores; return the share of rows that differ.

    Exact: forced blocks, count, causality, order. Ranked blocks: nothing chosen scores below the
    n-th best by more than eps, nothing left out scores above it by more than eps.
    """
    args = (inputs["q"], inputs["k_cmp"], case.spec)
    scale = case.Dk**-0.5
    scores = reference.block_scores(*args, scale=scale, doc_lens=case.doc_lens)
    expected = reference.select_blocks(*args, scale=scale, doc_lens=case.doc_lens)
    start = 0
    for score in scores:
        rows_of_doc = slice(start, start + score.shape[1])
        _assert_fair_document(score, expected[:, rows_of_doc], selection[:, rows_of_doc], case.spec)
        start = rows_of_doc.stop
    return (expected != selection).any(dim=-1).double().mean().item()


def _assert_fair_document(
    score: Tensor, expected: Tensor, selection: Tensor, spec: BlockSpec
) -> None:
    num_blocks = score.shape[-1]
    t = torch.arange(score.shape[1])
    current = (t // spec.l_sel)[None, :, None, None]
    used = selection >= 0
    assert (used.sum(-1) == (expected >= 0).sum(-1)).all(), "another number of blocks"
    assert (selection <= current).all(), "a block of the future"
    ordered = (selection[..., 1:] > selection[..., :-1]) | (selection[..., 1:] == -1)
    assert ordered.all(), "ids do not ascend"
    chosen = torch.zeros(*score.shape[:-1], num_blocks + 1, dtype=torch.bool)
    chosen.scatter_(-1, torch.where(used, selection, num_blocks).long(), True)
    chosen = chosen[..., :-1]
    block = torch.arange(num_blocks)
    forced = (block < spec.num_first) | (block > current - spec.num_local)
    assert (chosen | ~forced | (block > current)).all(), "a forced block is missing"
    free = (block <= current) & ~forced
    last = torch.zeros(*score.shape[:-1], num_blocks + 1, dtype=torch.bool)
    last.scatter_(-1, torch.where(expected >= 0, expected, num_blocks).long(), True)
    s_n = score.masked_fill(~(last[..., :-1] & free), torch.inf).amin(dim=-1, keepdim=True)
    has_ranked = s_n.isfinite()
    s_n = torch.where(has_ranked, s_n, torch.zeros_like(s_n))
    eps = 1e-5 * s_n + 2.0**-100
    too_low = chosen & free & (score < s_n - eps) & has_ranked
    too_high = ~chosen & free & (score > s_n + eps) & has_ranked
    assert not too_low.any(), "a chosen block scores too low"
    assert not too_high.any(), "a better block was left out"


@contextmanager
def torch_path(
    monkeypatch: pytest.MonkeyPatch, *, order: str = "auto", chunk: int | None = None
) -> Iterator[None]:
    """Force the torch path's order of the selected branch (prefix | gather) and its chunk size."""
    with monkeypatch.context() as patch:
        if order != "auto":
            patch.setattr(rows, "FETCH_COST", 0 if order == "gather" else 1 << 60)
        if chunk is not None:
            patch.setattr(attention, "MIN_CHUNK", chunk)
            patch.setattr(attention, "MAX_CHUNK", chunk)
        yield


def make_module(seed: int = 0, **options: Any) -> NSAAttention:
    """A small float64 NSAAttention with gates that differ by token, ready for every path."""
    torch.manual_seed(seed)
    sizes = dict(dim=24, n_heads=6, n_kv_groups=2, d_k=8, d_v=4, l=8, d=4, l_sel=8, n_sel=4, w=11)
    module = NSAAttention(**{**sizes, **options}).double().eval()
    torch.nn.init.normal_(module.gate.weight, std=0.3)
    for name, weight in module.named_parameters():
        if name == "qkv.bias" or name.endswith("_norm.weight"):
            torch.nn.init.normal_(weight, mean=0.5, std=0.3)
    return module


def _chunked(module: NSAAttention, x: Tensor) -> Tensor:
    cache = module.new_cache(x.shape[0], x.shape[1])
    sizes, outs = (7, 1, 16), list[Tensor]()
    while cache.length < x.shape[1]:
        size = sizes[len(outs) % len(sizes)]
        outs.append(module.prefill(x[:, cache.length : cache.length + size], cache))
    return torch.cat(outs, dim=1)


def _prefill(module: NSAAttention, x: Tensor) -> Tensor:
    return module.prefill(x, module.new_cache(x.shape[0], x.shape[1]))


def _decode(module: NSAAttention, x: Tensor) -> Tensor:
    cache = module.new_cache(x.shape[0], x.shape[1])
    return torch.cat([module.step(token, cache) for token in x.split(1, dim=1)], dim=1)


def _half_decode(module: NSAAttention, x: Tensor) -> Tensor:
    cache = module.new_cache(x.shape[0], x.shape[1])
    half = x.shape[1] // 2
    outs = [module.prefill(x[:, :half], cache)] if half else []
    outs += [module.step(token, cache) for token in x[:, half:].split(1, dim=1)]
    return torch.cat(outs, dim=1)


def _forward(module: NSAAttention, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x)


PATHS: dict[str, Callable[[NSAAttention, Tensor], Tensor]] = {
    "forward": _forward,
    "prefill": _prefill,
    "chunked": _chunked,
    "decode": _decode,
    "prefill+decode": _half_decode,
}
"""The ways to run a module over a sequence; all must give the same function."""

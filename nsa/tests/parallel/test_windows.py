"""The window branch apart from the others: every rank's sum is that of the operator on the row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa import BlockSpec, nsa_attention
from nsa.parallel import Split
from nsa.parallel.attention import Keys, Pair, attend_parts, attend_windows
from nsa.parallel.split import num_blocks, window_starts
from nsa.tests.support.helpers import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPEC = BlockSpec(l=8, d=4, l_sel=16, n_sel=3, w=10, num_local=1)
SPLITS = {
    "two ended": Split(80, 2),
    "contiguous": Split(80, 4, "contiguous"),
    "documents": Split(104, 2, "two_ended", (0, 3, 22, 83, 88, 104)),
}


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_both_calls_add_up_to_the_operator_on_the_row(backend: str, name: str) -> None:
    assert worst_error(SPLITS[name], backend, torch.float64) < 1e-12


@pytest.mark.gpu
def test_both_calls_add_up_on_triton() -> None:
    """test_triton_on_cpu.py runs it with TRITON_INTERPRET=1."""
    assert worst_error(Split(40, 2, "contiguous"), "triton", torch.float32) < 1e-5


def worst_error(split: Split, backend: str, dtype: torch.dtype) -> float:
    """Relative error of outputs and of each gradient, over all ranks, against the oracle."""
    torch.manual_seed(0)
    size, heads = split.num_tokens, {"q": (4, 8), "k": (2, 8), "v": (2, 4), "gates": (4, 3)}
    sizes = {name: (1, size, *last) for name, last in heads.items()}
    num_cmp = sum(num_blocks(split, SPEC))
    sizes |= {"k_cmp": (1, num_cmp, 2, 8), "v_cmp": (1, num_cmp, 2, 4)}
    given = {name: torch.randn(*shape, dtype=dtype, device=DEVICE) for name, shape in sizes.items()}
    ours = {name: x.clone().requires_grad_() for name, x in given.items()}
    theirs = {name: x.clone().requires_grad_() for name, x in given.items()}
    outs = [attend_rank(split, rank, ours, backend) for rank in range(split.num_ranks)]
    order = torch.cat([tokens_of(split, rank) for rank in range(split.num_ranks)])
    out, whole = torch.cat(outs, dim=1), attend_row(split, theirs)[:, order]
    out.square().sum().backward()
    whole.square().sum().backward()
    errors = [relative_error(out.detach(), whole.detach())]
    for name, x in ours.items():
        expected = theirs[name].grad
        assert x.grad is not None and expected is not None
        errors.append(relative_error(x.grad, expected))
    return max(errors)


def attend_rank(split: Split, rank: int, x: dict[str, Tensor], backend: str) -> Tensor:
    """As a rank does it, with keys that nobody had to send."""
    own = tokens_of(split, rank)
    starts = window_starts(split, SPEC.w)
    spans = [slice(starts[part], split.tokens(part).stop) for part in split.parts_of(rank)]
    windows: list[Pair] = [(x["k"][:, span], x["v"][:, span]) for span in spans]
    q, gates = x["q"][:, own], x["gates"][:, own]
    near = attend_windows(split, rank, q, windows, gates, SPEC, backend)
    keys = Keys((x["k_cmp"], x["v_cmp"]), (x["k"], x["v"]), None)
    return near + attend_parts(split, rank, q, keys, gates, SPEC, None, backend)[0]


def attend_row(split: Split, x: dict[str, Tensor]) -> Tensor:
    bounds = torch.tensor(split.bounds, dtype=torch.int32) if split.bounds else None
    keys = (x["k_cmp"], x["v_cmp"], x["k"], x["v"], x["k"], x["v"])
    return nsa_attention(x["q"], *keys, x["gates"], SPEC, cu_seqlens=bounds, backend="reference")


def tokens_of(split: Split, rank: int) -> Tensor:
    row = torch.arange(split.num_tokens)
    return torch.cat([row[split.tokens(part)] for part in split.parts_of(rank)])

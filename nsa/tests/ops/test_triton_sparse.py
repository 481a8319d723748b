"""sparse_attention on Triton equals the oracle; on a CPU the kernels run in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import BlockSpec, sparse_attention
from nsa.model.rules import InfLLMRule, MSARule, NSARule, Rule, Span
from nsa.ops.triton import problem, tiles
from nsa.ops.triton.choice import scores
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.selected import by_query
from nsa.tests.ops.test_sparse import Case, make, run

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 50
WHOLE: dict[str, Any] = {
    "num_queries": LENGTH,
    "num_keys": LENGTH,
    "offset": 0,
    "d_k": 8,
    "d_v": 8,
    "batch": 1,
}
LONGER = {"num_queries": 140, "num_keys": 140, "num_groups": 1}
CASES = {
    "block 16": Case(16, 3, **WHOLE | {"batch": 2}),
    "block 48, one for all": Case(48, 1, "1", **WHOLE),
    "block 64, each query head": Case(64, 3, "q", **WHOLE),
    "block 96, groups of one": Case(96, 3, per_group=1, **WHOLE),
    "block 128, groups of 16": Case(128, 1, per_group=16, **WHOLE | LONGER),
    "block 256, odd heads": Case(256, 1, **WHOLE | {"d_k": 12, "d_v": 20}),
    "more ids than blocks": Case(16, 64, "1", **WHOLE),
    "a sink": Case(32, 3, sink=True, **WHOLE),
}
DOCS = [0, 7, 33, 34, LENGTH]


ORDERS = ("by-block", "by-query")


@pytest.fixture
def force_order(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make the kernels take one of their orders of work, whatever the group."""

    def force(order: str) -> None:
        problem._kept.clear()
        monkeypatch.setattr(tiles, "BY_QUERY_FROM", 1 if order == "by-query" else 1 << 30)
        monkeypatch.setattr(problem, "FEW_QUERIES", 0)

    return force


def in_orders(*names: Any) -> list[tuple[Any, str]]:
    """Each in all orders on a GPU; in the interpreter, which takes seconds, in one of them."""
    return [
        (name, order)
        for i, name in enumerate(names)
        for j, order in enumerate(ORDERS)
        if DEVICE == "cuda" or i % 2 == j
    ]


def compare(tensors: dict[str, Any], rest: dict[str, Any], tolerance: float = 1e-4) -> None:
    """Output, log-sum-exp and all gradients, by the largest number of each."""
    tensors = {name: x.detach().to(DEVICE).requires_grad_() for name, x in tensors.items()}
    rest = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in rest.items()}
    wide = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    pairs = zip(run(tensors, "triton", **rest), run(wide, "reference", **rest), strict=True)
    for place, (ours, theirs) in enumerate(pairs):
        assert torch.equal(ours.isfinite(), theirs.isfinite()), place
        finite = theirs.isfinite()
        error = (ours[finite].double() - theirs[finite]).abs().max()
        assert error <= tolerance * max(1.0, theirs[finite].abs().max().item()), place


@pytest.mark.parametrize(("name", "order"), in_orders(*CASES))
def test_outputs_and_gradients_equal_the_oracle(
    name: str, order: str, force_order: Callable[[str], None]
) -> None:
    force_order(order)
    compare(*make(CASES[name], torch.float32))


@pytest.mark.parametrize(("block", "order"), in_orders(16, 96))
def test_documents_do_not_see_each_other(
    block: int, order: str, force_order: Callable[[str], None]
) -> None:
    force_order(order)
    tensors, rest = make(Case(block, 2, **WHOLE), torch.float32)
    bounds = torch.tensor(DOCS, dtype=torch.int32)
    compare(tensors, rest | {"cu_seqlens": bounds})


@pytest.mark.parametrize("order", ORDERS[:1] if DEVICE == "cpu" else ORDERS)
def test_what_is_not_finite_stays_in_its_document(
    order: str, force_order: Callable[[str], None]
) -> None:
    force_order(order)
    tensors, rest = make(Case(16, 3, **WHOLE), torch.float32)
    rest["cu_seqlens"] = torch.tensor(DOCS, dtype=torch.int32)
    tensors = {name: x.detach().to(DEVICE) for name, x in tensors.items()}
    rest = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in rest.items()}
    clean = sparse_attention(**tensors, **rest, backend="triton")
    tensors["v"][:, 20] = torch.nan
    out = sparse_attention(**tensors, **rest, backend="triton")
    for first, stop in pairwise(DOCS):
        if first <= 20 < stop:
            assert out[:, first:stop].isnan().any()
        else:
            assert torch.equal(out[:, first:stop], clean[:, first:stop])


OFFSETS: dict[str, dict[str, Any]] = {
    "one for all": {"q_offset": 21},
    "of each row": {"q_offset": torch.tensor([3, 30], dtype=torch.int32)},
}


@pytest.mark.parametrize(("name", "order"), in_orders(*OFFSETS))
def test_queries_with_an_offset_equal_the_oracle(
    name: str, order: str, force_order: Callable[[str], None]
) -> None:
    force_order(order)
    case = Case(16, 3, **WHOLE | {"batch": 2, "num_queries": 20, "offset": 0})
    tensors, rest = make(case, torch.float32)
    compare(tensors, rest | OFFSETS[name])


@pytest.mark.parametrize(("block", "order"), in_orders(96, 16))
def test_documents_have_offsets_of_their_own(
    block: int, order: str, force_order: Callable[[str], None]
) -> None:
    """One of them has no queries here."""
    force_order(order)
    tensors, rest = make(Case(block, 2, **WHOLE | {"num_queries": 23}), torch.float32)
    places = {"cu_seqlens": [0, 5, 20, 20, 23], "cu_seqlens_k": DOCS, "q_offset": [2, 11, 0, 9]}
    compare(tensors, rest | {name: torch.tensor(x).int() for name, x in places.items()})


def test_what_no_query_sees_may_be_anything(force_order: Callable[[str], None]) -> None:
    force_order("by-block")
    case = Case(16, 3, **WHOLE | {"num_queries": 20, "offset": 10})
    tensors, rest = make(case, torch.float32)
    tensors = {name: x.detach().to(DEVICE) for name, x in tensors.items()}
    rest = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in rest.items()}
    clean = sparse_attention(**tensors, **rest, backend="triton")
    tensors["v"][:, 30:] = torch.nan
    assert torch.equal(sparse_attention(**tensors, **rest, backend="triton"), clean)
    tensors["v"][:, 15] = torch.nan
    out = sparse_attention(**tensors, **rest, backend="triton")
    # Rows from position 15 on whose group reads block 0 are NaN; no other row is another number.
    reads = (rest["index"] == 0).any(dim=-1)  # [B, S, H]
    reads = reads.repeat_interleave(out.shape[2] // reads.shape[2], dim=2)
    assert reads[:, 5:].any() and out[:, 5:][reads[:, 5:]].isnan().all()
    assert ((out == clean) | out.isnan()).all()


@pytest.mark.parametrize("order", ORDERS[-1:] if DEVICE == "cpu" else ORDERS)
def test_only_the_log_sum_exp_may_have_a_gradient(
    order: str, force_order: Callable[[str], None]
) -> None:
    force_order(order)
    tensors, rest = make(Case(16, 3, **WHOLE), torch.float32)
    found = []
    for backend in ("triton", "reference"):
        given = {name: x.detach().to(DEVICE).requires_grad_() for name, x in tensors.items()}
        options = rest | {"index": rest["index"].to(DEVICE)}
        _, lse = sparse_attention(**given, **options, backend=backend, return_lse=True)
        lse[lse.isfinite()].square().sum().backward()
        found.append(given)
    ours, theirs = found
    for name in "qk":
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-4, atol=1e-4)
    assert not ours["v"].grad.any()


def test_the_gradient_of_the_values_alone_needs_no_kernel_for_the_queries(
    force_order: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    force_order("by-query")
    tensors, rest = make(Case(16, 3, **WHOLE), torch.float32)
    tensors = {name: x.detach().to(DEVICE) for name, x in tensors.items()}
    rest = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in rest.items()}

    def only_compiled(given: Problem, q: Tensor, *rest: Any) -> Tensor:
        assert q.is_meta, "dq was computed"  # for other calls of the kind it is compiled ahead
        return backward_q(given, q, *rest)

    backward_q = by_query.backward_q
    monkeypatch.setattr(by_query, "backward_q", only_compiled)
    grads = []
    for backend in ("triton", "reference"):
        v = tensors["v"].clone().requires_grad_()
        out = sparse_attention(**tensors | {"v": v}, **rest, backend=backend)
        grads += torch.autograd.grad(out.square().sum(), v)
    torch.testing.assert_close(*grads, rtol=0, atol=1e-4)


RULES = {
    "nsa": (NSARule(BlockSpec(8, 4, 16, 4, num_local=1)), 2, 6),
    "pooled infllm": (InfLLMRule(BlockSpec(8, 4, 16, 4, num_local=1)), 2, 6),
    "pools longer than blocks": (InfLLMRule(BlockSpec(16, 4, 8, 5)), 1, 4),
    "msa": (
        MSARule(BlockSpec(l_sel=16, n_sel=3, num_first=0, num_local=1), 12, 2, 6, 1e4, 1.0),
        2,
        4,
    ),
    "msa, blocks of 24": (MSARule(BlockSpec(8, 8, 24, 4), 12, 1, 16, 1e4, 1.0), 1, 2),
}


PLACES = {"whole": None, "documents": (0, 7, 90, 150)}
# All on a GPU; in the interpreter, which takes seconds, each rule in one of them.
CHOICES = [
    (name, place)
    for i, name in enumerate(RULES)
    for j, place in enumerate(PLACES)
    if DEVICE == "cuda" or (i + j) % 2
]


@pytest.mark.parametrize(("name", "place"), CHOICES)
def test_rules_choose_by_kernels_what_they_choose_in_torch(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rule, groups, heads), docs = RULES[name], PLACES[place]
    rule = rule.to(DEVICE)
    draw = torch.Generator().manual_seed(5)
    batch = 1 if docs else 2
    q, k, x = (
        torch.randn(batch, 150, *size, generator=draw).to(DEVICE)
        for size in ((heads, 8), (groups, 8), (12,))
    )
    bounds = None if docs is None else torch.tensor(docs, dtype=torch.int32)
    span = Span(0, bounds)
    monkeypatch.setattr(rule, "backend", "torch")
    expected = rule.index(q, k, x, span)
    monkeypatch.setattr(rule, "backend", "triton")
    monkeypatch.setattr(scores, "SCORE_BYTES", 1)  # several chunks of queries
    monkeypatch.setattr(scores, "ROWS", 64)
    monkeypatch.setattr(Rule, "_of_document", lambda *_: pytest.fail("torch chose the blocks"))
    problem._kept.clear()
    assert torch.equal(rule.index(q, k, x, span), expected)
    problem._kept.clear()


@pytest.mark.parametrize("name", RULES if DEVICE == "cuda" else ["pooled infllm"])
def test_rules_choose_by_kernels_nearly_the_same_blocks_in_bf16(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding decides between blocks whose scores are nearly equal, and between no others."""
    rule, groups, heads = RULES[name]
    rule, narrow = rule.to(DEVICE), torch.bfloat16
    draw = torch.Generator().manual_seed(6)
    length = 2000 if DEVICE == "cuda" else 150
    q, k, x = (
        torch.randn(1, length, *size, generator=draw).to(DEVICE, narrow)
        for size in ((heads, 8), (groups, 8), (12,))
    )
    found = []
    for backend in ("torch", "triton"):
        monkeypatch.setattr(rule, "backend", backend)
        with torch.autocast(DEVICE, narrow):
            found.append(rule.index(q, k, x, Span()))
    expected, chosen = found
    same = (chosen[..., None] == expected[..., None, :]).any(-1)
    assert same[chosen >= 0].float().mean() > 0.97
    assert (chosen >= 0).sum() == (expected >= 0).sum()

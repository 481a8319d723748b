"""sparse_attention: the torch path equals the oracle, and the oracle equals dense attention."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nsa import sparse_attention
from nsa.ops.eager import sparse

TOLERANCE = 1e-10


class Case(NamedTuple):
    """Sizes of a call; `heads` are those of the index: 1, g (KV heads) or q (query heads)."""

    block: int
    n: int
    heads: str = "g"
    num_groups: int = 2
    per_group: int = 3
    batch: int = 2
    num_queries: int = 40
    num_keys: int = 70
    offset: Any = 30  # a list: one for each batch element
    d_k: int = 6
    d_v: int = 5
    sink: bool = False


CASES = {
    "block 16": Case(16, 3),
    "block 48, one for all": Case(48, 1, "1"),
    "block 64, each query head": Case(64, 3, "q"),
    "block 96, groups of one": Case(96, 3, per_group=1),
    "block 128, groups of 16": Case(128, 2, per_group=16, num_groups=1),
    "block 256": Case(256, 1, num_keys=300, offset=200),
    "more ids than blocks": Case(16, 64, "1"),
    "unequal offsets": Case(16, 3, offset=[0, 29]),
    "a sink": Case(16, 3, sink=True),
    "a sink for each query head": Case(32, 2, "q", sink=True, offset=[3, 7]),
    "one query": Case(16, 4, num_queries=1, offset=69),
    "no offset": Case(16, 2, num_queries=70, offset=0),
}


def make(case: Case, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors with a gradient, and the other arguments. Ids repeat, are unsorted, end beyond the
    causal edge and beyond the keys, and are -1; the first row has only -1."""
    draw = torch.Generator().manual_seed(case.block * case.n + case.num_queries)

    def new(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=dtype).requires_grad_()

    num_heads = case.num_groups * case.per_group
    heads = {"1": 1, "g": case.num_groups, "q": num_heads}[case.heads]
    tensors = {
        "q": new(case.batch, case.num_queries, num_heads, case.d_k),
        "k": new(case.batch, case.num_keys, case.num_groups, case.d_k),
        "v": new(case.batch, case.num_keys, case.num_groups, case.d_v),
    }
    if case.sink:
        tensors["sink"] = new(num_heads)
    most = -(-case.num_keys // case.block)
    size = (case.batch, case.num_queries, heads, case.n)
    index = torch.randint(-1, most, size, generator=draw, dtype=torch.int32)
    index[:, 0] = -1
    offset = case.offset
    if isinstance(offset, list):
        offset = torch.tensor(offset, dtype=torch.int32)
    return tensors, {"index": index, "block": case.block, "q_offset": offset}


def run(tensors: dict[str, Any], backend: str, **rest: Any) -> list[Tensor]:
    """Output, log-sum-exp, and the gradients of a loss that uses both."""
    out, lse = sparse_attention(**tensors, **rest, backend=backend, return_lse=True)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    seen = torch.where(lse == -math.inf, 0.0, lse)
    loss = (out * weights).sum() + (seen * weights.sum(dim=-1).cos()).sum()
    grads = torch.autograd.grad(loss, list(tensors.values()))
    return [out.detach(), lse.detach(), *grads]


def assert_equal(found: list[Tensor], wanted: list[Tensor], tolerance: float = TOLERANCE) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_torch_path_equals_the_oracle(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, rest = make(case)
    wanted = run(tensors, "reference", **rest)
    for cost in (0, 1 << 30):  # fetched, and in place
        monkeypatch.setattr(sparse, "FETCH_COST", cost)
        for numbers in (1 << 22, 1):  # at once, and one query at a time
            monkeypatch.setattr(sparse, "CHUNK_NUMBERS", numbers)
            assert_equal(run(tensors, "torch", **rest), wanted)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_with_all_blocks_it_is_causal_attention(backend: str) -> None:
    tensors, rest = make(Case(16, 5, num_queries=70, offset=0, d_v=6))
    rest["index"] = torch.arange(5, dtype=torch.int32).expand(2, 70, 1, 5).contiguous()
    q, k, v = (x.transpose(1, 2) for x in tensors.values())
    dense = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    out = sparse_attention(**tensors, **rest, backend=backend)
    torch.testing.assert_close(out, dense, rtol=0, atol=TOLERANCE)
    wanted = torch.autograd.grad(dense.square().sum(), list(tensors.values()))
    found = torch.autograd.grad(out.square().sum(), list(tensors.values()))
    assert_equal([*found], [*wanted])


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_queries_can_be_split_anywhere(backend: str) -> None:
    tensors, rest = make(Case(16, 3, num_queries=70, offset=0))
    whole = run(tensors, backend, **rest)[0]
    for cut in (1, 16, 33):
        parts = [
            sparse_attention(
                tensors["q"][:, rows], tensors["k"], tensors["v"], rest["index"][:, rows],
                block=16, q_offset=rows.start, backend=backend,
            )
            for rows in (slice(0, cut), slice(cut, 70))
        ]  # fmt: skip
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("backend", "cost"), [("reference", 0), ("torch", 0), ("torch", 1 << 30)])
def test_packed_documents_equal_each_alone(
    backend: str, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has no queries here, one begins in the middle of its keys."""
    monkeypatch.setattr(sparse, "FETCH_COST", cost)  # fetched, and in place
    query_lens, key_lens, offsets = (20, 0, 7), (20, 33, 30), (0, 0, 23)
    case = Case(16, 3, batch=1, num_queries=27, num_keys=83)
    tensors, rest = make(case)
    bounds = [torch.tensor([0, *lens]).cumsum(0).to(torch.int32) for lens in (query_lens, key_lens)]
    rest |= {"q_offset": torch.tensor(offsets, dtype=torch.int32)}
    packed = run(tensors, backend, **rest, cu_seqlens=bounds[0], cu_seqlens_k=bounds[1])
    for rows, keys, offset in (
        (slice(0, 20), slice(0, 20), 0),
        (slice(20, 27), slice(53, 83), 23),
    ):
        alone = sparse_attention(
            tensors["q"][:, rows], tensors["k"][:, keys], tensors["v"][:, keys],
            rest["index"][:, rows], block=16, q_offset=offset, backend=backend,
        )  # fmt: skip
        torch.testing.assert_close(packed[0][:, rows], alone, rtol=0, atol=TOLERANCE)
    assert not packed[3][:, 20:53].any()  # nobody saw the keys of the second document


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_outputs_do_not_depend_on_later_keys_even_where_they_are_nan(backend: str) -> None:
    tensors, rest = make(Case(16, 3, num_queries=70, offset=0))
    before = run(tensors, backend, **rest)
    changed = {name: x.detach().clone() for name, x in tensors.items()}
    for name in ("k", "v"):
        changed[name][:, 41:] = math.nan
    after = run({name: x.requires_grad_() for name, x in changed.items()}, backend, **rest)
    assert torch.equal(after[0][:, :41], before[0][:, :41])
    assert after[0][:, 41:].isnan().any()
    assert not after[2][:, :41].isnan().any()  # nor does their gradient


def test_how_keys_are_read_does_not_depend_on_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ways may round differently, though not on every machine."""
    tensors, rest = make(Case(16, 3, num_queries=70, offset=0))
    ways: list[str] = []

    def watch(way: str) -> None:
        kind = getattr(sparse, way)

        def taken(*args: object) -> object:
            ways.append(way)
            return kind(*args)

        monkeypatch.setattr(sparse, way, taken)

    watch("Fetched")
    watch("InPlace")
    run(tensors, "torch", **rest)
    finite = ways.copy()
    with torch.no_grad():
        tensors["k"][:, 41:] = math.nan
        tensors["v"][:, 50:] = math.inf
    run(tensors, "torch", **rest)
    assert finite and ways == 2 * finite


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_query_without_keys_gives_zero_and_has_no_gradient(backend: str) -> None:
    tensors, rest = make(Case(16, 3, sink=True))
    rest["index"].fill_(-1)
    rest["index"][:, 1] = 4  # a block in the future
    out, lse, *grads = run(tensors, backend, **rest)
    assert not out.any() and (lse == -math.inf).all()
    assert not any(grad.any() for grad in grads)


def test_half_precision_has_a_log_sum_exp_in_fp32() -> None:
    tensors, rest = make(CASES["a sink"], torch.bfloat16)
    out, lse = sparse_attention(**tensors, **rest, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    wanted = sparse_attention(**{k: v.double() for k, v in tensors.items()}, **rest)
    assert (out - wanted).abs().max() <= 2**-7 * wanted.abs().max()


def test_ids_that_do_not_exist_read_nothing_outside_k_and_v() -> None:
    tensors, rest = make(Case(16, 3))
    wanted = run(tensors, "torch", **rest)
    index = rest["index"]
    rest["index"] = torch.cat([index, torch.full_like(index, 2**31 // 16 - 1)], dim=-1)
    assert_equal(run(tensors, "torch", **rest), wanted)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "index of another type": ({"index": torch.zeros(2, 40, 2, 3)}, "index is torch.float32; give"),
    "index of another shape": (
        {"index": torch.zeros(2, 40, 4, 3, dtype=torch.int32)},
        r"\[2, 40, H, n\] is needed.*H one of 1, 2, 6",
    ),
    "an index of nothing": ({"index": torch.zeros(2, 40, 2, 0, dtype=torch.int32)}, "n >= 1"),
    "a block of 24": ({"block": 24}, "block=24 is not a multiple of 16 up to 256; use"),
    "a block of 512": ({"block": 512}, "use 256"),
    "a block of 0": ({"block": 0}, "use 16"),
    "an offset beyond the keys": ({"q_offset": 31}, "40 queries and 70 keys.*use 0 to 30"),
    "a negative offset": ({"q_offset": -1}, "use 0 to 30"),
    "one of two offsets": (
        {"q_offset": torch.tensor([0, 31], dtype=torch.int32)},
        "q_offset=31 with 40 queries",
    ),
    "offsets of another shape": (
        {"q_offset": torch.zeros(3, dtype=torch.int32)},
        r"int32 \[2\]: one for each batch element",
    ),
    "a sink for each group": ({"sink": torch.zeros(2, dtype=torch.float64)}, "one logit for each"),
    "documents in a batch": (
        {"cu_seqlens": torch.tensor([0, 40], dtype=torch.int32)},
        "packed documents need B=1",
    ),
    "Triton": (
        {"backend": "triton"},
        "on cpu, the kernels need a CUDA device; use backend='torch'",
    ),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=list(BAD))
def test_bad_input_is_refused_in_three_parts(change: dict[str, Any], message: str) -> None:
    tensors, rest = make(Case(16, 3))
    with pytest.raises(ValueError, match=message):
        sparse_attention(**{**tensors, **rest, **change})


def test_documents_among_queries_and_keys_must_agree() -> None:
    tensors, rest = make(Case(16, 3, batch=1))
    bounds = {n: torch.tensor(n, dtype=torch.int32) for n in ((0, 20, 40), (0, 70), (0, 50, 40))}
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"cu_seqlens": bounds[0, 20, 40]}, "give cu_seqlens_k"),
        ({"cu_seqlens": bounds[0, 20, 40], "cu_seqlens_k": bounds[0, 70]}, "has 2 documents and"),
        ({"cu_seqlens": bounds[0, 50, 40], "cu_seqlens_k": bounds[0, 70]}, "falls from 50 to 40"),
    )
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            sparse_attention(**tensors, **rest, **given)

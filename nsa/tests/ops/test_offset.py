"""nsa_attention with q_offset: any part of the queries gives what the whole gives there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import BlockSpec, compress, nsa_attention

SPEC = BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11)
LENGTH = 61
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
OF_QUERIES = ("q", "gates")
BACKENDS = ("reference", "torch")


def make(length: int = LENGTH, batch: int = 2, bounds: list[int] | None = None) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(length)

    def new(heads: int, dim: int) -> Tensor:
        return torch.randn(batch, length, heads, dim, generator=draw, dtype=torch.float64)

    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    raw_k, raw_v = new(2, 6), new(2, 5)
    tensors = {
        "q": new(4, 6),
        "k_cmp": compress(raw_k, SPEC, cu_seqlens=cu_seqlens),
        "v_cmp": compress(raw_v, SPEC, cu_seqlens=cu_seqlens),
        **{"k_sel": new(2, 6), "v_sel": new(2, 5), "k_win": new(2, 6), "v_win": new(2, 5)},
        "gates": new(4, 3).sigmoid(),
    }
    return {name: tensors[name].requires_grad_() for name in NAMES}


def rows_of(tensors: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The same keys, and some of the queries."""
    return tensors | {name: tensors[name][:, rows] for name in OF_QUERIES}


def gradients(out: Tensor, weight: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((out * weight).sum(), list(tensors.values()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", [1, 8, 30, 60])
def test_two_parts_are_the_whole(backend: str, cut: int) -> None:
    """Outputs, selections, and the sum of the gradients."""
    tensors = make()
    whole, chosen = nsa_attention(**tensors, spec=SPEC, backend=backend, return_selection=True)
    weight = torch.randn(whole.shape, dtype=whole.dtype)
    wanted = gradients(whole, weight, tensors)
    parts = [
        nsa_attention(
            **rows_of(tensors, rows), spec=SPEC, backend=backend, q_offset=rows.start,
            return_selection=True,
        )
        for rows in (slice(0, cut), slice(cut, LENGTH))
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat([out for out, _ in parts], 1), whole, rtol=0, atol=1e-10)
    assert torch.equal(torch.cat([ids for _, ids in parts], 1), chosen)
    found = gradients(torch.cat([out for out, _ in parts], 1), weight, tensors)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_elements_may_have_offsets_of_their_own(backend: str) -> None:
    tensors, offsets = make(), [7, 40]
    whole = nsa_attention(**tensors, spec=SPEC, backend=backend)
    some: dict[str, Any] = {
        name: torch.stack([tensors[name][b, first : first + 20] for b, first in enumerate(offsets)])
        for name in OF_QUERIES
    }
    offset = torch.tensor(offsets, dtype=torch.int32)
    out = nsa_attention(**tensors | some, spec=SPEC, backend=backend, q_offset=offset)
    wanted = torch.stack([whole[b, first : first + 20] for b, first in enumerate(offsets)])
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_may_have_their_own_offsets_and_no_queries(backend: str) -> None:
    bounds = [0, 20, 29, LENGTH]
    tensors = make(batch=1, bounds=bounds)
    keys = torch.tensor(bounds, dtype=torch.int32)
    whole = nsa_attention(**tensors, spec=SPEC, backend=backend, cu_seqlens=keys)
    # Queries 5 to 19 of the first document, none of the second, 10 to 31 of the third.
    places = torch.cat([torch.arange(5, 20), torch.arange(29 + 10, LENGTH)])
    some: dict[str, Any] = {name: tensors[name][:, places] for name in OF_QUERIES}
    out = nsa_attention(
        **tensors | some, spec=SPEC, backend=backend, cu_seqlens_k=keys,
        cu_seqlens=torch.tensor([0, 15, 15, 37], dtype=torch.int32),
        q_offset=torch.tensor([5, 0, 10], dtype=torch.int32),
    )  # fmt: skip
    torch.testing.assert_close(out, whole[:, places], rtol=0, atol=1e-10)


def test_a_given_selection_counts_for_the_queries_that_are_there() -> None:
    tensors = make()
    whole, chosen = nsa_attention(**tensors, spec=SPEC, return_selection=True)
    late = rows_of(tensors, slice(33, LENGTH))
    out = nsa_attention(**late, spec=SPEC, q_offset=33, selection=chosen[:, 33:])
    torch.testing.assert_close(out, whole[:, 33:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["NSA_STRICT_ASSERTS=1", "NSA_SEL_RANGES_V2=0"])
def test_switches_know_the_offset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make()
    whole, chosen = nsa_attention(**tensors, spec=SPEC, return_selection=True)
    monkeypatch.setenv(*name.split("="))
    late = rows_of(tensors, slice(33, LENGTH))
    for given in (None, chosen[:, 33:]):
        out = nsa_attention(**late, spec=SPEC, q_offset=33, selection=given)
        torch.testing.assert_close(out, whole[:, 33:], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (62, "q_offset=62 with 20 queries and 61 keys.*use 0 to 41"),
        (-1, "q_offset=-1.*use 0 to 41"),
        (1.5, "q_offset=1.5 is not an integer"),
        (torch.tensor([1, 2, 3], dtype=torch.int32), r"int32 \[2\]: one for each batch element"),
    ],
)
def test_offsets_beyond_the_keys_are_refused(offset: Any, message: str) -> None:
    tensors = rows_of(make(), slice(0, 20))
    with pytest.raises(ValueError, match=message):
        nsa_attention(**tensors, spec=SPEC, q_offset=offset)

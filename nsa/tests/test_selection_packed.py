"""Packed documents: selection and selected attention equal those of the documents alone."""

import pytest
import torch

from nsa import BlockSpec, select_blocks
from nsa.tests.support.helpers import (
    BACKENDS,
    NAMES,
    Case,
    assert_near,
    careless_selection,
    make_inputs,
    run,
    run_with_gradients,
    torch_path,
)

CASE = Case(BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11), S=150, docs=(3, 40, 8, 99), G=3)


def _documents(inputs: dict[str, torch.Tensor]) -> list[tuple[Case, dict[str, torch.Tensor]]]:
    """The packed inputs cut into one case per document."""
    raw, cmp, parts = 0, 0, []
    for length in CASE.docs:
        num_cmp = CASE.spec.num_cmp(length)
        part = {
            name: x[:, cmp : cmp + num_cmp]
            if name in ("k_cmp", "v_cmp")
            else x[:, raw : raw + length]
            for name, x in inputs.items()
        }
        parts.append((Case(CASE.spec, S=length, G=3), part))
        raw, cmp = raw + length, cmp + num_cmp
    return parts


@pytest.mark.parametrize("backend", BACKENDS)
def test_selection_of_packed_documents_counts_blocks_from_their_start(backend):
    inputs = make_inputs(CASE)
    packed = select_blocks(
        inputs["q"], inputs["k_cmp"], CASE.spec, cu_seqlens=CASE.cu_seqlens, backend=backend
    )
    alone = [
        select_blocks(part["q"], part["k_cmp"], case.spec, backend=backend)
        for case, part in _documents(inputs)
    ]
    assert torch.equal(packed, torch.cat(alone, dim=1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_of_packed_documents_equals_theirs_alone(backend):
    inputs = make_inputs(CASE)
    packed = run(CASE, inputs, backend)
    alone = torch.cat([run(case, part, backend) for case, part in _documents(inputs)], dim=1)
    assert_near(packed, alone, 1e-12)


@pytest.mark.parametrize("order", ["prefix", "gather"])
def test_a_given_selection_is_a_set_of_blocks_on_the_torch_path(order, monkeypatch):
    inputs, selection = make_inputs(CASE), careless_selection(CASE)
    expected, expected_grads = run_with_gradients(CASE, inputs, "reference", selection=selection)
    with torch_path(monkeypatch, order=order, chunk=32):
        out, grads = run_with_gradients(CASE, inputs, "torch", selection=selection)
        _, returned = run(CASE, inputs, "torch", selection=selection, return_selection=True)
    assert torch.equal(returned, selection)
    assert_near(out, expected, 1e-10)
    for name in NAMES:
        assert_near(grads[name], expected_grads[name], 1e-10, f"gradient of {name}")

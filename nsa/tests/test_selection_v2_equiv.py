"""The fast selection (v2) chooses what the reference selection (v1) chooses, on every device."""

import pytest
import torch

from nsa import BlockSpec, select_blocks
from nsa.tests.support.gpu import needs_gpu
from nsa.tests.support.helpers import Case, assert_fair_selection, make_inputs

DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
SHAPES = [
    Case(BlockSpec(l=l, d=d, l_sel=l_sel, n_sel=n_sel, w=8), S=S, Hkv=Hkv, G=G)
    for (l, d, l_sel, n_sel) in [(8, 4, 8, 4), (16, 4, 8, 3), (4, 4, 16, 7), (32, 16, 64, 16)]
    for (S, Hkv, G) in [(1, 1, 1), (63, 2, 3), (64, 1, 8), (257, 2, 2)]
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_float64_selections_are_equal(case, device):
    inputs = {name: x.to(device) for name, x in make_inputs(case).items()}
    v1 = select_blocks(inputs["q"], inputs["k_cmp"], case.spec, backend="reference")
    v2 = select_blocks(inputs["q"], inputs["k_cmp"], case.spec)
    assert torch.equal(v1, v2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_equal_scores_are_broken_alike(case, device):
    """Queries of zero give every visible block the same weight: ties everywhere."""
    inputs = {name: x.to(device) for name, x in make_inputs(case).items()}
    q = torch.zeros_like(inputs["q"])
    v1 = select_blocks(q, inputs["k_cmp"], case.spec, backend="reference")
    v2 = select_blocks(q, inputs["k_cmp"], case.spec)
    assert torch.equal(v1, v2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_float32_selections_are_fair(case, device):
    inputs = make_inputs(case, torch.float32)
    v2 = select_blocks(inputs["q"].to(device), inputs["k_cmp"].to(device), case.spec)
    assert assert_fair_selection(case, inputs, v2.cpu()) <= 0.002


@pytest.mark.parametrize("device", DEVICES)
def test_switch_routes_to_the_reference(device, monkeypatch):
    case = SHAPES[7]
    inputs = {name: x.to(device) for name, x in make_inputs(case).items()}
    fast = select_blocks(inputs["q"], inputs["k_cmp"], case.spec)
    monkeypatch.setenv("NSA_SEL_RANGES_V2", "0")
    monkeypatch.setattr(
        "nsa.ops.eager.attention.select_blocks", None
    )  # would fail if it were called
    assert torch.equal(select_blocks(inputs["q"], inputs["k_cmp"], case.spec), fast)

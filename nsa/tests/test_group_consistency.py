"""All heads of a group share one selection, made from the sum of all their scores."""

import pytest
import torch

from nsa import BlockSpec, select_blocks
from nsa.tests.support.helpers import BACKENDS, Case, make_inputs, run

CASE = Case(BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11), S=120, Hkv=2, G=3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_permuting_the_heads_of_a_group_keeps_the_selection(backend):
    inputs = make_inputs(CASE)
    order = [2, 0, 1, 4, 5, 3]  # within each group of three
    selection = select_blocks(inputs["q"], inputs["k_cmp"], CASE.spec, backend=backend)
    permuted = select_blocks(inputs["q"][:, :, order], inputs["k_cmp"], CASE.spec, backend=backend)
    assert torch.equal(selection, permuted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head", range(6))
def test_every_head_has_a_say_in_its_own_group_only(backend, head):
    inputs = make_inputs(CASE)
    before = select_blocks(inputs["q"], inputs["k_cmp"], CASE.spec, backend=backend)
    inputs["q"][:, :, head] *= -4
    after = select_blocks(inputs["q"], inputs["k_cmp"], CASE.spec, backend=backend)
    own = head // 3
    assert not torch.equal(before[:, :, own], after[:, :, own])
    assert torch.equal(before[:, :, 1 - own], after[:, :, 1 - own])


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_of_a_group_read_the_same_blocks(backend):
    """Equal queries in all heads of a group give equal selected outputs; groups differ."""
    inputs = make_inputs(CASE)
    inputs["q"] = inputs["q"][:, :, :1].expand(-1, -1, 6, -1).contiguous()
    inputs["gates"] = torch.tensor([0.0, 1, 0], dtype=torch.float64).expand_as(inputs["gates"])
    out = run(CASE, inputs, backend)
    torch.testing.assert_close(out[:, :, 0], out[:, :, 1])
    torch.testing.assert_close(out[:, :, 3], out[:, :, 5])
    assert not torch.allclose(out[:, :, 0], out[:, :, 3])

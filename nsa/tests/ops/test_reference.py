"""The oracle against the paper's numbers and against dense attention, by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from nsa import BlockSpec, compress, select_blocks
from nsa.ops import reference
from nsa.tests.support.helpers import Case, make_inputs, run


def test_scores_weigh_the_overlap_in_strides_as_equation_9_does():
    """For l=32, d=16, l'=64 a block hears its five compressed tokens with weights 1, 2, 2, 2, 1."""
    spec = BlockSpec(l=32, d=16, l_sel=64, n_sel=3, w=8)
    length = 256
    num_cmp = spec.num_cmp(length)
    probs = torch.eye(num_cmp, dtype=torch.float64)[None, None]  # row i: all weight on block i
    scores = reference._scores_from_probs(
        torch.cat([probs, probs.new_zeros(1, 1, length - num_cmp, num_cmp)], dim=2), 1, length, spec
    )
    assert scores[0, :num_cmp, 0, 1].tolist() == [0, 0, 0, 1, 2, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0]


def test_compressed_attention_of_one_visible_block_returns_its_value():
    case = Case(BlockSpec(l=4, d=2, l_sel=4, n_sel=3, w=1), S=6, Hkv=1, G=1)
    inputs = make_inputs(case)
    inputs["gates"] = torch.tensor([1.0, 0, 0], dtype=torch.float64).expand(1, 6, 1, 3)
    out = run(case, inputs, "reference")
    assert out[0, :3].abs().max() == 0  # no complete block yet
    torch.testing.assert_close(out[0, 3, 0], inputs["v_cmp"][0, 0, 0])
    torch.testing.assert_close(out[0, 4, 0], inputs["v_cmp"][0, 0, 0])


def test_window_of_one_token_returns_the_token_itself():
    case = Case(BlockSpec(l=4, d=2, l_sel=4, n_sel=3, w=1), S=9)
    inputs = make_inputs(case)
    inputs["gates"] = torch.tensor([0, 0, 1.0], dtype=torch.float64).expand(1, 9, 4, 3)
    expected = inputs["v_win"].repeat_interleave(2, dim=2)
    torch.testing.assert_close(run(case, inputs, "reference"), expected)


@pytest.mark.parametrize("branch", ["sel", "win"])
def test_wide_branches_reproduce_dense_causal_attention(branch):
    case = Case(BlockSpec(l=4, d=2, l_sel=4, n_sel=16, w=64), S=50, G=3, Dv=6)
    inputs = make_inputs(case)
    gate = [0.0, 1, 0] if branch == "sel" else [0.0, 0, 1]
    inputs["gates"] = torch.tensor(gate, dtype=torch.float64).expand_as(inputs["gates"])
    q, k, v = (inputs[name].transpose(1, 2) for name in ("q", f"k_{branch}", f"v_{branch}"))
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(run(case, inputs, "reference"), dense.transpose(1, 2))


def test_scale_multiplies_the_logits_of_every_branch():
    case = Case(BlockSpec(l=4, d=2, l_sel=4, n_sel=3, w=5), S=20)
    inputs = make_inputs(case)
    scaled = {**inputs, "q": inputs["q"] * 3}
    default = 1 / math.sqrt(case.Dk)
    torch.testing.assert_close(
        run(case, inputs, "reference", scale=3 * default), run(case, scaled, "reference")
    )


def test_selection_by_hand():
    """Block 2 gets nearly all compressed weight, so it takes the one free place."""
    spec = BlockSpec(l=4, d=4, l_sel=4, n_sel=4, w=4)
    k_cmp = torch.zeros(1, 7, 1, 2, dtype=torch.float64)
    k_cmp[0, 2, 0, 0] = 50.0
    q = torch.zeros(1, 28, 1, 2, dtype=torch.float64)
    q[..., 0] = 1.0
    selection = select_blocks(q, k_cmp, spec, backend="reference")
    assert selection[0, 0, 0].tolist() == [0, -1, -1, -1]
    assert selection[0, 5, 0].tolist() == [0, 1, -1, -1]
    assert selection[0, 23, 0].tolist() == [0, 2, 4, 5]
    assert selection[0, 27, 0].tolist() == [0, 2, 5, 6]


def test_ties_go_to_the_lower_block():
    spec = BlockSpec(l=4, d=4, l_sel=4, n_sel=5, w=4)
    q = torch.zeros(1, 40, 1, 2, dtype=torch.float64)  # every score equal
    k_cmp = torch.randn(1, 10, 1, 2, dtype=torch.float64)
    selection = select_blocks(q, k_cmp, spec, backend="reference")
    assert selection[0, 39, 0].tolist() == [0, 1, 2, 8, 9]


def test_compress_is_the_mean_of_overlapping_blocks():
    x = torch.arange(10, dtype=torch.float64).view(1, 10, 1, 1)
    spec = BlockSpec(l=4, d=2, l_sel=4, n_sel=3, w=4)
    assert compress(x, spec, backend="reference").flatten().tolist() == [1.5, 3.5, 5.5, 7.5]

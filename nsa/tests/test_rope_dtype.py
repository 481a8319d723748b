"""Rotary positions keep their precision in low-precision models and at long positions."""

import math

import pytest
import torch

from nsa.model.rope import apply_rope, document_positions, rope_tables
from nsa.tests.support.helpers import make_module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_in_low_precision_rounds_once_at_the_end(dtype):
    x = torch.randn(1, 64, 2, 16, dtype=torch.float64).to(dtype)
    positions = torch.arange(60000, 60064)
    exact = rope_tables(positions, 16, base=10000.0, scale=1.0, dtype=torch.float64)
    fp32 = rope_tables(positions, 16, base=10000.0, scale=1.0)
    rotated = apply_rope(x, fp32)
    assert rotated.dtype == dtype
    expected = apply_rope(x.double(), exact)
    assert (rotated.double() - expected).abs().max() <= torch.finfo(
        dtype
    ).eps * expected.abs().max()


def test_tables_are_exact_at_positions_where_fp32_angles_are_not():
    table = rope_tables(torch.tensor([65535]), 8, base=10000.0, scale=1.0)
    angles = [65535 * 10000.0 ** (-2 * i / 8) for i in range(4)]
    expected = torch.tensor([[math.cos(a) for a in angles]])
    assert (table.cos - expected).abs().max() < 1e-6


def test_casting_a_module_keeps_its_positions_exact():
    """No table is a buffer that .to(bfloat16) could round."""
    module = make_module()
    before = module.rope(torch.arange(100), torch.float32)
    after = module.to(torch.bfloat16).rope(torch.arange(100), torch.bfloat16)
    assert after.cos.dtype == torch.float32
    assert torch.equal(before.cos, after.cos) and torch.equal(before.sin, after.sin)
    assert not list(module.buffers())


@pytest.mark.parametrize("phi", ["avg", "mlp"])
@pytest.mark.parametrize("head", range(6))
def test_every_query_head_is_rotated_like_its_keys(head, phi):
    """q.k depends on the distance only: equal tokens give equal logits along each diagonal."""
    module = make_module(phi=phi)
    x = torch.randn(1, 1, 24, dtype=torch.float64).expand(1, 40, 24)
    with torch.no_grad():
        q, keys, _, _ = module._project(x, module.rope(torch.arange(40), x.dtype))
    if phi == "mlp":  # it rotates what it makes of them
        k_cmp, *keys = keys
        torch.testing.assert_close(k_cmp, k_cmp[:, :1].expand_as(k_cmp))
    for k in keys:
        logits = q[0, :, head] @ k[0, :, head // 3].T
        for distance in (0, 1, 7, 30):
            diagonal = logits.diagonal(-distance)
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_positions_restart_with_each_document():
    cu_seqlens = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    positions = document_positions(9, cu_seqlens, torch.device("cpu"))
    assert positions.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4]


def test_gradient_of_a_rotation_is_the_rotation_back():
    rope = rope_tables(torch.arange(7), 8, base=100.0, scale=1.0, dtype=torch.float64)
    x = torch.randn(2, 7, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, rope), (x,))
    assert torch.autograd.gradgradcheck(lambda x: apply_rope(x, rope), (x,))


def test_rotation_of_bfloat16_is_rounded_once():
    rope = rope_tables(torch.arange(50), 16, base=100.0, scale=1.0)
    exact = rope_tables(torch.arange(50), 16, base=100.0, scale=1.0, dtype=torch.float64)
    x = torch.randn(1, 50, 2, 16).bfloat16().requires_grad_()
    wide = x.detach().double().requires_grad_()
    weight = torch.randn(1, 50, 2, 16).bfloat16()
    out, wanted = apply_rope(x, rope), apply_rope(wide, exact)
    (grad,) = torch.autograd.grad(out, x, weight)
    (wanted_grad,) = torch.autograd.grad(wanted, wide, weight.double())
    for found, expected in ((out, wanted), (grad, wanted_grad)):
        assert found.dtype == torch.bfloat16
        difference = (found.double() - expected).abs()
        assert (difference <= 2**-8 * expected.abs() + 1e-6).all()

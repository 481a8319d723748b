"""The torch path against the oracle: outputs, all gradients, selections, on a table of shapes."""

import pytest
import torch

from nsa import BlockSpec, compress, select_blocks
from nsa.tests.support.helpers import (
    NAMES,
    Case,
    assert_fair_selection,
    assert_near,
    make_inputs,
    run,
    run_with_gradients,
    torch_path,
)

SMALL = BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=11)
CASES = [
    Case(SMALL, S=1),
    Case(SMALL, S=7),  # S < l: no compressed token
    Case(SMALL, S=8),
    Case(SMALL, S=61, B=2),
    Case(SMALL, S=200, Hkv=1, G=1),
    Case(SMALL, S=96, Hkv=1, G=16, Dk=4, Dv=6),
    Case(SMALL, S=75, Hkv=3, G=5, Dk=6, Dv=10),
    Case(BlockSpec(l=4, d=4, l_sel=16, n_sel=3, w=200), S=90),  # w > S
    Case(BlockSpec(l=16, d=4, l_sel=4, n_sel=40, w=3), S=70),  # n * l' > S, l > l'
    Case(BlockSpec(l=12, d=4, l_sel=8, n_sel=5, w=1), S=83),
    Case(SMALL, S=150, docs=(1, 7, 8, 9, 64, 61)),
    Case(BlockSpec(l=4, d=2, l_sel=6, n_sel=3, w=5), S=97, G=1, docs=(50, 47)),
]
ORDERS = [("prefix", None), ("gather", None), ("auto", 13)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("order", "chunk"), ORDERS)
def test_float64_equals_the_oracle_in_outputs_and_gradients(case, order, chunk, monkeypatch):
    inputs = make_inputs(case)
    expected, expected_grads = run_with_gradients(case, inputs, "reference")
    with torch_path(monkeypatch, order=order, chunk=chunk):
        out, grads = run_with_gradients(case, inputs, "torch")
    assert_near(out, expected, 1e-10)
    for name in NAMES:
        assert_near(grads[name], expected_grads[name], 1e-10, f"gradient of {name}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_selects_what_the_oracle_selects(case, monkeypatch):
    inputs = make_inputs(case)
    args = dict(cu_seqlens=case.cu_seqlens)
    expected = select_blocks(inputs["q"], inputs["k_cmp"], case.spec, backend="reference", **args)
    with torch_path(monkeypatch, chunk=17):
        actual = select_blocks(inputs["q"], inputs["k_cmp"], case.spec, backend="torch", **args)
        _, used = run(case, inputs, "torch", return_selection=True)
    assert torch.equal(actual, expected)
    assert torch.equal(used, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("order", ["prefix", "gather"])
def test_float32_stays_within_rounding_under_the_same_selection(case, order, monkeypatch):
    inputs = make_inputs(case, torch.float32)
    wide = {name: x.double() for name, x in inputs.items()}
    _, selection = run(case, wide, "reference", return_selection=True)
    expected, expected_grads = run_with_gradients(case, wide, "reference", selection=selection)
    with torch_path(monkeypatch, order=order):
        out, grads = run_with_gradients(case, inputs, "torch", selection=selection)
    assert_near(out, expected, 1e-5)
    for name in NAMES:
        assert_near(grads[name], expected_grads[name], 1e-4, f"gradient of {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_selection_is_fair_to_the_oracle(dtype):
    case = Case(BlockSpec(l=8, d=4, l_sel=8, n_sel=6, w=11), S=400, B=2, G=4)
    inputs = make_inputs(case, dtype)
    selection = select_blocks(inputs["q"], inputs["k_cmp"], case.spec, backend="torch")
    assert assert_fair_selection(case, inputs, selection) <= 0.002


def test_bfloat16_errs_at_most_twice_as_much_as_flash_attention():
    case = Case(BlockSpec(l=16, d=8, l_sel=16, n_sel=6, w=48), S=256, G=4, Dk=32, Dv=32)
    inputs = make_inputs(case, torch.bfloat16)
    wide = {name: x.double() for name, x in inputs.items()}
    q, k, v = (inputs[name].transpose(1, 2) for name in ("q", "k_win", "v_win"))
    flash = torch.nn.functional.scaled_dot_product_attention
    exact = flash(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    flash_error = (flash(q, k, v, is_causal=True, enable_gqa=True).double() - exact).abs().max()
    expected, selection = run(case, wide, "reference", return_selection=True)
    out = run(case, inputs, "torch", selection=selection)
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).abs().max() <= 2 * flash_error


def test_fp32_gates_beside_bf16_are_used_in_full_precision():
    case = Case(SMALL, S=64)
    inputs = make_inputs(case, torch.bfloat16)
    fine = torch.rand(1, 64, 4, 3)
    wide = {name: x.double() for name, x in {**inputs, "gates": fine}.items()}
    expected, selection = run(case, wide, "reference", return_selection=True)
    out = run(case, {**inputs, "gates": fine}, "torch", selection=selection)
    assert_near(out, expected, 2**-8)
    inputs["gates"] = fine.requires_grad_()
    run(case, inputs, "torch").sum().backward()
    assert fine.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_given_selection_replaces_scoring(backend):
    case = Case(BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=3), S=64)
    inputs = make_inputs(case)
    own_out, own = run(case, inputs, backend, return_selection=True)
    torch.testing.assert_close(run(case, inputs, backend, selection=own), own_out)
    only_first = torch.full_like(own, -1)
    only_first[..., 0] = 0
    other = run(case, inputs, backend, selection=only_first)
    late = slice(16, None)
    assert not torch.allclose(other[:, late], own_out[:, late])


@pytest.mark.parametrize("case", [c for c in CASES if c.S > 8], ids=str)
def test_compress_equals_the_oracle(case):
    x = torch.randn(1, case.S, 3, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for backend in ("reference", "torch"):
        out = compress(x, case.spec, cu_seqlens=case.cu_seqlens, backend=backend)
        weight = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view_as(out)
        (grad,) = torch.autograd.grad((out * weight).sum(), x)
        results.append((out, grad))
    assert_near(results[1][0], results[0][0], 1e-12)
    assert_near(results[1][1], results[0][1], 1e-12, "gradient of x")


def test_autocast_around_the_operator_does_not_lower_its_precision():
    case = Case(SMALL, S=64)
    inputs = make_inputs(case, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, _ = run_with_gradients(case, inputs, "torch")
    outside, _ = run_with_gradients(case, inputs, "torch")
    assert torch.equal(inside, outside)

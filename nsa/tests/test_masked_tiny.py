"""Tiny sequences around every block boundary, where masks have empty and partial rows."""

import pytest
import torch

from nsa import BlockSpec
from nsa.tests.support.helpers import (
    NAMES,
    Case,
    assert_near,
    make_inputs,
    run_with_gradients,
    torch_path,
)

SPEC = BlockSpec(l=4, d=2, l_sel=4, n_sel=3, w=2)


@pytest.mark.parametrize("order", ["prefix", "gather"])
@pytest.mark.parametrize("length", range(1, 15))
def test_outputs_and_gradients_of_every_short_length(length, order, monkeypatch):
    case = Case(SPEC, S=length, B=2, Hkv=1, G=3, Dk=4, Dv=3)
    inputs = make_inputs(case)
    expected, expected_grads = run_with_gradients(case, inputs, "reference")
    with torch_path(monkeypatch, order=order):
        out, grads = run_with_gradients(case, inputs, "torch")
    assert_near(out, expected, 1e-10)
    for name in NAMES:
        assert_near(grads[name], expected_grads[name], 1e-10, f"gradient of {name}")
    assert all(grad.isfinite().all() for grad in grads.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
def test_low_precision_stays_finite_with_large_logits(length, dtype):
    case = Case(SPEC, S=length)
    inputs = make_inputs(case, dtype)
    inputs["q"] = inputs["q"] * 200
    out, grads = run_with_gradients(case, inputs, "torch")
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads.values())

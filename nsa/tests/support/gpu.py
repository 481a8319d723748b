"""What the GPU tests share: who may run them, tensors on the device, tolerances, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.ops import machine
from nsa.tests.support.helpers import NAMES, ZERO, Case, assert_near, make_inputs, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
needs_gpu = [pytest.mark.gpu, on_gpu]
"""For a whole file (`pytestmark`), or the `marks` of a parameter."""


def interpreted(test: Any) -> Any:
    """For a test of Triton's interpreter alone: test_triton_on_cpu.py runs its file there."""
    is_on = machine.interpreted()
    return pytest.mark.gpu(pytest.mark.skipif(not is_on, reason="needs the interpreter")(test))


TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Of outputs, relative to the largest value."""
GRAD_TOLERANCE = {torch.bfloat16: 1.25e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""dS = P * (dP - <dout, o>), with o in 16 bits: that alone gives errors of up to 1.1e-2 with bf16,
where a gradient is a sum of few such differences."""
ROUNDING = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-4}
"""Of gradients between two runs of one program, whose sums may be added in another order: a unit of
the last place of the largest."""


class OnDevice(Case):
    """A case whose document bounds are on the device."""

    @property
    def cu_seqlens(self) -> Tensor | None:
        bounds = super().cu_seqlens
        return None if bounds is None else bounds.to(DEVICE)


def on_device(case: Case) -> OnDevice:
    return OnDevice(**vars(case))


def device_inputs(case: Case, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    return {name: x.to(DEVICE) for name, x in make_inputs(case, dtype, seed).items()}


def device_dout(case: Case, dtype: torch.dtype) -> Tensor:  # [B, S, Hq, Dv]
    """A gradient of the output."""
    generator = torch.Generator().manual_seed(99)
    size = (case.B, case.S, case.Hkv * case.G, case.Dv)
    return torch.randn(size, generator=generator).to(dtype).to(DEVICE)


def forward_backward(
    case: Case, inputs: dict[str, Tensor], dout: Tensor, backend: str = "triton", **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and the gradient of every input; all tensors are used where they lie."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = run(case, leaves, backend, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    return out.detach(), dict(zip(leaves, grads, strict=True))


def compare(
    case: Case,
    dtype: torch.dtype,
    selection: Tensor | None = None,
    gates_dtype: torch.dtype | None = None,
) -> None:
    """Outputs and gradients against the torch path in float64, under one selection."""
    case = on_device(case)
    inputs, dout = device_inputs(case, dtype), device_dout(case, dtype)
    inputs["gates"] = inputs["gates"].to(gates_dtype or dtype)
    wide = {name: x.double() for name, x in inputs.items()}
    if selection is None:
        _, selection = run(case, wide, "torch", return_selection=True)
    expected, expected_grads = forward_backward(
        case, wide, dout.double(), "torch", selection=selection
    )
    out, grads = forward_backward(case, inputs, dout, selection=selection)
    assert out.dtype == dtype
    assert_near(out, expected, TOLERANCE[dtype])
    assert_near_gradients(grads, expected_grads, GRAD_TOLERANCE[dtype])


def assert_near_gradients(
    grads: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> None:
    """Each to its own largest value; one that must be 0, to the largest of all gradients."""
    largest = max(x.abs().max().item() for x in expected.values() if x.numel())
    for name in NAMES:
        if expected[name].numel() and expected[name].abs().max() <= ZERO:
            assert grads[name].abs().max().item() <= tolerance * largest, f"gradient of {name}"
        else:
            assert_near(grads[name], expected[name], tolerance, f"gradient of {name}")

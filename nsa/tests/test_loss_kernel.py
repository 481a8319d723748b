"""The kernel of the cross-entropy: on a GPU; test_cross_entropy.py runs it in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa.ops.triton.loss import BLOCK, losses_and_gradient
from nsa.ops.triton.start import INTERPRETED
from nsa.tests.gpu import DEVICE
from nsa.tests.helpers import assert_near
from nsa.train import cross_entropy
from nsa.train.cross_entropy import linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device"),
]
SIZES = [(3, 5, 64), (2, 64, 64), (4, BLOCK - 1, BLOCK), (2, BLOCK + 70, BLOCK + 128)]


def make(num_rows: int, vocab: int, width: int, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits whose padding holds what must not be read, and targets."""
    torch.manual_seed(0)
    logits = torch.full((num_rows, width), 1e6)
    logits[:, :vocab] = spread * torch.randn(num_rows, vocab)
    targets = torch.randint(vocab, (num_rows,))
    targets[0], targets[-1] = 0, vocab - 1
    return logits.to(DEVICE), targets.to(DEVICE)


@pytest.mark.parametrize("spread", [3.0, 3e4], ids=["usual", "huge"])
@pytest.mark.parametrize(("num_rows", "vocab", "width"), SIZES)
def test_losses_and_gradients_are_those_of_torch(
    num_rows: int, vocab: int, width: int, spread: float
) -> None:
    logits, targets = make(num_rows, vocab, width, spread)
    exact = logits[:, :vocab].double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="none")
    (expected_grad,) = torch.autograd.grad(expected.sum(), exact)
    losses = torch.empty(num_rows, device=DEVICE)
    losses_and_gradient(logits, targets, losses, vocab, with_grad=True)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert_near(logits[:, :vocab], expected_grad, 1e-5, "gradient")
    assert (logits[:, vocab:] == 0).all()


def test_without_a_gradient_the_logits_stay() -> None:
    logits, targets = make(3, 70, 128)
    before, losses = logits.clone(), torch.empty(3, device=DEVICE)
    losses_and_gradient(logits, targets, losses, 70, with_grad=False)
    assert torch.equal(logits, before)
    expected = F.cross_entropy(before[:, :70], targets, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=str)
def test_a_row_that_is_not_finite_has_no_finite_loss_and_leaves_the_others(poison: float) -> None:
    logits, targets = make(3, 70, 128)
    expected = F.cross_entropy(logits[:, :70], targets, reduction="none")
    logits[1, 20] = poison
    losses = torch.empty(3, device=DEVICE)
    losses_and_gradient(logits, targets, losses, 70, with_grad=True)
    assert not losses[1].isfinite()
    torch.testing.assert_close(losses[::2], expected[::2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 2e-3)],  # fp32: TF32 products
    ids=str,
)
@pytest.mark.parametrize("part", [7 * 1088, 1 << 27], ids=["parts", "whole"])
def test_the_loss_of_a_head_equals_float64(
    part: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "FUSED_PART_NUMBERS", part)
    if DEVICE == "cpu":
        monkeypatch.setattr(cross_entropy, "is_fused", lambda device, dtype: True)
    torch.manual_seed(0)
    hidden = torch.randn(60, 64, device=DEVICE, requires_grad=True)
    weight = (0.3 * torch.randn(1031, 64, device=DEVICE)).requires_grad_()
    targets = torch.randint(1031, (60,), device=DEVICE)
    assert cross_entropy.is_fused(hidden.device, dtype)
    exact = F.cross_entropy(hidden.double() @ weight.double().t(), targets)
    expected = torch.autograd.grad(exact * 3, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets, dtype)
    grads = torch.autograd.grad(loss * 3, (hidden, weight))
    assert_near(loss, exact.detach(), tolerance, "loss")
    for grad, wanted, name in zip(grads, expected, ("hidden", "weight"), strict=True):
        assert_near(grad, wanted, tolerance, name)

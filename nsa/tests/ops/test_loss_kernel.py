"""The kernel of the cross-entropy: on a GPU; test_triton_on_cpu.py runs it in the interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa.ops.machine import interpreted
from nsa.ops.triton.cross_entropy import BLOCK, losses_and_gradient
from nsa.tests.support.gpu import DEVICE, on_gpu
from nsa.tests.support.helpers import assert_near
from nsa.train import loss as loss_functions
from nsa.train.loss import IGNORED, linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="needs a CUDA device"),
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


def test_an_ignored_row_has_neither_loss_nor_gradient_whatever_its_logits_are() -> None:
    logits, targets = make(4, 70, 128)
    expected = F.cross_entropy(logits[:, :70], targets, reduction="none")
    targets[1], targets[2] = IGNORED, IGNORED
    logits[2, 20] = torch.nan
    losses = torch.empty(4, device=DEVICE)
    losses_and_gradient(logits, targets, losses, 70, ignored=IGNORED, with_grad=True)
    torch.testing.assert_close(losses[::3], expected[::3], rtol=1e-5, atol=1e-5)
    assert (losses[1:3] == 0).all() and (logits[1:3] == 0).all() and (logits[::3] != 0).any()


@on_gpu
def test_a_captured_loss_replays_with_other_targets() -> None:
    hidden = torch.randn(40, 64, device=DEVICE, requires_grad=True)
    weight = torch.randn(1031, 64, device=DEVICE, requires_grad=True)
    targets = torch.randint(1031, (40,), device=DEVICE)

    def loss_and_gradients() -> list[Tensor]:
        loss = linear_cross_entropy(hidden, weight, targets, torch.bfloat16)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss_and_gradients()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loss_and_gradients()
    targets[::3] = IGNORED
    graph.replay()
    for replayed, eager in zip(captured, loss_and_gradients(), strict=True):
        torch.testing.assert_close(replayed, eager)


@on_gpu
@pytest.mark.parametrize("wrong", [1031, -1])
def test_a_target_outside_the_vocabulary_stops_a_gpu_as_in_torch(wrong: int) -> None:
    """In a process of its own, which cannot use its GPU afterwards."""
    code = f"""if True:
        import torch
        from nsa.train.loss import linear_cross_entropy
        hidden, weight = torch.randn(8, 64).cuda(), torch.randn(1031, 64).cuda()
        targets = torch.arange(8).cuda()
        linear_cross_entropy(hidden, weight, targets, torch.bfloat16).item()
        print("right ids pass")
        targets[3] = {wrong}
        print(linear_cross_entropy(hidden, weight, targets, torch.bfloat16).item())
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout.split("\n") == ["right ids pass", ""]
    assert "device-side assert" in done.stderr


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 2e-3)],  # fp32: TF32 products
    ids=str,
)
@pytest.mark.parametrize("part", [7 * 1088, 1 << 27], ids=["parts", "whole"])
def test_the_loss_of_a_head_equals_float64(
    part: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_functions, "FUSED_PART_NUMBERS", part)
    if DEVICE == "cpu":
        monkeypatch.setattr(loss_functions, "is_fused", lambda device, dtype: True)
    torch.manual_seed(0)
    hidden = torch.randn(60, 64, device=DEVICE, requires_grad=True)
    weight = (0.3 * torch.randn(1031, 64, device=DEVICE)).requires_grad_()
    targets = torch.randint(1031, (60,), device=DEVICE)
    targets[::7] = IGNORED
    assert loss_functions.is_fused(hidden.device, dtype)
    exact = F.cross_entropy(hidden.double() @ weight.double().t(), targets)
    expected = torch.autograd.grad(exact * 3, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets, dtype)
    grads = torch.autograd.grad(loss * 3, (hidden, weight))
    assert_near(loss, exact.detach(), tolerance, "loss")
    for grad, wanted, name in zip(grads, expected, ("hidden", "weight"), strict=True):
        assert_near(grad, wanted, tolerance, name)

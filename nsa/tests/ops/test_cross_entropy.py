"""The loss in parts equals the loss from whole logits, and never has whole logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from nsa.train import loss as loss_functions
from nsa.train.loss import linear_cross_entropy


@pytest.mark.parametrize("part", [1, 7 * 50, 1 << 24], ids=["row-by-row", "parts", "whole"])
@pytest.mark.parametrize("num_rows", [1, 20])
def test_loss_and_gradients_equal_whole_logits(
    num_rows: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_functions, "PART_NUMBERS", part)
    torch.manual_seed(0)
    hidden = torch.randn(num_rows, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(50, (num_rows,))
    expected = F.cross_entropy(hidden @ weight.t(), targets)
    expected_grads = torch.autograd.grad(expected * 3, (hidden, weight))

    loss = linear_cross_entropy(hidden, weight, targets, torch.float64)
    grads = torch.autograd.grad(loss * 3, (hidden, weight))

    torch.testing.assert_close(loss, expected.float())
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "targets", [[1, -100, 4, -100], [-100, -100], []], ids=["some", "all", "no rows"]
)
def test_ignored_targets_are_left_out_as_in_torch(targets: list[int]) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(len(targets), 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor(targets, dtype=torch.int64)
    expected = F.cross_entropy(hidden @ weight.t(), ids)
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    for dtype in (torch.int64, torch.int32):
        loss = linear_cross_entropy(hidden, weight, ids.to(dtype), torch.float64)
        grads = torch.autograd.grad(loss, (hidden, weight))
        torch.testing.assert_close(loss, expected.float(), equal_nan=True)
        for grad, wanted in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wrong", [5, -1, -101, 1 << 40])
def test_a_target_outside_the_vocabulary_is_refused_with_its_number(wrong: int) -> None:
    hidden, weight = torch.randn(3, 8), torch.randn(5, 8)
    targets = torch.tensor([0, wrong, -100])
    with pytest.raises(IndexError):
        F.cross_entropy(hidden @ weight.t(), targets)
    with pytest.raises(IndexError, match=rf"target {wrong} .* vocabulary of 5 ids; use 0 to 4"):
        linear_cross_entropy(hidden, weight, targets, torch.float32)


def test_logits_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_functions, "PART_NUMBERS", 40 * 10)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple) else (out,):
                if isinstance(x, torch.Tensor) and x.shape[-1:] == (40,):
                    largest = max(largest, x.shape[0])
            return out

    hidden, weight = (torch.randn(n, 8, requires_grad=True) for n in (1000, 40))
    with Watch():
        linear_cross_entropy(hidden, weight, torch.zeros(1000, dtype=torch.long), torch.float32)
    assert largest == 10


def test_without_gradients_none_are_computed() -> None:
    hidden, weight = torch.randn(3, 8), torch.randn(5, 8)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 4]), torch.float32)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(
        F.cross_entropy(hidden @ weight.t(), torch.tensor([0, 1, 4])).item(), rel=1e-5
    )


def test_padded_rows_of_the_matrix_are_zero_and_have_no_gradient() -> None:
    weight = torch.randn(5, 3)
    matrix = loss_functions._matrix(weight, torch.float32, 4)
    assert matrix.shape == (8, 3) and torch.equal(matrix[:5], weight)
    assert (matrix[5:] == 0).all()
    assert loss_functions._matrix(weight, torch.float32, 5) is weight

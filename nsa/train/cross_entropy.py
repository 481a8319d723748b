"""The loss of an output head without its logits: a part of the rows at a time.

With V ids, the logits of N rows and their gradient take 8 N V bytes in fp32; for a large
vocabulary that is more than the rest of the step. Here the gradient of a part follows at once, and
only the gradients of the hidden states and of the matrix are kept for the backward.

On a GPU a kernel reads the logits of a part twice and leaves their gradient in their place; there
a part has more rows, because each adds its share to the gradient of the whole matrix, and the
matrix is padded with zero rows, because products of an odd width are slow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.model.memory import FUSED_PART, PART
from nsa.ops.plan import machine_obstacle, machine_of

PART_NUMBERS = PART
FUSED_PART_NUMBERS = FUSED_PART
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTH_STEP = 64
"""The kernel's logits have a width that is a multiple of this."""
IGNORED = -100
"""A target that is left out of the mean, as torch does by default."""


def linear_cross_entropy(
    hidden: Tensor,  # [N, dim]
    weight: Tensor,  # [V, dim]
    targets: Tensor,  # [N] integer: 0 .. V - 1, or IGNORED
    dtype: torch.dtype,
) -> Tensor:  # [] fp32
    """Mean cross-entropy in nats of softmax(hidden @ weight.T), with products in `dtype`.

    Over the targets that are not IGNORED; NaN where there are none.
    """
    targets = targets.long()
    _check_targets(targets, weight.shape[0])
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, dtype)
    return loss


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel computes the loss of a part."""
    if device.type != "cuda" or dtype not in FUSED_DTYPES:
        return False
    return not machine_obstacle(machine_of(device))


def _check_targets(targets: Tensor, vocab: int) -> None:
    """Refuse ids that are not in the vocabulary. On a GPU by an assertion on the device, as torch
    does: nobody waits for the answer, and a CUDA graph that is captured holds it."""
    known = ((targets >= 0) & (targets < vocab)) | (targets == IGNORED)
    if targets.device.type != "cpu":
        torch._assert_async(known.all(), f"a target is outside [0, {vocab}) and not {IGNORED}")
    elif not known.all():
        wrong = int(targets[~known][0])
        raise IndexError(
            f"target {wrong} is outside the vocabulary of {vocab} ids; give 0 to {vocab - 1}, or "
            f"{IGNORED} to leave a token out of the loss"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad[:2])
        ctx.dtypes = hidden.dtype, weight.dtype
        fused = is_fused(hidden.device, dtype)
        rows = hidden.detach().to(dtype)
        matrix = _matrix(weight.detach(), dtype, WIDTH_STEP if fused else 1)
        num_rows, vocab = rows.shape[0], weight.shape[0]
        losses = torch.empty(num_rows, dtype=torch.float32, device=rows.device)
        d_rows = torch.empty_like(rows) if wanted else None
        d_matrix: Tensor | None = None
        size = max((FUSED_PART_NUMBERS if fused else PART_NUMBERS) // len(matrix), 1)
        part_of = _fused_part if fused else _plain_part
        for first in range(0, num_rows, size):
            span = slice(first, first + size)
            logits = rows[span] @ matrix.t()
            d_logits = part_of(logits, targets[span], losses[span], vocab, wanted)
            if d_rows is None:
                continue
            d_rows[span] = d_logits @ matrix
            share = d_logits.t() @ rows[span]
            d_matrix = share.float() if d_matrix is None else d_matrix.add_(share)
        num_counted = (targets != IGNORED).sum()
        if d_rows is not None:
            if d_matrix is None:  # no rows at all
                d_matrix = torch.zeros_like(matrix, dtype=torch.float32)
            ctx.save_for_backward(d_rows, d_matrix[:vocab], num_counted)
        return losses.sum() / num_counted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_rows, d_matrix, num_counted = ctx.saved_tensors
        rows_dtype, matrix_dtype = ctx.dtypes
        share = grad / num_counted.clamp(min=1)  # none counted: no gradient, as in torch
        return (d_rows * share).to(rows_dtype), (d_matrix * share).to(matrix_dtype), None, None


def _matrix(weight: Tensor, dtype: torch.dtype, step: int) -> Tensor:  # [V, dim] -> [V_PAD, dim]
    """The matrix in `dtype`, with zero rows up to a multiple of `step`."""
    vocab, dim = weight.shape
    padded = -(-vocab // step) * step
    if padded == vocab:
        return weight.to(dtype)
    matrix = torch.empty(padded, dim, dtype=dtype, device=weight.device)
    matrix[:vocab] = weight
    matrix[vocab:] = 0
    return matrix


def _plain_part(
    logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, wanted: bool
) -> Tensor:
    """Write the losses of a part, and return the gradient of their sum for the logits.

    It is not divided by the number of rows here: fp16 has no such numbers.
    """
    wide, left_out = logits.float(), targets == IGNORED
    column = targets.masked_fill(left_out, 0)[:, None]
    norm = wide.logsumexp(dim=-1, keepdim=True)
    losses.copy_((norm - wide.gather(1, column))[:, 0].masked_fill_(left_out, 0.0))
    if not wanted:
        return logits
    probs = wide.sub_(norm).exp_()
    probs[torch.arange(len(targets), device=logits.device), column[:, 0]] -= 1.0
    return probs.masked_fill_(left_out[:, None], 0.0).to(logits.dtype)


def _fused_part(
    logits: Tensor, targets: Tensor, losses: Tensor, vocab: int, wanted: bool
) -> Tensor:
    """The same by the kernel, in the memory of the logits."""
    from nsa.ops.triton.loss import losses_and_gradient

    losses_and_gradient(logits, targets, losses, vocab, ignored=IGNORED, with_grad=wanted)
    return logits

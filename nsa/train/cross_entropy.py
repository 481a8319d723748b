"""The loss of an output head without its logits: a part of the rows at a time.

With V ids, the logits of N rows and their gradient take 8 N V bytes in fp32; for a large
vocabulary that is more than the rest of the step. Here the gradient of a part follows at once, and
only the gradients of the hidden states and of the matrix are kept for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.model.memory import PART

PART_NUMBERS = PART


def linear_cross_entropy(
    hidden: Tensor,  # [N, dim]
    weight: Tensor,  # [V, dim]
    targets: Tensor,  # [N] integer
    dtype: torch.dtype,
) -> Tensor:  # [] fp32
    """Mean cross-entropy in nats of softmax(hidden @ weight.T), with products in `dtype`."""
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, dtype)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad[:2])
        ctx.dtypes = hidden.dtype, weight.dtype
        rows, matrix = hidden.detach().to(dtype), weight.detach().to(dtype)
        num_rows, vocab = rows.shape[0], matrix.shape[0]
        total = torch.zeros((), dtype=torch.float32, device=rows.device)
        d_rows = torch.empty_like(rows) if wanted else None
        d_matrix = torch.zeros(matrix.shape, device=rows.device) if wanted else None
        size = max(PART_NUMBERS // vocab, 1)
        for first in range(0, num_rows, size):
            part, its_targets = rows[first : first + size], targets[first : first + size, None]
            logits = (part @ matrix.t()).float()
            norm = logits.logsumexp(dim=-1, keepdim=True)
            total += (norm - logits.gather(1, its_targets)).sum()
            if d_rows is None or d_matrix is None:
                continue
            probs = logits.sub_(norm).exp_()
            at = torch.arange(len(part), device=rows.device)
            probs[at, its_targets[:, 0]] -= 1.0
            d_logits = probs.to(dtype)  # not divided by num_rows yet: fp16 has no such numbers
            d_rows[first : first + size] = d_logits @ matrix
            d_matrix += d_logits.t() @ part
        if d_rows is not None and d_matrix is not None:
            ctx.save_for_backward(d_rows, d_matrix)
        return total / num_rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_rows, d_matrix = ctx.saved_tensors
        rows_dtype, matrix_dtype = ctx.dtypes
        share = grad / d_rows.shape[0]
        return (d_rows * share).to(rows_dtype), (d_matrix * share).to(matrix_dtype), None, None

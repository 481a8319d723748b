"""Starts the kernel of the cross-entropy of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.triton.kernels.loss import softmax_loss

BLOCK, NUM_WARPS = 4096, 8


def losses_and_gradient(
    logits: Tensor,  # [N, V_PAD]  overwritten where a gradient is wanted
    targets: Tensor,  # [N] int64
    losses: Tensor,  # [N] fp32  written
    vocab: int,
    *,
    with_grad: bool,
) -> None:
    """Cross-entropy of every row over its first `vocab` columns, and d loss / d logits in place.

    Columns behind `vocab` are padding: they are not read, and their gradient is 0.
    """
    num_rows, width = logits.shape
    with torch.cuda.device_of(logits):
        softmax_loss[(num_rows,)](
            logits,
            targets,
            losses,
            logits.stride(0),
            vocab,
            width,
            BLOCK=BLOCK,
            WITH_GRAD=with_grad,
            num_warps=NUM_WARPS,
        )

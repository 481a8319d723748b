"""Starts the kernel of the cross-entropy of logits."""

from __future__ import annotations

from torch import Tensor

from nsa.ops.triton.kernels.loss import softmax_loss
from nsa.ops.triton.start import Launch, Memo, form, start

BLOCK, NUM_WARPS = 4096, 8
MAX_KEPT = 1024
"""Launches remembered; beyond, all are forgotten."""

_memo: Memo = {}


def losses_and_gradient(
    logits: Tensor,  # [N, V_PAD]  overwritten where a gradient is wanted
    targets: Tensor,  # [N] int64: 0 .. vocab - 1, or `ignored`
    losses: Tensor,  # [N] fp32  written
    vocab: int,
    *,
    ignored: int = -100,
    with_grad: bool,
) -> None:
    """Cross-entropy of every row over its first `vocab` columns, and d loss / d logits in place.

    Columns behind `vocab` are padding: they are not read, and their gradient is 0. Loss and
    gradient of a row whose target is `ignored` are 0.
    """
    if len(_memo) >= MAX_KEPT:
        _memo.clear()
    num_rows, width = logits.shape
    start(
        _memo,
        (form(logits, targets, losses), vocab, ignored, with_grad),
        softmax_loss,
        (logits, targets, losses),
        lambda: Launch.plain(
            (num_rows,),
            (logits.stride(0), vocab, width),
            {"IGNORED": ignored, "BLOCK": BLOCK, "WITH_GRAD": with_grad},
            num_warps=NUM_WARPS,
        ),
    )

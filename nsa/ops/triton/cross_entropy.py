"""Cross-entropy of logits: one kernel for the losses and, in the logits' memory, the gradient."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.launcher import Launch, Memo, form, start


@triton.jit
def softmax_loss(
    p_logits, p_targets, p_losses, s_logits, V, V_PAD,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr, WITH_GRAD: tl.constexpr,
):  # fmt: skip
    """One row: its loss in nats; its V logits become softmax minus one-hot, the padding 0.

    Two passes over the row, the second from the cache. A row with a NaN or inf has a NaN loss. A
    row whose target is IGNORED has loss 0 and gradient 0, whatever its logits are.
    """
    # int64: rows * vocabulary may pass 2^31.
    i_r = tl.program_id(0).to(tl.int64)
    p_row = p_logits + i_r * s_logits
    target = tl.load(p_targets + i_r)
    counts = target != IGNORED
    # loss = lse - x[target] with lse = log(sum of exp(x)), as an online softmax in base e:
    # largest = max x, total = sum of exp(x - largest).
    largest = -float("inf")
    total = 0.0
    at_target = 0.0
    for first in range(0, V, BLOCK):
        o_v = first + tl.arange(0, BLOCK)
        b_x = tl.load(p_row + o_v, mask=o_v < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, tl.max(b_x, axis=0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(b_x - higher), axis=0)
        at_target += tl.sum(tl.where(o_v == target, b_x, 0.0), axis=0)
        largest = higher
    lse = largest + tl.log(total)
    tl.store(p_losses + i_r, tl.where(counts, lse - at_target, 0.0))
    # d loss / d x = exp(x - lse) - onehot(target), written over the logits. Columns V .. V_PAD - 1
    # are read as -inf, so that their gradient is 0.
    if WITH_GRAD:
        for first in range(0, V_PAD, BLOCK):
            o_v = first + tl.arange(0, BLOCK)
            b_x = tl.load(p_row + o_v, mask=o_v < V, other=-float("inf")).to(tl.float32)
            b_d = tl.exp(b_x - lse) - tl.where(o_v == target, 1.0, 0.0)
            b_d = tl.where(counts, b_d, 0.0)
            tl.store(p_row + o_v, b_d.to(p_logits.dtype.element_ty), mask=o_v < V_PAD)


# --- Launcher ---

BLOCK, NUM_WARPS = 4096, 8
MAX_CACHED = 1024
"""Cached launches; a full cache is cleared."""

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

    Columns from `vocab` on are padding: they are not read, and their gradient is 0. Loss and
    gradient of a row whose target is `ignored` are 0.
    """
    if len(_memo) >= MAX_CACHED:
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

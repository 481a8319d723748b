"""The training objective: the next token of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.train.cross_entropy import linear_cross_entropy
from nsa.train.runtime import Runtime

SAMPLE = 8192
"""Tokens of a batch that statistics in a pass of their own look at: as many rows as fit, or one."""


def next_token_loss(
    model: TinyLM,
    batch: Tensor,  # [B, S+1] int64
    runtime: Runtime,
    stats: AttentionStats | None = None,
    bounds: Tensor | None = None,  # [documents + 1] int32, on the host
) -> Tensor:  # [] fp32
    """Mean cross-entropy in nats: the first S tokens of a row predict the last S.

    With `bounds`, attention and positions stay inside a document. All S targets count even then:
    the first token of a document is predicted from the end mark before it, so that every row has
    equally many, and losses with and without bounds are of the same targets.
    """
    if stats is not None and model.compiled:
        collect_stats(model, batch, runtime, stats, bounds)
        stats = None
    inputs = _inputs(batch, bounds)
    with runtime.compute():
        hidden = model.hidden(inputs, cu_seqlens=bounds, stats=stats)  # [B, S, dim]
    targets = batch[:, 1:].flatten()
    return linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, targets, runtime.dtype)


def collect_stats(
    model: TinyLM,
    batch: Tensor,  # [B, S+1] int64
    runtime: Runtime,
    stats: AttentionStats,
    bounds: Tensor | None = None,
) -> None:
    """Statistics of the attention to the first rows of a batch, where an update cannot collect any.

    In a pass of its own, for a logged step must train as any other, to the bit; over `SAMPLE`
    tokens, for a pass over the whole batch would cost a third of a step.
    """
    rows = batch[: max(1, SAMPLE // (batch.shape[1] - 1))]
    if bounds is not None:
        end = rows.shape[0] * (batch.shape[1] - 1)
        bounds = torch.cat([bounds[bounds < end], bounds.new_tensor([end])])
    with torch.no_grad(), runtime.compute():
        model.hidden(_inputs(rows, bounds), cu_seqlens=bounds, stats=stats)


def _inputs(batch: Tensor, bounds: Tensor | None) -> Tensor:
    """All but the last token of each row; packed documents lie in one row."""
    inputs = batch[:, :-1]
    return inputs if bounds is None else inputs.reshape(1, -1)

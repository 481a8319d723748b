"""The training objective: the next token of each row."""

from __future__ import annotations

from torch import Tensor

from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.train.cross_entropy import linear_cross_entropy
from nsa.train.runtime import Runtime


def next_token_loss(
    model: TinyLM,
    batch: Tensor,  # [B, S+1] int64
    runtime: Runtime,
    stats: AttentionStats | None = None,
) -> Tensor:  # [] fp32
    """Mean cross-entropy in nats: the first S tokens of a row predict the last S."""
    with runtime.compute():
        hidden = model.hidden(batch[:, :-1], stats=stats)  # [B, S, dim]
    targets = batch[:, 1:].flatten()
    return linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, targets, runtime.dtype)

"""The training objective: the next token of each row."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.train.runtime import Runtime


def next_token_loss(
    model: TinyLM,
    batch: Tensor,  # [B, S+1] int64
    runtime: Runtime,
    stats: AttentionStats | None = None,
) -> Tensor:  # [] fp32
    """Mean cross-entropy in nats: the first S tokens of a row predict the last S."""
    with runtime.compute():
        logits = model(batch[:, :-1], stats=stats)  # [B, S, V]
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

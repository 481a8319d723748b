"""Perplexity by position in the context, and by the length of the context.

By position: rows of the longest length, and the mean loss of the targets in each part of a row. By
length: the last targets of these rows, each time with the context cut to another length, so that
all lengths are judged on the same targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from nsa.model import TinyLM

BINS = 16
"""Parts of a row."""


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Mean losses in nats; the perplexity is exp of the loss."""

    rows: int
    length: int
    """Targets of a row: tokens of the longest context."""
    loss: float
    """Over all targets of the rows."""
    until: list[int]
    """By position: where each part ends, in targets of a row."""
    loss_at: list[float]
    """By position: the loss of each part."""
    targets: int
    """By length: the last targets of each row that are judged."""
    lengths: list[int]
    """By length: tokens of context and targets."""
    loss_of: list[float]
    """By length: the loss of the last targets."""

    @property
    def perplexity(self) -> float:
        """Of all targets."""
        return math.exp(self.loss)


Compute = Callable[[], AbstractContextManager[Any]]
"""The context of a forward pass: precision and kernels."""


def measure(
    model: TinyLM,
    ids: NDArray[Any],
    lengths: Sequence[int],
    *,
    num_tokens: int,
    bins: int = BINS,
    batch_tokens: int = 16384,
    compute: Compute = nullcontext,
) -> Perplexity:
    """Perplexity of text on about `num_tokens` targets, at the longest of the lengths first."""
    lengths = sorted(set(lengths))
    rows = cut_rows(ids, lengths[-1], num_tokens)  # [R, S + 1]
    targets = max(lengths[0] // 2, 1)
    losses = {
        length: _losses_of(model, rows[:, -length - 1 :], batch_tokens, compute)
        for length in lengths
    }
    longest = losses[lengths[-1]]
    parts = binned(longest.mean(0), bins)
    return Perplexity(
        rows=len(rows),
        length=lengths[-1],
        loss=longest.mean().item(),
        until=parts["until"],
        loss_at=parts["loss"],
        targets=targets,
        lengths=list(lengths),
        loss_of=[losses[length][:, -targets:].mean().item() for length in lengths],
    )


def cut_rows(ids: NDArray[Any], length: int, num_tokens: int) -> Tensor:  # [R, length + 1] int64
    """Rows of a text, one after another: the last target of a row is the next one's first token."""
    found = (len(ids) - 1) // length
    if found < 1:
        raise ValueError(
            f"a text of {len(ids)} tokens has no row of {length} tokens and a target; use shorter "
            "--lengths or a longer --text"
        )
    num = min(found, max(1, num_tokens // length))
    starts = np.arange(num)[:, None] * length + np.arange(length + 1)
    return torch.from_numpy(np.asarray(ids)[starts].astype(np.int64))


def _losses_of(
    model: TinyLM, rows: Tensor, batch_tokens: int, compute: Compute
) -> Tensor:  # [R, S + 1] -> [R, S] fp64, on the CPU
    size = max(1, batch_tokens // (rows.shape[1] - 1))
    device = model.embed.weight.device
    parts = []
    for some in rows.split(size):
        with compute():
            parts.append(token_losses(model, some.to(device)).cpu())
    return torch.cat(parts)


@torch.no_grad()
def token_losses(model: TinyLM, rows: Tensor) -> Tensor:  # [B, S + 1] -> [B, S] fp64
    """Nats of every target; the logits of one row at a time."""
    hidden = model.hidden(rows[:, :-1])
    losses = [
        F.cross_entropy(model.head(row).float(), targets, reduction="none")
        for row, targets in zip(hidden, rows[:, 1:], strict=True)
    ]
    return torch.stack(losses).double()


def binned(losses: Tensor, bins: int = BINS) -> dict[str, list[Any]]:  # [S]
    """Means over parts of equal length: does the loss still fall with more context?"""
    parts = losses.tensor_split(min(bins, len(losses)))
    ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    return {"until": ends, "loss": [round(part.mean().item(), 5) for part in parts]}

"""Sampling: choose the next token from its logits. Pure functions, one per step.

Order: repetition penalty, temperature, top-k, top-p, draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SEED_LIMIT = 1 << 63


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings; invalid values are rejected on construction."""

    temperature: float = 1.0
    """0 is greedy; below 1 sharpens the distribution, above 1 flattens it."""
    top_k: int = 0
    """Draw only from the k most likely tokens; 0 draws from all."""
    top_p: float = 1.0
    """Draw from the smallest set of most likely tokens with at least this probability; 1: all."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens already in prompt or text less likely; 1 is off."""
    seed: int = 0
    """Equal seed, prompt, model and settings give equal text."""

    def __post_init__(self) -> None:
        checks = (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0,
             "a finite number >= 0", "0 for the most likely token, 1 for the model's own choice"),
            ("top_k", self.top_k >= 0, "a whole number >= 0", "0 to keep all tokens"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, at most 1", "1 to keep all tokens"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf,
             "a finite number above 0", "1 for none"),
            ("seed", 0 <= self.seed < SEED_LIMIT, "a whole number of 0 to 2^63 - 1", "0"),
        )  # fmt: skip
        for name, is_good, allowed, advice in checks:
            if not is_good:
                raise ValueError(
                    f"{name}={getattr(self, name)} is not allowed; it must be {allowed}; "
                    f"use {advice}"
                )


def choose_tokens(
    logits: Tensor,  # [B, V]
    sampling: Sampling,
    draws: Sequence[torch.Generator],  # one for each row, on the CPU
    seen: Tensor | None = None,  # [B, V] bool  tokens so far; needed for a penalty
) -> Tensor:  # [B] int64, on the CPU
    """Choose one token per row; a row depends only on its own logits and generator.

    The draw is done in fp32 on the CPU, so that equal logits and seed give the same token on every
    device.
    """
    logits = logits.float().cpu()
    if logits.isnan().any():
        raise ValueError(
            "the logits are NaN: the weights are damaged, or overflow in this precision; "
            "use fp32 or another checkpoint"
        )
    if sampling.repetition_penalty != 1.0:
        assert seen is not None, "a repetition penalty needs the tokens so far"
        logits = penalize(logits, seen, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / sampling.temperature
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    probabilities = torch.softmax(logits, dim=-1)
    rows = zip(probabilities, draws, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=draw) for row, draw in rows])


def penalize(
    logits: Tensor,  # [B, V]
    seen: Tensor,  # [B, V] bool
    penalty: float,
) -> Tensor:  # [B, V]
    """Divide positive logits of seen tokens by the penalty, multiply negative ones."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:  # [B, V] -> [B, V]
    """Set all but the k largest logits to -inf; ties go to the lower id."""
    return _keep(logits, torch.arange(logits.shape[-1]) < k)


def keep_top_p(logits: Tensor, p: float) -> Tensor:  # [B, V] -> [B, V]
    """Keep the smallest set of most likely tokens with sum >= p, -inf for others; ties as above."""
    # fp64: fp32 rounding over a large vocabulary could move the cut.
    probabilities = torch.softmax(logits.double(), dim=-1)
    ranked = probabilities.sort(dim=-1, descending=True, stable=True).values
    reached = ranked.cumsum(dim=-1) >= p
    keep = torch.ones_like(reached)
    keep[..., 1:] = ~reached[..., :-1]  # keep a token if those before it do not reach p
    return _keep(logits, keep)


def _keep(logits: Tensor, keep_rank: Tensor) -> Tensor:
    """Set tokens to -inf whose rank (most likely first) is not kept."""
    # A stable sort makes ties deterministic; torch.topk does not promise that.
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    keep = torch.zeros_like(logits, dtype=torch.bool)
    keep.scatter_(-1, order, keep_rank.expand_as(logits))
    return logits.masked_fill(~keep, -math.inf)

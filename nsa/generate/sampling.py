"""The choice of the next token from its logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sample_token(
    logits: Tensor,  # [B, V]
    temperature: float,
    generator: torch.Generator | None = None,
) -> Tensor:  # [B] int64
    """Draw one token for each row; temperature 0 takes the most likely one.

    Below 1 the likely tokens become likelier, above 1 all become more alike. The draw is made in
    fp32 on the CPU, so that on every device the same logits and seed give the same token.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(
            f"temperature={temperature} is not allowed; it must be a finite number >= 0; "
            "use 0 for the most likely token, 1 for the model's own distribution"
        )
    logits = logits.float().cpu()
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)

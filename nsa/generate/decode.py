"""Text from a model: the prompt in one prefill, then token by token with the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.data import Tokenizer
from nsa.generate.sampling import sample_token
from nsa.model import TinyLM

PROMPT = "KING.\n"
SAMPLE_TOKENS = 400
TEMPERATURE = 0.5
"""Low: a model of a two-minute run writes words then, where it would mumble at 1."""


def sample_text(model: TinyLM, tokenizer: Tokenizer, seed: int) -> str:
    """Let a model write a short text, to see what it has learned."""
    prompt = torch.from_numpy(tokenizer.encode(PROMPT).copy()).long()[None]
    ids = generate(model, prompt, SAMPLE_TOKENS, temperature=TEMPERATURE, seed=seed)
    text = ids[0].tolist()
    return tokenizer.decode(text[: text.index(tokenizer.eos)] if tokenizer.eos in text else text)


@torch.no_grad()
def generate(
    model: TinyLM,
    prompt: Tensor,  # [B, T] int64, T >= 1
    num_tokens: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> Tensor:  # [B, T + num_tokens] int64, on the CPU
    """Continue each prompt by `num_tokens` tokens; the same arguments give the same tokens."""
    if prompt.ndim != 2 or prompt.shape[1] < 1 or num_tokens < 0:
        raise ValueError(
            f"prompt of shape {tuple(prompt.shape)} and num_tokens={num_tokens}; a prompt is "
            "[batch, tokens] with at least one token, num_tokens is >= 0; correct them"
        )
    device = next(model.parameters()).device
    draws = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    cache = model.new_cache(batch=len(prompt), max_len=prompt.shape[1] + num_tokens)
    logits = model.prefill(prompt.to(device), cache)[:, -1]  # [B, V]
    tokens = [prompt.cpu()]
    for left in range(num_tokens, 0, -1):
        token = sample_token(logits, temperature, draws)  # [B]
        tokens.append(token[:, None])
        if left > 1:
            logits = model.step(token.to(device), cache)
    model.train(was_training)
    return torch.cat(tokens, dim=1)

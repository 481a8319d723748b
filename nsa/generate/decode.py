"""Decoding: prefill the prompt, then generate token by token with the cache and a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nsa.data import Tokenizer
from nsa.model import ModelCache, NSACache, TinyLM
from nsa.records.results import PROMPT

# --- Sampling: choose the next token from its logits ---
# Order: repetition penalty, temperature, top-k, top-p, draw.


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


SAMPLE_TOKENS = 400
TEMPERATURE = 0.5
"""Low: after a two-minute run a model writes words at 0.5, but gibberish at 1."""
GRAPH_FROM = 8
"""From this many tokens on, capturing a CUDA graph pays off; it costs a few steps."""


# --- token by token ---

Prefill = Callable[[Tensor, ModelCache], Tensor]
"""(ids [B, T], an empty cache) -> the logits of the next token [B, V]; fills the cache."""


def sample_text(model: TinyLM, tokenizer: Tokenizer, seed: int) -> str:
    """A short sample text, to see what the model has learned."""
    prompt = torch.from_numpy(tokenizer.encode(PROMPT).copy()).long()[None]
    sampling = Sampling(temperature=TEMPERATURE, seed=seed)
    ids = generate(model, prompt, SAMPLE_TOKENS, sampling)
    text = ids[0].tolist()
    return tokenizer.decode(text[: text.index(tokenizer.eos)] if tokenizer.eos in text else text)


def generate(
    model: TinyLM,
    prompt: Tensor,  # [B, T] int64, T >= 1
    num_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008  frozen
) -> Tensor:  # [B, T + num_tokens] int64, on the CPU
    """Continue each prompt by `num_tokens` tokens; deterministic for equal arguments."""
    new = list(next_tokens(model, prompt, num_tokens, sampling))
    return torch.cat([prompt.cpu(), *(token[:, None] for token in new)], dim=1)


def next_tokens(
    model: TinyLM,
    prompt: Tensor,  # [B, T] int64, T >= 1
    num_tokens: int,
    sampling: Sampling,
    prefill: Prefill | None = None,
) -> Iterator[Tensor]:  # [B] int64, on the CPU
    """Yield the next token of every prompt, `num_tokens` times, as soon as it is chosen.

    Every row has its own generator with the same seed, so that a prompt's text does not depend on
    the other prompts in the batch. `prefill` reads the prompts in place of the model alone.
    """
    if prompt.ndim != 2 or prompt.shape[0] < 1 or prompt.shape[1] < 1 or num_tokens < 0:
        raise ValueError(
            f"prompt of shape {tuple(prompt.shape)} and num_tokens={num_tokens}; a prompt is "
            "[batch, tokens] with at least one token, and num_tokens >= 0; correct them"
        )
    device = model.embed.weight.device
    draws = [torch.Generator().manual_seed(sampling.seed) for _ in range(len(prompt))]
    seen = None
    if sampling.repetition_penalty != 1.0:
        seen = torch.zeros(len(prompt), model.vocab, dtype=torch.bool)
        seen.scatter_(1, prompt.cpu(), True)
    with _evaluating(model):
        cache = model.new_cache(batch=len(prompt), max_len=prompt.shape[1] + num_tokens)
        prefill = prefill or model.prefill_last
        logits = prefill(prompt.to(device), cache) if num_tokens else None
        step: Callable[[Tensor], Tensor] = partial(model.step, cache=cache)
        if num_tokens >= GRAPH_FROM and can_capture(model, cache):
            step = GraphedStep(model, cache)
        for left in range(num_tokens, 0, -1):
            assert logits is not None
            token = choose_tokens(logits, sampling, draws, seen)
            if seen is not None:
                seen.scatter_(1, token[:, None], True)
            yield token
            if left > 1:
                with _few_threads(model):
                    logits = step(token.to(device))


ONE_THREAD_BELOW = 2_000_000
"""Parameters up to which a decode step on a CPU takes one thread. Its products have one row: more
threads gain at most 8 % on an idle machine, and take seven to ten times as long on a busy one."""


@contextmanager
def _few_threads(model: TinyLM) -> Iterator[None]:
    before = torch.get_num_threads()
    if model.embed.weight.device.type != "cpu" or before == 1 or not _is_small(model):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_small(model: TinyLM) -> bool:
    return sum(p.numel() for p in model.parameters()) < ONE_THREAD_BELOW


@contextmanager
def _evaluating(model: TinyLM) -> Iterator[None]:
    """Evaluation mode; restores the previous mode even if the generator is abandoned."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


# --- the decode step as a CUDA graph: one launch instead of hundreds ---

WARM_UP = 2
"""Steps before the capture: the first compiles kernels and allocates their memory."""


def can_capture(model: TinyLM, cache: ModelCache) -> bool:
    """Whether a step can be captured.

    Only the decode kernels read sequence lengths on the device; other decode paths read them on
    the host, and a graph would replay a fixed length.
    """
    if not model.embed.weight.is_cuda:
        return False
    pairs = zip(model.layers, cache.layers, strict=True)
    return all(
        isinstance(layer, NSACache) and block.attn.decodes_by_kernels(layer)
        for block, layer in pairs
    )


class GraphedStep:
    """`model.step` for one cache; each call overwrites the logits of the previous one."""

    def __init__(self, model: TinyLM, cache: ModelCache) -> None:
        self.cache = cache
        self.graph = torch.cuda.CUDAGraph()
        batch, device = cache.layers[0].batch, model.embed.weight.device
        self._ids = torch.zeros(batch, dtype=torch.int64, device=device)
        with torch.cuda.device(device), _no_autocast_cache():
            self._capture(model, torch.cuda.Stream(device))

    def __call__(self, ids: Tensor) -> Tensor:  # [B] -> [B, V]
        """Append one token per sequence; returns the next logits."""
        for layer in self.cache.layers:
            # The graph itself cannot raise: check room and shape on the host first.
            layer.check(ids[:, None])
        self._ids.copy_(ids)
        self.graph.replay()
        for layer in self.cache.layers:
            layer.advanced()
        return self.logits

    def _capture(self, model: TinyLM, side: torch.cuda.Stream) -> None:
        """Warm up and capture without side effects on the cache.

        The appended tokens lie where the next real token goes; lengths and counters are restored.
        """
        layers, length = self.cache.layers, self.cache.length
        counters = [(layer.reads.clone(), layer.last_reads.clone()) for layer in layers]

        def put_back() -> None:
            self.cache.clear()
            for layer in layers:
                layer.length = length

        # Warm up on the capture stream, ordered after work already queued on the current one.

        current = torch.cuda.current_stream(side.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                model.step(self._ids, self.cache)
                put_back()
        current.wait_stream(side)
        with torch.cuda.graph(self.graph, stream=side):
            self.logits = model.step(self._ids, self.cache)
        put_back()
        for layer, (reads, last_reads) in zip(layers, counters, strict=True):
            layer.reads.copy_(reads)
            layer.last_reads.copy_(last_reads)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Disable autocast's weight cache during capture.

    Autocast frees its cached low-precision weights when it ends; a graph that captured their
    addresses would read freed memory. Without the cache the graph casts for itself.
    """
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)

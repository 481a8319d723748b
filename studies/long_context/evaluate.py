"""The needle grid: whether a model answers, by length of the context and depth of the needle.

By `forward`, an answer is right where it has the largest logit, with all tokens before it given:
one pass over the whole context. By `decode`, the question goes through prefill in tiles and its
last token through a decode step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nsa.config import ModelConfig
from nsa.model import TinyLM
from studies.long_context.results import ROPES, WAYS, Grid
from studies.long_context.task import (
    Document,
    Ids,
    build,
    draw_secrets,
    generator_of,
)
from studies.long_context.vocabulary import Words


@dataclass(frozen=True, kw_only=True)
class Exam:
    """What all models are asked."""

    words: Words
    hay: Ids
    """Held-out text."""
    depths: Sequence[float]
    trials: int
    """Questions for each depth."""
    batch_tokens: int
    """Tokens that go through a model at once, at least one context."""
    seed: int

    def documents(self, task: str, length: int) -> Iterator[Document]:
        """Contexts of `length` tokens that end with an answer; the same for every model.

        One needle each, all depths in turn; with many, one at each of the depths.
        """
        for trial in range(self.trials):
            together = [list(self.depths)] if task == "multi" else [[d] for d in self.depths]
            for depths in together:
                draw = generator_of(self.seed, "exam", task, length, trial, depths)
                keys = draw.permutation(self.words.keys)
                secrets = draw_secrets(task, depths, self.words, keys, draw)
                yield build(length + 1, secrets, self.hay, self.words, draw)


def scale_rope(model: TinyLM, trained: ModelConfig, rope: str, factor: float) -> None:
    """Make the model read contexts `factor` times as long as those of its training.

    `linear` divides the positions, `base` slows the slow frequencies alone: with this base the
    slowest turns as under `linear`, and neighbours stay as far apart as they were.
    """
    scale, base = trained.rope_scale, trained.rope_base
    if rope == "linear":
        scale *= max(1.0, factor)
    elif rope == "base":
        base *= max(1.0, factor) ** (trained.d_k / (trained.d_k - 2))
    elif rope != "none":
        raise ValueError(f"rope={rope!r} is not known; use one of {', '.join(ROPES)}")
    for block in model.layers:
        block.attn.rope_scale, block.attn.rope_base = scale, base


@torch.no_grad()
def ask(model: TinyLM, exam: Exam, name: str, task: str, rope: str, way: str, length: int) -> Grid:
    """The grid of a model at one length."""
    start = time.perf_counter()
    right, asked = np.zeros(len(exam.depths), int), np.zeros(len(exam.depths), int)
    answer: Callable[[TinyLM, Tensor, list[Document]], Tensor] = ANSWERERS[way]
    places = {depth: i for i, depth in enumerate(exam.depths)}
    device = model.embed.weight.device
    for documents in _batches(exam.documents(task, length), max(1, exam.batch_tokens // length)):
        ids = torch.from_numpy(np.stack([document.ids for document in documents])).to(device)
        for document, found in zip(documents, answer(model, ids, documents).tolist(), strict=True):
            for depth, is_right in zip(document.depths, found, strict=False):
                asked[places[depth]] += 1
                right[places[depth]] += is_right
    return Grid(
        model=name,
        task=task,
        rope=rope,
        way=way,
        length=length,
        depths=list(exam.depths),
        right=right.tolist(),
        asked=asked.tolist(),
        seconds=round(time.perf_counter() - start, 3),
    )


def _by_forward(model: TinyLM, ids: Tensor, documents: list[Document]) -> Tensor:  # [B, questions]
    hidden = model.hidden(ids[:, :-1])
    places = torch.tensor([document.answers for document in documents], device=ids.device)
    row = torch.arange(len(documents), device=ids.device)[:, None]
    return model.head(hidden[row, places - 1]).argmax(-1) == ids[row, places]


def _by_decode(model: TinyLM, ids: Tensor, documents: list[Document]) -> Tensor:  # [B, 1]
    """The first question alone."""
    (place,) = {document.answers[0] for document in documents}
    cache = model.new_cache(batch=len(documents), max_len=place)
    model.prefill_last(ids[:, : place - 1], cache)
    return (model.step(ids[:, place - 1], cache).argmax(-1) == ids[:, place])[:, None]


ANSWERERS = dict(zip(WAYS, (_by_forward, _by_decode), strict=True))


def _batches(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
    batch: list[Document] = []
    for document in documents:
        batch.append(document)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch

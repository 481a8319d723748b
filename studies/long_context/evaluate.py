"""The needle grid of the study: what all models are asked, also past the lengths of training.

nsa.evaluate.grid asks and counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nsa.config import ModelConfig
from nsa.evaluate.grid import count_answers
from nsa.evaluate.needles import Document, Ids, build, generator_of
from nsa.model import TinyLM
from studies.long_context.results import ROPES, Grid
from studies.long_context.task import draw_secrets
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
                yield build(length + 1, secrets, self.hay, self.words.end, draw)


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


def ask(model: TinyLM, exam: Exam, name: str, task: str, rope: str, way: str, length: int) -> Grid:
    """The grid of a model at one length."""
    start = time.perf_counter()
    batch = max(1, exam.batch_tokens // length)
    found = count_answers(model, exam.documents(task, length), exam.depths, way=way, batch=batch)
    return Grid(
        model=name,
        task=task,
        rope=rope,
        way=way,
        length=length,
        depths=list(exam.depths),
        right=found.right,
        asked=found.asked,
        seconds=round(time.perf_counter() - start, 3),
    )

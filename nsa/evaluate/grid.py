"""The needle grid: whether a model answers, by length of the context and depth of the needle.

By `forward`, an answer is right where each of its tokens has the largest logit, with all tokens
before it given: one pass over the whole context. By `decode`, the question goes through prefill in
tiles, and its last token and the answer through decode steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nsa.evaluate.needles import Document
from nsa.evaluate.results import WAYS
from nsa.model import TinyLM


class Counts(NamedTuple):
    """Answers at each depth."""

    right: list[int]
    asked: list[int]


@torch.no_grad()
def count_answers(
    model: TinyLM,
    documents: Iterable[Document],
    depths: Sequence[float],
    *,
    way: str = "forward",
    batch: int = 1,
) -> Counts:
    """Ask all questions of the documents, `batch` documents of one length at a time."""
    right, asked = np.zeros(len(depths), int), np.zeros(len(depths), int)
    places = {depth: i for i, depth in enumerate(depths)}
    device = model.embed.weight.device
    for some in _batches(documents, batch):
        ids = torch.from_numpy(np.stack([document.ids for document in some])).to(device)
        for document, found in zip(some, ANSWERERS[way](model, ids, some).tolist(), strict=True):
            for depth, is_right in zip(document.depths, found, strict=False):
                asked[places[depth]] += 1
                right[places[depth]] += is_right
    return Counts(right.tolist(), asked.tolist())


def _by_forward(model: TinyLM, ids: Tensor, documents: list[Document]) -> Tensor:  # [B, questions]
    hidden = model.hidden(ids[:, :-1])
    places = torch.tensor([document.answers for document in documents], device=ids.device)
    # [B, questions, tokens of an answer]
    places = places[..., None] + torch.arange(documents[0].answer_len, device=ids.device)
    row = torch.arange(len(documents), device=ids.device)[:, None, None]
    return (model.head(hidden[row, places - 1]).argmax(-1) == ids[row, places]).all(-1)


def _by_decode(model: TinyLM, ids: Tensor, documents: list[Document]) -> Tensor:  # [B, 1]
    """The first question alone."""
    (place,) = {document.answers[0] for document in documents}
    stop = place + documents[0].answer_len
    cache = model.new_cache(batch=len(documents), max_len=stop)
    model.prefill_last(ids[:, : place - 1], cache)
    right = [
        model.step(ids[:, at - 1], cache).argmax(-1) == ids[:, at] for at in range(place, stop)
    ]
    return torch.stack(right).all(0)[:, None]


ANSWERERS: dict[str, Callable[[TinyLM, Tensor, list[Document]], Tensor]] = dict(
    zip(WAYS, (_by_forward, _by_decode), strict=True)
)


def _batches(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    """Groups of neighbours whose tensors have one shape."""
    batch: list[Document] = []
    for document in documents:
        if batch and (len(batch) == size or _shape(document) != _shape(batch[0])):
            yield batch
            batch = []
        batch.append(document)
    if batch:
        yield batch


def _shape(document: Document) -> tuple[Any, ...]:
    first = document.answers[:1]
    return len(document.ids), len(document.answers), document.answer_len, first

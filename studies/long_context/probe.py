"""Right answers in held-out training rows, by the distance between a needle and its question.

The grid asks at the ends of long texts; here are the questions of training, over short distances,
too: where a model does not retrieve, this says from which distance on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from nsa.model import TinyLM
from studies.long_context.results import Probe
from studies.long_context.task import Document

SHORTEST = 16
"""Tokens up to which all distances count as one."""


@torch.no_grad()
def probe(model: TinyLM, rows: Sequence[Document], name: str, batch_tokens: int) -> Probe:
    """Ask for every answer of the rows, with all tokens before it given."""
    start = time.perf_counter()
    seq_len = len(rows[0].ids)
    device = model.embed.weight.device
    found: list[bool] = []
    size = max(1, batch_tokens // seq_len)
    for first in range(0, len(rows), size):
        batch = rows[first : first + size]
        ids = torch.from_numpy(np.stack([row.ids for row in batch])).to(device)
        hidden = model.hidden(ids)
        places = [(i, place) for i, row in enumerate(batch) for place in row.answers]
        row, place = torch.tensor(places, device=device).reshape(-1, 2).unbind(1)
        found += (model.head(hidden[row, place - 1]).argmax(-1) == ids[row, place]).tolist()
    distances = [distance for row in rows for distance in row.distances]
    limits = [max(SHORTEST, 1 << (distance - 1).bit_length()) for distance in distances]
    kinds = sorted(set(limits))
    return Probe(
        model=name,
        seq_len=seq_len,
        distances=kinds,
        right=[sum(f for f, x in zip(found, limits, strict=True) if x == kind) for kind in kinds],
        asked=[limits.count(kind) for kind in kinds],
        seconds=round(time.perf_counter() - start, 3),
    )

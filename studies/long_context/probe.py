"""Right answers in held-out training rows, by the distance between a needle and its question.

The grid asks at the ends of long texts; here are the questions of training, over short distances,
too: where a model does not retrieve, this says from which distance on. Of NSA it also says how
often the block of the needle was among those that were read, by the KV head that finds most of
them: some head of some layer reads a given block by chance nearly always.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nsa.evaluate.needles import Document
from nsa.model import TinyLM
from studies.long_context.results import Probe
from studies.recorder import SelectionRecorder

SHORTEST = 16
"""Tokens up to which all distances count as one."""


@torch.no_grad()
def probe(model: TinyLM, rows: Sequence[Document], name: str, batch_tokens: int) -> Probe:
    """Ask for every answer of the rows, with all tokens before it given."""
    start = time.perf_counter()
    seq_len = len(rows[0].ids)
    device = model.embed.weight.device
    found: list[bool] = []
    reads: list[Tensor] = []
    size = max(1, batch_tokens // seq_len)
    for first in range(0, len(rows), size):
        batch = rows[first : first + size]
        ids = torch.from_numpy(np.stack([row.ids for row in batch])).to(device)
        recorder = SelectionRecorder()
        hidden = model.hidden(ids, stats=recorder)
        places = [(i, place) for i, row in enumerate(batch) for place in row.answers]
        row, place = torch.tensor(places, device=device).reshape(-1, 2).unbind(1)
        told = place - torch.tensor([x for r in batch for x in r.distances], device=device)
        if recorder.layers:
            reads.append(_reads(recorder, row, place - 1, told))
        found += (model.head(hidden[row, place - 1]).argmax(-1) == ids[row, place]).tolist()
    distances = [distance for row in rows for distance in row.distances]
    limits = [max(SHORTEST, 1 << (distance - 1).bit_length()) for distance in distances]
    kinds = sorted(set(limits))

    def count(of: list[bool]) -> list[int]:
        return [sum(f for f, x in zip(of, limits, strict=True) if x == kind) for kind in kinds]

    return Probe(
        model=name,
        seq_len=seq_len,
        distances=kinds,
        right=count(found),
        chosen=count(best_head(torch.cat(reads))) if reads else None,
        asked=[limits.count(kind) for kind in kinds],
        seconds=round(time.perf_counter() - start, 3),
    )


def _reads(
    recorder: SelectionRecorder, row: Tensor, query: Tensor, told: Tensor
) -> Tensor:  # [questions, layers * Hkv] bool
    """Whether each head reads, for each query, the block of the token that it is to tell."""
    block = (told // recorder.block_tokens)[:, None, None]
    return torch.cat([(ids[row, query] == block).any(-1) for ids in recorder.layers], dim=1)


def best_head(reads: Tensor) -> list[bool]:
    """Those of the head that reads most of the blocks."""
    best: list[bool] = reads[:, reads.sum(0).argmax()].tolist()
    return best

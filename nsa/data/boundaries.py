"""Where documents start inside a row, for attention that does not cross their borders."""

from __future__ import annotations

import torch
from torch import Tensor


def document_starts(
    row: Tensor,  # [T] int64
    eos: int,
) -> Tensor:  # [number of starts] int64, ascending
    """Return the positions right after an end mark; one in the last place starts nothing here.

    Position 0 is never among them: a row usually begins in the middle of a document.
    """
    return (row[:-1] == eos).nonzero().flatten() + 1


def cu_seqlens(
    tokens: Tensor,  # [S] int64, the inputs of a row
    eos: int,
) -> Tensor:  # [documents + 1] int32, on the device of the tokens
    """Return 0, the starts of the documents and S, as the packed operators take them."""
    starts = document_starts(tokens, eos)
    return torch.cat([starts.new_tensor([0]), starts, starts.new_tensor([len(tokens)])]).int()


def packed_bounds(
    batch: Tensor,  # [B, S+1] int64
    eos: int,
) -> Tensor:  # [documents + 1] int32, on the device of the batch
    """Return the bounds of the inputs of all rows put one after another; each row starts anew."""
    seq_len = batch.shape[1] - 1
    bounds = [cu_seqlens(row[:-1], eos)[:-1] + seq_len * i for i, row in enumerate(batch)]
    return torch.cat([*bounds, bounds[0].new_tensor([seq_len * len(batch)])])

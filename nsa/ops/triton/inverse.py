"""The inverse of a selection: for each block the queries that chose it, and a flat work list."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops.spec import BlockSpec


class Blocks(NamedTuple):
    """Where the selection blocks of all documents lie, int32 [blocks]."""

    start: Tensor  # first token
    stop: Tensor  # one past the last token
    row_base: Tensor | None  # [S] number of the first block of the row's document (packed only)

    @property
    def num(self) -> int:
        return len(self.start)


class Inverse(NamedTuple):
    """Entries sorted by block, for every segment (batch element, KV head)."""

    entries: Tensor  # [segments, rows * n_sel] int32  row * n_sel + place
    offsets: Tensor  # [segments, blocks + 1] int32  where a block's entries begin


class Items(NamedTuple):
    """Work list: the blocks cut into pieces of equal size, in the order of the blocks."""

    block: Tensor  # [segments, items] int32  its block; `blocks` where the list has ended
    first: Tensor  # [segments, blocks] int32  first item of each block


def index_blocks(doc_lens: list[int], spec: BlockSpec, device: torch.device) -> Blocks:
    """Number the blocks of the documents one after another."""
    lengths = torch.tensor(doc_lens)
    counts = torch.tensor([spec.num_blocks(length) for length in doc_lens])
    starts, bases = lengths.cumsum(0) - lengths, counts.cumsum(0) - counts
    within = torch.arange(int(counts.sum())) - bases.repeat_interleave(counts)
    start = starts.repeat_interleave(counts) + within * spec.l_sel
    stop = torch.minimum(start + spec.l_sel, (starts + lengths).repeat_interleave(counts))
    row_base = None
    if len(doc_lens) > 1:
        row_base = bases.repeat_interleave(lengths).to(torch.int32).to(device)
    return Blocks(start.to(torch.int32).to(device), stop.to(torch.int32).to(device), row_base)


def invert(
    selection: Tensor,  # [B, rows, Hkv, n_sel] int32
    blocks: Blocks,
    first_row: int,
) -> Inverse:
    """Sort the entries of a chunk of rows by block; stable, so the order is always the same."""
    batch, num_rows, num_groups, n_sel = selection.shape
    ids = selection
    if blocks.row_base is not None:
        base = blocks.row_base[first_row : first_row + num_rows, None, None]
        ids = torch.where(ids >= 0, ids + base, ids)
    ids = torch.where(ids >= 0, ids, blocks.num)
    ids = ids.permute(0, 2, 1, 3).reshape(batch * num_groups, num_rows * n_sel)
    narrow = torch.int16 if blocks.num < 1 << 15 else torch.int32
    ordered, entries = ids.to(narrow).sort(dim=-1, stable=True)
    edges = torch.arange(blocks.num + 1, device=ids.device, dtype=narrow)
    offsets = torch.searchsorted(ordered, edges.expand(len(ids), -1).contiguous(), out_int32=True)
    return Inverse(entries.to(torch.int32), offsets)


def cut(inverse: Inverse, piece: int) -> Items:
    """Cut every block's entries into pieces of `piece`; the list has the worst-case length."""
    num_segments, num_blocks = inverse.offsets.shape[0], inverse.offsets.shape[1] - 1
    counts = inverse.offsets.diff(dim=-1)
    ends = ((counts + piece - 1) // piece).cumsum(dim=-1, dtype=torch.int32)
    num_items = inverse.entries.shape[1] // piece + num_blocks
    number = torch.arange(num_items, device=ends.device, dtype=torch.int32)
    number = number.expand(num_segments, -1).contiguous()
    block = torch.searchsorted(ends, number, right=True, out_int32=True)
    first = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], dim=-1)
    return Items(block, first.contiguous())

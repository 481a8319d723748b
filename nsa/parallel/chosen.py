"""The selected branch's keys and values, where only blocks that somebody chose are sent.

An all-gather sends every token to every rank. Here each rank first chooses its blocks, tells all
others which, and receives the tokens of those alone. That is less where queries agree on few
blocks, or where a rank has few queries. The rule: chosen blocks are sent if the rank that wants
most from others wants less than an all-gather would bring it. All ranks see the same numbers, so
all decide alike. The decision needs numbers on the host: a sync in every layer. plan.py prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from nsa.ops import BlockSpec
from nsa.parallel.exchange import Context, all_gather, in_order
from nsa.parallel.split import Split


class Wanted(NamedTuple):
    """Which blocks of the row each rank reads."""

    blocks: Tensor  # [P, blocks of the row] bool
    tokens: list[int]
    """By rank: the tokens of these blocks that others hold."""

    def is_less(self, split: Split) -> bool:
        """The rule: whether sending the chosen blocks beats an all-gather."""
        return max(self.tokens) < gathered_tokens(split)


def ask_all(
    context: Context,
    split: Split,
    selection: Tensor,  # [B, T, Hkv, n_sel] int32, of this rank's tokens
    block: int,
) -> Wanted:
    """Tell all ranks what this one reads, and learn what they do."""
    table, device = _blocks_of(split, block), selection.device
    held = [piece for part in split.parts_of(context.rank) for piece in split.pieces[part]]
    lens = torch.tensor([piece.num_tokens for piece in held])
    base = torch.tensor([table.first_of[piece.start] for piece in held])
    # Ids count from the start of a document; here from that of the row.
    shift = base.repeat_interleave(lens).to(device)[:, None, None]  # [T, 1, 1]
    num = len(table.lengths)
    ids = torch.where(selection >= 0, selection + shift, num)
    own = torch.zeros(num + 1, dtype=torch.uint8, device=device)
    own.index_fill_(0, ids.flatten(), 1)
    blocks = all_gather(own[None, :num], context.group) > 0
    return Wanted(blocks, (blocks * _elsewhere(split, block).to(device)).sum(dim=1).tolist())


def fetch(
    context: Context,
    split: Split,
    wanted: Wanted,
    block: int,
    *tensors: Tensor,  # [B, T, H, D], of this rank's tokens; D may differ
) -> Callable[[], tuple[Tensor, ...]]:  # [B, S, H, D]
    """The whole row, with zeros for the tokens of blocks that this rank does not read."""
    x = torch.cat(tensors, dim=-1).transpose(0, 1)  # [T, B, H, D]
    num_own, device = x.shape[0], x.device
    # [P, T]: the block of every token, in the order in which ranks hold them.
    blocks = _held_blocks(split, block).to(device)
    asked = wanted.blocks[:, blocks[context.rank]]  # [P, T]: who reads which of the own tokens
    reads = wanted.blocks[context.rank][blocks]  # [P, T]: what this rank reads of whom
    rows = asked.nonzero()[:, 1]  # by receiver
    places = reads.flatten().nonzero()[:, 0]
    counts = torch.stack([asked.sum(dim=1), reads.sum(dim=1)]).tolist()
    received = collectives.all_to_all_single_autograd(
        x.index_select(0, rows), counts[1], counts[0], context.group
    )

    def whole() -> Tensor:
        row = received.new_zeros(split.num_ranks * num_own, *x.shape[1:])
        gathered = row.index_copy(0, places, received)
        return in_order(gathered, split, [split.part_len] * split.num_parts)

    sizes = [t.shape[-1] for t in tensors]
    return lambda: whole().split(sizes, dim=-1)


def num_row_blocks(split: Split, block: int) -> int:
    """Selection blocks of the row, those of all its documents."""
    return len(_blocks_of(split, block).lengths)


def gathered_tokens(split: Split) -> int:
    """Tokens that an all-gather brings to a rank."""
    return split.num_tokens - split.num_tokens // split.num_ranks


def most_wanted(split: Split, spec: BlockSpec, num_choosers: int) -> int:
    """A bound of what the rank that wants most can want of others, before anybody has chosen.

    `num_choosers` KV heads and rows of a batch choose n_sel blocks each for every query, of those
    that begin before it in its document.
    """
    table, elsewhere = _blocks_of(split, spec.l_sel), _elsewhere(split, spec.l_sel)
    seen = torch.zeros_like(elsewhere, dtype=torch.bool)
    for rank in range(split.num_ranks):
        for piece in (piece for part in split.parts_of(rank) for piece in split.pieces[part]):
            first = table.first_of[piece.start]
            seen[rank, first : first + spec.num_blocks(piece.num_keys)] = True
    num_queries = split.num_tokens // split.num_ranks
    most = num_choosers * num_queries * spec.n_sel * spec.l_sel
    return min(most, int((elsewhere * seen).sum(dim=1).max()))


class _Blocks(NamedTuple):
    """The selection blocks of a row: those of its documents, one after another."""

    lengths: list[int]
    """Tokens of each block."""
    first_of: dict[int, int]
    """By the first token of a document: its first block."""


@lru_cache(maxsize=8)
def _blocks_of(split: Split, block: int) -> _Blocks:
    lengths: list[int] = []
    first_of = {}
    for start, stop in pairwise(split.bounds or (0, split.num_tokens)):
        first_of[start] = len(lengths)
        lengths += [min(block, stop - first) for first in range(start, stop, block)]
    return _Blocks(lengths, first_of)


@lru_cache(maxsize=8)
def _held_blocks(split: Split, block: int) -> Tensor:  # [P, T] int64, on the host
    """The block of every token, by rank, in the order in which it holds them."""
    lengths = torch.tensor(_blocks_of(split, block).lengths)
    by_token = torch.arange(len(lengths)).repeat_interleave(lengths)
    held = [
        torch.cat([by_token[split.tokens(part)] for part in split.parts_of(rank)])
        for rank in range(split.num_ranks)
    ]
    return torch.stack(held)


@lru_cache(maxsize=8)
def _elsewhere(split: Split, block: int) -> Tensor:  # [P, blocks of the row] int64, on the host
    """By rank: the tokens of each block that other ranks hold."""
    lengths = torch.tensor(_blocks_of(split, block).lengths)
    held = [row.bincount(minlength=len(lengths)) for row in _held_blocks(split, block)]
    return lengths - torch.stack(held)

"""What a recorded selection says: how far queries read, and how alike those of neighbours are.

Only queries that had to choose count: those with more blocks before them than they may read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa import BlockSpec
from nsa.model.stats import count_reads, distance_edges

LAGS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Tokens between two queries whose blocks are compared."""
TILES = (2, 4, 8, 16, 32, 64, 128)
"""Neighbouring queries whose blocks are put together."""


def describe_selection(
    layers: list[Tensor],  # each [B, S, Hkv, n_sel] int32
    spec: BlockSpec,
) -> dict[str, Any]:
    """Distances, overlaps and unions by layer, each beside what blocks drawn at random would give.

    `overlap`: of the blocks that a query chose by score, the share that the one so many tokens
    later chose, too. `union`: different blocks that a tile of neighbours reads, forced ones
    included, in units of n_sel: 1 where all read the same.
    """
    seq_len = layers[0].shape[1]
    first = first_choosing(spec)
    chooses = seq_len > first and spec.n_sel > spec.num_forced
    lags = [lag for lag in LAGS if chooses and first + lag < seq_len]
    tiles = [tile for tile in TILES if chooses and _tile_range(first, seq_len, tile)[1] > 0]
    members = [membership(ids, spec) for ids in layers]
    by_chance = chance(seq_len, spec)
    return {
        "block_tokens": spec.l_sel,
        "n_sel": spec.n_sel,
        "seq_len": seq_len,
        "rows": layers[0].shape[0],
        "edges": distance_edges(spec.num_blocks(seq_len)),
        "distances": [_distances(ids, spec) for ids in layers],
        "random_distances": random_distances(by_chance, spec),
        "lags": lags,
        "overlap": [[overlap(member, spec, lag) for lag in lags] for member in members],
        "random_overlap": [overlap(by_chance[None, :, None], spec, lag) for lag in lags],
        "tiles": tiles,
        "union": [[union(member, spec, tile) for tile in tiles] for member in members],
        "random_union": [union(by_chance[None, :, None], spec, tile) for tile in tiles],
    }


def first_choosing(spec: BlockSpec) -> int:
    """The first query with more blocks before it than it reads."""
    return spec.n_sel * spec.l_sel


def overlap(
    member: Tensor,  # [B, S, Hkv, blocks] bool, or how likely a block is read
    spec: BlockSpec,
    lag: int,
) -> float:
    """Mean share of a query's scored blocks that the query `lag` tokens later has scored, too."""
    first = first_choosing(spec)
    by_score = ~forced(member.shape[1], spec).to(member.device)[:, None]
    scored = (member * by_score)[:, first:]
    both = scored[:, :-lag] * scored[:, lag:]
    return both.sum(-1).double().mean().item() / (spec.n_sel - spec.num_forced)


def union(
    member: Tensor,  # [B, S, Hkv, blocks] bool, or how likely a block is read
    spec: BlockSpec,
    tile: int,
) -> float:
    """Mean number of blocks that a tile of neighbours reads, over n_sel."""
    start, count = _tile_range(first_choosing(spec), member.shape[1], tile)
    tiles = member[:, start : start + count * tile].unflatten(1, (count, tile))
    read = tiles.any(2) if member.dtype == torch.bool else 1 - (1 - tiles).prod(2)
    return read.sum(-1).double().mean().item() / spec.n_sel


def membership(
    ids: Tensor,  # [B, S, Hkv, n_sel] int32
    spec: BlockSpec,
) -> Tensor:  # [B, S, Hkv, blocks] bool
    """Whether each query reads each block."""
    num_blocks = spec.num_blocks(ids.shape[1])
    places = torch.where(ids < 0, num_blocks, ids).long()
    member = torch.zeros(*ids.shape[:3], num_blocks + 1, dtype=torch.bool, device=ids.device)
    return member.scatter_(3, places, True)[..., :num_blocks]


def forced(seq_len: int, spec: BlockSpec) -> Tensor:  # [S, blocks] bool
    """The blocks that each query reads whatever their scores: the first and its last two."""
    own = (torch.arange(seq_len) // spec.l_sel)[:, None]
    block = torch.arange(spec.num_blocks(seq_len))
    return ((block < spec.num_first) | (block > own - spec.num_local)) & (block <= own)


def chance(seq_len: int, spec: BlockSpec) -> Tensor:  # [S, blocks] fp64
    """How likely each query reads each block where all but the forced ones are drawn at random."""
    own = torch.arange(seq_len)[:, None] // spec.l_sel
    free = (own - (spec.num_forced - 1)).clamp(min=1)
    drawn = ((spec.n_sel - spec.num_forced) / free).clamp(max=1.0).double()
    reachable = torch.arange(spec.num_blocks(seq_len)) <= own
    return torch.where(forced(seq_len, spec), 1.0, drawn * reachable)


def random_distances(
    by_chance: Tensor,  # [S, blocks] fp64
    spec: BlockSpec,
) -> list[float]:
    """What `distances` would be of blocks that are drawn at random."""
    seq_len = by_chance.shape[0]
    edges = distance_edges(spec.num_blocks(seq_len))
    own = torch.arange(seq_len)[:, None] // spec.l_sel
    block = torch.arange(spec.num_blocks(seq_len))
    away = (own - block).clamp(min=0)
    place = torch.bucketize(away, torch.tensor(edges))
    place = torch.where((block == 0) & (away > 1), len(edges), place)
    counts = torch.zeros(len(edges) + 1, dtype=torch.float64)
    counts.scatter_add_(0, place.flatten(), by_chance.flatten())
    return [round(share, 5) for share in (counts / counts.sum()).tolist()]


def _distances(ids: Tensor, spec: BlockSpec) -> list[float]:
    """The share of reads in each bin of distance, over the KV heads; the first block last."""
    counts = count_reads(ids.cpu(), spec.l_sel)
    by_head = torch.tensor(counts.map_of(*counts.tensors).distances, dtype=torch.float64)
    return [round(share, 5) for share in by_head.mean(0).tolist()]


def _tile_range(first: int, seq_len: int, tile: int) -> tuple[int, int]:
    """Where the first whole tile of choosing queries starts, and how many follow."""
    start = -(-first // tile) * tile
    return start, (seq_len - start) // tile

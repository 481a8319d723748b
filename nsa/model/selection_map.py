"""Which blocks the queries of a layer read, counted on the device: a small square, and distances.

Both axes of the square are the blocks of a sequence, put into at most BINS bins of neighbours. A
distance is counted in blocks, from the query's own block back to the one that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.model.rope import document_positions

BINS = 32
"""Along each axis, at most."""


@dataclass(frozen=True)
class SelectionCounts:
    """What one layer read; all on the device, nobody has waited for it."""

    block_tokens: int
    num_blocks: int
    """In the sequence; those of a packed document count from its start."""
    queries: Tensor  # [bins] int64, of each bin, for one KV head
    reads: Tensor  # [Hkv, bins of queries, bins of blocks] int64
    distances: Tensor  # [Hkv, len(distance_edges) + 1] int64; the last: the first block, from afar

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What has to come to the host, for `map_of`."""
        return self.queries, self.reads, self.distances

    def map_of(self, queries: Tensor, reads: Tensor, distances: Tensor) -> LayerMap:
        """Counts as shares, from copies of `tensors` on the host."""
        blocks = torch.bincount(_bins(torch.arange(self.num_blocks), self.num_blocks))
        places = queries[:, None] * blocks  # (query, block) pairs in each cell
        totals = distances.sum(dim=-1, keepdim=True)
        return LayerMap(
            block_tokens=self.block_tokens,
            num_blocks=self.num_blocks,
            edges=distance_edges(self.num_blocks),
            reads=(reads.double() / places.clamp(min=1)).tolist(),
            distances=(distances.double() / totals.clamp(min=1)).tolist(),
        )


@dataclass(frozen=True)
class LayerMap:
    """What one layer read, as shares."""

    block_tokens: int
    num_blocks: int
    edges: list[int]
    """The largest distance of each bin, as distance_edges gives them."""
    reads: list[list[list[float]]]
    """By KV head, bin of queries, bin of blocks: the share of pairs that were read, 0 to 1."""
    distances: list[list[float]]
    """By KV head: the share of all reads in each bin of distance; they add up to 1."""


def distance_edges(num_blocks: int) -> list[int]:
    """The largest distance of each bin: 0, 1, 2, 4, 8 ... up to the length of the sequence."""
    return [0] + [1 << i for i in range(max(1, (num_blocks - 1).bit_length() + 1))]


@torch.no_grad()
def count_reads(
    selection: Tensor,  # [B, S, Hkv, n_sel] int32, -1 where nothing is read
    block_tokens: int,
    cu_seqlens: Tensor | None = None,  # [docs + 1] int32
) -> SelectionCounts:
    """Count what a selection reads; no host sync."""
    batch, seq_len, num_groups, _ = selection.shape
    device, num_blocks = selection.device, -(-seq_len // block_tokens)
    own = document_positions(seq_len, cu_seqlens, device) // block_tokens  # [S]
    bins, edges = min(BINS, num_blocks), len(distance_edges(num_blocks))
    queries = _count(_bins(own, num_blocks), torch.ones_like(own), bins) * batch

    ids = selection.long()
    is_read = (ids >= 0).long()
    group = torch.arange(num_groups, device=device)[:, None]
    cell = (group * bins + _bins(own, num_blocks)[:, None, None]) * bins + _bins(
        ids.clamp(min=0), num_blocks
    )
    away = own[:, None, None] - ids
    place = torch.bucketize(away, _edges_on(device, edges))
    place = torch.where((ids == 0) & (away > 1), edges, place.clamp(max=edges - 1))
    place = group * (edges + 1) + place
    return SelectionCounts(
        block_tokens,
        num_blocks,
        queries,
        _count(cell, is_read, num_groups * bins * bins).view(num_groups, bins, bins),
        _count(place, is_read, num_groups * (edges + 1)).view(num_groups, edges + 1),
    )


def _bins(blocks: Tensor, num_blocks: int) -> Tensor:
    return blocks * min(BINS, num_blocks) // num_blocks


def _edges_on(device: torch.device, count: int) -> Tensor:
    """distance_edges, made on the device: copying a list there would wait for it."""
    edges = 2 ** (torch.arange(count, device=device) - 1).clamp(min=0)
    return torch.where(torch.arange(count, device=device) == 0, 0, edges)


def _count(index: Tensor, weight: Tensor, size: int) -> Tensor:  # [size] int64
    """Add up the weights at each index; whole numbers, so the order does not matter."""
    zeros = torch.zeros(size, dtype=torch.int64, device=index.device)
    return zeros.scatter_add_(0, index.flatten(), weight.flatten())

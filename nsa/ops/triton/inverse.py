"""The inverse of a selection: who chose each block, as chunks of queries and a list of work."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.ops.triton.kernels import index
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.select import Selection
from nsa.ops.triton.start import Launch, ceil_div, start
from nsa.ops.triton.tiles import padded

CACHE_BYTES = 24 << 20
"""What the queries of one chunk and KV head may take of the L2 cache, with their gradients."""
BIN_ROWS = 1024
"""Rows, pairs of a query and a head, that a bin shall have on average, whatever the cache says: a
bin ends with a pass over the gradients of its block."""
MIN_CHUNK, MAX_CHUNK = 1024, 16384
PART_BYTES = 2 << 30
"""Workspace for what queries get from their blocks; longer sequences go in groups of chunks."""
MAX_PIECE, MIN_PIECE = 512, 32
"""Queries of one item, at most: many for less overhead, fewer where there is little work."""
ITEMS = 2048
"""Items that keep every processor of a large GPU at work, some of them longer than others."""
SUBS = 8
"""Parts in which a chunk is counted."""
COUNT_QUERIES = 128
"""Queries that the index kernels look at together."""
ADD_BLOCK = 8192
"""Counts that are added up together."""
FILL = 1024
"""Items that are marked as unused together."""


class Inverse(NamedTuple):
    """For every segment, chunk of queries and block, the queries that chose the block.

    The work list of a chunk is as long as its worst case.
    """

    ends: Tensor  # [segments, chunks, blocks, SUBS] int32: one past the last entry of each part
    queries: Tensor  # [segments, S * n_sel] int32
    places: Tensor  # [segments, S * n_sel] int16: the query's own number of the block
    item_block: Tensor  # [segments, chunks, items] int32; `blocks` where the list has ended
    item_ends: Tensor  # [segments, chunks, blocks] int32: one past the last item of each bin


def invert(problem: Problem, chosen: Selection) -> Inverse:
    """List who chose each block, chunk by chunk, in the order of the queries."""
    inverse = empty_inverse(problem, sized=True)
    segments, num_chunks, num_blocks, _ = inverse.ends.shape
    sub = chunk_size(problem) // SUBS
    grid = (problem.num_words, num_chunks * SUBS, segments)
    sizes = (problem.seq_len, sub, num_blocks, problem.num_words)
    constants = {"SUBS": SUBS, "BQ": min(COUNT_QUERIES, max(sub, 16))}
    counts = torch.empty_like(inverse.ends)
    start(
        problem.memo,
        "count",
        index.count_choices,
        (chosen.bits, counts),
        lambda: Launch.plain(grid, sizes, constants),
    )
    start(
        problem.memo,
        "add up",
        index.add_up,
        (counts, inverse.ends),
        lambda: Launch.plain((segments,), (counts[0].numel(),), {"BLOCK": ADD_BLOCK}, num_warps=8),
    )
    start(
        problem.memo,
        "list",
        index.list_choices,
        (chosen.bits, chosen.before, counts, inverse.ends, inverse.queries, inverse.places),
        lambda: Launch.plain(grid, (*sizes, inverse.queries.shape[1]), constants),
    )
    start(
        problem.memo,
        "cut",
        index.cut_bins,
        (inverse.ends, inverse.item_block, inverse.item_ends),
        lambda: Launch.plain(
            (num_chunks, segments),
            (num_chunks, num_blocks, inverse.item_block.shape[2], piece_size(problem)),
            {"SUBS": SUBS, "NB": padded(num_blocks), "FILL": FILL},
        ),
    )
    return inverse


def empty_inverse(problem: Problem, *, sized: bool = False) -> Inverse:
    """Memory for an inverse, or, not `sized`, five empty tensors that stand for none."""
    kinds = (torch.int32, torch.int32, torch.int16, torch.int32, torch.int32)
    if not sized:
        return Inverse(*(problem.empty(0, dtype=kind) for kind in kinds))
    segments, num_blocks = problem.num_segments, problem.num_blocks
    chunk, num_entries = chunk_size(problem), problem.seq_len * problem.spec.n_sel
    num_chunks = ceil_div(problem.seq_len, chunk)
    # At worst every bin ends with an item of its own.
    num_items = chunk * problem.spec.n_sel // piece_size(problem) + num_blocks
    sizes = (
        (segments, num_chunks, num_blocks, SUBS),
        (segments, num_entries),
        (segments, num_entries),
        (segments, num_chunks, num_items),
        (segments, num_chunks, num_blocks),
    )
    pairs = zip(sizes, kinds, strict=True)
    return Inverse(*(problem.empty(*size, dtype=kind) for size, kind in pairs))


def piece_size(problem: Problem) -> int:
    """Queries of one item, at most: a power of two."""
    each = problem.num_segments * problem.seq_len * problem.spec.n_sel // ITEMS
    return min(max(1 << max(each, 1).bit_length() - 1, MIN_PIECE), MAX_PIECE)


def chunk_size(problem: Problem) -> int:
    """Queries of one chunk, a power of two.

    Their rows of one KV head stay in the cache, or, where there are many blocks, fill the bins.
    """
    width = 2 * problem.d_k + 2 * problem.d_v + 4 * problem.d_k
    cached = CACHE_BYTES // (problem.per_group * width)
    filled = ceil_div(problem.num_blocks * BIN_ROWS, problem.spec.n_sel * problem.per_group)
    rows = max(1 << cached.bit_length() - 1, 1 << (filled - 1).bit_length())
    if not problem.by_query:
        fitting = PART_BYTES // part_bytes(problem, max(problem.d_k, problem.d_v))
        rows = min(rows, 1 << max(fitting, 1).bit_length() - 1)
    rows = min(max(rows, MIN_CHUNK), MAX_CHUNK)
    return min(rows, max(1 << (problem.seq_len - 1).bit_length(), SUBS))


def part_bytes(problem: Problem, dim: int) -> int:
    """What one query's partial results of `dim` numbers take."""
    num_rows = problem.batch * problem.num_heads * problem.spec.n_sel
    return num_rows * dim * problem.dtype.itemsize

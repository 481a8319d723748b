"""Launching the selected branch by its own blocks: the inverse index, chunks and work lists."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.triton.band import Gated
from nsa.ops.triton.kernels import by_block, by_query, index
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.select import Selection
from nsa.ops.triton.start import Launch, ceil_div, start
from nsa.ops.triton.tiles import Tiles, block_tiles, padded, query_tiles

PART_BYTES = 1 << 30
"""Workspace for what a query gets from its blocks; longer sequences go in groups of chunks."""
CACHE_BYTES = 24 << 20
"""What the queries of one chunk and KV head may take of the L2 cache, with their gradients."""
PIECE = 256
"""Queries of one item, at most."""
SUBS = 8
"""Parts in which a chunk is counted."""
COUNT_QUERIES = 128
"""Queries that the index kernels look at together."""
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


class Group(NamedTuple):
    """Chunks whose partial results are in the workspace together."""

    first_chunk: int
    num_chunks: int
    first_row: int
    num_rows: int


def forward_by_query(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Selection,
    lse: Tensor,  # [B, Hq, S] fp32, written
    gated: Gated,
) -> Tensor:  # [B, S, Hq, Dv]
    """Output of the selected branch; finishes the gated sum."""
    out = torch.empty_like(gated.out)
    tiles = _query_tiles(problem)
    start(
        problem.memo,
        "by query",
        by_query.query_forward,
        (
            q, *problem.keys(k, v, tiles.BN), chosen.ids, chosen.num_chosen,
            problem.row_index(1, q)[0], out, lse, *gated,
        ),
        lambda: Launch.tiled(
            (problem.seq_len, problem.num_segments),
            (
                problem.seq_len, problem.num_groups, problem.per_group, problem.scale_log2,
                *q.stride()[:3], *gated.gates.stride()[:3],
            ),
            _constants(problem, N_SEL=problem.spec.n_sel),
            tiles,
        ),
    )  # fmt: skip
    return out


def forward_by_block(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Selection,
    inverse: Inverse,
    lse: Tensor,  # [B, Hq, S] fp32, written
    gated: Gated,
) -> Tensor:  # [B, S, Hq, Dv]
    """Output of the selected branch; finishes the gated sum."""
    out = torch.empty_like(gated.out)
    tiles = _block_tiles(problem)
    groups = _groups(problem, problem.d_v)
    size = problem.num_segments * groups[0].num_rows * problem.spec.n_sel * problem.per_group
    part, part_lse = problem.empty(size, problem.d_v), problem.empty(size, dtype=torch.float32)
    for group in groups:
        _forward_group(problem, group, tiles, q, k, v, inverse, part, part_lse)
        _merge_group(problem, group, part, part_lse, chosen, out, lse, gated)
    return out


def _forward_group(
    problem: Problem,
    group: Group,
    tiles: Tiles,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inverse: Inverse,
    part: Tensor,
    part_lse: Tensor,
) -> None:
    start(
        problem.memo,
        ("by block", group),
        by_block.block_forward,
        (
            q, *problem.keys(k, v, tiles.BN), part, part_lse, inverse.queries, inverse.places,
            inverse.item_block, inverse.item_ends, inverse.ends, *problem.block_index(q),
        ),
        lambda: Launch.tiled(
            (inverse.item_block.shape[2], group.num_chunks, problem.num_segments),
            (*_sizes(problem, inverse, group), problem.scale_log2, *q.stride()[:3]),
            _constants(problem, N_SEL=problem.spec.n_sel, blocks=True),
            tiles,
        ),
    )  # fmt: skip


def _merge_group(
    problem: Problem,
    group: Group,
    part: Tensor,
    part_lse: Tensor,
    chosen: Selection,
    out: Tensor,
    lse: Tensor,
    gated: Gated,
) -> None:
    start(
        problem.memo,
        ("merge", group),
        by_block.merge_parts,
        (part, part_lse, chosen.num_chosen, out, lse, *gated),
        lambda: Launch(
            (group.num_rows, problem.num_segments),
            (
                group.first_row, group.num_rows, problem.seq_len, problem.num_groups,
                problem.per_group, *gated.gates.stride()[:3],
            ),
            {"DV": problem.d_v, "DV_PAD": padded(problem.d_v), "N_SEL": problem.spec.n_sel}
            | {"G_PAD": 1 << (problem.per_group - 1).bit_length()},
            num_warps=1,
        ),
    )  # fmt: skip


def backward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,  # [B, Hq, S, 4] fp32, of this branch
    chosen: Selection,
    inverse: Inverse,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of q in fp32, and of k and v.

    Those of k and v are sums of several programs, which meet in memory in no fixed order.
    """
    dk, dv = _backward_kv(problem, q, k, v, dout, stats, inverse)
    if problem.by_query:
        return _dq_by_query(problem, q, k, v, dout, stats, chosen), dk, dv
    return _dq_by_block(problem, q, k, v, dout, stats, chosen, inverse), dk, dv


def _backward_kv(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    inverse: Inverse,
) -> tuple[Tensor, Tensor]:
    tiles = _block_tiles(problem, "dkv")
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    dv = torch.zeros(v.shape, dtype=torch.float32, device=q.device)
    _, num_chunks, num_items = inverse.item_block.shape
    start(
        problem.memo,
        "dkv by block",
        by_block.block_dkv,
        (
            q, k, v, dout, stats, dk, dv, inverse.queries,
            inverse.item_block, inverse.item_ends, inverse.ends, *problem.block_index(q),
        ),
        lambda: Launch.tiled(
            (num_items, num_chunks, problem.num_segments),
            (
                num_chunks, problem.seq_len, inverse.queries.shape[1], problem.num_blocks,
                num_items, PIECE, problem.num_groups, problem.per_group,
                problem.scale, problem.scale_log2,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3],
            ),
            _constants(problem, blocks=True),
            tiles,
        ),
    )  # fmt: skip
    return dk.to(k.dtype), dv.to(v.dtype)


def _dq_by_block(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    chosen: Selection,
    inverse: Inverse,
) -> Tensor:
    tiles = _block_tiles(problem, "dq")
    dq = problem.empty(*q.shape, dtype=torch.float32)
    groups = _groups(problem, problem.d_k)
    size = problem.num_segments * groups[0].num_rows * problem.spec.n_sel * problem.per_group
    part = problem.empty(size, problem.d_k)
    for group in groups:
        _dq_group(problem, group, tiles, q, k, v, dout, stats, inverse, part)
        _sum_group(problem, group, part, chosen, dq)
    return dq


def _dq_group(
    problem: Problem,
    group: Group,
    tiles: Tiles,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    inverse: Inverse,
    part: Tensor,
) -> None:
    start(
        problem.memo,
        ("dq by block", group),
        by_block.block_dq,
        (
            q, *problem.keys(k, v, tiles.BN), dout, stats, part, inverse.queries, inverse.places,
            inverse.item_block, inverse.item_ends, inverse.ends, *problem.block_index(q),
        ),
        lambda: Launch.tiled(
            (inverse.item_block.shape[2], group.num_chunks, problem.num_segments),
            (
                *_sizes(problem, inverse, group), problem.scale, problem.scale_log2,
                *q.stride()[:3], *dout.stride()[:3],
            ),
            _constants(problem, N_SEL=problem.spec.n_sel, blocks=True),
            tiles,
        ),
    )  # fmt: skip


def _sum_group(problem: Problem, group: Group, part: Tensor, chosen: Selection, dq: Tensor) -> None:
    start(
        problem.memo,
        ("sum of places", group),
        by_block.sum_places,
        (part, chosen.num_chosen, dq),
        lambda: Launch(
            (group.num_rows, problem.num_segments),
            (
                group.first_row, group.num_rows, problem.seq_len, problem.num_groups,
                problem.per_group,
            ),
            {"DK": problem.d_k, "DK_PAD": padded(problem.d_k), "N_SEL": problem.spec.n_sel}
            | {"G_PAD": 1 << (problem.per_group - 1).bit_length()},
            num_warps=1,
        ),
    )  # fmt: skip


def _dq_by_query(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    chosen: Selection,
) -> Tensor:
    tiles = _query_tiles(problem, backward=True)
    dq = problem.empty(*q.shape, dtype=torch.float32)
    start(
        problem.memo,
        "dq by query",
        by_query.query_dq,
        (
            q, *problem.keys(k, v, tiles.BN), dout, stats, chosen.ids, chosen.num_chosen,
            problem.row_index(1, q)[0], dq,
        ),
        lambda: Launch.tiled(
            (problem.seq_len, problem.num_segments),
            (
                problem.seq_len, problem.num_groups, problem.per_group,
                problem.scale, problem.scale_log2, *q.stride()[:3], *dout.stride()[:3],
            ),
            _constants(problem, N_SEL=problem.spec.n_sel),
            tiles,
        ),
    )  # fmt: skip
    return dq


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
        lambda: Launch(grid, sizes, constants),
    )
    torch.cumsum(
        counts.view(segments, -1), dim=-1, dtype=torch.int32, out=inverse.ends.view(segments, -1)
    )
    start(
        problem.memo,
        "list",
        index.list_choices,
        (chosen.bits, chosen.before, counts, inverse.ends, inverse.queries, inverse.places),
        lambda: Launch(grid, (*sizes, inverse.queries.shape[1]), constants),
    )
    start(
        problem.memo,
        "cut",
        index.cut_bins,
        (inverse.ends, inverse.item_block, inverse.item_ends),
        lambda: Launch(
            (num_chunks, segments),
            (num_chunks, num_blocks, inverse.item_block.shape[2], PIECE),
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
    num_items = chunk * problem.spec.n_sel // PIECE + num_blocks
    sizes = (
        (segments, num_chunks, num_blocks, SUBS),
        (segments, num_entries),
        (segments, num_entries),
        (segments, num_chunks, num_items),
        (segments, num_chunks, num_blocks),
    )
    pairs = zip(sizes, kinds, strict=True)
    return Inverse(*(problem.empty(*size, dtype=kind) for size, kind in pairs))


def chunk_size(problem: Problem) -> int:
    """Queries whose rows of one KV head stay in the cache: a power of two."""
    width = 2 * problem.d_k + 2 * problem.d_v + 4 * problem.d_k
    rows = CACHE_BYTES // (problem.per_group * width)
    rows = min(max(1 << rows.bit_length() - 1, 1024), 16384)
    return min(rows, max(1 << (problem.seq_len - 1).bit_length(), SUBS))


def _groups(problem: Problem, dim: int) -> list[Group]:
    """Chunks in groups whose partial results of `dim` numbers fit the workspace."""
    chunk, seq_len = chunk_size(problem), problem.seq_len
    row_bytes = (
        problem.batch * problem.num_heads * problem.spec.n_sel * dim * problem.dtype.itemsize
    )
    together = max(PART_BYTES // (row_bytes * chunk), 1)
    num_chunks = ceil_div(seq_len, chunk)
    return [
        Group(
            first,
            min(together, num_chunks - first),
            first * chunk,
            min(together * chunk, seq_len - first * chunk),
        )
        for first in range(0, num_chunks, together)
    ]


def _sizes(problem: Problem, inverse: Inverse, group: Group) -> tuple[int, ...]:
    """The numbers that block_forward and block_dq begin with."""
    _, num_chunks, num_items = inverse.item_block.shape
    return (
        group.first_chunk, num_chunks, group.first_row, group.num_rows, problem.seq_len,
        inverse.queries.shape[1], problem.num_blocks, num_items, PIECE,
        problem.num_groups, problem.per_group,
    )  # fmt: skip


def _block_tiles(problem: Problem, purpose: str = "forward") -> Tiles:
    sizes = (problem.d_k, problem.d_v, problem.per_group, problem.spec.l_sel)
    return block_tiles(*sizes, problem.dtype, purpose)


def _query_tiles(problem: Problem, *, backward: bool = False) -> Tiles:
    sizes = (problem.d_k, problem.d_v, problem.per_group, problem.spec.l_sel)
    return query_tiles(*sizes, problem.dtype, backward=backward)


def _constants(problem: Problem, *, blocks: bool = False, **more: Any) -> dict[str, Any]:
    """In the order of the kernels; `blocks` for those that walk the inverse."""
    subs = {"SUBS": SUBS} if blocks else {}
    common = {"L_SEL": problem.spec.l_sel, **subs, "HAS_DOCS": problem.packed}
    return {**problem.dims(), **more, **common, "UPCAST": problem.upcast}

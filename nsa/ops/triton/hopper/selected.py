"""Gradients of the selected branch in Gluon, for compute capability 9.0, all in one pass.

selected_tiles.py has the products. Here rows (query, head) of q and dout are gathered by TMA
(gather.py), and dq of a query is stored by TMA: one instruction for all heads of a group, which
pays for large groups. Smaller ones take selected_rows.py. Each of the two consumers has a warp that
loads its tiles and one that stores its dq. Names as in tile.py.

Gluon is Triton's language one level below: layouts, shared memory, barriers and the roles of warps
are written out. This module is imported where its route is taken (Problem.in_gluon), nowhere else.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from nsa.ops.triton.hopper.gather import (
    ROWS,
    block_rows,
    copy_rows,
    copy_stats,
    group_rows,
    pieces_of,
    place_rows,
    queries_of,
    query_rows,
    query_stats,
    stat_pieces_of,
)
from nsa.ops.triton.hopper.parts import sync_warps
from nsa.ops.triton.hopper.selected_tiles import Bars, Buffers, Sums, consume, find_item
from nsa.ops.triton.launcher import Launch, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.selected.block_index import Group, QueryLists, piece_size
from nsa.ops.triton.tile import COUNTS

STAGES = {128: 4, 64: 8}
"""By head dim, tiles in flight, half of them for each consumer: what fits shared memory."""
OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""Warps of a consumer, and registers of a thread on average over the three warpgroups: 240 for a
consumer and 24 for the four warps that copy."""


@gluon.jit(do_not_specialize=COUNTS)
def selected_backward(
    t_q, t_dout, t_k, t_v, t_stats, t_part, p_dk, p_dv, p_queries, p_places, p_items, p_first_item,
    p_starts, p_block_start, p_block_stop,
    first_chunk, num_chunks, first_row, num_rows, S, NUM_ENTRIES, NUM_BLOCKS, NUM_ITEMS, MOST, Hkv,
    scale, scale_log2,
    R: gl.constexpr, D: gl.constexpr, N_SEL: gl.constexpr,
    HAS_DOCS: gl.constexpr, ORDERED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of one item; arguments and results as in block_backward (MOST: queries of an item).

    R is the rows of a query in a tile.
    """
    i_item, i_seg = gl.program_id(0), gl.program_id(2)
    list_row = i_seg * num_chunks + first_chunk + gl.program_id(1)
    block = gl.load(p_items + list_row.to(gl.int64) * NUM_ITEMS + i_item)
    # Unused items name the block NUM_BLOCKS.
    if block < NUM_BLOCKS:
        item, place = find_item(
            p_first_item, p_starts, p_block_start, p_block_stop, block, list_row,
            first_row, num_rows, S, NUM_BLOCKS, NUM_ITEMS, MOST, Hkv, R, D, HAS_DOCS, ORDERED,
        )  # fmt: skip
        p_queries += i_seg.to(gl.int64) * NUM_ENTRIES
        p_places += i_seg.to(gl.int64) * NUM_ENTRIES
        _run(
            t_q, t_dout, t_k, t_v, t_stats, t_part, p_dk, p_dv, p_queries, p_places, item, place,
            S, scale, scale_log2, R, D, N_SEL, STAGES, ORDERED,
        )  # fmt: skip


@gluon.jit
def _run(
    t_q, t_dout, t_k, t_v, t_stats, t_part, p_dk, p_dv, p_queries, p_places, item, place,
    S, scale, scale_log2, R: gl.constexpr, D: gl.constexpr,
    N_SEL: gl.constexpr, STAGES: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Shared memory, barriers and roles."""
    dtype: gl.constexpr = t_k.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    # In a layout of TMA, so that it is aligned to 128 bytes; read as the table that it is.
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    b_stats = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, 4], PLAIN)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    bufs = Buffers(
        gl.allocate_shared_memory(dtype, [ROWS, D], TILE),
        gl.allocate_shared_memory(dtype, [ROWS, D], TILE),
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], TILE),
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], TILE),
        b_stats._reinterpret(gl.float32, [STAGES, ROWS, 4], TABLE),
        gl.allocate_shared_memory(dtype, [2, ROWS, ROWS], TILE),
        gl.allocate_shared_memory(dtype, [2, ROWS, D], TILE),
    )
    bars = Bars(
        gl.allocate_shared_memory(gl.int64, [1], BAR),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR),
        gl.allocate_shared_memory(gl.int64, [2, 1], BAR),
        gl.allocate_shared_memory(gl.int64, [2, 1], BAR),
        gl.allocate_shared_memory(gl.int64, [2, 1], BAR),
    )
    mbarrier.init(bars.kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.full.index(i), count=1)
        mbarrier.init(bars.empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(bars.swapped.index(i), count=1)
        mbarrier.init(bars.dq_full.index(i), count=1)
        mbarrier.init(bars.dq_empty.index(i), count=1)
    # TMA reaches barriers by another way than the threads that initialised them.
    fence_async_shared()
    sync_warps()
    sums = Sums(p_dk, p_dv, place, p_queries, S, scale, scale_log2)
    loaded = (t_q, t_dout, t_k, t_v, t_stats, p_queries, S)
    stored = (t_part, p_queries, p_places)
    gl.warp_specialize(
        [
            (consume, (0, 2, sums, None, bufs, bars, item, R, D, N_SEL, STAGES, ORDERED)),
            (consume, (1, 2, sums, None, bufs, bars, item, R, D, N_SEL, STAGES, ORDERED)),
            (_load, (0, loaded, bufs, bars, item, R, D, STAGES)),
            (_load, (1, loaded, bufs, bars, item, R, D, STAGES)),
            (_store, (0, stored, bufs, bars, item, R, D, N_SEL)),
            (_store, (1, stored, bufs, bars, item, R, D, N_SEL)),
        ],
        [4, 1, 1, 1, 1],
        [240, 24, 24, 24, 24],
    )


@gluon.jit
def _load(
    C: gl.constexpr, loaded, bufs, bars, item,
    R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the block's keys and values (C = 0), then the rows of consumer C, tile by tile.

    A stage that both consumers used could be waited for by one while it still holds an older tile
    of the other, so each has its own.
    """
    t_q, t_dout, t_k, t_v, t_stats, p_queries, S = loaded
    HALF: gl.constexpr = STAGES // 2
    SIZE: gl.constexpr = ROWS * (2 * D * 2 + 16)
    if C == 0:
        mbarrier.expect(bars.kv_full, 2 * ROWS * D * 2)
        at = [item.i_b, item.k0, item.i_g, 0]
        tma.async_copy_global_to_shared(t_k, at, bars.kv_full, bufs.k)
        tma.async_copy_global_to_shared(t_v, at, bars.kv_full, bufs.v)
    d_q, d_dout = pieces_of(bufs.q, R), pieces_of(bufs.dout, R)
    d_stats = stat_pieces_of(bufs.stats, R)
    for i in range(C, item.num_tiles, 2):
        turn = i // 2
        stage = C * HALF + turn % HALF
        # Queries are loaded before the wait, which hides their latency.
        queries = queries_of(p_queries, item.first, item.stop, i, S, R)
        bar = bars.full.index(stage)
        mbarrier.wait(bars.empty.index(stage), (turn // HALF & 1) ^ 1)
        mbarrier.expect(bar, SIZE)
        copy_rows(t_q, item.i_b, item.i_g, queries, bar, d_q, stage, R, D)
        copy_stats(t_stats, item.i_b, item.i_g, queries, bar, d_stats, stage, R)
        copy_rows(t_dout, item.i_b, item.i_g, queries, bar, d_dout, stage, R, D)


@gluon.jit
def _store(
    C: gl.constexpr, stored, bufs, bars, item, R: gl.constexpr, D: gl.constexpr, N_SEL: gl.constexpr
):
    """Store dq of the tiles of consumer C, each query's rows to its own place."""
    t_part, p_queries, p_places = stored
    PIECES: gl.constexpr = ROWS // R
    PANELS: gl.constexpr = D // ROWS
    pieces = pieces_of(bufs.dq, R)
    for i in range(C, item.num_tiles, 2):
        rows = _places(t_part, p_queries, p_places, item, i, R, N_SEL)
        mbarrier.wait(bars.dq_full.index(C), i // 2 & 1)
        for j in gl.static_range(PIECES):
            for c in gl.static_range(PANELS):
                piece = pieces.index((C * PANELS + c) * PIECES + j)
                tma.async_copy_shared_to_global(t_part, [rows[j], 0, c * ROWS], piece)
        tma.store_wait(0)
        sync_warps()
        mbarrier.arrive(bars.dq_empty.index(C))


@gluon.jit
def _places(t_part, p_queries, p_places, item, i, R: gl.constexpr, N_SEL: gl.constexpr):
    """Where dq of each query of tile i goes; past the end of the item the last place, which nobody
    reads."""
    PIECES: gl.constexpr = ROWS // R
    rows = ()
    for j in gl.static_range(PIECES):
        entry = item.first + i * PIECES + j
        t = gl.load(p_queries + entry, mask=entry < item.stop, other=0)
        n = gl.load(p_places + entry, mask=entry < item.stop, other=0).to(gl.int32)
        row = gl.where(entry < item.stop, (item.shift + t) * N_SEL + n, t_part.shape[0] - 1)
        rows = rows + (row,)  # type: ignore[assignment]
    return rows


# --- Launcher ---


def backward(
    problem: Problem,
    group: Group,
    q: Tensor,  # [B, S, Hq, D]
    k: Tensor,  # [B, S, Hkv, D]
    v: Tensor,  # [B, S, Hkv, D]
    dout: Tensor,  # [B, S, Hq, D]
    stats: Tensor,  # [B, S, Hq, 4] fp32, of this branch
    lists: QueryLists,
    grads: tuple[Tensor, Tensor],  # of k and v: their sums, or the slots of the items
    part: Tensor,  # [segments * rows of the group * n_sel * G + G, D]
    *,
    ordered: bool,
) -> None:
    """Add dk and dv of a group of chunks to `grads`, or write them there, and dq to `part`."""
    size, groups, dim = problem.per_group, problem.num_groups, problem.d_k
    start(
        problem.memo,
        ("backward in Gluon", group, ordered),
        selected_backward,
        (
            query_rows(q, groups), query_rows(dout, groups), block_rows(k), block_rows(v),
            query_stats(stats, groups), place_rows(part, size), *grads,
            lists.queries, lists.places, lists.item_block, lists.first_item, lists.starts,
            *problem.block_index(lists.queries),
        ),
        lambda: Launch(
            (lists.item_block.shape[2], group.num_chunks, problem.num_segments),
            (
                group.first_chunk, lists.item_block.shape[1], group.first_row, group.num_rows,
                problem.seq_len, lists.queries.shape[1], problem.num_blocks,
                lists.item_block.shape[2], piece_size(problem), groups,
                problem.scale, problem.scale_log2,
            ),
            {"R": group_rows(size), "D": dim, "N_SEL": problem.spec.n_sel}
            | {"HAS_DOCS": problem.packed, "ORDERED": ordered}
            | {"STAGES": STAGES[dim]},
            OPTIONS,
        ),
    )  # fmt: skip

"""Gradients of the selected branch in Gluon, for compute capability 9.0, all in one pass.

A program takes an item of block_index.py, as block_backward does (by_block_backward.py): a block
and queries that chose it. Rows (query, head) of q and dout are gathered by TMA into tiles of 64
(gather.py). Two warpgroups, the consumers, take tiles in turn, each with its own sums of dk and dv;
at the end one adds up dk and the other dv. dq of a tile goes to the places of its queries, as in
block_backward. Each consumer has a warp that loads its tiles and one that stores its dq. Names as
in tile.py.

Gluon is Triton's language one level below: layouts, shared memory, barriers and the roles of warps
are written out. This module is imported where its route is taken (Problem.in_gluon), nowhere else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.ops.triton.block_index import Group, QueryLists, piece_size
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
from nsa.ops.triton.hopper.parts import rounded, sync_warps
from nsa.ops.triton.launcher import Launch, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.tile import COUNTS

STAGES = {128: 4, 64: 8}
"""By head dim, tiles in flight, half of them for each consumer: what fits shared memory."""
OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""Warps of a consumer, and registers of a thread on average over the three warpgroups: 240 for a
consumer and 24 for the four warps that copy."""


class Item(NamedTuple):
    """Segment, first key of the block, entries, tiles, and what is added to a query to get its row
    of the partial results."""

    i_b: Any
    i_g: Any
    k0: Any
    first: Any
    stop: Any
    num_tiles: Any
    shift: Any


class Place(NamedTuple):
    """Where the sums go: first row and distance of rows, in numbers; the block's last key + 1."""

    row: Any
    s_row: Any
    k_stop: Any


class Buffers(NamedTuple):
    """Of a block (k, v), of the stages, and of the consumers (dS^T and dq)."""

    k: Any
    v: Any
    q: Any
    dout: Any
    stats: Any
    ds: Any
    dq: Any


class Bars(NamedTuple):
    """Barriers: the block is there; a tile is, by stage; a tile has been read, by stage; dq of a
    tile is there, by consumer; it has been read, by consumer; sums to swap are, by consumer."""

    kv_full: Any
    full: Any
    empty: Any
    dq_full: Any
    dq_empty: Any
    swapped: Any


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
        bin = list_row.to(gl.int64) * (NUM_BLOCKS + 1) + block
        first = gl.load(p_starts + bin) + (i_item - gl.load(p_first_item + bin)) * MOST
        stop = gl.minimum(first + MOST, gl.load(p_starts + bin + 1))
        p_queries += i_seg.to(gl.int64) * NUM_ENTRIES
        p_places += i_seg.to(gl.int64) * NUM_ENTRIES
        k0 = block * ROWS
        k_stop = gl.minimum(k0 + ROWS, S)
        if HAS_DOCS:
            k0 = gl.load(p_block_start + block)
            k_stop = gl.load(p_block_stop + block)
        num_tiles = ((stop - first) * R + ROWS - 1) // ROWS
        i_b, i_g = i_seg // Hkv, i_seg % Hkv
        shift = i_seg * num_rows - first_row
        item = Item(i_b, i_g, k0, first, stop, num_tiles, shift)
        # Rows of this item's slot, or of the block's keys.
        if ORDERED:
            slot = (i_seg * gl.num_programs(1) + gl.program_id(1)).to(gl.int64) * NUM_ITEMS
            place = Place((slot + i_item) * (ROWS * D), D, k_stop)
        else:
            row = ((i_b.to(gl.int64) * S + k0) * Hkv + i_g) * D
            place = Place(row, Hkv * D, k_stop)
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
        mbarrier.init(bars.dq_full.index(i), count=1)
        mbarrier.init(bars.dq_empty.index(i), count=1)
        mbarrier.init(bars.swapped.index(i), count=1)
    # TMA reaches barriers by another way than the threads that initialised them.
    fence_async_shared()
    sync_warps()
    sums = (p_dk, p_dv, place, p_queries, S, scale, scale_log2)
    loaded = (t_q, t_dout, t_k, t_v, t_stats, p_queries, S)
    stored = (t_part, p_queries, p_places)
    gl.warp_specialize(
        [
            (_consume, (0, sums, bufs, bars, item, R, D, STAGES, ORDERED)),
            (_consume, (1, sums, bufs, bars, item, R, D, STAGES, ORDERED)),
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


@gluon.jit
def _consume(
    C: gl.constexpr, sums, bufs, bars, item,
    R: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Sum this consumer's tiles; then consumer 0 writes dk of both, and consumer 1 dv."""
    p_dk, p_dv, place, p_queries, S, scale, scale_log2 = sums
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    SWAP: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    b_dk = gl.zeros([ROWS, D], gl.float32, OL)
    b_dv = gl.zeros([ROWS, D], gl.float32, OL)
    num_masked = _num_masked(p_queries, item, S, R)
    mbarrier.wait(bars.kv_full, 0)
    b_dk, b_dv = _tiles(
        b_dk, b_dv, bufs, bars, 0, num_masked, item.k0, scale, scale_log2,
        True, C, STAGES, SL, OL,
    )  # fmt: skip
    b_dk, b_dv = _tiles(
        b_dk, b_dv, bufs, bars, num_masked, item.num_tiles, item.k0, scale, scale_log2,
        False, C, STAGES, SL, OL,
    )  # fmt: skip
    # This consumer's stages are free: the other one finds there what it adds to its own.
    swap = bufs.q._reinterpret(gl.float32, [STAGES // 2, ROWS, D], SWAP)
    if C == 0:
        swap.index(0).store(b_dv)
    else:
        swap.index(STAGES // 4).store(b_dk)
    sync_warps()
    mbarrier.arrive(bars.swapped.index(C))
    mbarrier.wait(bars.swapped.index(1 - C), 0)
    b_more = swap.index((1 - C) * (STAGES // 4)).load(OL)
    o_k = gl.arange(0, ROWS, gl.SliceLayout(1, OL))
    o_d = gl.arange(0, D, gl.SliceLayout(0, OL))
    at = (place.row + o_k.to(gl.int64) * place.s_row)[:, None] + o_d[None, :]
    mask = (item.k0 + o_k < place.k_stop)[:, None] & (o_d < D)[None, :]
    if C == 0:
        _give(p_dk + at, (b_dk + b_more) * scale, mask, ORDERED)
    else:
        _give(p_dv + at, b_more + b_dv, mask, ORDERED)


@gluon.jit
def _num_masked(p_queries, item, S, R: gl.constexpr):
    """Tiles that need a mask: those with a query that may not see the whole block, up to an even
    number. They are the first ones, because a list ascends and holds no query before the block."""
    # At most ROWS - 1 queries see a part of the block. Each warp counts them.
    o_e = item.first + gl.arange(0, ROWS, gl.BlockedLayout([2], [32], [4], [0]))
    t = gl.load(p_queries + o_e, mask=o_e < item.stop, other=S + ROWS)
    num_partial = gl.sum((t < item.k0 + ROWS - 1).to(gl.int32), 0)
    num_masked = (num_partial * R + ROWS - 1) // ROWS
    return gl.minimum((num_masked + 1) // 2 * 2, item.num_tiles)


@gluon.jit
def _tiles(
    b_dk, b_dv, bufs, bars, lo, hi, k0, scale, scale_log2,
    MASKED: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    SL: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """Add the tiles lo + C, lo + C + 2, ... below hi to the sums; lo is even, or hi."""
    AL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    HALF: gl.constexpr = STAGES // 2
    dtype: gl.constexpr = bufs.k.dtype
    D: gl.constexpr = bufs.k.shape[1]
    for i in range(lo + C, hi, 2):
        turn = i // 2
        stage = C * HALF + turn % HALF
        b_q, b_dout, b_stats = bufs.q.index(stage), bufs.dout.index(stage), bufs.stats.index(stage)
        mbarrier.wait(bars.full.index(stage), turn // HALF & 1)
        # s^T = k q^T and dP^T = v dout^T: [keys, rows].
        zero = gl.zeros([ROWS, ROWS], gl.float32, SL)
        b_s = warpgroup_mma(bufs.k, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_dp = warpgroup_mma(bufs.v, b_dout.permute((1, 0)), zero, use_acc=False, is_async=True)
        lse = _column(b_stats, 0, SL)
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        # P^T = exp2(s'^T - lse), masked, times the gate. dV += P^T dout.
        b_p = gl.exp2(b_s * scale_log2 - lse[None, :])
        if MASKED:
            token = _column(b_stats, 3, SL)
            o_k = (k0 + gl.arange(0, ROWS, gl.SliceLayout(1, SL))).to(gl.float32)
            b_p = gl.where(o_k[:, None] <= token[None, :], b_p, 0.0)
        b_p = b_p * _column(b_stats, 2, SL)[None, :]
        b_pa = gl.convert_layout(rounded(b_p, dtype), AL)
        b_dv = warpgroup_mma(b_pa, b_dout, b_dv, is_async=True)
        # dS^T = P^T * (dP^T - delta). dK += dS^T q.
        delta = _column(b_stats, 1, SL)
        b_dp = warpgroup_mma_wait(1, deps=(b_dp,))
        b_ds = rounded(b_p * (b_dp - delta[None, :]), dtype)
        b_dsa = gl.convert_layout(b_ds, AL)
        b_dk = warpgroup_mma(b_dsa, b_q, b_dk, is_async=True)
        # dq = scale * dS k, [rows, D]. For that dS^T goes through shared memory: its rows there are
        # columns of the left operand.
        bufs.ds.index(C).store(b_ds)
        fence_async_shared()
        b_dv, b_pa = warpgroup_mma_wait(1, deps=(b_dv, b_pa))
        sync_warps()
        # The dq before has been stored.
        mbarrier.wait(bars.dq_empty.index(C), (turn & 1) ^ 1)
        none = gl.zeros([ROWS, D], gl.float32, OL)
        b_t = bufs.ds.index(C).permute((1, 0))
        b_dq = warpgroup_mma(b_t, bufs.k, none, use_acc=False, is_async=True)
        b_dk, b_dsa = warpgroup_mma_wait(1, deps=(b_dk, b_dsa))
        # All four warps have read the tile before one thread gives its stage back.
        sync_warps()
        mbarrier.arrive(bars.empty.index(stage))
        b_dq = warpgroup_mma_wait(0, deps=(b_dq,))
        bufs.dq.index(C).store(rounded(b_dq * scale, dtype))
        fence_async_shared()
        sync_warps()
        mbarrier.arrive(bars.dq_full.index(C))
    return b_dk, b_dv


@gluon.jit
def _column(b_stats, COLUMN: gl.constexpr, LAYOUT: gl.constexpr):
    """One of the four numbers of each row [ROWS], as the columns of a tile [keys, rows] have it."""
    WIDE: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        [[0, 0], [0, 0]],
        [],
        [64, 1],
    )
    b = gl.reshape(b_stats.slice(COLUMN, 1, dim=1).load(WIDE), [ROWS])
    return gl.convert_layout(b, gl.SliceLayout(0, LAYOUT))


@gluon.jit
def _give(p, b, mask, ORDERED: gl.constexpr):
    """Store to memory that only this program writes (ORDERED), or add atomically."""
    if ORDERED:
        gl.store(p, b, mask=mask)
    else:
        gl.atomic_add(p, b, mask=mask, sem="relaxed")


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

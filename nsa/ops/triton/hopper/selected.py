"""Gradients of the selected keys and values in Gluon, for compute capability 9.0 and large groups.

A program takes an item of block_index.py, as block_backward does (by_block_backward.py): a block
and queries that chose it. A warp, the producer, gathers rows (query, head) of q and dout by TMA
into tiles of 64. Two warpgroups, the consumers, take tiles in turn, each with its own sums of dk
and dv; at the end one adds up dk and the other dv. Names as in tile.py.

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
from nsa.ops.triton.hopper.parts import sync_warps
from nsa.ops.triton.launcher import Launch, Rows, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.tile import COUNTS

ROWS = gl.constexpr(64)
"""Rows of a tile, keys of a block, and columns of a panel: 128 bytes, which TMA swizzles."""
STAGES = 4
"""Tiles in flight, half of them for each consumer: what fits shared memory at D 128."""
OPTIONS = {"num_warps": 4, "maxnreg": 168}
"""Warps of a consumer, and registers of a thread on average over the three warpgroups: 240 for a
consumer and 24 for the producer, whose warpgroup has one warp in use."""


class Item(NamedTuple):
    """Segment, first key of the block, entries, and tiles, of which the first ones are masked."""

    i_b: Any
    i_g: Any
    k0: Any
    first: Any
    stop: Any
    num_tiles: Any
    num_masked: Any


class Place(NamedTuple):
    """Where the sums go: first row and distance of rows, in numbers; the block's last key + 1."""

    row: Any
    s_row: Any
    k_stop: Any


class Buffers(NamedTuple):
    """Of a block (k, v) and of the stages; `d_` are the same memory in the pieces of TMA."""

    k: Any
    v: Any
    q: Any
    dout: Any
    stats: Any
    d_q: Any
    d_dout: Any
    d_stats: Any


class Bars(NamedTuple):
    """Barriers: the block is there; a tile is, by stage; a tile has been read, by stage."""

    kv_full: Any
    full: Any
    empty: Any


@gluon.jit(do_not_specialize=COUNTS)
def selected_dkv(
    t_q, t_dout, t_k, t_v, t_stats, p_dk, p_dv, p_queries, p_items, p_first_item, p_starts,
    p_block_start, p_block_stop,
    first_chunk, num_chunks, S, NUM_ENTRIES, NUM_BLOCKS, NUM_ITEMS, MOST, Hkv, scale, scale_log2,
    G: gl.constexpr, D: gl.constexpr, PIECE: gl.constexpr, HAS_DOCS: gl.constexpr,
    ORDERED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of one item; arguments and results as in block_backward (MOST: queries of an item).

    A tile has a mask only where one of its queries may not see the whole block. Those are the first
    of a list, because it ascends and holds no query before the block.
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
        k0 = block * ROWS
        k_stop = gl.minimum(k0 + ROWS, S)
        if HAS_DOCS:
            k0 = gl.load(p_block_start + block)
            k_stop = gl.load(p_block_stop + block)
        # At most ROWS - 1 queries see a part of the block.
        o_e = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0]))
        t = gl.load(p_queries + first + o_e, mask=first + o_e < stop, other=S + ROWS)
        num_partial = gl.sum((t < k0 + ROWS - 1).to(gl.int32), 0)
        num_tiles = ((stop - first) * G + ROWS - 1) // ROWS
        num_masked = (num_partial * G + ROWS - 1) // ROWS
        num_masked = gl.minimum((num_masked + 1) // 2 * 2, num_tiles)
        i_b, i_g = i_seg // Hkv, i_seg % Hkv
        item = Item(i_b, i_g, k0, first, stop, num_tiles, num_masked)
        # Rows of this item's slot, or of the block's keys.
        if ORDERED:
            slot = (i_seg * gl.num_programs(1) + gl.program_id(1)).to(gl.int64) * NUM_ITEMS
            place = Place((slot + i_item) * (ROWS * D), D, k_stop)
        else:
            row = ((i_b.to(gl.int64) * S + k0) * Hkv + i_g) * D
            place = Place(row, Hkv * D, k_stop)
        _run(
            t_q, t_dout, t_k, t_v, t_stats, p_dk, p_dv, p_queries, item, place,
            S, scale, scale_log2, G, D, PIECE, STAGES, ORDERED,
        )  # fmt: skip


@gluon.jit
def _run(
    t_q, t_dout, t_k, t_v, t_stats, p_dk, p_dv, p_queries, item, place,
    S, scale, scale_log2, G: gl.constexpr, D: gl.constexpr, PIECE: gl.constexpr,
    STAGES: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Shared memory, barriers and roles."""
    dtype: gl.constexpr = t_k.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SWAP: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    b_k = gl.allocate_shared_memory(dtype, [ROWS, D], TILE)
    b_v = gl.allocate_shared_memory(dtype, [ROWS, D], TILE)
    b_q = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], TILE)
    b_dout = gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], TILE)
    b_stats = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, 4], TABLE)
    # The same memory as the pieces that TMA writes, and as the sums that the consumers swap.
    PIECES: gl.constexpr = STAGES * (D // ROWS) * (ROWS // PIECE)
    d_q = b_q._reinterpret(dtype, [PIECES, PIECE, ROWS], TILE)
    d_dout = b_dout._reinterpret(dtype, [PIECES, PIECE, ROWS], TILE)
    d_stats = b_stats._reinterpret(gl.float32, [STAGES * (ROWS // PIECE), PIECE, 4], PLAIN)
    swap = b_q._reinterpret(gl.float32, [2, ROWS, D], SWAP)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], BAR)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR)
    swapped = gl.allocate_shared_memory(gl.int64, [2, 1], BAR)
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(swapped.index(i), count=1)
    # TMA reaches barriers by another way than the threads that initialised them.
    fence_async_shared()
    sync_warps()
    bufs = Buffers(b_k, b_v, b_q, b_dout, b_stats, d_q, d_dout, d_stats)
    bars = Bars(kv_full, full, empty)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, p_dk, p_dv, bufs, bars, swap, swapped, item, place, scale, scale_log2,
                    D, STAGES, ORDERED,
                ),
            ),
            (
                _consume,
                (
                    1, p_dk, p_dv, bufs, bars, swap, swapped, item, place, scale, scale_log2,
                    D, STAGES, ORDERED,
                ),
            ),
            (
                _produce,
                (
                    t_q, t_dout, t_k, t_v, t_stats, p_queries, bufs, bars, item, S,
                    G, D, PIECE, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _produce(
    t_q, t_dout, t_k, t_v, t_stats, p_queries, bufs, bars, item, S,
    G: gl.constexpr, D: gl.constexpr, PIECE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the block's keys and values, then its rows, tile by tile, in pieces of PIECE rows."""
    PIECES: gl.constexpr = ROWS // PIECE
    HALF: gl.constexpr = STAGES // 2
    PANELS: gl.constexpr = D // ROWS
    mbarrier.expect(bars.kv_full, 2 * ROWS * D * 2)
    at = [item.i_b, item.k0, item.i_g, 0]
    tma.async_copy_global_to_shared(t_k, at, bars.kv_full, bufs.k)
    tma.async_copy_global_to_shared(t_v, at, bars.kv_full, bufs.v)
    for i in range(item.num_tiles):
        # Tile i belongs to consumer i % 2, which has its own stages: a stage that both used could
        # be waited for by one while it still holds an older tile of the other. Queries are loaded
        # before the wait, which hides their latency.
        turn = i // 2
        stage = i % 2 * HALF + turn % HALF
        queries = _queries(p_queries, item.first, item.stop, i, S, G, PIECE)
        bar = bars.full.index(stage)
        mbarrier.wait(bars.empty.index(stage), (turn // HALF & 1) ^ 1)
        mbarrier.expect(bar, ROWS * (2 * D * 2 + 16))
        for j in gl.static_range(PIECES):
            t = queries[j]
            head = item.i_g * G + (i * PIECES + j) % (G // PIECE) * PIECE
            tma.async_copy_global_to_shared(
                t_stats, [item.i_b, head, t, 0], bar, bufs.d_stats.index(stage * PIECES + j)
            )
            for c in gl.static_range(PANELS):
                panel = (stage * PANELS + c) * PIECES + j
                at = [item.i_b, t, head, c * ROWS]
                tma.async_copy_global_to_shared(t_q, at, bar, bufs.d_q.index(panel))
                tma.async_copy_global_to_shared(t_dout, at, bar, bufs.d_dout.index(panel))


@gluon.jit
def _queries(p_queries, first, stop, i, S, G: gl.constexpr, PIECE: gl.constexpr):
    """The query of each piece of tile i; past the end of the item query S, which TMA reads as 0."""
    PIECES: gl.constexpr = ROWS // PIECE
    queries = ()
    for j in gl.static_range(PIECES):
        entry = first + (i * PIECES + j) // (G // PIECE)
        t = gl.load(p_queries + entry, mask=entry < stop, other=S)
        queries = queries + (t,)  # type: ignore[assignment]
    return queries


@gluon.jit
def _consume(
    C: gl.constexpr, p_dk, p_dv, bufs, bars, swap, swapped, item, place, scale, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Sum this consumer's tiles; then consumer 0 writes dk of both, and consumer 1 dv."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    b_dk = gl.zeros([ROWS, D], gl.float32, OL)
    b_dv = gl.zeros([ROWS, D], gl.float32, OL)
    mbarrier.wait(bars.kv_full, 0)
    b_dk, b_dv = _tiles(
        b_dk, b_dv, bufs, bars, 0, item.num_masked, item.k0, scale_log2, True, C, STAGES, SL, OL
    )
    b_dk, b_dv = _tiles(
        b_dk, b_dv, bufs, bars, item.num_masked, item.num_tiles, item.k0, scale_log2,
        False, C, STAGES, SL, OL,
    )  # fmt: skip
    # This consumer's stages are free: the other one finds there what it adds to its own.
    if C == 0:
        swap.index(C).store(b_dv)
    else:
        swap.index(C).store(b_dk)
    sync_warps()
    mbarrier.arrive(swapped.index(C))
    mbarrier.wait(swapped.index(1 - C), 0)
    b_more = swap.index(1 - C).load(OL)
    o_k = gl.arange(0, ROWS, gl.SliceLayout(1, OL))
    o_d = gl.arange(0, D, gl.SliceLayout(0, OL))
    at = (place.row + o_k.to(gl.int64) * place.s_row)[:, None] + o_d[None, :]
    mask = (item.k0 + o_k < place.k_stop)[:, None] & (o_d < D)[None, :]
    if C == 0:
        _give(p_dk + at, (b_dk + b_more) * scale, mask, ORDERED)
    else:
        _give(p_dv + at, b_more + b_dv, mask, ORDERED)


@gluon.jit
def _tiles(
    b_dk, b_dv, bufs, bars, lo, hi, k0, scale_log2,
    MASKED: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
    SL: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """Add the tiles lo + C, lo + C + 2, ... below hi to the sums; lo is even, or hi."""
    AL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    HALF: gl.constexpr = STAGES // 2
    dtype: gl.constexpr = bufs.k.dtype
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
        b_pa = gl.convert_layout(b_p.to(dtype), AL)
        b_dv = warpgroup_mma(b_pa, b_dout, b_dv, is_async=True)
        # dS^T = P^T * (dP^T - delta). dK += dS^T q.
        delta = _column(b_stats, 1, SL)
        b_dp = warpgroup_mma_wait(1, deps=(b_dp,))
        b_ds = gl.convert_layout((b_p * (b_dp - delta[None, :])).to(dtype), AL)
        b_dk = warpgroup_mma(b_ds, b_q, b_dk, is_async=True)
        b_dv, b_pa = warpgroup_mma_wait(1, deps=(b_dv, b_pa))
        b_dk, b_ds = warpgroup_mma_wait(0, deps=(b_dk, b_ds))
        # All four warps have read the tile before one thread gives its stage back.
        sync_warps()
        mbarrier.arrive(bars.empty.index(stage))
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


def _box(x: Tensor, block_shape: tuple[int, int, int, int], swizzle: int) -> Rows:
    """A descriptor of `block_shape` of x [B, S, H, D] at a time."""
    layout = gl.NVMMASharedLayout(swizzle, 8 * x.element_size(), rank=4)
    rows = Rows(x, 0, 0, layout)
    rows.block_shape = block_shape
    return rows


def backward_kv(
    problem: Problem,
    group: Group,
    q: Tensor,  # [B, S, Hq, D]
    k: Tensor,  # [B, S, Hkv, D]
    v: Tensor,  # [B, S, Hkv, D]
    dout: Tensor,  # [B, S, Hq, D]
    stats: Tensor,  # [B, Hq, S, 4] fp32, of this branch
    lists: QueryLists,
    grads: tuple[Tensor, Tensor],  # of k and v: their sums, or the slots of the items
    *,
    ordered: bool,
) -> None:
    """Add dk and dv of a group of chunks to `grads`, or write them there."""
    per_group, dim = problem.per_group, problem.d_k
    piece = piece_rows(per_group)
    rows, keys = (1, 1, piece, ROWS.value), (1, ROWS.value, 1, dim)
    start(
        problem.memo,
        ("backward in Gluon", group, ordered),
        selected_dkv,
        (
            _box(q, rows, 128), _box(dout, rows, 128), _box(k, keys, 128), _box(v, keys, 128),
            _box(stats, (1, piece, 1, 4), 0), *grads, lists.queries, lists.item_block,
            lists.first_item, lists.starts, *problem.block_index(lists.queries),
        ),
        lambda: Launch(
            (lists.item_block.shape[2], group.num_chunks, problem.num_segments),
            (
                group.first_chunk, lists.item_block.shape[1], problem.seq_len,
                lists.queries.shape[1], problem.num_blocks, lists.item_block.shape[2],
                piece_size(problem), problem.num_groups, problem.scale, problem.scale_log2,
            ),
            {"G": per_group, "D": dim, "PIECE": piece, "HAS_DOCS": problem.packed}
            | {"ORDERED": ordered, "STAGES": STAGES},
            OPTIONS,
        ),
    )  # fmt: skip


def piece_rows(per_group: int) -> int:
    """Heads of a query that one TMA instruction fetches: a power of two that divides the group."""
    return min(per_group & -per_group, ROWS.value)

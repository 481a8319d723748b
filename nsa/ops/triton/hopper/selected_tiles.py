"""Products of the selected branch's gradients in Gluon: what both ways of loading rows share.

A program takes an item of block_index.py, as block_backward does (by_block_backward.py): a block
and queries that chose it, as rows (query, head) in tiles of 64. A warpgroup, the consumer, sums dk
and dv over its tiles; dq of a tile goes to the places of its queries. How rows come and dq goes
differs. By TMA (selected.py) a program has two consumers, which take tiles in turn; at the end one
adds up dk and the other dv. Row by row (selected_rows.py) it has one, which stores dq from its
registers. Names as in tile.py, barriers as in parts.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.ops.triton.hopper.gather import ROWS, pieces_of
from nsa.ops.triton.hopper.parts import (
    rounded,
    row_layout,
    stat_column,
    sync_warps,
    with_sign,
)


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
    """Of a block (k, v), of the stages, and of the consumers (dS^T and, by TMA, dq)."""

    k: Any
    v: Any
    q: Any
    dout: Any
    stats: Any
    ds: Any
    dq: Any = None


class Bars(NamedTuple):
    """Barriers: the block is there; a tile is, by stage; a tile has been read, by stage. By TMA:
    sums to swap are there, by consumer; dq of a tile is, by consumer; it has been read.

    A barrier that nobody waits for must not exist: Triton gives its memory to other values, and the
    hardware may initialise it after they were written (docs/log/faults.md).
    """

    kv_full: Any
    full: Any
    empty: Any
    swapped: Any = None
    dq_full: Any = None
    dq_empty: Any = None


class Sums(NamedTuple):
    """Gradients of keys and values, where they go, and what all tiles need."""

    p_dk: Any
    p_dv: Any
    place: Any
    p_queries: Any
    S: Any
    scale: Any
    scale_log2: Any


class Parts(NamedTuple):
    """Row by row: where dq goes."""

    p_places: Any
    p_part: Any


@gluon.jit
def find_item(
    p_first_item, p_starts, p_block_start, p_block_stop, block, list_row,
    first_row, num_rows, S, NUM_BLOCKS, NUM_ITEMS, MOST, Hkv,
    R: gl.constexpr, D: gl.constexpr, HAS_DOCS: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """The item of this program, and where its sums go. R is the rows of a query in a tile, MOST the
    queries of an item; the other arguments as in block_backward."""
    i_item, i_seg = gl.program_id(0), gl.program_id(2)
    bin = list_row.to(gl.int64) * (NUM_BLOCKS + 1) + block
    first = gl.load(p_starts + bin) + (i_item - gl.load(p_first_item + bin)) * MOST
    stop = gl.minimum(first + MOST, gl.load(p_starts + bin + 1))
    k0 = block * ROWS
    k_stop = gl.minimum(k0 + ROWS, S)
    if HAS_DOCS:
        k0 = gl.load(p_block_start + block)
        k_stop = gl.load(p_block_stop + block)
    num_tiles = ((stop - first) * R + ROWS - 1) // ROWS
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    item = Item(i_b, i_g, k0, first, stop, num_tiles, i_seg * num_rows - first_row)
    # Rows of this item's slot, or of the block's keys.
    if ORDERED:
        slot = (i_seg * gl.num_programs(1) + gl.program_id(1)).to(gl.int64) * NUM_ITEMS
        place = Place((slot + i_item) * (ROWS * D), D, k_stop)
    else:
        row = ((i_b.to(gl.int64) * S + k0) * Hkv + i_g) * D
        place = Place(row, Hkv * D, k_stop)
    return item, place


@gluon.jit
def consume(
    C: gl.constexpr, NC: gl.constexpr, sums, parts, bufs, bars, item,
    R: gl.constexpr, D: gl.constexpr, N_SEL: gl.constexpr, STAGES: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """Sum the tiles of consumer C of NC, and write dk and dv. Of two, consumer 0 then writes dk of
    both, and consumer 1 dv. `parts`: row by row, else None."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    b_dk = gl.zeros([ROWS, D], gl.float32, OL)
    b_dv = gl.zeros([ROWS, D], gl.float32, OL)
    num_masked = _num_masked(sums.p_queries, item, sums.S, R, NC)
    mbarrier.wait(bars.kv_full, 0)
    b_dk, b_dv = _tiles(
        b_dk, b_dv, sums, parts, bufs, bars, item, 0, num_masked,
        True, C, NC, STAGES, R, N_SEL, SL, OL,
    )  # fmt: skip
    b_dk, b_dv = _tiles(
        b_dk, b_dv, sums, parts, bufs, bars, item, num_masked, item.num_tiles,
        False, C, NC, STAGES, R, N_SEL, SL, OL,
    )  # fmt: skip
    place = sums.place
    o_k = gl.arange(0, ROWS, gl.SliceLayout(1, OL))
    o_d = gl.arange(0, D, gl.SliceLayout(0, OL))
    at = (place.row + o_k.to(gl.int64) * place.s_row)[:, None] + o_d[None, :]
    mask = (item.k0 + o_k < place.k_stop)[:, None] & (o_d < D)[None, :]
    if NC == 1:
        _give(sums.p_dk + at, b_dk * sums.scale, mask, ORDERED)
        _give(sums.p_dv + at, b_dv, mask, ORDERED)
    elif C == 0:
        b_dk += _swapped(0, b_dv, bufs, bars, D, STAGES, OL)
        _give(sums.p_dk + at, b_dk * sums.scale, mask, ORDERED)
    else:
        b_dv += _swapped(1, b_dk, bufs, bars, D, STAGES, OL)
        _give(sums.p_dv + at, b_dv, mask, ORDERED)


@gluon.jit
def _num_masked(p_queries, item, S, R: gl.constexpr, NC: gl.constexpr):
    """Tiles that need a mask: those with a query that may not see the whole block, up to a multiple
    of NC. They are the first ones: a list ascends and holds no query before the block."""
    # At most ROWS - 1 queries see a part of the block. Each warp counts them.
    o_e = item.first + gl.arange(0, ROWS, gl.BlockedLayout([2], [32], [4], [0]))
    t = gl.load(p_queries + o_e, mask=o_e < item.stop, other=S + ROWS)
    num_partial = gl.sum((t < item.k0 + ROWS - 1).to(gl.int32), 0)
    num_masked = (num_partial * R + ROWS - 1) // ROWS
    return gl.minimum((num_masked + NC - 1) // NC * NC, item.num_tiles)


@gluon.jit
def _swapped(
    C: gl.constexpr, b_given, bufs, bars, D: gl.constexpr, STAGES: gl.constexpr, OL: gl.constexpr
):
    """Give the other consumer a sum, and get what it gives."""
    SWAP: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    # This consumer's stages are free: the other one finds there what it adds to its own.
    swap = bufs.q._reinterpret(gl.float32, [STAGES // 2, ROWS, D], SWAP)
    swap.index(C * (STAGES // 4)).store(b_given)
    sync_warps()
    mbarrier.arrive(bars.swapped.index(C))
    mbarrier.wait(bars.swapped.index(1 - C), 0)
    return swap.index((1 - C) * (STAGES // 4)).load(OL)


@gluon.jit
def _tiles(
    b_dk, b_dv, sums, parts, bufs, bars, item, lo, hi,
    MASKED: gl.constexpr, C: gl.constexpr, NC: gl.constexpr, STAGES: gl.constexpr,
    R: gl.constexpr, N_SEL: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """Add the tiles lo + C, lo + C + NC, ... below hi to the sums; lo is a multiple of NC, or hi.

    A consumer has stages of its own: one that both used could be waited for by one of them while it
    still holds an older tile of the other.
    """
    AL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    OWN: gl.constexpr = STAGES // NC
    dtype: gl.constexpr = bufs.k.dtype
    D: gl.constexpr = bufs.k.shape[1]
    panels = pieces_of(bufs.k, ROWS)
    for i in range(lo + C, hi, NC):
        turn = i // NC
        stage = C * OWN + turn % OWN
        b_q, b_dout, b_stats = bufs.q.index(stage), bufs.dout.index(stage), bufs.stats.index(stage)
        mbarrier.wait(bars.full.index(stage), turn // OWN & 1)
        if parts is not None:  # threads wrote the tile, which wgmma reads by another way
            fence_async_shared()
        # s^T = k q^T and dP^T = v dout^T: [keys, rows].
        zero = gl.zeros([ROWS, ROWS], gl.float32, SL)
        b_s = warpgroup_mma(bufs.k, b_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_dp = warpgroup_mma(bufs.v, b_dout.permute((1, 0)), zero, use_acc=False, is_async=True)
        gated_lse = stat_column(b_stats, 0, SL)
        lse = gated_lse
        if parts is not None:  # past the end of the item are rows of its last query
            o_c = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, SL))
            lse = gl.where(o_c < (item.stop - item.first) * R, lse, float("inf"))
        b_s = warpgroup_mma_wait(1, deps=(b_s,))
        # P^T = exp2(s'^T - lse), which is times the gate, masked. dV += P^T dout.
        b_p = gl.exp2(b_s * sums.scale_log2 - lse[None, :])
        if MASKED:
            token = stat_column(b_stats, 3, SL)
            o_k = (item.k0 + gl.arange(0, ROWS, gl.SliceLayout(1, SL))).to(gl.float32)
            b_p = gl.where(o_k[:, None] <= token[None, :], b_p, 0.0)
        b_p = with_sign(b_p, gated_lse)
        if parts is None:
            b_pa = gl.convert_layout(rounded(b_p, dtype), AL)
            b_dv = warpgroup_mma(b_pa, b_dout, b_dv, is_async=True)
            b_dp = warpgroup_mma_wait(1, deps=(b_dp,))
        else:
            b_dp = warpgroup_mma_wait(0, deps=(b_dp,))
        # dS^T = P^T * (dP^T - delta). dK += dS^T q.
        delta = stat_column(b_stats, 1, SL)
        b_ds = rounded(b_p * (b_dp - delta[None, :]), dtype)
        if parts is not None:  # not before: registers
            b_pa = gl.convert_layout(rounded(b_p, dtype), AL)
            b_dv = warpgroup_mma(b_pa, b_dout, b_dv, is_async=True)
        b_dsa = gl.convert_layout(b_ds, AL)
        b_dk = warpgroup_mma(b_dsa, b_q, b_dk, is_async=True)
        # dq = scale * dS k, [rows, D]. For that dS^T goes through shared memory: its rows there are
        # columns of the left operand.
        bufs.ds.index(C).store(b_ds)
        fence_async_shared()
        b_dv, b_pa = warpgroup_mma_wait(1, deps=(b_dv, b_pa))
        sync_warps()
        b_t = bufs.ds.index(C).permute((1, 0))
        if parts is None:
            # The dq before has been stored.
            mbarrier.wait(bars.dq_empty.index(C), (turn & 1) ^ 1)
            none = gl.zeros([ROWS, D], gl.float32, OL)
            b_dq = warpgroup_mma(b_t, bufs.k, none, use_acc=False, is_async=True)
        else:  # 64 columns at a time: there are registers for no more
            b_dq = warpgroup_mma(b_t, panels.index(0), zero, use_acc=False, is_async=True)
        b_dk, b_dsa = warpgroup_mma_wait(1, deps=(b_dk, b_dsa))
        if parts is not None:
            t, n = _queries_of(sums, parts, item, i, R)
        # All four warps have read the tile before one thread gives its stage back.
        sync_warps()
        mbarrier.arrive(bars.empty.index(stage))
        b_dq = warpgroup_mma_wait(0, deps=(b_dq,))
        b_out = rounded(b_dq * sums.scale, dtype)
        if parts is None:
            bufs.dq.index(C).store(b_out)
            fence_async_shared()
            sync_warps()
            mbarrier.arrive(bars.dq_full.index(C))
        else:
            for c in gl.static_range(1, D // ROWS):
                b_dq = warpgroup_mma(b_t, panels.index(c), zero, use_acc=False, is_async=True)
                _store_rows(parts, item, i, t, n, b_out, c - 1, R, D, N_SEL)
                b_dq = warpgroup_mma_wait(0, deps=(b_dq,))
                b_out = rounded(b_dq * sums.scale, dtype)
            _store_rows(parts, item, i, t, n, b_out, D // ROWS - 1, R, D, N_SEL)
    return b_dk, b_dv


@gluon.jit
def _queries_of(sums, parts, item, i, G: gl.constexpr):
    """Query of each row of tile i, and its own number of the block; past the end of the item those
    of its last query."""
    o_r = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, row_layout(ROWS)))
    entry = gl.minimum(item.first + o_r // G, item.stop - 1)
    return gl.load(sums.p_queries + entry), gl.load(parts.p_places + entry)


@gluon.jit
def _store_rows(
    parts, item, i, t, n, b_out, PANEL: gl.constexpr,
    G: gl.constexpr, D: gl.constexpr, N_SEL: gl.constexpr,
):  # fmt: skip
    """Store 64 columns of dq of tile i, from registers to the place of each row, 16 bytes at a
    time."""
    IO: gl.constexpr = row_layout(ROWS)
    o_r = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, IO))
    o_d = PANEL * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, IO))
    row = ((item.shift + t).to(gl.int64) * N_SEL + n) * G + o_r % G
    mask = (o_r < (item.stop - item.first) * G)[:, None] & (o_d < D)[None, :]
    p_rows = parts.p_part + (row * D)[:, None] + o_d[None, :]
    # The conversion is between lanes of a warp.
    gl.store(p_rows, gl.convert_layout(b_out, IO), mask=mask)


@gluon.jit
def _give(p, b, mask, ORDERED: gl.constexpr):
    """Store to memory that only this program writes (ORDERED), or add atomically."""
    if ORDERED:
        gl.store(p, b, mask=mask)
    else:
        gl.atomic_add(p, b, mask=mask, sem="relaxed")

"""Gradients of the selected branch in Gluon, row by row: for small groups.

selected_tiles.py has the products. TMA takes an instruction for each query, and some hundred cycles
for each instruction, so that with few heads in a group it is what a program waits for
(selected.py). Here four warps load the rows (query, head) by cp.async, 16 bytes a thread, and tiles
have no padding. One warpgroup, the consumer, multiplies and stores dq from its registers. Two such
programs share a multiprocessor: one multiplies while the other looks up its item or adds up its
sums. Names as in tile.py.

This module is imported where its route is taken (Problem.in_gluon), nowhere else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from nsa.ops.triton.hopper.gather import ROWS, block_rows
from nsa.ops.triton.hopper.parts import sync_warps
from nsa.ops.triton.hopper.selected_tiles import (
    Bars,
    Buffers,
    Parts,
    Sums,
    consume,
    find_item,
)
from nsa.ops.triton.launcher import Launch, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.selected.block_index import WIDE, Group, QueryLists, _extent, piece_size
from nsa.ops.triton.tile import COUNTS

STAGES = {128: 2, 64: 4}
"""By head dim, tiles in flight: what lets two programs fit shared memory."""
LOADER_REGISTERS = {128: 24, 64: 56}
"""By head dim, registers of a thread that loads; one that multiplies has the rest of twice 128."""
UNIT = gl.constexpr(8)
"""Numbers of 16 bytes, which one thread copies; strides are multiples of it."""


class Sources(NamedTuple):
    """What is loaded: pointers to the first row of the segment, and distances of tokens and heads,
    in units of 16 bytes."""

    p_q: Any
    p_dout: Any
    p_stats: Any
    p_queries: Any
    s_qs: Any
    s_qh: Any
    s_os: Any
    s_oh: Any
    Hq: Any


@gluon.jit(do_not_specialize=COUNTS)
def selected_rows_backward(
    p_q, p_dout, t_k, t_v, p_stats, p_part, p_dk, p_dv, p_queries, p_places, p_items, p_first_item,
    p_starts, p_block_start, p_block_stop,
    first_chunk, num_chunks, first_row, num_rows, S, NUM_ENTRIES, NUM_BLOCKS, NUM_ITEMS, MOST, Hkv,
    s_qb, s_qs, s_qh, s_ob, s_os, s_oh, scale, scale_log2,
    G: gl.constexpr, D: gl.constexpr, N_SEL: gl.constexpr, HAS_DOCS: gl.constexpr,
    ORDERED: gl.constexpr, NARROW: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Gradients of one item; arguments and results as in block_backward (MOST: queries of an item).

    Strides are in units of 16 bytes. NARROW: so are offsets, as int32.
    """
    i_item, i_seg = gl.program_id(0), gl.program_id(2)
    list_row = i_seg * num_chunks + first_chunk + gl.program_id(1)
    block = gl.load(p_items + list_row.to(gl.int64) * NUM_ITEMS + i_item)
    # Unused items name the block NUM_BLOCKS.
    if block < NUM_BLOCKS:
        item, place = find_item(
            p_first_item, p_starts, p_block_start, p_block_stop, block, list_row,
            first_row, num_rows, S, NUM_BLOCKS, NUM_ITEMS, MOST, Hkv, G, D, HAS_DOCS, ORDERED,
        )  # fmt: skip
        p_queries += i_seg.to(gl.int64) * NUM_ENTRIES
        p_places += i_seg.to(gl.int64) * NUM_ENTRIES
        i_b, i_g = item.i_b.to(gl.int64), item.i_g.to(gl.int64)
        p_q += (i_b * s_qb + i_g * G * s_qh) * UNIT
        p_dout += (i_b * s_ob + i_g * G * s_oh) * UNIT
        p_stats += (i_b * S * Hkv + i_g) * (G * 4)
        sources = Sources(
            p_q, p_dout, p_stats, p_queries, s_qs, s_qh, s_os, s_oh, Hkv * G,
        )  # fmt: skip
        sums = Sums(p_dk, p_dv, place, p_queries, S, scale, scale_log2)
        _run(
            sources, t_k, t_v, sums, Parts(p_places, p_part), item,
            G, D, N_SEL, STAGES, ORDERED, NARROW, REGISTERS,
        )  # fmt: skip


@gluon.jit
def _run(
    sources, t_k, t_v, sums, parts, item, G: gl.constexpr, D: gl.constexpr, N_SEL: gl.constexpr,
    STAGES: gl.constexpr, ORDERED: gl.constexpr, NARROW: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Shared memory, barriers and roles."""
    dtype: gl.constexpr = t_k.dtype
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    TABLE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    bufs = Buffers(
        gl.allocate_shared_memory(dtype, [ROWS, D], TILE),
        gl.allocate_shared_memory(dtype, [ROWS, D], TILE),
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], TILE),
        gl.allocate_shared_memory(dtype, [STAGES, ROWS, D], TILE),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, 4], TABLE),
        gl.allocate_shared_memory(dtype, [1, ROWS, ROWS], TILE),
    )
    bars = Bars(
        gl.allocate_shared_memory(gl.int64, [1], BAR),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], BAR),
    )
    mbarrier.init(bars.kv_full, count=1)
    for i in gl.static_range(STAGES):
        # Every thread that loads arrives once its copies have.
        mbarrier.init(bars.full.index(i), count=128)
        mbarrier.init(bars.empty.index(i), count=1)
    # TMA reaches barriers by another way than the threads that initialised them.
    fence_async_shared()
    sync_warps()
    gl.warp_specialize(
        [
            (consume, (0, 1, sums, parts, bufs, bars, item, G, D, N_SEL, STAGES, ORDERED)),
            (_load, (sources, t_k, t_v, bufs, bars, item, G, D, STAGES, NARROW)),
        ],
        [4],
        [REGISTERS],
    )


@gluon.jit
def _load(
    sources, t_k, t_v, bufs, bars, item,
    G: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Load the block's keys and values, then rows, tile by tile."""
    ROW: gl.constexpr = gl.BlockedLayout([1, UNIT], [256 // D, D // UNIT], [4, 1], [1, 0])
    STAT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    # Rows that are copied together: at D 128 there are registers for no more.
    SOME: gl.constexpr = 64 if D == 64 else 16
    mbarrier.expect(bars.kv_full, 2 * ROWS * D * 2)
    at = [item.i_b, item.k0, item.i_g, 0]
    tma.async_copy_global_to_shared(t_k, at, bars.kv_full, bufs.k)
    tma.async_copy_global_to_shared(t_v, at, bars.kv_full, bufs.v)
    o_r = gl.arange(0, SOME, gl.SliceLayout(1, ROW))
    o_s = gl.arange(0, ROWS, gl.SliceLayout(1, STAT))
    for i in range(item.num_tiles):
        stage = i % STAGES
        b_q, b_dout = bufs.q.index(stage), bufs.dout.index(stage)
        # Queries are loaded before the wait, which hides their latency.
        stat = _row_of(sources, item, i * ROWS + o_s, G, NARROW)
        row = _row_of(sources, item, i * ROWS + o_r, G, NARROW)
        mbarrier.wait(bars.empty.index(stage), (i // STAGES & 1) ^ 1)
        _copy_stats(sources, stat, bufs.stats.index(stage), STAT)
        for n in gl.static_range(ROWS // SOME):
            if n > 0:
                row = _row_of(sources, item, i * ROWS + n * SOME + o_r, G, NARROW)
            _copy_row(sources.p_q, row, sources.s_qs, sources.s_qh, b_q.slice(n * SOME, SOME), ROW)
            _copy_row(
                sources.p_dout, row, sources.s_os, sources.s_oh, b_dout.slice(n * SOME, SOME), ROW
            )
        async_copy.mbarrier_arrive(bars.full.index(stage), increment_count=False)
    # Copies in flight belong to this program.
    async_copy.wait_group(0)


@gluon.jit
def _row_of(sources, item, o_r, G: gl.constexpr, NARROW: gl.constexpr):
    """Query and head of the rows o_r of an item; past its end those of its last query."""
    nth = o_r // G
    entry = gl.minimum(item.first + nth, item.stop - 1)
    t, head = gl.load(sources.p_queries + entry), o_r - nth * G
    if not NARROW:
        t, head = t.to(gl.int64), head.to(gl.int64)
    return t, head


@gluon.jit
def _copy_row(p, row, s_s, s_h, buf, LAYOUT: gl.constexpr):
    """Start copying rows of q or dout."""
    t, head = row
    o_d = gl.arange(0, buf.shape[1], gl.SliceLayout(0, LAYOUT))
    at = (t * s_s + head * s_h).to(gl.int64) * UNIT
    async_copy.async_copy_global_to_shared(buf, p + at[:, None] + o_d[None, :])


@gluon.jit
def _copy_stats(sources, row, buf, LAYOUT: gl.constexpr):
    """Start copying the four numbers of each row, of [B, S, Hq, 4]."""
    t, head = row
    o_4 = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))
    at = (t * sources.Hq + head).to(gl.int64) * 4
    async_copy.async_copy_global_to_shared(buf, sources.p_stats + at[:, None] + o_4[None, :])


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
    part: Tensor,  # [segments * rows of the group * n_sel * G, D], or longer
    *,
    ordered: bool,
) -> None:
    """Add dk and dv of a group of chunks to `grads`, or write them there, and dq to `part`."""
    dim, unit = problem.d_k, UNIT.value
    start(
        problem.memo,
        ("backward by rows in Gluon", group, ordered),
        selected_rows_backward,
        (
            q, dout, block_rows(k), block_rows(v), stats, part, *grads,
            lists.queries, lists.places, lists.item_block, lists.first_item, lists.starts,
            *problem.block_index(lists.queries),
        ),
        lambda: Launch(
            (lists.item_block.shape[2], group.num_chunks, problem.num_segments),
            (
                group.first_chunk, lists.item_block.shape[1], group.first_row, group.num_rows,
                problem.seq_len, lists.queries.shape[1], problem.num_blocks,
                lists.item_block.shape[2], piece_size(problem), problem.num_groups,
                *(stride // unit for x in (q, dout) for stride in x.stride()[:3]),
                problem.scale, problem.scale_log2,
            ),
            {"G": problem.per_group, "D": dim, "N_SEL": problem.spec.n_sel}
            | {"HAS_DOCS": problem.packed, "ORDERED": ordered, "STAGES": STAGES[dim]}
            | {"NARROW": all(_extent(x) // unit < WIDE for x in (q, dout))}
            | {"REGISTERS": LOADER_REGISTERS[dim]},
            {"num_warps": 4, "maxnreg": 128},
        ),
    )  # fmt: skip

"""Selected attention in key-block order, forward, in Gluon, for compute capability 9.0.

It does the work of block_forward (by_block_forward.py), item by item: a block and queries that
chose it, as rows (query, head) in tiles of 64. A program is one warpgroup. Keys and values lie in
shared memory for the whole item. Rows of q go from memory to the registers from which wgmma reads
them, and outputs from its registers to memory, both without shared memory: several programs share
an SM, and while one waits for memory, another computes. Names as in tile.py.

A thread holds 2 columns of every 8 of a wgmma operand, which would be loads of 4 bytes. So columns
are paired differently: column 8 a + 2 b + c of keys and values lies in column 8 b + 2 a + c of
shared memory (a, b < 4, c < 2, in every 32 columns). What a thread holds of 32 columns then is 8
neighbours: 16 bytes of a row. A sum over columns (q k^T) does not depend on their order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.ops.triton.block_index import Group, QueryLists, item_sizes
from nsa.ops.triton.hopper.parts import rounded, sync_warps
from nsa.ops.triton.launcher import Launch, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.tile import COUNTS

ROWS = gl.constexpr(64)
"""Rows of a tile, and keys of a block."""
PROGRAMS = {64: 5, 128: 4}
"""Programs of an SM, by head dim: they decide how many registers a thread has."""


class Item(NamedTuple):
    """Entries of an item, and where the segment's queries and results lie."""

    first: Any
    stop: Any
    p_queries: Any
    p_places: Any
    p_q: Any
    row0: Any
    """Row of part that the first query of the segment would have, over N_SEL."""


@gluon.jit(do_not_specialize=COUNTS)
def selected_forward(
    p_q, p_k, p_v, p_part, p_part_lse, p_queries, p_places, p_items, p_first_item, p_starts,
    p_block_start, p_block_stop, p_row_shift,
    first_chunk, num_chunks, first_row, num_rows, S, NUM_ENTRIES, NUM_BLOCKS, NUM_ITEMS, MOST,
    Hkv, first_seg, scale_log2, s_qb, s_qs, s_qh, s_kb, s_ks, s_kh, s_vb, s_vs, s_vh,
    G: gl.constexpr, D: gl.constexpr, N_SEL: gl.constexpr, HAS_DOCS: gl.constexpr,
):  # fmt: skip
    """Partial outputs of one item; arguments and results as in block_forward (MOST: its PIECE), for
    the segments from first_seg on."""
    i_item, i_seg = gl.program_id(0), (first_seg + gl.program_id(2)).to(gl.int64)
    list_row = i_seg * num_chunks + first_chunk + gl.program_id(1)
    block = gl.load(p_items + list_row * NUM_ITEMS + i_item)
    # Unused items name the block NUM_BLOCKS.
    if block < NUM_BLOCKS:
        bin = list_row * (NUM_BLOCKS + 1) + block
        first = gl.load(p_starts + bin) + (i_item - gl.load(p_first_item + bin)) * MOST
        stop = gl.minimum(first + MOST, gl.load(p_starts + bin + 1))
        k0 = block * ROWS
        k_stop = gl.minimum(k0 + ROWS, S)
        if HAS_DOCS:
            k0 = gl.load(p_block_start + block)
            k_stop = gl.load(p_block_stop + block)
        i_b, i_g = i_seg // Hkv, i_seg % Hkv
        entries = i_seg * NUM_ENTRIES
        item = Item(
            first, stop, p_queries + entries, p_places + entries,
            p_q + i_b * s_qb + i_g * G * s_qh, gl.program_id(2).to(gl.int64) * num_rows - first_row,
        )  # fmt: skip
        k_buf = _load_block(p_k + i_b * s_kb + i_g * s_kh, s_ks, k0, k_stop, D)
        v_buf = _load_block(p_v + i_b * s_vb + i_g * s_vh, s_vs, k0, k_stop, D)
        # wgmma reads shared memory by another way than threads write it.
        fence_async_shared()
        sync_warps()
        _run(
            item, k_buf, v_buf, p_part, p_part_lse, p_row_shift, k0, scale_log2, s_qs, s_qh,
            G, D, N_SEL,
        )  # fmt: skip


@gluon.jit
def _load_block(p, s_row, k0, k_stop, D: gl.constexpr):
    """A block of keys or values in shared memory, columns in wgmma's order; 0 after its end."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_k = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED))
    o_d = gl.arange(0, D, gl.SliceLayout(0, LOADED))
    at = ((k0 + o_k).to(gl.int64) * s_row)[:, None] + o_d[None, :]
    b = gl.load(p + at, mask=(k0 + o_k < k_stop)[:, None] & (o_d < D)[None, :], other=0.0)
    buf = gl.allocate_shared_memory(p.dtype.element_ty, [ROWS, D], gl.NVMMASharedLayout(128, 16))
    buf.store(_transposed(b, D))
    return buf


@gluon.jit
def _transposed(b, D: gl.constexpr):
    """The columns of b [ROWS, D] in wgmma's order, or from it to that of memory: it is its own
    inverse."""
    b = gl.reshape(b, [ROWS, D // 32, 4, 4, 2])
    return gl.reshape(gl.permute(b, (0, 1, 3, 2, 4)), [ROWS, D])


@gluon.jit
def _run(
    item, k_buf, v_buf, p_part, p_part_lse, p_row_shift, k0, scale_log2, s_qs, s_qh,
    G: gl.constexpr, D: gl.constexpr, N_SEL: gl.constexpr,
):  # fmt: skip
    """The tiles of an item. Queries are loaded two tiles ahead, their rows one."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    # Rows of q and of the output as a thread holds them: 16 bytes of two rows, in every 32 columns.
    MORE: gl.constexpr = [[0, 32]] if D == 64 else [[0, 32], [0, 64]]
    IO: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]] + MORE,
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, D],
    )
    dtype: gl.constexpr = k_buf.dtype
    num = (item.stop - item.first) * G
    num_tiles = (num + ROWS - 1) // ROWS
    num_masked = _num_masked(item, p_row_shift, k0, G)
    zero = gl.zeros([ROWS, ROWS], gl.float32, SL)
    none = gl.zeros([ROWS, D], gl.float32, OL)
    t = gl.load(item.p_queries + _entries(item, 0, G, IO))
    b_q = _load_rows(item, t, 0, s_qs, s_qh, G, D, IO, SL)
    t_next = gl.load(item.p_queries + _entries(item, 1, G, IO))
    for i in range(num_tiles):
        t_after = gl.load(item.p_queries + _entries(item, i + 2, G, IO))
        place = gl.load(item.p_places + _entries(item, i, G, IO)).to(gl.int32)
        # s = q k^T: [rows, keys].
        b_s = warpgroup_mma(b_q, k_buf.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        b_q = _load_rows(item, t_next, i + 1, s_qs, s_qh, G, D, IO, SL)
        # Without a barrier, ptxas delays these loads until the next product, and needs more
        # registers. At D 64 it is slower with one.
        if D == 128:
            sync_warps()
        if i < num_masked:
            last = t
            if p_row_shift is not None:
                last += gl.load(p_row_shift + t)
            last = gl.convert_layout(last, gl.SliceLayout(1, SL))
            o_k = k0 + gl.arange(0, ROWS, gl.SliceLayout(0, SL))
            b_s = gl.where(o_k[None, :] <= last[:, None], b_s, float("-inf"))
        # Softmax over this block alone, of which every query sees a token.
        top = gl.max(b_s, axis=1) * scale_log2
        b_p = gl.exp2(b_s * scale_log2 - top[:, None])
        total = gl.sum(b_p, axis=1)
        # out = p v / total: [rows, D].
        b_pa = gl.convert_layout(rounded(b_p, dtype), PL)
        b_o = warpgroup_mma(b_pa, v_buf, none, use_acc=False, is_async=True)
        lse = gl.convert_layout(top + _approx("lg2", total), gl.SliceLayout(1, IO))
        share = gl.convert_layout(_approx("rcp", total), gl.SliceLayout(1, OL))
        o_r = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, IO))
        row = ((item.row0 + t) * N_SEL + place) * G + o_r % G
        gl.store(p_part_lse + row, lse, mask=o_r < num)
        b_o, b_pa = warpgroup_mma_wait(0, deps=(b_o, b_pa))
        b_out = _transposed(rounded(b_o * share[:, None], dtype), D)
        o_d = gl.arange(0, D, gl.SliceLayout(0, IO))
        p_rows = p_part + (row * D)[:, None] + o_d[None, :]
        mask = (o_r < num)[:, None] & (o_d < D)[None, :]
        gl.store(p_rows, gl.convert_layout(b_out, IO), mask=mask)
        t = t_next
        t_next = t_after


@gluon.jit
def _approx(NAME: gl.constexpr, x):
    """log2(x) or 1 / x in one instruction, for 1 <= x <= ROWS: exact to 2 units in the last place.
    Triton's take 15 and 10, in every thread of a row."""
    return gl.inline_asm_elementwise(
        NAME + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _num_masked(item, p_row_shift, k0, G: gl.constexpr):
    """Tiles that need a mask: those of queries that see a part of the block.

    They are at most ROWS - 1, and the first of a list: it ascends and holds none before the block.
    """
    o_e = item.first + gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [4], [0]))
    last = gl.load(item.p_queries + gl.minimum(o_e, item.stop - 1))
    if p_row_shift is not None:
        last += gl.load(p_row_shift + last)
    num_partial = gl.sum(((o_e < item.stop) & (last < k0 + ROWS - 1)).to(gl.int32), 0)
    return (num_partial * G + ROWS - 1) // ROWS


@gluon.jit
def _entries(item, i, G: gl.constexpr, IO: gl.constexpr):
    """Entry of each row of tile i; past the end of the item the last one again."""
    o_r = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, IO))
    return gl.minimum(item.first + o_r // G, item.stop - 1)


@gluon.jit
def _load_rows(
    item, t, i, s_qs, s_qh, G: gl.constexpr, D: gl.constexpr, IO: gl.constexpr, SL: gl.constexpr
):
    """Rows of q of tile i as the left operand of wgmma, [ROWS, D]; t is the query of each."""
    o_r = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, IO))
    o_d = gl.arange(0, D, gl.SliceLayout(0, IO))
    at = t.to(gl.int64) * s_qs + o_r % G * s_qh
    b_q = gl.load(item.p_q + at[:, None] + o_d[None, :])
    return gl.convert_layout(_transposed(b_q, D), gl.DotOperandLayout(0, SL, 2))


# --- Launcher ---


def forward_group(
    problem: Problem,
    group: Group,
    segments: range,
    q: Tensor,  # [B, S, Hq, D]
    k: Tensor,  # [B, any, Hkv, D]
    v: Tensor,  # [B, any, Hkv, D]
    lists: QueryLists,
    part: Tensor,  # [segments, rows, n_sel, G, D]
    part_lse: Tensor,  # the same without D, fp32
) -> None:
    """Write the partial outputs of a group of chunks and some of the segments."""
    dim = problem.d_k
    *sizes, num_groups, per_group = item_sizes(problem, lists, group)
    start(
        problem.memo,
        ("by block in Gluon", group, segments),
        selected_forward,
        (
            q, k, v, part, part_lse, lists.queries, lists.places, lists.item_block,
            lists.first_item, lists.starts, *problem.block_index(q), problem.row_shift,
        ),
        lambda: Launch(
            (lists.item_block.shape[2], group.num_chunks, len(segments)),
            (
                *sizes, num_groups, segments.start, problem.scale_log2,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            ),
            {"G": per_group, "D": dim, "N_SEL": problem.spec.n_sel, "HAS_DOCS": problem.packed},
            {"num_warps": 4, "maxnreg": 65536 // (PROGRAMS[dim] * 128) // 8 * 8},
        ),
    )  # fmt: skip

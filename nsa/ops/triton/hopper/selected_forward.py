"""Selected attention in key-block order, forward, in Gluon, for compute capability 9.0.

It does the work of block_forward (by_block_forward.py), item by item: a block and queries that
chose it, as rows (query, head) in tiles of 64. A program is one warpgroup. Keys and values lie in
shared memory for the whole item. Rows of q go from memory to the registers from which wgmma reads
them, and outputs from its registers to memory, both without shared memory: several programs share
an SM, and while one waits for memory, another computes. Names as in tile.py.

Keys and values have their columns exchanged in shared memory (`exchanged` in parts.py), so that
what a thread holds of a row are 16 neighbouring bytes. A sum over columns (q k^T) does not depend
on their order.
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

from nsa.ops.triton.hopper.parts import exchanged, rounded, row_layout, sync_warps
from nsa.ops.triton.launcher import Launch, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.selected.block_index import Group, QueryLists, item_constants, item_sizes
from nsa.ops.triton.tile import COUNTS

ROWS = gl.constexpr(64)
"""Rows of a tile, and keys of a block."""
PROGRAMS = {64: 5, 128: 4}
"""Programs of an SM, by head dim: they decide how many registers a thread has."""


class Item(NamedTuple):
    """Entries of an item, and the lists of its segment; N_SEL * G rows of part for each query, the
    first of which is first_row."""

    first: Any
    stop: Any
    p_queries: Any
    p_places: Any
    first_row: Any


class Rows(NamedTuple):
    """Of each row of a tile: query, its own number of the block, and head."""

    t: Any
    place: Any
    head: Any


@gluon.jit(do_not_specialize=COUNTS)
def selected_forward(
    p_q, p_k, p_v, p_part, p_part_lse, p_queries, p_places, p_items, p_first_item, p_starts,
    p_block_start, p_block_stop, p_row_shift,
    first_chunk, num_chunks, first_row, num_rows, S, NUM_ENTRIES, NUM_BLOCKS, NUM_ITEMS, MOST,
    Hkv, first_seg, scale_log2, s_qb, s_qs, s_qh, s_kb, s_ks, s_kh, s_vb, s_vs, s_vh,
    G: gl.constexpr, D: gl.constexpr, N_SEL: gl.constexpr, HAS_DOCS: gl.constexpr,
    NARROW: gl.constexpr,
):  # fmt: skip
    """Partial outputs of one item; arguments and results as in block_forward (MOST: its PIECE), for
    the segments from first_seg on. Strides of q count pairs of numbers."""
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
        item = Item(first, stop, p_queries + entries, p_places + entries, first_row)
        k_buf = _load_block(p_k + i_b * s_kb + i_g * s_kh, s_ks, k0, k_stop, D)
        v_buf = _load_block(p_v + i_b * s_vb + i_g * s_vh, s_vs, k0, k_stop, D)
        # wgmma reads shared memory by another way than threads write it.
        fence_async_shared()
        sync_warps()
        # Pairs of numbers in 32 bits; memory of this segment alone.
        p_pairs = p_q.to(gl.pointer_type(gl.int32)) + i_b * s_qb + i_g * G * s_qh
        part0 = gl.program_id(2).to(gl.int64) * num_rows * (N_SEL * G)
        _run(
            item, k_buf, v_buf, p_pairs, p_part + part0 * D, p_part_lse + part0, p_row_shift,
            k0, scale_log2, s_qs, s_qh, G, D, N_SEL, NARROW,
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
    buf.store(exchanged(b, D))
    return buf


@gluon.jit
def _run(
    item, k_buf, v_buf, p_pairs, p_part, p_part_lse, p_row_shift, k0, scale_log2, s_qs, s_qh,
    G: gl.constexpr, D: gl.constexpr, N_SEL: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """The tiles of an item. Queries are loaded two tiles ahead, their rows of q one."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    IO: gl.constexpr = row_layout(D)
    RL: gl.constexpr = gl.SliceLayout(1, IO)
    dtype: gl.constexpr = k_buf.dtype
    num = (item.stop - item.first) * G
    num_masked = _num_masked(item, p_row_shift, k0, G)
    zero = gl.zeros([ROWS, ROWS], gl.float32, SL)
    none = gl.zeros([ROWS, D], gl.float32, OL)
    o_r = gl.arange(0, ROWS, RL)
    o_d = gl.arange(0, D, gl.SliceLayout(0, IO))
    # Rows of q and of part: those of the next tile are known a tile ahead.
    at, place = _places(_rows_of(item, o_r, G), item, s_qs, s_qh, G, N_SEL, NARROW)
    pairs = _load_pairs(p_pairs, at, D)
    at, next_place = _places(_rows_of(item, ROWS + o_r, G), item, s_qs, s_qh, G, N_SEL, NARROW)
    for i in range((num + ROWS - 1) // ROWS):
        coming = _rows_of(item, (i + 2) * ROWS + o_r, G)
        # s = q k^T: [rows, keys].
        b_q = _operand(pairs, D, dtype, SL)
        b_s = warpgroup_mma(b_q, k_buf.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=(b_s,))
        pairs = _load_pairs(p_pairs, at, D)
        # Without a barrier, ptxas delays these loads until the next product, and needs more
        # registers. At D 64 it is slower with one.
        if D == 128:
            sync_warps()
        if i < num_masked:
            last = _rows_of(item, i * ROWS + o_r, G).t
            if p_row_shift is not None:
                last += gl.load(p_row_shift + last)
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
        lse = gl.convert_layout(top + _approx("lg2", total), RL)
        share = gl.convert_layout(_approx("rcp", total), gl.SliceLayout(1, OL))
        m_r = o_r < num - i * ROWS
        gl.store(p_part_lse + place, lse, mask=m_r)
        b_o, b_pa = warpgroup_mma_wait(0, deps=(b_o, b_pa))
        b_out = gl.convert_layout(exchanged(rounded(b_o * share[:, None], dtype), D), IO)
        p_rows = p_part + (place.to(gl.int64) * D)[:, None] + o_d[None, :]
        gl.store(p_rows, b_out, mask=m_r[:, None] & (o_d < D)[None, :])
        place = next_place
        at, next_place = _places(coming, item, s_qs, s_qh, G, N_SEL, NARROW)


@gluon.jit
def _rows_of(item, o_r, G: gl.constexpr):
    """Rows o_r of an item; past its end those of the last query again."""
    nth = o_r // G
    entry = gl.minimum(item.first + nth, item.stop - 1)
    place = gl.load(item.p_places + entry).to(gl.int32)
    return Rows(gl.load(item.p_queries + entry), place, o_r - nth * G)


@gluon.jit
def _places(rows, item, s_qs, s_qh, G: gl.constexpr, N_SEL: gl.constexpr, NARROW: gl.constexpr):
    """Offset of rows in q, and their rows of part [num_rows, N_SEL, G]: fewer than 2^31."""
    t, head = rows.t, rows.head
    if not NARROW:
        t, head = t.to(gl.int64), head.to(gl.int64)
    place = ((rows.t - item.first_row) * N_SEL + rows.place) * G + rows.head
    return t * s_qs + head * s_qh, place


@gluon.jit
def _load_pairs(p_pairs, at, D: gl.constexpr):
    """Rows of q as pairs of numbers: [ROWS, D // 2] int32, 16 bytes in every 16 columns.

    As single numbers, a loop would carry them in registers of their own.
    """
    MORE: gl.constexpr = [[0, 16]] if D == 64 else [[0, 16], [0, 32]]
    LOADED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]] + MORE,
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, D // 2],
    )
    at = gl.convert_layout(at, gl.SliceLayout(1, LOADED))
    o_d = gl.arange(0, D // 2, gl.SliceLayout(0, LOADED))
    return gl.load(p_pairs + at[:, None] + o_d[None, :])


@gluon.jit
def _operand(pairs, D: gl.constexpr, dtype: gl.constexpr, SL: gl.constexpr):
    """Pairs of numbers as the left operand of wgmma, [ROWS, D] of `dtype`."""
    low = _half("{.reg .b16 x; mov.b32 {$0, x}, $1;}", pairs)
    high = _half("{.reg .b16 x; mov.b32 {x, $0}, $1;}", pairs)
    b_q = gl.reshape(gl.join(low, high), [ROWS, D]).to(dtype, bitcast=True)
    return gl.convert_layout(exchanged(b_q, D), gl.DotOperandLayout(0, SL, 2))


@gluon.jit
def _half(CODE: gl.constexpr, pairs):
    return gl.inline_asm_elementwise(CODE, "=h,r", [pairs], dtype=gl.int16, is_pure=True, pack=1)


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
                *(stride // 2 for stride in q.stride()[:3]), *k.stride()[:3], *v.stride()[:3],
            ),
            {"G": per_group, "D": dim, "N_SEL": problem.spec.n_sel, "HAS_DOCS": problem.packed}
            | {"NARROW": item_constants(problem, q)["NARROW"]},
            {"num_warps": 4, "maxnreg": 65536 // (PROGRAMS[dim] * 128) // 8 * 8},
        ),
    )  # fmt: skip

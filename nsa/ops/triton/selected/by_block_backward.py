"""Gradients of selected attention in key-block order (by_block_forward.py).

A program takes an item: a block and queries that chose it. It sums dk and dv of the block over its
queries, and writes the part of dq that each query gets from this block to the query's own place.
With large groups dq is computed in query order (by_query.py), and only dk and dv here. On compute
capability 9.0 kernels in Gluon (hopper/selected.py and selected_rows.py) take the items of all
groups where they were measured to be faster. Names as in tile.py, segment, bin and item as in
block_index.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.bands.banded_backward import sum_all
from nsa.ops.triton.choice.selection import Selection
from nsa.ops.triton.launcher import Launch, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.selected.block_index import (
    Group,
    QueryLists,
    _block_range,
    _item,
    fill_zeros,
    fitted_tiles,
    group_chunks,
    item_constants,
    item_sizes,
    part_bytes,
)
from nsa.ops.triton.tile import COUNTS, _dot, _dot_add, _load, _offsets, _stats
from nsa.ops.triton.tiles import padded


@triton.jit(do_not_specialize=COUNTS)
def block_backward(
    p_q, p_k, p_v, p_dout, p_stats, p_dk, p_dv, p_part, p_queries, p_places, p_items, p_first_item,
    p_starts, p_block_start, p_block_stop,
    first_chunk, num_chunks, first_row, num_rows, S, NUM_ENTRIES, NUM_BLOCKS, NUM_ITEMS, PIECE,
    Hkv, G, scale, scale_log2,
    s_qb, s_qs, s_qh, s_kb, s_ks, s_kh, s_vb, s_vs, s_vh, s_ob, s_os, s_oh,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, N_SEL: tl.constexpr, L_SEL: tl.constexpr,
    HAS_DOCS: tl.constexpr, UPCAST: tl.constexpr, NARROW: tl.constexpr, WITH_DQ: tl.constexpr,
    ORDERED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients from one item: of its block's keys and values, and partial ones of its queries.

    dk and dv are summed in registers over the item and then added to fp32 [B, S, Hkv, D] with
    atomics, in no fixed order. ORDERED: they go to the item's own slot, [segments, chunks of this
    launch, NUM_ITEMS, BN, D] fp32, and sum_items adds the slots in order.
    dq, WITH_DQ, goes to part [segments, num_rows, N_SEL, G, DK], as the output does in the forward.
    Tiles are [keys, rows]: P^T and dS^T are left operands as they are.
    """
    i_seg = tl.program_id(2).to(tl.int64)
    chunk = first_chunk + tl.program_id(1)
    block, first, stop = _item(
        p_items, p_first_item, p_starts, chunk, num_chunks, NUM_BLOCKS, NUM_ITEMS, PIECE
    )
    # An unused item.
    if block >= NUM_BLOCKS:
        return
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    p_queries += i_seg * NUM_ENTRIES
    p_places += i_seg * NUM_ENTRIES
    o_r = tl.arange(0, BM)
    head = i_g * G + o_r % G
    o_dk, o_dv = tl.arange(0, DK1), tl.arange(0, DV_PAD)
    k0, k_stop = _block_range(p_block_start, p_block_stop, block, S, L_SEL, HAS_DOCS)
    o_k = k0 + tl.arange(0, BN)
    m_k = o_k < k_stop
    keys = o_k.to(tl.int64)[:, None]
    # k [BN, DK1 (+ DK2)], v [BN, DV_PAD], and the sums dk, dv of the same shapes.
    p_rows = p_k + i_b * s_kb + i_g * s_kh + keys * s_ks
    b_k = _load(p_rows + o_dk[None, :], m_k, o_dk, DK, DK1, True)
    b_dk = tl.zeros([BN, DK1], tl.float32)
    if DK2 > 0:
        o_dk2 = DK1 + tl.arange(0, DK2)
        b_k2 = _load(p_rows + o_dk2[None, :], m_k, o_dk2, DK, DK1 + DK2, True)
        b_dk2 = tl.zeros([BN, DK2], tl.float32)
    p_rows = p_v + i_b * s_vb + i_g * s_vh + keys * s_vs + o_dv[None, :]
    b_v = _load(p_rows, m_k, o_dv, DV, DV_PAD, True)
    b_dv = tl.zeros([BN, DV_PAD], tl.float32)
    # One loop with a mask in every tile: peeled into two it spills more registers than the mask
    # costs time (docs/log/portable.md). Offsets are int32 where they fit (NARROW): fewer registers.
    for entry in range(first, stop, BM // G):
        m_r = (entry + o_r // G < stop) & (o_r // G < BM // G)
        t = tl.load(p_queries + entry + o_r // G, mask=m_r, other=0)
        p_rows_q = p_q + i_b * s_qb + _offsets(t, s_qs, head, s_qh, NARROW)[:, None]
        b_q = _load(p_rows_q + o_dk[None, :], m_r, o_dk, DK, DK1, True)
        # s^T = k q^T: [BN, BM].
        b_s = _dot(b_k, tl.trans(b_q), UPCAST)  # [BN, BM]
        if DK2 > 0:
            b_q2 = _load(p_rows_q + o_dk2[None, :], m_r, o_dk2, DK, DK1 + DK2, True)
            b_s = _dot_add(b_s, b_k2, tl.trans(b_q2), UPCAST)
        p_rows_o = p_dout + i_b * s_ob + _offsets(t, s_os, head, s_oh, NARROW)[:, None]
        b_dout = _load(p_rows_o + o_dv[None, :], m_r, o_dv, DV, DV_PAD, True)
        # P^T = sign * exp2(s'^T - lse), masked; it is times the gate. The position of the query
        # comes with the stats, as fp32, which is exact up to MAX_TOKENS.
        lse, delta, sign, token = _stats(p_stats, (i_b * Hkv * G + head) * S + t, m_r)
        b_p = tl.math.exp2(b_s * scale_log2 - lse[None, :])
        visible = o_k.to(tl.float32)[:, None] <= token[None, :]
        if HAS_DOCS or L_SEL < BN:  # else a key beyond the block is beyond every query, too
            visible = visible & m_k[:, None]
        b_p = tl.where(visible, b_p, 0.0) * sign[None, :]
        # dV += P^T dout;  dS^T = P^T * (dP^T - delta) with dP^T = v dout^T;  dK += dS^T q.
        b_dv = _dot_add(b_dv, b_p.to(b_dout.dtype), b_dout, UPCAST)
        b_dp = _dot(b_v, tl.trans(b_dout), UPCAST)
        b_ds = (b_p * (b_dp - delta[None, :])).to(b_q.dtype)
        b_dk = _dot_add(b_dk, b_ds, b_q, UPCAST)
        if DK2 > 0:
            b_dk2 = _dot_add(b_dk2, b_ds, b_q2, UPCAST)
        if WITH_DQ:
            # Partial dq of the query from this block, to the query's own place.
            place = tl.load(p_places + entry + o_r // G, mask=m_r, other=0).to(tl.int32)
            row = ((i_seg * num_rows + t - first_row) * N_SEL + place) * G + o_r % G
            p_row = p_part + row[:, None] * DK
            # dq^T = scale * k^T dS^T as [DK, rows]: then k is the operand that is transposed. For
            # dS k, dS would have to be moved.
            b_dq = tl.trans(_dot(tl.trans(b_k), b_ds, UPCAST)) * scale
            m_q = m_r[:, None] & (o_dk < DK)[None, :]
            tl.store(p_row + o_dk[None, :], b_dq.to(p_part.dtype.element_ty), mask=m_q)
            if DK2 > 0:
                b_dq2 = tl.trans(_dot(tl.trans(b_k2), b_ds, UPCAST)) * scale
                m_q2 = m_r[:, None] & (o_dk2 < DK)[None, :]
                tl.store(p_row + o_dk2[None, :], b_dq2.to(p_part.dtype.element_ty), mask=m_q2)
    # Rows of this item's slot, or of the block's keys.
    if ORDERED:
        slot = (i_seg * tl.num_programs(1) + tl.program_id(1)) * NUM_ITEMS + tl.program_id(0)
        row = slot * BN + tl.arange(0, BN)[:, None]
    else:
        row = (i_b * S + keys) * Hkv + i_g
    p_rows = p_dk + row * DK + o_dk[None, :]
    _give(p_rows, b_dk * scale, m_k[:, None] & (o_dk < DK)[None, :], ORDERED)
    if DK2 > 0:
        p_rows = p_dk + row * DK + o_dk2[None, :]
        _give(p_rows, b_dk2 * scale, m_k[:, None] & (o_dk2 < DK)[None, :], ORDERED)
    p_rows = p_dv + row * DV + o_dv[None, :]
    _give(p_rows, b_dv, m_k[:, None] & (o_dv < DV)[None, :], ORDERED)


@triton.jit
def _give(p, b, mask, ORDERED: tl.constexpr):
    """Store to memory that only this program writes (ORDERED), or add atomically."""
    if ORDERED:
        tl.store(p, b, mask=mask)
    else:
        tl.atomic_add(p, b, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=COUNTS)
def sum_items(
    p_slots, p_sum, p_first_item, p_block_start, p_block_stop,
    first_chunk, num_chunks, num_together, S, NUM_BLOCKS, NUM_ITEMS, Hkv,
    D: tl.constexpr, D_PAD: tl.constexpr, L_SEL: tl.constexpr, HAS_DOCS: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Add the slots of one block's items to fp32 [B, S, Hkv, D], in the order of the items."""
    block, i_seg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    k0, k_stop = _block_range(p_block_start, p_block_stop, block, S, L_SEL, HAS_DOCS)
    o_n, o_d = tl.arange(0, BN), tl.arange(0, D_PAD)
    # [BN, D_PAD] of the block's keys; the sum continues over groups of chunks.
    mask = (k0 + o_n < k_stop)[:, None] & (o_d < D)[None, :]
    row = ((i_seg // Hkv) * S + k0 + o_n) * Hkv + i_seg % Hkv
    p_rows = p_sum + row[:, None] * D + o_d[None, :]
    b_sum = tl.load(p_rows, mask=mask, other=0.0)
    # Chunks in order, and within a chunk the items of this block in order: a fixed sum.
    for i in range(0, num_together):
        p_first = p_first_item + (i_seg * num_chunks + first_chunk + i) * (NUM_BLOCKS + 1) + block
        for item in range(tl.load(p_first), tl.load(p_first + 1)):
            slot = (i_seg * num_together + i) * NUM_ITEMS + item
            p_slot = p_slots + (slot * BN + o_n)[:, None] * D + o_d[None, :]
            b_sum += tl.load(p_slot, mask=mask, other=0.0)
    tl.store(p_rows, b_sum, mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def sum_places(
    p_part, p_num_chosen, p_dq, p_more, first_row, num_rows, S, Hkv, G,
    DK: tl.constexpr, DK_PAD: tl.constexpr, N_SEL: tl.constexpr, G_PAD: tl.constexpr,
):  # fmt: skip
    """dq of one query and group: the sum over its places, in order, and of `more`, if given; both
    are [B, S, Hq, DK], and may be one tensor."""
    i_seg = tl.program_id(1).to(tl.int64)
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    t = first_row + tl.program_id(0)
    o_h, o_d = tl.arange(0, G_PAD), tl.arange(0, DK_PAD)
    mask = (o_h < G)[:, None] & (o_d < DK)[None, :]
    row = (i_seg * num_rows + tl.program_id(0)) * N_SEL * G + o_h
    at = ((i_b * S + t) * Hkv * G + i_g * G + o_h)[:, None] * DK + o_d[None, :]
    b_dq = tl.zeros([G_PAD, DK_PAD], tl.float32)
    if p_more is not None:
        b_dq += tl.load(p_more + at, mask=mask, other=0.0).to(tl.float32)
    # dq = sum over the places n of part[n]: [G_PAD, DK_PAD].
    for n in tl.range(0, tl.load(p_num_chosen + i_seg * S + t), loop_unroll_factor=8):
        p_rows = p_part + (row + n * G)[:, None] * DK + o_d[None, :]
        b_dq += tl.load(p_rows, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_dq + at, b_dq.to(p_dq.dtype.element_ty), mask=mask)


# --- Launchers: groups of chunks whose partial results fit the workspace ---

TMA_GROUP = 16
"""Heads of a group from which the kernel in Gluon gathers rows by TMA, a query at a time."""
SUMMED = 512
"""Numbers of dq that a warp of sum_places adds up, of eight places at a time."""


def backward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,  # [B, Hq, S, 4] fp32, of this branch; in Gluon [B, S, Hq, 4]
    chosen: Selection,
    lists: QueryLists,
    *,
    ordered: bool = False,
    more: Tensor | None = None,  # [B, S, Hq, Dk]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. That of q includes `more`, in whose place it is if the dtype fits.

    Several programs add to those of k and v, atomically and in no fixed order. `ordered`: each
    writes to its own slot, and a second kernel sums the slots in order (deterministic).
    """
    sums = _zeros(problem, k, v)
    dq = problem.empty(*q.shape) if more is None or more.dtype != problem.dtype else more
    groups = group_chunks(problem, lists, part_bytes(problem, problem.d_k), ordered)
    size = problem.num_segments * groups[0].num_rows * problem.spec.n_sel * problem.per_group
    if problem.in_gluon:
        size += problem.per_group  # a place for what belongs to no query
    part = problem.empty(size, problem.d_k)
    slots = _slots(problem, lists, groups[0]) if ordered else None
    for group in groups:
        _backward_group(problem, group, q, k, v, dout, stats, lists, slots or sums, part, ordered)
        _sum_group(problem, group, part, chosen, dq, more)
        if slots:
            _sum_slots(problem, group, q, lists, slots, sums)
    return dq, *sum_all(problem, 1, sums, 1, k, v)


def backward_kv(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    lists: QueryLists,
    *,
    ordered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v alone; by_query.backward_q computes that of q."""
    sums = _zeros(problem, k, v)
    groups = group_chunks(problem, lists, 0, ordered)
    slots = _slots(problem, lists, groups[0]) if ordered else None
    for group in groups:
        _backward_group(problem, group, q, k, v, dout, stats, lists, slots or sums, None, ordered)
        if slots:
            _sum_slots(problem, group, q, lists, slots, sums)
    return sum_all(problem, 1, sums, 1, k, v)


def _backward_group(
    problem: Problem,
    group: Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    lists: QueryLists,
    grads: tuple[Tensor, Tensor],  # of k and v: their sums, or the slots of the items
    part: Tensor | None,  # partial gradients of q; None: none
    ordered: bool,
) -> None:
    if part is not None and problem.in_gluon:
        from nsa.ops.triton.hopper import (
            selected,
            selected_rows,
        )  # only there: see their docstrings

        by_tma = problem.per_group >= TMA_GROUP
        rest = (q, k, v, dout, stats, lists, grads, part)
        (selected if by_tma else selected_rows).backward(problem, group, *rest, ordered=ordered)
        return
    start(
        problem.memo,
        ("backward by block", group, ordered),
        block_backward,
        (
            q, k, v, dout, stats, *grads, q if part is None else part,
            lists.queries, lists.places, lists.item_block, lists.first_item, lists.starts,
            *problem.block_index(q),
        ),
        lambda: Launch.tiled(
            (lists.item_block.shape[2], group.num_chunks, problem.num_segments),
            (
                *item_sizes(problem, lists, group), problem.scale, problem.scale_log2,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3],
            ),
            {**item_constants(problem, q, dout), "WITH_DQ": part is not None, "ORDERED": ordered},
            fitted_tiles(problem, "dkv" if part is None else "backward"),
        ),
    )  # fmt: skip


def _sum_group(
    problem: Problem,
    group: Group,
    part: Tensor,
    chosen: Selection,
    dq: Tensor,
    more: Tensor | None,
) -> None:
    heads, width = 1 << (problem.per_group - 1).bit_length(), padded(problem.d_k)
    start(
        problem.memo,
        ("sum of places", group, None if more is None else more.dtype),
        sum_places,
        (part, chosen.num_chosen, dq, more),
        lambda: Launch.plain(
            (group.num_rows, problem.num_segments),
            (
                group.first_row, group.num_rows, problem.seq_len, problem.num_groups,
                problem.per_group,
            ),
            {"DK": problem.d_k, "DK_PAD": width, "N_SEL": problem.spec.n_sel, "G_PAD": heads},
            num_warps=min(max(heads * width // SUMMED, 1), 8),
        ),
    )  # fmt: skip


def _slots(problem: Problem, lists: QueryLists, group: Group) -> tuple[Tensor, Tensor]:
    """Memory for the gradients of k and v of every item of a group of chunks."""
    num_items = problem.num_segments * group.num_chunks * lists.item_block.shape[2]
    keys = padded(problem.spec.l_sel)
    return (
        problem.empty(num_items, keys, problem.d_k, dtype=torch.float32),
        problem.empty(num_items, keys, problem.d_v, dtype=torch.float32),
    )


def _sum_slots(
    problem: Problem,
    group: Group,
    q: Tensor,
    lists: QueryLists,
    slots: tuple[Tensor, Tensor],
    sums: tuple[Tensor, Tensor],
) -> None:
    for name, slot, total in zip("kv", slots, sums, strict=True):
        _sum_slots_of(problem, group, name, slot, total, lists, problem.block_index(q))


def _sum_slots_of(
    problem: Problem,
    group: Group,
    name: str,
    slots: Tensor,
    total: Tensor,
    lists: QueryLists,
    block_index: tuple[Tensor, ...],
) -> None:
    _, num_chunks, num_items = lists.item_block.shape
    start(
        problem.memo,
        ("sum of slots", name, group),
        sum_items,
        (slots, total, lists.first_item, *block_index),
        lambda: Launch.plain(
            (problem.num_blocks, problem.num_segments),
            (
                group.first_chunk, num_chunks, group.num_chunks, problem.seq_len,
                problem.num_blocks, num_items, problem.num_groups,
            ),
            {"D": total.shape[3], "D_PAD": padded(total.shape[3]), "L_SEL": problem.spec.l_sel}
            | {"HAS_DOCS": problem.packed, "BN": padded(problem.spec.l_sel)},
        ),
    )  # fmt: skip


def _zeros(problem: Problem, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 zeros, to which programs add."""
    dk, dv = (problem.empty(*x.shape, dtype=torch.float32) for x in (k, v))
    fill_zeros(problem, "no sums", dk, dv)
    return dk, dv

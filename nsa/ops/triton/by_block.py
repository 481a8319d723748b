"""Selected attention in key-block order: a program takes one block and the queries that chose it.

The blocks of a query lie anywhere in the sequence: in query order every block is read again for
each query, in block order once for many. `p_queries` lists, chunk by chunk of queries and block by
block, who chose the block (block_index.py, which also defines segment, bin and item). The rows of a
tile are (query, head) pairs, so any group size fills a tile. Chunks keep what is gathered and
scattered within the L2 cache.

A query's results from its blocks are partial: each goes to a place of its own, [n_sel] per query,
and a second kernel sums the places in their order. Launchers are below the kernels; names as in
tile.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.banded import Gated
from nsa.ops.triton.block_index import PART_BYTES, SUBS, Inverse, chunk_size, part_bytes, piece_size
from nsa.ops.triton.launcher import Launch, ceil_div, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.select import Selection
from nsa.ops.triton.tile import _dot, _dot_add, _load, _offsets, _rows, _stats, _store_gated
from nsa.ops.triton.tiles import Tiles, fitted_block_tiles, padded


@triton.jit
def _item(
    p_items, p_item_ends, p_ends, chunk, num_chunks, NUM_BLOCKS, NUM_ITEMS, PIECE,
    SUBS: tl.constexpr,
):  # fmt: skip
    """Block of a program's item, its first entry, one past its last; block >= NUM_BLOCKS: none."""
    i_item, i_seg = tl.program_id(0), tl.program_id(2).to(tl.int64)
    # Block of the item, and its bin. min: unused items name a block that does not exist.
    block = tl.load(p_items + (i_seg * num_chunks + chunk) * NUM_ITEMS + i_item)
    bin = (i_seg * num_chunks + chunk) * NUM_BLOCKS + tl.minimum(block, NUM_BLOCKS - 1)
    # The item is number i_item - first_item of its bin; the bin's entries begin at `start`.
    first_item = tl.load(p_item_ends + bin - 1, mask=block > 0, other=0)
    start = tl.load(p_ends + bin * SUBS - 1, mask=(block > 0) | (chunk > 0), other=0)
    first = start + (i_item - first_item) * PIECE
    stop = tl.minimum(first + PIECE, tl.load(p_ends + bin * SUBS + SUBS - 1))
    return block, first, stop


@triton.jit
def _block_range(
    p_block_start, p_block_stop, block, S, L_SEL: tl.constexpr, HAS_DOCS: tl.constexpr
):
    """First token of a block, and one past its last."""
    if HAS_DOCS:
        return tl.load(p_block_start + block), tl.load(p_block_stop + block)
    return block * L_SEL, tl.minimum(block * L_SEL + L_SEL, S)


@triton.jit
def _masked_stop(p_queries, first, stop, k0, PER_TILE, ALWAYS: tl.constexpr, BN: tl.constexpr):
    """One past the last entry whose tile needs a mask, a whole number of tiles from `first`.

    Entries are in the order of the queries, so only the first BN of a bin can be queries within the
    block, which do not see all of it. ALWAYS: the block may end before the tile does.
    """
    if ALWAYS:
        return stop
    own = tl.load(p_queries + first) < k0 + BN
    return tl.where(own, tl.minimum(first + tl.cdiv(BN, PER_TILE) * PER_TILE, stop), first)


@triton.jit
def block_forward(
    p_q, t_k, t_k2, t_v, p_part, p_part_lse, p_queries, p_places, p_items, p_item_ends, p_ends,
    p_block_start, p_block_stop,
    first_chunk, num_chunks, first_row, num_rows, S, NUM_ENTRIES, NUM_BLOCKS, NUM_ITEMS, PIECE,
    Hkv, G, scale_log2, s_qb, s_qs, s_qh,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, N_SEL: tl.constexpr, L_SEL: tl.constexpr, SUBS: tl.constexpr,
    HAS_DOCS: tl.constexpr, UPCAST: tl.constexpr, NARROW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Partial outputs of one item: up to PIECE queries that chose one block, all their heads.

    part is [segments, num_rows, N_SEL, G, DV], part_lse the same without DV, for the rows of the
    sequence from first_row on.
    """
    i_seg = tl.program_id(2).to(tl.int64)
    chunk = first_chunk + tl.program_id(1)
    block, first, stop = _item(
        p_items, p_item_ends, p_ends, chunk, num_chunks, NUM_BLOCKS, NUM_ITEMS, PIECE, SUBS
    )
    if block >= NUM_BLOCKS:
        return  # the list of items is as long as the worst case; this one is unused
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    # Row r of a tile is entry r // G and head r % G. Rows beyond (BM // G) * G are unused.
    o_r, o_dk, o_dv = tl.arange(0, BM), tl.arange(0, DK1), tl.arange(0, DV_PAD)
    nth, head = o_r // G, (o_r % G).to(tl.int64)
    k0, k_stop = _block_range(p_block_start, p_block_stop, block, S, L_SEL, HAS_DOCS)
    o_k = k0 + tl.arange(0, BN)
    # k [BN, DK1 (+ DK2)] and v [BN, DV_PAD] of the block stay for the whole item.
    b_k = _rows(t_k, i_b, k0, i_g, 0, BN, DK1)
    b_v = _rows(t_v, i_b, k0, i_g, 0, BN, DV_PAD)
    if DK2 > 0:
        o_dk2 = DK1 + tl.arange(0, DK2)
        b_k2 = _rows(t_k2, i_b, k0, i_g, DK1, BN, DK2)
    p_qh = p_q + i_b * s_qb + i_g * G * s_qh
    # The mask is peeled: only queries within their own block need one, and they come first.
    masked_stop = _masked_stop(
        p_queries + i_seg * NUM_ENTRIES, first, stop, k0, BM // G, HAS_DOCS or L_SEL < BN, BN
    )
    for part in tl.static_range(2):
        if part == 0:
            lo, hi = first, masked_stop
        else:
            lo, hi = masked_stop, stop
        for entry in range(lo, hi, BM // G):
            # Gather q of the tile's queries: [BM, DK1].
            m_r = (entry + nth < stop) & (nth < BM // G)
            at = i_seg * NUM_ENTRIES + entry + nth
            t = tl.load(p_queries + at, mask=m_r, other=0)
            p_rows = p_qh + _offsets(t, s_qs, head, s_qh, NARROW)[:, None]
            b_q = _load(p_rows + o_dk[None, :], m_r, o_dk, DK, DK1, True)
            # s = q k^T: [BM, BN].
            b_s = _dot(b_q, tl.trans(b_k), UPCAST)
            if DK2 > 0:
                b_q2 = _load(p_rows + o_dk2[None, :], m_r, o_dk2, DK, DK1 + DK2, True)
                b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
            if part == 0:
                visible = (o_k < k_stop)[None, :] & (o_k[None, :] <= t[:, None])
                b_s = tl.where(visible, b_s, float("-inf"))
            # Softmax over this block alone: a chosen block holds a visible token, so a row in use
            # has a finite maximum. Unused rows may see nothing; 0 and 1 keep them finite.
            top = tl.where(m_r, tl.max(b_s, axis=1) * scale_log2, 0.0)
            b_p = tl.math.exp2(b_s * scale_log2 - top[:, None])
            total = tl.where(m_r, tl.sum(b_p, axis=1), 1.0)
            # out = p v / total: [BM, DV_PAD]. The reciprocal is faster than a division.
            b_out = _dot(b_p.to(b_v.dtype), b_v, UPCAST) * (1.0 / total)[:, None]
            place = tl.load(p_places + at, mask=m_r, other=0).to(tl.int32)
            # The query's own place for this block. int64 through i_seg: may pass 2^31.
            row = ((i_seg * num_rows + t - first_row) * N_SEL + place) * G + head
            tl.store(p_part_lse + row, top + tl.math.log2(total), mask=m_r)
            m_o = m_r[:, None] & (o_dv < DV)[None, :]
            p_rows_o = p_part + row[:, None] * DV + o_dv[None, :]
            tl.store(p_rows_o, b_out.to(p_part.dtype.element_ty), mask=m_o)


@triton.jit
def merge_parts(
    p_part, p_part_lse, p_num_chosen, p_o, p_lse, p_gates, p_o_cmp, p_o_win, p_out,
    first_row, num_rows, S, Hkv, G, s_gb, s_gs, s_gh,
    DV: tl.constexpr, DV_PAD: tl.constexpr, N_SEL: tl.constexpr, G_PAD: tl.constexpr,
):  # fmt: skip
    """Selected output of one query and group from its partial outputs, and the gated sum."""
    i_seg = tl.program_id(1).to(tl.int64)
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    t = first_row + tl.program_id(0)
    o_h, o_d = tl.arange(0, G_PAD), tl.arange(0, DV_PAD)
    m_h = o_h < G
    m_o = m_h[:, None] & (o_d < DV)[None, :]
    num_chosen = tl.load(p_num_chosen + i_seg * S + t)
    # First place of the query: part is [segments, num_rows, N_SEL, G, DV], part_lse without DV.
    row = (i_seg * num_rows + tl.program_id(0)) * N_SEL * G + o_h
    # With lse_n of each place: top = max lse_n, weight_n = exp2(lse_n - top),
    # out = sum of weight_n * out_n / sum of weight_n, lse = top + log2(sum of weight_n).
    # Places are summed in order, so the result does not depend on who wrote them when.
    top = tl.full([G_PAD], float("-inf"), tl.float32)
    for n in tl.range(0, num_chosen, loop_unroll_factor=8):
        lse = tl.load(p_part_lse + row + n * G, mask=m_h, other=float("-inf"))
        top = tl.maximum(top, lse)
    none = top == float("-inf")
    safe_top = tl.where(none, 0.0, top)
    total = tl.zeros([G_PAD], tl.float32)
    b_out = tl.zeros([G_PAD, DV_PAD], tl.float32)
    for n in tl.range(0, num_chosen, loop_unroll_factor=8):
        lse = tl.load(p_part_lse + row + n * G, mask=m_h, other=float("-inf"))
        b_part = tl.load(p_part + (row + n * G)[:, None] * DV + o_d[None, :], mask=m_o, other=0.0)
        weight = tl.math.exp2(lse - safe_top)
        total += weight
        b_out += b_part.to(tl.float32) * weight[:, None]
    b_out = b_out * (1.0 / tl.where(none, 1.0, total))[:, None]
    lse = tl.where(none, float("inf"), top + tl.math.log2(total))
    # Store lse [B, Hq, S], the branch [G, DV] and the gated sum.
    i_h = i_g * G + o_h
    tl.store(p_lse + (i_b * Hkv * G + i_h) * S + t, lse, mask=m_h)
    at = ((i_b * S + t) * Hkv * G + i_h)[:, None] * DV + o_d[None, :]
    tl.store(p_o + at, b_out.to(p_o.dtype.element_ty), mask=m_o)
    p_gate = p_gates + i_b * s_gb + tl.cast(t, tl.int64) * s_gs + i_h * s_gh
    _store_gated(p_o_cmp, p_o_win, p_out, p_gate, b_out, at, m_h, m_o)


@triton.jit
def block_backward(
    p_q, p_k, p_v, p_dout, p_stats, p_dk, p_dv, p_part, p_queries, p_places, p_items, p_item_ends,
    p_ends, p_block_start, p_block_stop,
    first_chunk, num_chunks, first_row, num_rows, S, NUM_ENTRIES, NUM_BLOCKS, NUM_ITEMS, PIECE,
    Hkv, G, scale, scale_log2,
    s_qb, s_qs, s_qh, s_kb, s_ks, s_kh, s_vb, s_vs, s_vh, s_ob, s_os, s_oh,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, N_SEL: tl.constexpr, L_SEL: tl.constexpr, SUBS: tl.constexpr,
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
        p_items, p_item_ends, p_ends, chunk, num_chunks, NUM_BLOCKS, NUM_ITEMS, PIECE, SUBS
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
    # costs time (docs/kernels.md). Offsets are int32 where they fit (NARROW), for the same reason.
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
        # P^T = exp2(s'^T - lse), masked, times the gate. The position of the query comes with the
        # stats, as fp32, which is exact up to MAX_TOKENS.
        lse, delta, gate, token = _stats(p_stats, (i_b * Hkv * G + head) * S + t, m_r)
        b_p = tl.math.exp2(b_s * scale_log2 - lse[None, :])
        visible = o_k.to(tl.float32)[:, None] <= token[None, :]
        if HAS_DOCS or L_SEL < BN:  # else a key beyond the block is beyond every query, too
            visible = visible & m_k[:, None]
        b_p = tl.where(visible, b_p, 0.0) * gate[None, :]
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


@triton.jit
def sum_items(
    p_slots, p_sum, p_item_ends, p_block_start, p_block_stop,
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
        p_ends = p_item_ends + (i_seg * num_chunks + first_chunk + i) * NUM_BLOCKS + block
        first = tl.load(p_ends - 1, mask=block > 0, other=0)
        for item in range(first, tl.load(p_ends)):
            slot = (i_seg * num_together + i) * NUM_ITEMS + item
            p_slot = p_slots + (slot * BN + o_n)[:, None] * D + o_d[None, :]
            b_sum += tl.load(p_slot, mask=mask, other=0.0)
    tl.store(p_rows, b_sum, mask=mask)


@triton.jit
def sum_places(
    p_part, p_num_chosen, p_dq, first_row, num_rows, S, Hkv, G,
    DK: tl.constexpr, DK_PAD: tl.constexpr, N_SEL: tl.constexpr, G_PAD: tl.constexpr,
):  # fmt: skip
    """dq of one query and group: the sum over its places, in order, fp32 [B, S, Hq, DK]."""
    i_seg = tl.program_id(1).to(tl.int64)
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    t = first_row + tl.program_id(0)
    o_h, o_d = tl.arange(0, G_PAD), tl.arange(0, DK_PAD)
    mask = (o_h < G)[:, None] & (o_d < DK)[None, :]
    row = (i_seg * num_rows + tl.program_id(0)) * N_SEL * G + o_h
    b_dq = tl.zeros([G_PAD, DK_PAD], tl.float32)
    # dq = sum over the places n of part[n]: [G_PAD, DK_PAD].
    for n in tl.range(0, tl.load(p_num_chosen + i_seg * S + t), loop_unroll_factor=8):
        p_rows = p_part + (row + n * G)[:, None] * DK + o_d[None, :]
        b_dq += tl.load(p_rows, mask=mask, other=0.0).to(tl.float32)
    at = ((i_b * S + t) * Hkv * G + i_g * G + o_h)[:, None] * DK + o_d[None, :]
    tl.store(p_dq + at, b_dq, mask=mask)


# --- Launchers: groups of chunks whose partial results fit the workspace ---

WIDE = 1 << 31
"""Offsets from here on need int64."""


class Group(NamedTuple):
    """Chunks whose partial results are in the workspace together."""

    first_chunk: int
    num_chunks: int
    first_row: int
    num_rows: int


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Selection,
    inverse: Inverse,
    lse: Tensor,  # [B, Hq, S] fp32, written
    gated: Gated,
) -> Tensor:  # [B, S, Hq, Dv]
    """Output of the selected branch; also writes the gated sum."""
    out = torch.empty_like(gated.out)
    tiles = _tiles(problem)
    groups = _groups(problem, inverse, part_bytes(problem, problem.d_v))
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
        block_forward,
        (
            q, *problem.keys(k, v, tiles.BN), part, part_lse, inverse.queries, inverse.places,
            inverse.item_block, inverse.item_ends, inverse.ends, *problem.block_index(q),
        ),
        lambda: Launch.tiled(
            (inverse.item_block.shape[2], group.num_chunks, problem.num_segments),
            (*_sizes(problem, inverse, group), problem.scale_log2, *q.stride()[:3]),
            _constants(problem, q),
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
        merge_parts,
        (part, part_lse, chosen.num_chosen, out, lse, *gated),
        lambda: Launch.plain(
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
    *,
    ordered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # the first fp32
    """Gradients of q, k and v.

    Several programs add to those of k and v, atomically and in no fixed order. `ordered`: each
    writes to its own slot, and a second kernel sums the slots in order (deterministic).
    """
    sums = _zeros(k), _zeros(v)
    dq = problem.empty(*q.shape, dtype=torch.float32)
    groups = _groups(problem, inverse, part_bytes(problem, problem.d_k), ordered)
    size = problem.num_segments * groups[0].num_rows * problem.spec.n_sel * problem.per_group
    part = problem.empty(size, problem.d_k)
    slots = _slots(problem, inverse, groups[0]) if ordered else None
    for group in groups:
        _backward_group(problem, group, q, k, v, dout, stats, inverse, slots or sums, part, ordered)
        _sum_group(problem, group, part, chosen, dq)
        if slots:
            _sum_slots(problem, group, q, inverse, slots, sums)
    return dq, sums[0].to(k.dtype), sums[1].to(v.dtype)


def backward_kv(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    inverse: Inverse,
    *,
    ordered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v alone; by_query.backward_q computes that of q."""
    sums = _zeros(k), _zeros(v)
    groups = _groups(problem, inverse, 0, ordered)
    slots = _slots(problem, inverse, groups[0]) if ordered else None
    for group in groups:
        _backward_group(problem, group, q, k, v, dout, stats, inverse, slots or sums, None, ordered)
        if slots:
            _sum_slots(problem, group, q, inverse, slots, sums)
    return sums[0].to(k.dtype), sums[1].to(v.dtype)


def _backward_group(
    problem: Problem,
    group: Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    inverse: Inverse,
    grads: tuple[Tensor, Tensor],  # of k and v: their sums, or the slots of the items
    part: Tensor | None,  # partial gradients of q; None: none
    ordered: bool,
) -> None:
    start(
        problem.memo,
        ("backward by block", group, ordered),
        block_backward,
        (
            q, k, v, dout, stats, *grads, q if part is None else part,
            inverse.queries, inverse.places, inverse.item_block, inverse.item_ends, inverse.ends,
            *problem.block_index(q),
        ),
        lambda: Launch.tiled(
            (inverse.item_block.shape[2], group.num_chunks, problem.num_segments),
            (
                *_sizes(problem, inverse, group), problem.scale, problem.scale_log2,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3],
            ),
            {**_constants(problem, q, dout), "WITH_DQ": part is not None, "ORDERED": ordered},
            _tiles(problem, "dkv" if part is None else "backward"),
        ),
    )  # fmt: skip


def _sum_group(problem: Problem, group: Group, part: Tensor, chosen: Selection, dq: Tensor) -> None:
    start(
        problem.memo,
        ("sum of places", group),
        sum_places,
        (part, chosen.num_chosen, dq),
        lambda: Launch.plain(
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


def _slots(problem: Problem, inverse: Inverse, group: Group) -> tuple[Tensor, Tensor]:
    """Memory for the gradients of k and v of every item of a group of chunks."""
    num_items = problem.num_segments * group.num_chunks * inverse.item_block.shape[2]
    keys = padded(problem.spec.l_sel)
    return (
        problem.empty(num_items, keys, problem.d_k, dtype=torch.float32),
        problem.empty(num_items, keys, problem.d_v, dtype=torch.float32),
    )


def _sum_slots(
    problem: Problem,
    group: Group,
    q: Tensor,
    inverse: Inverse,
    slots: tuple[Tensor, Tensor],
    sums: tuple[Tensor, Tensor],
) -> None:
    for name, slot, total in zip("kv", slots, sums, strict=True):
        _sum_slots_of(problem, group, name, slot, total, inverse, problem.block_index(q))


def _sum_slots_of(
    problem: Problem,
    group: Group,
    name: str,
    slots: Tensor,
    total: Tensor,
    inverse: Inverse,
    block_index: tuple[Tensor, ...],
) -> None:
    _, num_chunks, num_items = inverse.item_block.shape
    start(
        problem.memo,
        ("sum of slots", name, group),
        sum_items,
        (slots, total, inverse.item_ends, *block_index),
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


def _groups(
    problem: Problem, inverse: Inverse, row_bytes: int, ordered: bool = False
) -> list[Group]:
    """Chunks in groups whose partial results fit PART_BYTES.

    A query position has `row_bytes` of them; with `ordered` an item also has its slot.
    """
    chunk, seq_len = chunk_size(problem), problem.seq_len
    chunk_bytes = row_bytes * chunk
    if ordered:
        width = padded(problem.spec.l_sel) * (problem.d_k + problem.d_v)
        slot_bytes = problem.num_segments * inverse.item_block.shape[2] * width * 4
        chunk_bytes = max(chunk_bytes, slot_bytes)
    num_chunks = ceil_div(seq_len, chunk)
    together = max(PART_BYTES // chunk_bytes, 1) if chunk_bytes else num_chunks
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
    """The sizes that open the argument lists of both kernels."""
    _, num_chunks, num_items = inverse.item_block.shape
    return (
        group.first_chunk, num_chunks, group.first_row, group.num_rows, problem.seq_len,
        inverse.queries.shape[1], problem.num_blocks, num_items, piece_size(problem),
        problem.num_groups, problem.per_group,
    )  # fmt: skip


def _tiles(problem: Problem, purpose: str = "forward") -> Tiles:
    tiles = fitted_block_tiles(*problem.sizes, purpose, problem.capability)
    assert tiles is not None, "a problem whose blocks do not fit is masked"
    return tiles


def _constants(problem: Problem, *gathered: Tensor) -> dict[str, Any]:
    """Constants in the kernels' order; `gathered` are the tensors read with computed offsets."""
    return {
        **problem.dims(),
        "N_SEL": problem.spec.n_sel,
        "L_SEL": problem.spec.l_sel,
        "SUBS": SUBS,
        "HAS_DOCS": problem.packed,
        "UPCAST": problem.upcast,
        "NARROW": all(_extent(x) < WIDE for x in gathered),
    }


def _extent(x: Tensor) -> int:
    """Largest offset within one batch element of [B, S, H, D]."""
    return sum(
        (size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)
    )


def _zeros(x: Tensor) -> Tensor:
    """fp32 zeros, to which programs add."""
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)

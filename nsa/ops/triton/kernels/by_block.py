"""Selected attention in key-block order: a program takes one block and the queries that chose it.

A query's own blocks lie anywhere, so going by queries reads every block again for each of them;
going by blocks reads it once for many. `p_entries` lists, block by block, the (query, place)
pairs that chose the block, as query * N_SEL + place within a chunk of queries. The rows of a tile
are pairs of such an entry and a head of the group: any group size fills a tile.

Names as in band.py. A segment is one (batch element, KV head) of the chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.kernels.band import _dot


@triton.jit
def _rows(p_entries, first, stop, G, N_SEL: tl.constexpr, BM: tl.constexpr):
    """Query, place and head of BM rows from entry `first` on, and which rows are used."""
    o_r = tl.arange(0, BM)
    entry = first + o_r // G
    m_r = (entry < stop) & (o_r // G < BM // G)
    at = tl.load(p_entries + entry, mask=m_r, other=0)
    return at // N_SEL, at % N_SEL, o_r % G, m_r


@triton.jit
def block_forward(
    p_q, p_k, p_v, p_part, p_part_lse, p_entries, p_offsets, p_items, p_item_first,
    p_block_start, p_block_stop,
    first_row, NUM_ENTRIES, NUM_BLOCKS, NUM_ITEMS, Hkv, G, scale_log2,
    s_qb, s_qs, s_qh, s_kb, s_ks, s_kh, s_vb, s_vs, s_vh,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    N_SEL: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Partial outputs of one item: up to BM // G queries that chose one block.

    part is [segments, rows of the chunk * N_SEL, G, DV], part_lse the same without DV.
    """
    i_item, i_seg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(p_items + i_seg * NUM_ITEMS + i_item)
    if block >= NUM_BLOCKS:
        return  # the list is as long as the worst case; here it has ended
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    p_offsets += i_seg * (NUM_BLOCKS + 1) + block
    place_in_block = i_item - tl.load(p_item_first + i_seg * NUM_BLOCKS + block)
    first = tl.load(p_offsets) + place_in_block * (BM // G)
    p_entries += i_seg * NUM_ENTRIES
    query, place, head, m_r = _rows(p_entries, first, tl.load(p_offsets + 1), G, N_SEL, BM)
    o_dk, o_dv = tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
    t = first_row + query
    h = i_g * G + head
    p_rows_q = p_q + i_b * s_qb + (t.to(tl.int64) * s_qs + h * s_qh)[:, None] + o_dk[None, :]
    b_q = tl.load(p_rows_q, mask=m_r[:, None] & (o_dk < DK)[None, :], other=0.0)
    o_k = tl.load(p_block_start + block) + tl.arange(0, BN)
    m_k = o_k < tl.load(p_block_stop + block)
    keys = o_k.to(tl.int64)
    p_keys = p_k + i_b * s_kb + i_g * s_kh + keys[None, :] * s_ks + o_dk[:, None]
    b_k = tl.load(p_keys, mask=m_k[None, :] & (o_dk < DK)[:, None], other=0.0)
    b_s = _dot(b_q, b_k, UPCAST) * scale_log2
    b_s = tl.where(m_k[None, :] & (o_k[None, :] <= t[:, None]), b_s, float("-inf"))
    top = tl.max(b_s, axis=1)  # a chosen block holds a visible token, so this is finite
    b_p = tl.math.exp2(b_s - top[:, None])
    total = tl.sum(b_p, axis=1)
    p_values = p_v + i_b * s_vb + i_g * s_vh + keys[:, None] * s_vs + o_dv[None, :]
    b_v = tl.load(p_values, mask=m_k[:, None] & (o_dv < DV)[None, :], other=0.0)
    b_out = _dot(b_p.to(b_v.dtype), b_v, UPCAST) / total[:, None]
    row = (i_seg * NUM_ENTRIES + query * N_SEL + place) * G + head
    tl.store(p_part_lse + row, top + tl.math.log2(total), mask=m_r)
    p_rows = p_part + row[:, None] * DV + o_dv[None, :]
    tl.store(p_rows, b_out.to(p_part.dtype.element_ty), mask=m_r[:, None] & (o_dv < DV)[None, :])


@triton.jit
def merge_parts(
    p_part, p_part_lse, p_selection, p_out, p_lse,
    first_row, NUM_ROWS, NUM_ENTRIES, S, Hkv, G,
    DV: tl.constexpr, DV_PAD: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one query and head from its N_SEL partial ones."""
    i_row, i_seg = tl.program_id(0) // G, tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) % G
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    t = (first_row + i_row).to(tl.int64)
    o_n, o_d = tl.arange(0, N_SEL_PAD), tl.arange(0, DV_PAD)
    ids = tl.load(
        p_selection + ((i_b * S + t) * Hkv + i_g) * N_SEL + o_n, mask=o_n < N_SEL, other=-1
    )
    used = ids >= 0
    row = (i_seg * NUM_ENTRIES + i_row * N_SEL + o_n) * G + head
    lses = tl.load(p_part_lse + row, mask=used, other=float("-inf"))
    top = tl.max(lses, axis=0)
    weights = tl.math.exp2(lses - top)
    total = tl.sum(weights, axis=0)
    mask = used[:, None] & (o_d < DV)[None, :]
    parts = tl.load(p_part + row[:, None] * DV + o_d[None, :], mask=mask, other=0.0)
    out = tl.sum(parts.to(tl.float32) * weights[:, None], axis=0) / total
    h = i_g * G + head
    p_row = p_out + ((i_b * S + t) * Hkv * G + h) * DV + o_d
    tl.store(p_row, out.to(p_out.dtype.element_ty), mask=o_d < DV)
    tl.store(p_lse + (i_b * Hkv * G + h) * S + t, top + tl.math.log2(total))


@triton.jit
def block_backward(
    p_q, p_k, p_v, p_dout, p_lse, p_delta, p_gates, p_dq, p_dk, p_dv,
    p_entries, p_offsets, p_items, p_item_first, p_block_start, p_block_stop,
    NUM_ENTRIES, NUM_BLOCKS, NUM_ITEMS, PIECE, S, Hkv, G, scale, scale_log2,
    s_qb, s_qs, s_qh, s_kb, s_ks, s_kh, s_vb, s_vs, s_vh, s_ob, s_os, s_oh, s_gb, s_gs, s_gh,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    N_SEL: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients from one piece: up to PIECE queries of one block, all heads of the group.

    dk and dv of the block are summed in registers and added to fp32 [B, S, Hkv, D] once a piece;
    dq goes to fp32 [B, S, Hq, DK] by vector additions in memory.
    """
    i_item, i_seg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = tl.load(p_items + i_seg * NUM_ITEMS + i_item)
    if block >= NUM_BLOCKS:
        return
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    p_offsets += i_seg * (NUM_BLOCKS + 1) + block
    place_in_block = i_item - tl.load(p_item_first + i_seg * NUM_BLOCKS + block)
    first = tl.load(p_offsets) + place_in_block * PIECE
    stop = tl.minimum(first + PIECE, tl.load(p_offsets + 1))
    p_entries += i_seg * NUM_ENTRIES
    o_dk, o_dv = tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
    m_dk, m_dv = o_dk < DK, o_dv < DV
    o_k = tl.load(p_block_start + block) + tl.arange(0, BN)
    m_k = o_k < tl.load(p_block_stop + block)
    keys = o_k.to(tl.int64)[:, None]
    p_keys = p_k + i_b * s_kb + i_g * s_kh + keys * s_ks + o_dk[None, :]
    b_k = tl.load(p_keys, mask=m_k[:, None] & m_dk[None, :], other=0.0)
    p_values = p_v + i_b * s_vb + i_g * s_vh + keys * s_vs + o_dv[None, :]
    b_v = tl.load(p_values, mask=m_k[:, None] & m_dv[None, :], other=0.0)
    b_dk = tl.zeros([BN, DK_PAD], tl.float32)
    b_dv = tl.zeros([BN, DV_PAD], tl.float32)
    for entry in range(first, stop, BM // G):
        query, _, head, m_r = _rows(p_entries, entry, stop, G, N_SEL, BM)
        t, h = query.to(tl.int64), i_g * G + head
        p_rows_q = p_q + i_b * s_qb + (t * s_qs + h * s_qh)[:, None] + o_dk[None, :]
        b_q = tl.load(p_rows_q, mask=m_r[:, None] & m_dk[None, :], other=0.0)
        p_rows_o = p_dout + i_b * s_ob + (t * s_os + h * s_oh)[:, None] + o_dv[None, :]
        b_dout = tl.load(p_rows_o, mask=m_r[:, None] & m_dv[None, :], other=0.0)
        head_row = (i_b * Hkv * G + h) * S + t
        lse = tl.load(p_lse + head_row, mask=m_r, other=float("inf"))
        delta = tl.load(p_delta + head_row, mask=m_r, other=0.0)
        p_gate = p_gates + i_b * s_gb + h * s_gh + t * s_gs
        gate = tl.load(p_gate, mask=m_r, other=0.0).to(tl.float32)
        b_s = _dot(b_q, tl.trans(b_k), UPCAST) * scale_log2
        visible = m_k[None, :] & (o_k[None, :] <= query[:, None])
        b_p = tl.where(visible, tl.math.exp2(b_s - lse[:, None]), 0.0) * gate[:, None]
        b_dv += _dot(tl.trans(b_p.to(b_dout.dtype)), b_dout, UPCAST)
        b_dp = _dot(b_dout, tl.trans(b_v), UPCAST)
        b_ds = (b_p * (b_dp - delta[:, None])).to(b_q.dtype)
        b_dk += _dot(tl.trans(b_ds), b_q, UPCAST)
        b_dq = _dot(b_ds, b_k, UPCAST) * scale
        p_rows_dq = p_dq + ((i_b * S + t) * Hkv * G + h)[:, None] * DK + o_dk[None, :]
        tl.atomic_add(p_rows_dq, b_dq, mask=m_r[:, None] & m_dk[None, :], sem="relaxed")
    row = (i_b * S + keys) * Hkv + i_g
    m_rows = m_k[:, None] & m_dk[None, :]
    tl.atomic_add(p_dk + row * DK + o_dk[None, :], b_dk * scale, mask=m_rows, sem="relaxed")
    m_rows = m_k[:, None] & m_dv[None, :]
    tl.atomic_add(p_dv + row * DV + o_dv[None, :], b_dv, mask=m_rows, sem="relaxed")

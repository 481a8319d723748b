"""Kernels that rank blocks: probabilities of a group, then the choice (Eq. 9 to 12).

The probabilities of a bounded chunk of queries are the only thing that is stored. All sums are
fp32, in an order that is the same for every block, so that equal scores tie exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.kernels.band import _band, _dot


@triton.jit
def group_probs(
    p_q, p_k, p_lse, p_probs, p_row_start, p_row_key,
    first_row, stop_row, S, N, Hkv, G, scale_log2,
    s_qb, s_qs, s_qh, s_kb, s_ks, s_kh, s_pb, s_pg, s_ps,
    OFF, STEP,
    DK: tl.constexpr, DK_PAD: tl.constexpr, HAS_DOCS: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """p_cmp of BM queries and BN compressed tokens, summed over the heads of a KV head."""
    i_b, i_g = (tl.program_id(2) // Hkv).to(tl.int64), (tl.program_id(2) % Hkv).to(tl.int64)
    o_t = first_row + tl.program_id(1) * BM + tl.arange(0, BM)
    m_t = o_t < stop_row
    o_k = tl.program_id(0) * BN + tl.arange(0, BN)
    _, first, last = _band(o_t, m_t, p_row_start, p_row_key, OFF, STEP, 0, HAS_DOCS)
    reach = tl.max(tl.where(m_t, last, -1), axis=0)
    begin = tl.min(tl.where(m_t, first, N), axis=0)
    if (tl.program_id(0) * BN > reach) | (tl.program_id(0) * BN + BN <= begin):
        return  # nobody sees these tokens, and nobody will read this part
    o_d = tl.arange(0, DK_PAD)
    m_d = o_d < DK
    p_keys = p_k + i_b * s_kb + i_g * s_kh + o_k.to(tl.int64)[None, :] * s_ks + o_d[:, None]
    b_k = tl.load(p_keys, mask=(o_k < N)[None, :] & m_d[:, None], other=0.0)  # [DK, BN]
    visible = (o_k[None, :] >= first[:, None]) & (o_k[None, :] <= last[:, None])
    rows = o_t.to(tl.int64)[:, None]
    b_sum = tl.zeros([BM, BN], tl.float32)
    for g in range(0, G):
        i_h = i_g * G + g
        p_rows_q = p_q + i_b * s_qb + i_h * s_qh + rows * s_qs + o_d[None, :]
        b_q = tl.load(p_rows_q, mask=m_t[:, None] & m_d[None, :], other=0.0)
        lse = tl.load(p_lse + (i_b * Hkv * G + i_h) * S + o_t, mask=m_t, other=float("inf"))
        b_s = _dot(b_q, b_k, UPCAST) * scale_log2
        b_sum += tl.where(visible, tl.math.exp2(b_s - lse[:, None]), 0.0)
    p_rows = p_probs + i_b * s_pb + i_g * s_pg + (rows - first_row) * s_ps + o_k[None, :]
    tl.store(p_rows, b_sum, mask=m_t[:, None] & (o_k < N)[None, :])


@triton.jit
def choose_blocks(
    p_probs, p_selection, p_bits, p_row_start, p_row_key,
    first_row, S, Hkv, s_pb, s_pg, s_ps,
    OFF, STEP, NUM_WORDS,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr,
    STRIDES: tl.constexpr, OVERLAP: tl.constexpr,
    NB: tl.constexpr, NW: tl.constexpr, HAS_DOCS: tl.constexpr,
):  # fmt: skip
    """Scores of one query's NB blocks, the choice of N_SEL, as ids and as bits.

    STRIDES = l_sel / d and OVERLAP = l / d: stride s of the document hears the compressed tokens
    s - OVERLAP + 1 .. s, and block j the strides j * STRIDES .. (j + 1) * STRIDES - 1.
    """
    i_b, i_g = (tl.program_id(1) // Hkv).to(tl.int64), (tl.program_id(1) % Hkv).to(tl.int64)
    t = first_row + tl.program_id(0)
    position, base = t, 0
    if HAS_DOCS:
        position = t - tl.load(p_row_start + t)
        base = tl.load(p_row_key + t)
    num_visible = tl.maximum((position - OFF + STEP) // STEP, 0)
    current = position // L_SEL
    o_j = tl.arange(0, NB)
    p_row = p_probs + i_b * s_pb + i_g * s_pg + tl.program_id(0).to(tl.int64) * s_ps + base
    scores = tl.zeros([NB], tl.float32)
    for stride in range(0, STRIDES):
        for back in range(0, OVERLAP):
            i = o_j * STRIDES + stride - back
            scores += tl.load(p_row + i, mask=(i >= 0) & (i < num_visible), other=0.0)
    forced = (o_j == 0) | (o_j == current - 1) | (o_j == current)
    scores = tl.where(forced, float("inf"), scores)
    scores = tl.where(scores == scores, scores, 0.0)  # a NaN ranks last
    # Scores are not negative, so their bits are ordered like them; the lower index wins a tie.
    key = (scores.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - o_j).to(tl.int64)
    key = tl.where(o_j <= current, key, -1)
    chosen = tl.zeros([NB], tl.int32)
    for _ in range(0, N_SEL):
        best = tl.max(key, axis=0)
        hit = (key == best) & (best >= 0)
        chosen = tl.where(hit, 1, chosen)
        key = tl.where(hit, -1, key)

    row = (i_b * S + t) * Hkv + i_g
    place = tl.cumsum(chosen, axis=0) - 1
    tl.store(p_selection + row * N_SEL + place, o_j, mask=chosen != 0)
    o_n = tl.arange(0, N_SEL_PAD)
    unused = (o_n >= tl.sum(chosen, axis=0)) & (o_n < N_SEL)
    tl.store(p_selection + row * N_SEL + o_n, tl.full([N_SEL_PAD], -1, tl.int32), mask=unused)
    o_w = tl.arange(0, NW)
    words = tl.sum(tl.reshape(chosen << (o_j % 32), [NW, 32]), axis=1)
    p_row_bits = p_bits + ((i_b * Hkv + i_g) * S + t) * NUM_WORDS
    tl.store(p_row_bits + o_w, words, mask=o_w < NUM_WORDS)


@triton.jit
def pack_selection(
    p_selection, p_bits, p_row_start, S, Hkv, NUM_WORDS,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr,
    NW: tl.constexpr, HAS_DOCS: tl.constexpr,
):  # fmt: skip
    """Bits of one query's given block ids; blocks of the future and empty places are left out."""
    i_b, i_g = (tl.program_id(1) // Hkv).to(tl.int64), (tl.program_id(1) % Hkv).to(tl.int64)
    t = tl.program_id(0)
    position = t
    if HAS_DOCS:
        position = t - tl.load(p_row_start + t)
    o_n = tl.arange(0, N_SEL_PAD)
    p_ids = p_selection + ((i_b * S + t) * Hkv + i_g) * N_SEL
    ids = tl.load(p_ids + o_n, mask=o_n < N_SEL, other=-1)
    before = tl.load(p_ids + o_n - 1, mask=(o_n > 0) & (o_n < N_SEL), other=-1)
    legal = (ids >= 0) & (ids <= position // L_SEL) & (ids != before)
    o_w = tl.arange(0, NW)
    here = legal[None, :] & (ids[None, :] // 32 == o_w[:, None])
    words = tl.sum(tl.where(here, 1 << (ids % 32)[None, :], 0), axis=1)
    p_row_bits = p_bits + ((i_b * Hkv + i_g) * S + t) * NUM_WORDS
    tl.store(p_row_bits + o_w, words, mask=o_w < NUM_WORDS)

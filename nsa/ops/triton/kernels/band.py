"""Flash attention over a band of keys, forward: compressed, window, and masked selected branch.

tile.py has the names, the band and its letters. Probabilities are formed in base 2; so is the
log-sum-exp, +inf for a query that sees nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.kernels.gate import _store_gated
from nsa.ops.triton.kernels.tile import (
    _band,
    _dot,
    _dot_add,
    _is_selected,
    _load,
    _rows,
    _tile_range,
)


@triton.jit
def band_forward(
    p_q, t_k, t_k2, t_v, p_o, p_lse, p_bits, p_row_start, p_row_key, p_row_block,
    p_gates, p_o_cmp, p_o_win, p_out,
    S, K, Hq, G, scale_log2,
    s_qb, s_qs, s_qh, s_gb, s_gs, s_gh,
    OFF, STEP, W, NUM_WORDS,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L_SEL: tl.constexpr, SELECT: tl.constexpr, HAS_DOCS: tl.constexpr,
    UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of BM queries of one head; the selected branch adds up the gated sum.

    o, o_cmp, o_win and out are contiguous [B, S, Hq, DV].
    """
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows start first
    i_b, i_h = (tl.program_id(1) // Hq).to(tl.int64), (tl.program_id(1) % Hq).to(tl.int64)
    i_g = i_h // G
    o_t = i_m * BM + tl.arange(0, BM)
    m_t = o_t < S
    o_n = tl.arange(0, BN)
    o_dk, o_dv = tl.arange(0, DK1), tl.arange(0, DV_PAD)
    p_rows = p_q + i_b * s_qb + i_h * s_qh + o_t.to(tl.int64)[:, None] * s_qs
    b_q = _load(p_rows + o_dk[None, :], m_t, o_dk, DK, DK1, True)
    if DK2 > 0:
        o_dk2 = DK1 + tl.arange(0, DK2)
        b_q2 = _load(p_rows + o_dk2[None, :], m_t, o_dk2, DK, DK1 + DK2, True)
    first, last = _band(o_t, m_t, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS)
    start, full, masked, stop = _tile_range(
        i_m, S, K, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS, BM, BN
    )
    p_bits += (i_b * (Hq // G) + i_g) * NUM_WORDS * S

    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    b_out = tl.zeros([BM, DV_PAD], tl.float32)
    for part in tl.static_range(1 if SELECT else 3):
        # Only the edges of the band need a mask; the selected branch needs it everywhere.
        if SELECT:
            lo, hi = start, stop
        elif part == 0:
            lo, hi = start, full
        elif part == 1:
            lo, hi = full, masked
        else:
            lo, hi = masked, stop
        for k0 in range(lo, hi, BN):
            o_k = k0 + o_n
            b_k = _rows(t_k, i_b, k0, i_g, 0, BN, DK1)
            b_s = _dot(b_q, tl.trans(b_k), UPCAST)
            if DK2 > 0:
                b_k2 = _rows(t_k2, i_b, k0, i_g, DK1, BN, DK2)
                b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
            if SELECT or part != 1:
                visible = (o_k[None, :] >= first[:, None]) & (o_k[None, :] <= last[:, None])
                if SELECT:
                    visible = visible & _is_selected(
                        o_t, m_t, k0, o_k, p_bits, p_row_start, p_row_block, S, L_SEL, BN, HAS_DOCS
                    )
                b_s = tl.where(visible, b_s, float("-inf"))
            new_top = tl.maximum(top, tl.max(b_s, axis=1) * scale_log2)
            safe_top = new_top
            if SELECT or part != 1:
                safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            b_p = tl.math.exp2(b_s * scale_log2 - safe_top[:, None])
            shrink = tl.math.exp2(top - safe_top)
            total = total * shrink + tl.sum(b_p, axis=1)
            b_v = _rows(t_v, i_b, k0, i_g, 0, BN, DV_PAD)
            b_out = _dot_add(b_out * shrink[:, None], b_p.to(b_v.dtype), b_v, UPCAST)
            top = new_top

    sees_none = total == 0.0
    b_out = b_out * (1.0 / tl.where(sees_none, 1.0, total))[:, None]
    lse = tl.where(sees_none, float("inf"), top + tl.math.log2(total))
    tl.store(p_lse + tl.program_id(1).to(tl.int64) * S + o_t, lse, mask=m_t)
    row = (i_b * S + o_t) * Hq + i_h
    at = row[:, None] * DV + o_dv[None, :]
    m_o = m_t[:, None] & (o_dv < DV)[None, :]
    tl.store(p_o + at, b_out.to(p_o.dtype.element_ty), mask=m_o)
    if SELECT:
        p_gate = p_gates + i_b * s_gb + i_h * s_gh + o_t.to(tl.int64) * s_gs
        _store_gated(p_o_cmp, p_o_win, p_out, p_gate, b_out, at, m_t, m_o)

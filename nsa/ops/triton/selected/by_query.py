"""Selected attention in query order: a program takes one query and the heads of its group.

Every selected block is read again for each query, so this order is for large groups, whose heads
fill a tile; by_block_forward.py has the other order. Launchers are below the kernels; names as in
tile.py.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.bands.banded_forward import NOT_GATED, Gated, gate_strides
from nsa.ops.triton.choice.selection import Selection
from nsa.ops.triton.launcher import Launch, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.tile import COUNTS, _dot, _dot_add, _load, _rows, _stats, _store_gated
from nsa.ops.triton.tiles import Tiles, query_tiles


@triton.jit(do_not_specialize=COUNTS)
def query_forward(
    p_q, t_k, t_k2, t_v, p_selection, p_num_chosen, p_row_start, p_row_key,
    p_o, p_lse, p_gates, p_o_cmp, p_o_win, p_out,
    S, Hkv, G, scale_log2,
    s_qb, s_qs, s_qh, s_gb, s_gs, s_gh,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, N_SEL: tl.constexpr, L_SEL: tl.constexpr, HAS_DOCS: tl.constexpr,
    UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one query and the BM >= G heads of its group, and the gated sum
    where there are gates."""
    # int64: offsets of a segment may pass 2^31.
    i_seg = tl.program_id(1).to(tl.int64)
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    t = tl.program_id(0)
    # First key of the document, and the last one that the query sees: its own.
    start, last = 0, t
    if HAS_DOCS:
        start = tl.load(p_row_key + t)
        last = start + t - tl.load(p_row_start + t)
    o_h, o_n = tl.arange(0, BM), tl.arange(0, BN)
    m_h = o_h < G
    i_h = i_g * G + o_h
    o_dk, o_dv = tl.arange(0, DK1), tl.arange(0, DV_PAD)
    # q: [BM, DK1 (+ DK2)], one row per head of the group.
    p_rows = p_q + i_b * s_qb + tl.cast(t, tl.int64) * s_qs + (i_h * s_qh)[:, None]
    b_q = _load(p_rows + o_dk[None, :], m_h, o_dk, DK, DK1, True)
    if DK2 > 0:
        o_dk2 = DK1 + tl.arange(0, DK2)
        b_q2 = _load(p_rows + o_dk2[None, :], m_h, o_dk2, DK, DK1 + DK2, True)
    p_ids = p_selection + ((i_b * S + t) * Hkv + i_g) * N_SEL
    num_chosen = tl.load(p_num_chosen + i_seg * S + t)
    # Online softmax over the selected keys, base 2, as in band_forward.
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    b_out = tl.zeros([BM, DV_PAD], tl.float32)
    # One flat loop over (selected block, tile of BN keys of it), so that it is pipelined. A mask in
    # every tile: two loops, with and without, cost more registers than the mask costs time.
    STEPS: tl.constexpr = (L_SEL + BN - 1) // BN
    for i in range(0, num_chosen * STEPS):
        k0 = start + tl.load(p_ids + i // STEPS) * L_SEL + i % STEPS * BN
        o_k = k0 + o_n
        # The key lies in the block and not after the query: that also covers the sequence's end.
        m_k = (o_k <= last) & (i % STEPS * BN + o_n < L_SEL)
        # s = q k^T: [BM, BN].
        b_k = _rows(t_k, i_b, k0, i_g, 0, BN, DK1)
        b_s = _dot(b_q, tl.trans(b_k), UPCAST)
        if DK2 > 0:
            b_k2 = _rows(t_k2, i_b, k0, i_g, DK1, BN, DK2)
            b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
        b_v = _rows(t_v, i_b, k0, i_g, 0, BN, DV_PAD)
        b_s = tl.where(m_k[None, :], b_s, float("-inf"))
        # The same steps as in band_forward: new maximum, rescale, add p and p v.
        new_top = tl.maximum(top, tl.max(b_s, axis=1) * scale_log2)
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        b_p = tl.math.exp2(b_s * scale_log2 - safe_top[:, None])
        shrink = tl.math.exp2(top - safe_top)
        total = total * shrink + tl.sum(b_p, axis=1)
        b_out = _dot_add(b_out * shrink[:, None], b_p.to(b_v.dtype), b_v, UPCAST)
        top = new_top
    # out = b_out / total and lse, then the gated sum, for the G heads in use.
    sees_none = total == 0.0
    b_out = b_out * (1.0 / tl.where(sees_none, 1.0, total))[:, None]
    lse = tl.where(sees_none, float("inf"), top + tl.math.log2(total))
    tl.store(p_lse + (i_b * Hkv * G + i_h) * S + t, lse, mask=m_h)
    at = ((i_b * S + t) * Hkv * G + i_h)[:, None] * DV + o_dv[None, :]
    m_o = m_h[:, None] & (o_dv < DV)[None, :]
    tl.store(p_o + at, b_out.to(p_o.dtype.element_ty), mask=m_o)
    if p_gates is not None:
        p_gate = p_gates + i_b * s_gb + tl.cast(t, tl.int64) * s_gs + i_h * s_gh
        _store_gated(p_o_cmp, p_o_win, p_out, p_gate, b_out, at, m_h, m_o)


@triton.jit(do_not_specialize=COUNTS)
def query_dq(
    p_q, t_k, t_k2, t_v, p_dout, p_stats, p_selection, p_num_chosen, p_row_start, p_row_key, p_dq,
    S, Hkv, G, scale, scale_log2,
    s_qb, s_qs, s_qh, s_ob, s_os, s_oh,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, N_SEL: tl.constexpr, L_SEL: tl.constexpr, HAS_DOCS: tl.constexpr,
    UPCAST: tl.constexpr, ADDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradient of one query and the BM >= G heads of its group. ADDS: added to what dq holds."""
    # int64: offsets of a segment may pass 2^31.
    i_seg = tl.program_id(1).to(tl.int64)
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    t = tl.program_id(0)
    # First key of the document, and the last one that the query sees: its own.
    start, last = 0, t
    if HAS_DOCS:
        start = tl.load(p_row_key + t)
        last = start + t - tl.load(p_row_start + t)
    o_h, o_n = tl.arange(0, BM), tl.arange(0, BN)
    m_h = o_h < G
    i_h = i_g * G + o_h
    o_dk, o_dv = tl.arange(0, DK1), tl.arange(0, DV_PAD)
    # q [BM, DK1 (+ DK2)] and dout [BM, DV_PAD], one row per head of the group.
    p_rows = p_q + i_b * s_qb + tl.cast(t, tl.int64) * s_qs + (i_h * s_qh)[:, None]
    b_q = _load(p_rows + o_dk[None, :], m_h, o_dk, DK, DK1, True)
    b_dq = tl.zeros([BM, DK1], tl.float32)
    if DK2 > 0:
        o_dk2 = DK1 + tl.arange(0, DK2)
        b_q2 = _load(p_rows + o_dk2[None, :], m_h, o_dk2, DK, DK1 + DK2, True)
        b_dq2 = tl.zeros([BM, DK2], tl.float32)
    p_rows = p_dout + i_b * s_ob + tl.cast(t, tl.int64) * s_os + (i_h * s_oh)[:, None]
    b_dout = _load(p_rows + o_dv[None, :], m_h, o_dv, DV, DV_PAD, True)
    lse, delta, sign, _ = _stats(p_stats, (i_b * Hkv * G + i_h) * S + t, m_h)
    p_ids = p_selection + ((i_b * S + t) * Hkv + i_g) * N_SEL
    num_chosen = tl.load(p_num_chosen + i_seg * S + t)
    # The same flat loop as in the forward: dS = P * (dP - delta), dQ += dS k. The sign of the
    # gate is the same for all keys of a row and is multiplied in at the end.
    STEPS: tl.constexpr = (L_SEL + BN - 1) // BN
    for i in range(0, num_chosen * STEPS):
        k0 = start + tl.load(p_ids + i // STEPS) * L_SEL + i % STEPS * BN
        m_k = (k0 + o_n <= last) & (i % STEPS * BN + o_n < L_SEL)
        b_k = _rows(t_k, i_b, k0, i_g, 0, BN, DK1)
        b_s = _dot(b_q, tl.trans(b_k), UPCAST)
        if DK2 > 0:
            b_k2 = _rows(t_k2, i_b, k0, i_g, DK1, BN, DK2)
            b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
        b_v = _rows(t_v, i_b, k0, i_g, 0, BN, DV_PAD)
        # P = exp2(s' - lse), which is times the size of the gate, dP = dout v^T and
        # dS = P * (dP - delta): [BM, BN].
        b_p = tl.where(m_k[None, :], tl.math.exp2(b_s * scale_log2 - lse[:, None]), 0.0)
        b_dp = _dot(b_dout, tl.trans(b_v), UPCAST)
        b_ds = (b_p * (b_dp - delta[:, None])).to(b_k.dtype)
        b_dq = _dot_add(b_dq, b_ds, b_k, UPCAST)
        if DK2 > 0:
            b_dq2 = _dot_add(b_dq2, b_ds, b_k2, UPCAST)
    # dq = sign * scale * sum, and what the other branches gave.
    b_dq = b_dq * (sign * scale)[:, None]
    dtype = p_dq.dtype.element_ty
    p_rows = p_dq + ((i_b * S + t) * Hkv * G + i_h)[:, None] * DK
    m_rows = m_h[:, None] & (o_dk < DK)[None, :]
    if ADDS:
        b_dq += tl.load(p_rows + o_dk[None, :], mask=m_rows, other=0.0).to(tl.float32)
    tl.store(p_rows + o_dk[None, :], b_dq.to(dtype), mask=m_rows)
    if DK2 > 0:
        b_dq2 = b_dq2 * (sign * scale)[:, None]
        m_rows = m_h[:, None] & (o_dk2 < DK)[None, :]
        if ADDS:
            b_dq2 += tl.load(p_rows + o_dk2[None, :], mask=m_rows, other=0.0).to(tl.float32)
        tl.store(p_rows + o_dk2[None, :], b_dq2.to(dtype), mask=m_rows)


# --- Launchers ---


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Selection,
    lse: Tensor,  # [B, Hq, S] fp32, written
    gated: Gated | None,
) -> Tensor:  # [B, S, Hq, Dv]
    """Output of the selected branch; also writes the gated sum, if there is one."""
    out = problem.empty(problem.batch, problem.seq_len, problem.num_heads, problem.d_v)
    tiles = _tiles(problem)
    start(
        problem.memo,
        "by query",
        query_forward,
        (
            q, *problem.keys(k, v, tiles.BN), chosen.ids, chosen.num_chosen,
            *problem.row_index(1, q), out, lse, *(gated or NOT_GATED),
        ),
        lambda: Launch.tiled(
            (problem.seq_len, problem.num_segments),
            (
                problem.seq_len, problem.num_groups, problem.per_group, problem.scale_log2,
                *q.stride()[:3], *gate_strides(gated),
            ),
            _constants(problem),
            tiles,
        ),
    )  # fmt: skip
    return out


def backward_q(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,  # [B, Hq, S, 4] fp32, of this branch
    chosen: Selection,
    dq: Tensor | None = None,  # [B, S, Hq, Dk]
) -> Tensor:  # [B, S, Hq, Dk]
    """Gradient of q from the selected branch, added to `dq` where that is given."""
    tiles = _tiles(problem, backward=True)
    adds = dq is not None
    dq = problem.empty(*q.shape) if dq is None else dq
    start(
        problem.memo,
        ("dq by query", adds),
        query_dq,
        (
            q, *problem.keys(k, v, tiles.BN), dout, stats, chosen.ids, chosen.num_chosen,
            *problem.row_index(1, q), dq,
        ),
        lambda: Launch.tiled(
            (problem.seq_len, problem.num_segments),
            (
                problem.seq_len, problem.num_groups, problem.per_group,
                problem.scale, problem.scale_log2, *q.stride()[:3], *dout.stride()[:3],
            ),
            {**_constants(problem), "ADDS": adds},
            tiles,
        ),
    )  # fmt: skip
    return dq


def _tiles(problem: Problem, *, backward: bool = False) -> Tiles:
    return query_tiles(*problem.sizes, problem.capability, backward=backward)


def _constants(problem: Problem) -> dict[str, Any]:
    """Constants in the kernels' order."""
    return {
        **problem.dims(),
        "N_SEL": problem.spec.n_sel,
        "L_SEL": problem.spec.l_sel,
        "HAS_DOCS": problem.packed,
        "UPCAST": problem.upcast,
    }

"""Kernels of the gated sum of the three branches and of its gradient (Eq. 5)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_sum(
    p_cmp, p_sel, p_win, p_gates, p_out, NUM_ROWS, Hq, S,
    s_gb, s_gs, s_gh,
    DV: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out = sum of gate * branch for ROWS rows (b, s, h) of contiguous [B, S, Hq, DV] tensors."""
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < NUM_ROWS
    o_d = tl.arange(0, DV_PAD)
    at = o_r[:, None] * DV + o_d[None, :]
    mask = m_r[:, None] & (o_d < DV)[None, :]
    p_row = p_gates + o_r // (Hq * S) * s_gb + o_r // Hq % S * s_gs + o_r % Hq * s_gh
    out = tl.load(p_cmp + at, mask=mask, other=0.0).to(tl.float32) * _gate(p_row, 0, m_r)
    out += tl.load(p_sel + at, mask=mask, other=0.0).to(tl.float32) * _gate(p_row, 1, m_r)
    out += tl.load(p_win + at, mask=mask, other=0.0).to(tl.float32) * _gate(p_row, 2, m_r)
    tl.store(p_out + at, out.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def gate_backward(
    p_cmp, p_sel, p_win, p_dout, p_dgates, p_delta, NUM_ROWS, Hq, S,
    s_ob, s_os, s_oh,
    DV: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """<dout, branch> of each row: the gradient of its gate, and what its softmax subtracts.

    dgates is [B, S, Hq, 3] contiguous; delta is [3, B, Hq, S] fp32.
    """
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < NUM_ROWS
    o_d = tl.arange(0, DV_PAD)
    i_b, i_s, i_h = o_r // (Hq * S), o_r // Hq % S, o_r % Hq
    mask = m_r[:, None] & (o_d < DV)[None, :]
    p_rows = p_dout + (i_b * s_ob + i_s * s_os + i_h * s_oh)[:, None] + o_d[None, :]
    dout = tl.load(p_rows, mask=mask, other=0.0).to(tl.float32)
    at = o_r[:, None] * DV + o_d[None, :]
    row = (i_b * Hq + i_h) * S + i_s
    delta = tl.sum(dout * tl.load(p_cmp + at, mask=mask, other=0.0).to(tl.float32), axis=1)
    tl.store(p_delta + row, delta, mask=m_r)
    tl.store(p_dgates + o_r * 3, delta.to(p_dgates.dtype.element_ty), mask=m_r)
    delta = tl.sum(dout * tl.load(p_sel + at, mask=mask, other=0.0).to(tl.float32), axis=1)
    tl.store(p_delta + NUM_ROWS + row, delta, mask=m_r)
    tl.store(p_dgates + o_r * 3 + 1, delta.to(p_dgates.dtype.element_ty), mask=m_r)
    delta = tl.sum(dout * tl.load(p_win + at, mask=mask, other=0.0).to(tl.float32), axis=1)
    tl.store(p_delta + 2 * NUM_ROWS + row, delta, mask=m_r)
    tl.store(p_dgates + o_r * 3 + 2, delta.to(p_dgates.dtype.element_ty), mask=m_r)


@triton.jit
def _gate(p_row, branch, m_r):
    return tl.load(p_row + branch, mask=m_r, other=0.0).to(tl.float32)[:, None]

"""The gated sum of the three branches, as the selected branch ends with it, and its gradient."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_gated(p_o_cmp, p_o_win, p_out, p_gate, b_sel, at, m_rows, m_o):
    """out = sum of gate * branch (Eq. 5) at the offsets `at`; p_gate is at each row's gates."""
    # Rounded like the stored branch, so that the gradient of the gate is that of this sum.
    b_sel = b_sel.to(p_out.dtype.element_ty).to(tl.float32)
    b_sum = b_sel * tl.load(p_gate + 1, mask=m_rows, other=0.0).to(tl.float32)[:, None]
    b_o = tl.load(p_o_cmp + at, mask=m_o, other=0.0).to(tl.float32)
    b_sum += b_o * tl.load(p_gate, mask=m_rows, other=0.0).to(tl.float32)[:, None]
    b_o = tl.load(p_o_win + at, mask=m_o, other=0.0).to(tl.float32)
    b_sum += b_o * tl.load(p_gate + 2, mask=m_rows, other=0.0).to(tl.float32)[:, None]
    tl.store(p_out + at, b_sum.to(p_out.dtype.element_ty), mask=m_o)


@triton.jit
def gate_backward(
    p_o_cmp, p_o_sel, p_o_win, p_dout, p_lse, p_gates, p_dgates, p_stats, p_dcmp, p_dwin,
    NUM_ROWS, Hq, S, s_ob, s_os, s_oh, s_gb, s_gs, s_gh,
    DV: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta = <dout, branch> of each row: the gradient of its gate, and what its softmax subtracts.

    dgates is [B, S, Hq, 3]; stats [3, B, Hq, S, 4] fp32 holds what the other backward kernels read
    of a row: log-sum-exp, delta, gate, and its own index in the sequence. Where they are asked for,
    the gradients of branches with their gates, gate * dout, are written: [B, S, Hq, DV].
    """
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < NUM_ROWS
    o_d = tl.arange(0, DV_PAD)
    i_b, i_s, i_h = o_r // (Hq * S), o_r // Hq % S, o_r % Hq
    mask = m_r[:, None] & (o_d < DV)[None, :]
    p_rows = p_dout + (i_b * s_ob + i_s * s_os + i_h * s_oh)[:, None] + o_d[None, :]
    dout = tl.load(p_rows, mask=mask, other=0.0).to(tl.float32)
    at = o_r[:, None] * DV + o_d[None, :]
    p_gate = p_gates + i_b * s_gb + i_s * s_gs + i_h * s_gh
    for branch in tl.static_range(3):
        if branch == 0:
            p_o = p_o_cmp
        elif branch == 1:
            p_o = p_o_sel
        else:
            p_o = p_o_win
        delta = tl.sum(dout * tl.load(p_o + at, mask=mask, other=0.0).to(tl.float32), axis=1)
        row = branch * NUM_ROWS + (i_b * Hq + i_h) * S + i_s
        gate = tl.load(p_gate + branch, mask=m_r, other=0.0).to(tl.float32)
        tl.store(p_stats + row * 4, tl.load(p_lse + row, mask=m_r, other=0.0), mask=m_r)
        tl.store(p_stats + row * 4 + 1, delta, mask=m_r)
        tl.store(p_stats + row * 4 + 2, gate, mask=m_r)
        tl.store(p_stats + row * 4 + 3, i_s.to(tl.float32), mask=m_r)
        if branch == 0 and p_dcmp is not None:
            b_gated = (dout * gate[:, None]).to(p_dcmp.dtype.element_ty)
            tl.store(p_dcmp + at, b_gated, mask=mask)
        if branch == 2 and p_dwin is not None:
            b_gated = (dout * gate[:, None]).to(p_dwin.dtype.element_ty)
            tl.store(p_dwin + at, b_gated, mask=mask)
        tl.store(p_dgates + o_r * 3 + branch, delta.to(p_dgates.dtype.element_ty), mask=m_r)

"""Kernels of mean compression (phi = avg), forward and backward, without atomics."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mean_forward(
    p_x, p_out, p_cmp_first, N, H, s_xb, s_xs, s_xh,
    L: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    HAS_DOCS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Means of BLOCKS compression blocks of one head; out is contiguous [B, N, H, D]."""
    i_b, i_h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    o_n = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    m_n = o_n < N
    if HAS_DOCS:
        start = tl.load(p_cmp_first + o_n, mask=m_n, other=L - 1) - (L - 1)
    else:
        start = o_n * STRIDE
    o_d = tl.arange(0, D_PAD)
    mask = m_n[:, None] & (o_d < D)[None, :]
    p_head = p_x + i_b * s_xb + i_h * s_xh + o_d[None, :]
    total = tl.zeros([BLOCKS, D_PAD], tl.float32)
    for i in range(0, L):
        rows = (start + i).to(tl.int64)[:, None]
        total += tl.load(p_head + rows * s_xs, mask=mask, other=0.0).to(tl.float32)
    p_rows = p_out + ((i_b * N + o_n[:, None]) * H + i_h) * D + o_d[None, :]
    tl.store(p_rows, (total / L).to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def mean_backward(
    p_dout, p_dx, p_row_start, p_row_cmp, p_raw_last, S, N, H, s_ob, s_os, s_oh,
    L: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    HAS_DOCS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient of ROWS tokens of one head: the sum over the blocks that hold them, over L."""
    i_b, i_h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    o_t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_t = o_t < S
    if HAS_DOCS:
        start = tl.load(p_row_start + o_t, mask=m_t, other=0)
        base = tl.load(p_row_cmp + o_t, mask=m_t, other=0)
        length = tl.load(p_raw_last + o_t, mask=m_t, other=0) + 1 - start
    else:
        start = o_t * 0
        base = o_t * 0
        length = start + S
    num_blocks = tl.maximum(length - L + STRIDE, 0) // STRIDE
    o_d = tl.arange(0, D_PAD)
    p_head = p_dout + i_b * s_ob + i_h * s_oh + o_d[None, :]
    total = tl.zeros([ROWS, D_PAD], tl.float32)
    for back in range(0, L // STRIDE):
        block = (o_t - start) // STRIDE - back
        m_b = m_t & (block >= 0) & (block < num_blocks)
        rows = (base + block).to(tl.int64)[:, None]
        mask = m_b[:, None] & (o_d < D)[None, :]
        total += tl.load(p_head + rows * s_os, mask=mask, other=0.0).to(tl.float32)
    p_rows = p_dx + ((i_b * S + o_t[:, None]) * H + i_h) * D + o_d[None, :]
    mask = m_t[:, None] & (o_d < D)[None, :]
    tl.store(p_rows, (total / L).to(p_dx.dtype.element_ty), mask=mask)

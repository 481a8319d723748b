"""Sum of the partial gradients that several programs have written."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sum(p_parts, p_out, i_b, i_block, SIZE, PARTS, BLOCK: tl.constexpr):
    o = i_block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(0, PARTS):
        total += tl.load(p_parts + (i_b * PARTS + part) * SIZE + o, mask=mask, other=0.0)
    tl.store(p_out + i_b * SIZE + o, total.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def sum_parts(p_dk_parts, p_dv_parts, p_dk, p_dv, SIZE_K, SIZE_V, PARTS, BLOCK: tl.constexpr):
    """[B, PARTS, SIZE] fp32 -> [B, SIZE], for the gradients of keys and of values, in order."""
    i_b = tl.program_id(1).to(tl.int64)
    num_k = tl.cdiv(SIZE_K, BLOCK)
    if tl.program_id(0) < num_k:
        _sum(p_dk_parts, p_dk, i_b, tl.program_id(0), SIZE_K, PARTS, BLOCK)
    else:
        _sum(p_dv_parts, p_dv, i_b, tl.program_id(0) - num_k, SIZE_V, PARTS, BLOCK)

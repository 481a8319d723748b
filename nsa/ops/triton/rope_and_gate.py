"""Rotary positions and gates of one new token per sequence, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.machine import interpreted
from nsa.ops.triton.launcher import Launch, Memo, form, start
from nsa.ops.triton.tile import _let_next_come, _wait
from nsa.ops.triton.tiles import capability_of, padded


@triton.jit
def rotate_and_gate_kernel(
    p_heads, p_cos, p_sin, p_logits, p_rotated, p_gates,
    NUM_HEADS, NUM_GATED, NUM_ROTATED, s_b, s_h, s_table, s_logits,
    D: tl.constexpr, HALF_PAD: tl.constexpr, SOFTMAX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One head of [B, NUM_HEADS, D]; the first NUM_ROTATED are rotated, NUM_GATED have gates."""
    i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    half: tl.constexpr = D // 2
    o_d = tl.arange(0, HALF_PAD)
    m_d = o_d < half
    _wait(EARLY)
    _let_next_come(EARLY)
    # Both halves of the head, [D / 2] each: the half-split layout of nsa/model/rope.py.
    p_row = p_heads + i_b * s_b + i_h * s_h + o_d
    b_first = tl.load(p_row, mask=m_d, other=0.0).to(tl.float32)
    b_second = tl.load(p_row + half, mask=m_d, other=0.0).to(tl.float32)
    # x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin. Heads from NUM_ROTATED on are copied.
    if i_h < NUM_ROTATED:
        b_cos = tl.load(p_cos + i_b * s_table + o_d, mask=m_d, other=1.0)
        b_sin = tl.load(p_sin + i_b * s_table + o_d, mask=m_d, other=0.0)
        b_turned = b_first * b_cos - b_second * b_sin
        b_second = b_second * b_cos + b_first * b_sin
        b_first = b_turned
    p_row = p_rotated + (i_b * NUM_HEADS + i_h) * D + o_d
    tl.store(p_row, b_first.to(p_rotated.dtype.element_ty), mask=m_d)
    tl.store(p_row + half, b_second.to(p_rotated.dtype.element_ty), mask=m_d)
    # Query heads come first: head i_h has the gate logits 3 i_h .. 3 i_h + 2 (cmp, sel, win). The
    # fourth lane only fills a power of two; -inf makes it 0 in the softmax.
    if i_h < NUM_GATED:
        o_g = tl.arange(0, 4)
        m_g = o_g < 3
        p_mine = p_logits + i_b * s_logits + i_h * 3 + o_g
        b_logits = tl.load(p_mine, mask=m_g, other=float("-inf")).to(tl.float32)
        if SOFTMAX:
            b_gates = tl.exp(b_logits - tl.max(b_logits, axis=0))
            b_gates = b_gates / tl.sum(b_gates, axis=0)
        else:
            b_gates = 1.0 / (1.0 + tl.exp(-b_logits))
        p_out = p_gates + (i_b * NUM_GATED + i_h) * 3 + o_g
        tl.store(p_out, b_gates.to(p_gates.dtype.element_ty), mask=m_g)


# --- Launcher ---

_memo: Memo = {}


def rotate_and_gate(
    heads: Tensor,  # [B, 1, H, D]
    tables: tuple[Tensor, Tensor],  # cosines and sines [B, 1, D / 2] fp32
    logits: Tensor,  # [B, 1, 3 * Hq]
    num_rotated: int,
    *,
    softmax: bool,  # else sigmoid
) -> tuple[Tensor, Tensor]:  # [B, 1, H, D], [B, 1, Hq, 3]
    """All heads, the first `num_rotated` of them rotated, and the gates of the query heads.

    Gates are fp32 for bf16 heads, of the heads' dtype otherwise.
    """
    batch, _, num_heads, dim = heads.shape
    num_gated = logits.shape[2] // 3
    rotated = torch.empty((batch, 1, num_heads, dim), dtype=heads.dtype, device=heads.device)
    wide = torch.float32 if heads.dtype == torch.bfloat16 else heads.dtype
    gates = torch.empty((batch, 1, num_gated, 3), dtype=wide, device=heads.device)
    cos, sin = tables
    early = not interpreted() and capability_of(heads.device) >= (9, 0)
    start(
        _memo, (form(heads, cos, sin, logits), num_rotated, softmax), rotate_and_gate_kernel,
        (heads, cos, sin, logits, rotated, gates),
        lambda: Launch(
            (num_heads, batch),
            (
                num_heads, num_gated, num_rotated, heads.stride(0), heads.stride(2),
                cos.stride(0), logits.stride(0),
            ),
            {"D": dim, "HALF_PAD": padded(dim // 2), "SOFTMAX": softmax, "EARLY": early},
            {"num_warps": 1, "launch_pdl": early},
        ),
    )  # fmt: skip
    return rotated, gates

"""Merge the parts of a decode step into its output: softmax weights per branch, gates, sum.

The compressed branch comes first; parts are added in the order of their index. Names as in
attend.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.tile import _let_next_come, _wait


@triton.jit
def _num_parts(
    t, NUM_CMP, WIN,
    L: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr,
    FORCED: tl.constexpr, PER_PART: tl.constexpr, CMP_PART: tl.constexpr, WIN_PART: tl.constexpr,
):  # fmt: skip
    """Number of parts of the token at t: compressed branch, window, forced and other blocks."""
    # The same counts as in attend.py, from the position alone: nothing is read back.
    num_cmp = tl.minimum(tl.maximum((t + 1 - L + STEP) // STEP, 0), NUM_CMP)
    num_win = tl.minimum(t + 1, WIN)
    num_forced = tl.minimum(t // L_SEL + 1, FORCED)
    num_free = tl.minimum(t // L_SEL + 1, N_SEL) - num_forced
    return (
        tl.cdiv(num_cmp, CMP_PART), tl.cdiv(num_win, WIN_PART),
        tl.cdiv(num_forced, PER_PART), tl.cdiv(num_free, PER_PART),
    )  # fmt: skip


@triton.jit
def _among(o_p, first, num):
    """Whether parts o_p are among the `num` parts from `first` on."""
    return (o_p >= first) & (o_p < first + num)


@triton.jit
def _parts(p_part, p_part_lse, rows, m_rows, DV: tl.constexpr, DV_PAD: tl.constexpr):
    """Outputs [PARTS, 1, DV_PAD] and log-sum-exps of the parts m_rows; 0 and -inf for others."""
    o_dv = tl.arange(0, DV_PAD)
    p, mask = p_part + rows[:, :, None] * DV + o_dv[None, None, :], m_rows[:, :, None]
    if DV < DV_PAD:
        mask = mask & (o_dv < DV)[None, None, :]
    b_parts = tl.load(p, mask=mask, other=0.0, cache_modifier=".cg")
    lse = tl.load(p_part_lse + rows, mask=m_rows, other=float("-inf"), cache_modifier=".cg")
    return b_parts, lse


@triton.jit
def _gates(p_gate, m_h):
    """Gates of heads: of the compressed, the selected branch and the window, fp32 [HEADS] each."""
    gate_cmp = tl.load(p_gate, mask=m_h, other=0.0, cache_modifier=".cg").to(tl.float32)
    gate_sel = tl.load(p_gate + 1, mask=m_h, other=0.0, cache_modifier=".cg").to(tl.float32)
    gate_win = tl.load(p_gate + 2, mask=m_h, other=0.0, cache_modifier=".cg").to(tl.float32)
    return gate_cmp, gate_sel, gate_win


@triton.jit
def _weights(lse, gate, mine):
    """Weights of one branch's parts in the gated sum [PARTS, HEADS]; 0 if it saw nothing."""
    # weight_p = gate * exp2(lse_p - top) / sum over the branch's parts of exp2(lse - top).
    lse = tl.where(mine[:, None], lse, float("-inf"))
    top = tl.max(lse, axis=0)
    weight = tl.math.exp2(lse - tl.where(top == float("-inf"), 0.0, top)[None, :])
    total = tl.sum(weight, axis=0)
    return weight * (gate / tl.where(total == 0.0, 1.0, total))[None, :]


@triton.jit
def _sum_compressed(
    p_part, p_part_lse, gate, first, o_h, m_h, num, G,
    DV: tl.constexpr, DV_PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The gated compressed branch [HEADS, DV_PAD] of heads o_h: `num` parts from `first` on."""
    o_p = tl.arange(0, PARTS)
    rows = ((first + o_p) * G)[:, None] + o_h[None, :]
    b_parts, lse = _parts(
        p_part, p_part_lse, rows, (o_p < num)[:, None] & m_h[None, :], DV, DV_PAD
    )  # fmt: skip
    return tl.sum(b_parts * _weights(lse, gate, o_p < num)[:, :, None], axis=0)


@triton.jit
def _sum_tokens(
    p_part, p_part_lse, gate_sel, gate_win, first, o_h, m_h, num_win, num_forced, num_free, G,
    WIN_PARTS, AHEAD_PARTS, DV: tl.constexpr, DV_PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The gated sum of the selected branch and the window [HEADS, DV_PAD]."""
    o_p = tl.arange(0, PARTS)
    in_win = o_p < num_win
    in_sel = _among(o_p, WIN_PARTS, num_forced) | _among(o_p, AHEAD_PARTS, num_free)
    rows = ((first + o_p) * G)[:, None] + o_h[None, :]
    m_rows = (in_sel | in_win)[:, None] & m_h[None, :]
    b_parts, lse = _parts(p_part, p_part_lse, rows, m_rows, DV, DV_PAD)
    weight = _weights(lse, gate_sel, in_sel) + _weights(lse, gate_win, in_win)
    return tl.sum(b_parts * weight[:, :, None], axis=0)


@triton.jit
def merge_parts(
    p_part, p_part_lse, p_gates, p_out, p_lengths, p_current,
    Hkv, G, NUM_PARTS, CMP_PARTS, WIN_PARTS, AHEAD_PARTS, NUM_CMP, MAX_LEN, WIN,
    s_gb, s_gh, s_ob, s_oh,
    DV: tl.constexpr, DV_PAD: tl.constexpr, L: tl.constexpr, STEP: tl.constexpr,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, FORCED: tl.constexpr, PER_PART: tl.constexpr,
    CMP_PART: tl.constexpr, WIN_PART: tl.constexpr, CMP_PADDED: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr, ADVANCE: tl.constexpr,
):  # fmt: skip
    """The gated sum of one head over the branches. ADVANCE: the sequence is then a token longer.

    One head per program: four were slower (docs/log/decode.md). The compressed branch is summed
    before the wait, while attend_tokens still runs; the gates are older than the step.
    """
    i_seg = tl.program_id(1).to(tl.int64)
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    o_dv, o_h = tl.arange(0, DV_PAD), tl.program_id(0) + tl.arange(0, 1)
    p_gate = p_gates + i_b * s_gb + (i_g * G + o_h) * s_gh
    m_h = o_h < G
    gate_cmp, gate_sel, gate_win = _gates(p_gate, m_h)
    t = tl.load(p_current + i_b, cache_modifier=".cg")
    num_cmp, num_win, num_forced, num_free = _num_parts(
        t, NUM_CMP, WIN, L, STEP, L_SEL, N_SEL, FORCED, PER_PART, CMP_PART, WIN_PART
    )
    # Rows of part [segments, NUM_PARTS, G, DV]; int64 through i_seg.
    first = i_seg * NUM_PARTS
    b_sum = _sum_compressed(
        p_part, p_part_lse, gate_cmp, first, o_h, m_h & (t < MAX_LEN), num_cmp, G,
        DV, DV_PAD, CMP_PADDED,
    )  # fmt: skip
    _wait(EARLY)
    _let_next_come(EARLY)
    if t >= MAX_LEN:
        return
    b_sum += _sum_tokens(
        p_part, p_part_lse, gate_sel, gate_win, first + CMP_PARTS, o_h, m_h,
        num_win, num_forced, num_free, G, WIN_PARTS, AHEAD_PARTS, DV, DV_PAD, PARTS,
    )  # fmt: skip
    # out = sum over the branches: [1, DV], rounded once.
    p_rows = p_out + i_b * s_ob + (i_g * G + o_h)[:, None] * s_oh + o_dv[None, :]
    tl.store(p_rows, b_sum.to(p_out.dtype.element_ty), mask=(o_dv < DV)[None, :])
    # One program per sequence counts the token, after all kernels of the step have read the length.
    if ADVANCE:
        tl.store(p_lengths + i_b, t + 1, mask=(tl.program_id(0) == 0) & (i_g == 0))

"""Flash attention over a band of keys, forward: compressed, window and masked selected branch.

tile.py has the names, the band and its letters. The log-sum-exp is in base 2, and +inf for a query
that sees nothing. No sum depends on the order of the programs. Gradients: banded_backward.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.launcher import Launch, ceil_div, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.tile import (
    COUNTS,
    _band,
    _dot,
    _dot_add,
    _is_selected,
    _load,
    _rows,
    _store_gated,
    _tile_range,
)
from nsa.ops.triton.tiles import forward_tiles


@triton.jit(do_not_specialize=COUNTS)
def band_forward(
    p_q, t_k, t_k2, t_v, p_o, p_lse, p_bits, p_row_start, p_row_key,
    p_gates, p_o_cmp, p_o_win, p_out,
    S, K, Hq, G, scale_log2,
    s_qb, s_qs, s_qh, s_gb, s_gs, s_gh,
    OFF, STEP, W, NUM_WORDS,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L_SEL: tl.constexpr, SELECT: tl.constexpr, HAS_DOCS: tl.constexpr,
    UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of BM queries of one head; SELECT also writes the gated sum.

    o, o_cmp, o_win and out are contiguous [B, S, Hq, DV].
    """
    # Late queries see the most keys. Their programs start first, so that none is left at the end.
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    # int64: offsets of a batch element or a head may pass 2^31.
    i_b, i_h = (tl.program_id(1) // Hq).to(tl.int64), (tl.program_id(1) % Hq).to(tl.int64)
    i_g = i_h // G
    o_t = i_m * BM + tl.arange(0, BM)
    m_t = o_t < S
    o_n = tl.arange(0, BN)
    o_dk, o_dv = tl.arange(0, DK1), tl.arange(0, DV_PAD)
    # q: [BM, DK1] and, where the head has a rest, [BM, DK2].
    p_rows = p_q + i_b * s_qb + i_h * s_qh + o_t.to(tl.int64)[:, None] * s_qs
    b_q = _load(p_rows + o_dk[None, :], m_t, o_dk, DK, DK1, True)
    if DK2 > 0:
        o_dk2 = DK1 + tl.arange(0, DK2)
        b_q2 = _load(p_rows + o_dk2[None, :], m_t, o_dk2, DK, DK1 + DK2, True)
    # [BM]: first and last visible key of each query. Scalars: the ranges of key tiles.
    first, last = _band(o_t, m_t, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS)
    start, full, masked, stop = _tile_range(
        i_m, S, K, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS, BM, BN
    )
    p_bits += (i_b * (Hq // G) + i_g) * NUM_WORDS * S

    # Online softmax in base 2, with s' = s * scale_log2 and scale_log2 = scale * log2(e):
    #   top = max s',  total = sum of exp2(s' - top),  b_out = sum of exp2(s' - top) * v.
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    b_out = tl.zeros([BM, DV_PAD], tl.float32)
    # The mask is peeled: only the edges of the band need it (parts 0 and 2), the tiles between them
    # run without. The selected branch has holes everywhere and masks every tile.
    for part in tl.static_range(1 if SELECT else 3):
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
            # s = q k^T: [BM, BN], summed over both parts of the head.
            b_k = _rows(t_k, i_b, k0, i_g, 0, BN, DK1)
            b_s = _dot(b_q, tl.trans(b_k), UPCAST)
            if DK2 > 0:
                b_k2 = _rows(t_k2, i_b, k0, i_g, DK1, BN, DK2)
                b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
            if SELECT or part != 1:
                visible = (o_k[None, :] >= first[:, None]) & (o_k[None, :] <= last[:, None])
                if SELECT:
                    visible = visible & _is_selected(
                        o_t, m_t, k0, o_k, p_bits, p_row_start, S, L_SEL, BN, HAS_DOCS
                    )
                b_s = tl.where(visible, b_s, float("-inf"))
            # Scaled after the maximum: a scale that is not positive was moved into q before.
            new_top = tl.maximum(top, tl.max(b_s, axis=1) * scale_log2)
            safe_top = new_top
            # A row that has seen nothing yet has top -inf; exp2(-inf - -inf) would be NaN.
            if SELECT or part != 1:
                safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            b_p = tl.math.exp2(b_s * scale_log2 - safe_top[:, None])
            shrink = tl.math.exp2(top - safe_top)
            # Rescale what was summed over the old maximum: [BM] and [BM, DV_PAD].
            total = total * shrink + tl.sum(b_p, axis=1)
            # p v: p is rounded to the dtype of v, the operand of a 16-bit product.
            b_v = _rows(t_v, i_b, k0, i_g, 0, BN, DV_PAD)
            b_out = _dot_add(b_out * shrink[:, None], b_p.to(b_v.dtype), b_v, UPCAST)
            top = new_top

    # out = b_out / total, lse = log2(sum of exp2(s')); a row that sees nothing: 0 and +inf.
    sees_none = total == 0.0
    b_out = b_out * (1.0 / tl.where(sees_none, 1.0, total))[:, None]
    lse = tl.where(sees_none, float("inf"), top + tl.math.log2(total))
    tl.store(p_lse + tl.program_id(1).to(tl.int64) * S + o_t, lse, mask=m_t)
    # Store [BM, DV]; i_b and i_h are int64, and so are the offsets.
    row = (i_b * S + o_t) * Hq + i_h
    at = row[:, None] * DV + o_dv[None, :]
    m_o = m_t[:, None] & (o_dv < DV)[None, :]
    tl.store(p_o + at, b_out.to(p_o.dtype.element_ty), mask=m_o)
    if SELECT:
        p_gate = p_gates + i_b * s_gb + i_h * s_gh + o_t.to(tl.int64) * s_gs
        _store_gated(p_o_cmp, p_o_win, p_out, p_gate, b_out, at, m_t, m_o)


# --- Launcher ---


class Gated(NamedTuple):
    """What the selected branch, the last one, needs to finish the gated sum."""

    gates: Tensor  # [B, S, Hq, 3]
    o_cmp: Tensor  # [B, S, Hq, Dv]
    o_win: Tensor  # [B, S, Hq, Dv]
    out: Tensor  # [B, S, Hq, Dv], written


NOT_GATED = (None,) * len(Gated._fields)
"""The same for a call without gates: the kernels store the selected branch alone."""


def gate_strides(gated: Gated | None) -> tuple[int, ...]:
    """Strides of the gates' batch, sequence and heads."""
    return (0, 0, 0) if gated is None else gated.gates.stride()[:3]


def forward(
    problem: Problem,
    branch: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,  # [B, Hq, S] fp32, written
    bits: Tensor | None = None,
    gated: Gated | None = None,
) -> Tensor:  # [B, S, Hq, Dv]
    """Output of one branch. With `bits`, of the selected one, it also writes the gated sum."""
    out = problem.empty(problem.batch, problem.seq_len, problem.num_heads, v.shape[3])
    if k.shape[1] == 0:  # shorter than one compression block: no query sees a key
        lse.fill_(torch.inf)
        return out.zero_()
    sizes = (problem.d_k, v.shape[3], problem.dtype, branch, problem.capability)
    tiles = forward_tiles(*sizes, words=bits is not None and problem.words)
    rest = (q,) * 4 if gated is None else gated
    start(
        problem.memo,
        ("forward", branch, bits is None),
        band_forward,
        (
            q, *problem.keys(k, v, tiles.BN), out, lse, q if bits is None else bits,
            *problem.row_index(branch, q), *rest,
        ),
        lambda: Launch.tiled(
            (ceil_div(problem.seq_len, tiles.BM), problem.batch * problem.num_heads),
            (
                problem.seq_len, k.shape[1], problem.num_heads, problem.per_group,
                problem.scale_log2, *q.stride()[:3], *rest[0].stride()[:3],
                *problem.bands[branch][:3], problem.num_words,
            ),
            {**problem.dims(v.shape[3]), **problem.branch_constants(bits is not None)},
            tiles,
        ),
    )  # fmt: skip
    return out

"""sparse_attention on the kernels of the selected branch: a given index, one softmax, no gates.

A block longer than the kernels hold at once (tiles.MAX_KEYS) is read as several shorter ones. An
index for each query head goes through as groups of one head. A sink is applied afterwards, from the
log-sum-exp.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.checks import Layout
from nsa.ops.plan import NO_FLAGS
from nsa.ops.spec import BlockSpec
from nsa.ops.triton import by_block_backward, by_block_forward, by_query, select
from nsa.ops.triton.block_index import QueryLists, empty_lists, list_queries
from nsa.ops.triton.documents import finite_only
from nsa.ops.triton.launcher import (
    Launch,
    ceil_div,
    describable,
    padded_head,
    positive_scale,
    start,
)
from nsa.ops.triton.operators import MAX_GRID
from nsa.ops.triton.problem import Problem, problem_of
from nsa.ops.triton.select import Selection
from nsa.ops.triton.tiles import padded, sparse_spec

ROWS = 16
"""Rows of [B, S, Hq] that one program of row_stats takes."""


class SparseProblem(Problem):
    """A call whose queries always read their blocks, also in short sequences."""

    masked = False


class Static(NamedTuple):
    """The arguments that are not tensors."""

    spec: BlockSpec
    scale: float
    doc_lens: list[int]


@triton.jit
def row_stats(
    p_o, p_dout, p_lse, p_dlse, p_stats, NUM_ROWS, Hq, S, s_ob, s_os, s_oh,
    DV: tl.constexpr, DV_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What the backward kernels read of a row, [B, Hq, S, 4] fp32: log-sum-exp, delta, 1, index.

    dS = P * (dP - <dout, o> + d lse), so delta = <dout, o> - d lse.
    """
    # [ROWS] rows of [B, S, Hq], in that order. int64: rows * DV may pass 2^31.
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < NUM_ROWS
    o_d = tl.arange(0, DV_PAD)
    i_h, i_t, i_b = o_r % Hq, o_r // Hq % S, o_r // Hq // S
    mask = m_r[:, None] & (o_d < DV)[None, :]
    b_o = tl.load(p_o + o_r[:, None] * DV + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
    p_rows = p_dout + i_b * s_ob + i_t * s_os + i_h * s_oh
    b_dout = tl.load(p_rows[:, None] + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(b_o * b_dout, axis=1)
    at = (i_b * Hq + i_h) * S + i_t
    lse = tl.load(p_lse + at, mask=m_r, other=0.0)
    if p_dlse is not None:
        # A row that sees nothing has no gradient.
        sees_any = m_r & (lse != float("inf"))
        delta -= tl.load(p_dlse + o_r, mask=sees_any, other=0.0)
    p_row = p_stats + at * 4
    tl.store(p_row, lse, mask=m_r)
    tl.store(p_row + 1, delta, mask=m_r)
    tl.store(p_row + 2, tl.full([ROWS], 1.0, tl.float32), mask=m_r)
    tl.store(p_row + 3, i_t.to(tl.float32), mask=m_r)


# --- Public function ---


def sparse_attention(
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, S, Hkv, Dk]
    v: Tensor,  # [B, S, Hkv, Dv]
    index: Tensor,  # [B, S, H, n] int32, H = 1, Hkv or Hq
    *,
    block: int,
    scale: float,
    sink: Tensor | None,  # [Hq]
    layout: Layout,
) -> tuple[Tensor, Tensor]:  # [B, S, Hq, Dv], [B, S, Hq] fp32
    """Attention to the tokens of the chosen blocks up to the query, and its log-sum-exp."""
    num_heads, num_groups, d_v = q.shape[2], k.shape[2], v.shape[3]
    if index.shape[2] == num_heads != num_groups:
        k, v = (x.repeat_interleave(num_heads // num_groups, dim=2) for x in (k, v))
    index = index.expand(-1, -1, k.shape[2], -1)
    spec, index = sparse_spec(block, index.shape[3]), select.split_ids(index, block)
    q, scale = positive_scale(q, scale)
    q, k, v = (padded_head(x) for x in (q, k, v))
    static, most = Static(spec, scale, layout.key_lens), MAX_GRID // q.shape[2]
    parts = [
        _Sparse.apply(*(x[first : first + most] for x in (q, k, v, index)), static)
        for first in range(0, q.shape[0], most)
    ]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(x) for x in zip(*parts, strict=True))
    out = out if out.shape[3] == d_v else out[..., :d_v]
    return (out, lse) if sink is None else _with_sink(out, lse, sink)


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """One more key of logit `sink` and value 0; a query without a visible key stays as it is."""
    sees_none = lse == -math.inf
    known = lse.masked_fill(sees_none, 0.0)
    total = torch.logaddexp(known, sink.to(lse.dtype))
    share = (known - total).exp().masked_fill(sees_none, 0.0)
    out = (out.to(lse.dtype) * share[..., None]).to(out.dtype)
    return out, total.masked_fill(sees_none, -math.inf)


# --- Autograd ---


class _Sparse(torch.autograd.Function):
    """Output and log-sum-exp; saves the inputs, both results and the packed selection."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor, static: Static
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (describable(x) for x in (q, k, v))
        with torch.cuda.device_of(q):
            problem = _problem((q, k, v), static)
            (q_in, k_in, v_in), is_bad = _finite(problem, q, k, v)
            chosen = select.given(problem, index)
            size = (problem.batch, problem.num_heads, problem.seq_len)
            lse = problem.empty(*size, dtype=torch.float32)  # base 2, +inf where nothing is seen
            if problem.by_query:
                lists = empty_lists(problem)
                out = by_query.forward(problem, q_in, k_in, v_in, chosen, lse, None)
            else:
                lists = list_queries(problem, chosen)
                out = by_block_forward.forward(problem, q_in, k_in, v_in, chosen, lists, lse, None)
        ctx.save_for_backward(q, k, v, out, lse, *chosen, *lists)
        ctx.static = static
        ctx.set_materialize_grads(False)
        natural = (lse * math.log(2)).masked_fill(lse == math.inf, -math.inf).transpose(1, 2)
        if is_bad is not None:
            out = out.masked_fill(is_bad[None, :, None, None], math.nan)
        return out, natural

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return (None,) * 5
            dout = torch.zeros_like(out)
        chosen, lists = Selection(*rest[:4]), QueryLists(*rest[4:])
        dout = describable(dout)
        ordered = torch.are_deterministic_algorithms_enabled()
        with torch.cuda.device_of(q):
            problem = _problem((q, k, v, dout), ctx.static)
            (q, k, v, dout), is_bad = _finite(problem, q, k, v, dout)
            stats = _stats(problem, out, dout, lse, dlse)
            if is_bad is not None:
                stats[..., 2].masked_fill_(is_bad, math.nan)
            if problem.by_query:
                dq = by_query.backward_q(problem, q, k, v, dout, stats, chosen)
                lists = list_queries(problem, chosen)
                dk, dv = by_block_backward.backward_kv(
                    problem, q, k, v, dout, stats, lists, ordered=ordered
                )
            else:
                dq, dk, dv = by_block_backward.backward(
                    problem, q, k, v, dout, stats, chosen, lists, ordered=ordered
                )
        return dq.to(q.dtype), dk, dv, None, None


def _problem(tensors: tuple[Tensor, ...], static: Static) -> Problem:
    q, _, v = tensors[:3]
    rest = (static.spec, static.scale, static.doc_lens, NO_FLAGS)
    return problem_of(tensors, q, v, *rest, SparseProblem)


def _finite(problem: Problem, *tensors: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Packed documents: 0 for what is not finite, and the rows that would have seen it.

    A tile may hold two documents, and 0 * NaN would cross.
    """
    if problem.documents is None:
        return list(tensors), None
    return finite_only(problem.documents, tensors, problem.seq_len)


def _stats(
    problem: Problem, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
) -> Tensor:  # [B, Hq, S, 4] fp32
    stats = problem.empty(*lse.shape, 4, dtype=torch.float32)
    num_rows = problem.batch * problem.seq_len * problem.num_heads
    given = None if dlse is None else dlse.float().contiguous()
    start(
        problem.memo,
        ("stats", given is None),
        row_stats,
        (out, dout, lse, given, stats),
        lambda: Launch.plain(
            (ceil_div(num_rows, ROWS),),
            (num_rows, problem.num_heads, problem.seq_len, *dout.stride()[:3]),
            {"DV": problem.d_v, "DV_PAD": padded(problem.d_v), "ROWS": ROWS},
        ),
    )
    return stats

"""sparse_attention on the kernels of the selected branch: a given index, one softmax, no gates.

A block longer than the kernels hold at once (tiles.read_spec) is read as several shorter ones. An
index for each query head goes through as groups of one head. A sink is applied afterwards, from the
log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.checks import Layout
from nsa.ops.plan import NO_FLAGS
from nsa.ops.spec import BlockSpec
from nsa.ops.triton.choice.selection import Selection, pack_given, split_ids
from nsa.ops.triton.documents import QUERY, RAW, finite_only
from nsa.ops.triton.launcher import (
    Launch,
    ceil_div,
    compiling_ahead,
    describable,
    on_meta,
    padded_head,
    positive_scale,
    start,
)
from nsa.ops.triton.operators import MAX_GRID, cut, in_one_row, must_be_one_row
from nsa.ops.triton.problem import Problem, problem_of
from nsa.ops.triton.selected import by_block_backward, by_block_forward, by_query
from nsa.ops.triton.selected.block_index import QueryLists, empty_lists, list_queries
from nsa.ops.triton.tile import COUNTS, _with_gate
from nsa.ops.triton.tiles import capability_of, padded, read_spec, sparse_spec

ROWS = 16
"""Rows of [B, S, Hq] that one program of row_stats takes."""


class SparseProblem(Problem):
    """A call whose queries always read their blocks, also in short sequences."""

    masked = False
    long = False
    small_parts = False


class Static(NamedTuple):
    """The arguments that are not tensors."""

    spec: BlockSpec
    scale: float
    doc_lens: list[int]
    query_lens: Sequence[int] = ()
    offsets: Sequence[int] = ()


@triton.jit(do_not_specialize=COUNTS)
def row_stats(
    p_o, p_dout, p_lse, p_dlse, p_stats, p_row_shift, NUM_ROWS, Hq, S, s_ob, s_os, s_oh,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BY_TOKEN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What the backward kernels read of a row, [B, Hq, S, 4] fp32: see tile.gate_backward; here the
    gate is 1. BY_TOKEN: [B, S, Hq, 4].

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
    if BY_TOKEN:
        at = o_r
    p_row = p_stats + at * 4
    gate = tl.full([ROWS], 1.0, tl.float32)
    tl.store(p_row, _with_gate(lse, gate), mask=m_r)
    tl.store(p_row + 1, delta, mask=m_r)
    tl.store(p_row + 2, gate, mask=m_r)
    key = i_t
    if p_row_shift is not None:
        key += tl.load(p_row_shift + i_t, mask=m_r, other=0)
    tl.store(p_row + 3, key.to(tl.float32), mask=m_r)


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
    q, scale = positive_scale(q, scale)
    q, k, v = (padded_head(x) for x in (q, k, v))
    sizes = (q.shape[3], v.shape[3], q.shape[2] // k.shape[2], sparse_spec(block, index.shape[3]))
    spec = read_spec(*sizes, q.dtype, capability_of(q.device))
    index = split_ids(index, block // spec.l_sel)
    if not layout.whole:
        batch, apart = q.shape[0], must_be_one_row(layout, q)
        layout = layout.in_one_row(batch) if apart else layout.up_to_last_query()
        static = Static(spec, scale, layout.key_lens, layout.query_lens, layout.offsets())
        if not apart:
            k, v = (cut(x, layout.key_lens[0]) for x in (k, v))
            out, lse = _Sparse.apply(q, k, v, index, static)
            return _finished(out, lse, sink, d_v)
        parts = _Sparse.apply(*(in_one_row(x) for x in (q, k, v, index)), static)
        out, lse = (x.squeeze(0).unflatten(0, (batch, -1)) for x in parts)
        return _finished(out, lse, sink, d_v)
    static, most = Static(spec, scale, layout.key_lens), MAX_GRID // q.shape[2]
    if q.shape[0] <= most:  # no slices: each would be one more copy of a gradient
        out, lse = _Sparse.apply(q, k, v, index, static)
    else:
        batches = zip(*(x.split(most) for x in (q, k, v, index)), strict=True)
        parts = [_Sparse.apply(*batch, static) for batch in batches]
        out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    return _finished(out, lse, sink, d_v)


def _finished(out: Tensor, lse: Tensor, sink: Tensor | None, d_v: int) -> tuple[Tensor, Tensor]:
    """Without the padding of the head, and with one more key of logit `sink` and value 0; a query
    without a visible key stays as it is."""
    out = out if out.shape[3] == d_v else out[..., :d_v]
    if sink is None:
        return out, lse
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
            if problem.is_first_of_kind(any(ctx.needs_input_grad)):
                _compile_ahead(problem, (q, k, v), index, any(ctx.needs_input_grad))
            (q_in, k_in, v_in), is_bad = _finite(problem, q, k, v)
            results = _forward(problem, q_in, k_in, v_in, index)
        ctx.save_for_backward(q, k, v, results.out, results.lse, *results.chosen, *results.lists)
        ctx.static = static
        ctx.set_materialize_grads(False)
        out, lse = results.out, results.lse
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
        saved = Results(out, lse, Selection(*rest[:3]), QueryLists(*rest[3:]))
        dout = describable(dout)
        with torch.cuda.device_of(q):
            problem = _problem((q, k, v, dout), ctx.static)
            (q, k, v, dout), is_bad = _finite(problem, q, k, v, dout)
            stats = _stats(problem, out, dout, lse, dlse)
            if is_bad is not None:
                bad_rows = is_bad[:, None] if problem.in_gluon else is_bad
                stats[..., 0].masked_fill_(bad_rows, math.nan)
            has_dq = ctx.needs_input_grad[0]
            grads = _backward(problem, q, k, v, dout, stats, saved, has_dq=has_dq)
        return *grads, None, None


# --- Order of the kernels ---


class Results(NamedTuple):
    """Output, and what the backward pass needs beside the inputs."""

    out: Tensor  # [B, S, Hq, Dv]
    lse: Tensor  # [B, Hq, S] fp32, base 2, +inf where nothing is seen
    chosen: Selection
    lists: QueryLists  # empty in query order


def _forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, index: Tensor) -> Results:
    chosen = pack_given(problem, index)
    size = (problem.batch, problem.num_heads, problem.seq_len)
    lse = problem.empty(*size, dtype=torch.float32)
    if not problem.has_lists:
        out = by_query.forward(problem, q, k, v, chosen, lse, None)
        return Results(out, lse, chosen, empty_lists(problem))
    lists = list_queries(problem, chosen)
    out = by_block_forward.forward(problem, q, k, v, chosen, lists, lse, None)
    return Results(out, lse, chosen, lists)


def _backward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    saved: Results,
    *,
    has_dq: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of q, k and v; where that of q has a kernel of its own, it is left out if nobody
    asks for it."""
    rest, chosen = (q, k, v, dout, stats), saved.chosen
    ordered = torch.are_deterministic_algorithms_enabled()
    lists = saved.lists if problem.has_lists else list_queries(problem, chosen)
    if problem.in_gluon or not problem.by_query:
        return by_block_backward.backward(problem, *rest, chosen, lists, ordered=ordered)
    dq = by_query.backward_q(problem, *rest, chosen) if has_dq else None
    return dq, *by_block_backward.backward_kv(problem, *rest, lists, ordered=ordered)


def _compile_ahead(
    problem: Problem, inputs: tuple[Tensor, ...], index: Tensor, backward_too: bool
) -> None:
    """Compile the kernels of such calls on threads, for this and for other lengths."""
    with compiling_ahead():
        for twin in (problem.on_meta(), *problem.at_other_lengths()):
            lengths = problem.lengths_at(twin)
            q, k, v = (on_meta(x, lengths) for x in inputs)
            results = _forward(twin, q, k, v, on_meta(index, lengths))
            if backward_too:
                dout = twin.empty(*results.out.shape)
                for dlse in (None, twin.empty(*results.out.shape[:3], dtype=torch.float32)):
                    stats = _stats(twin, results.out, dout, results.lse, dlse)
                _backward(twin, q, k, v, dout, stats, results)


def _problem(tensors: tuple[Tensor, ...], static: Static) -> Problem:
    q, _, v = tensors[:3]
    rest = (static.spec, static.scale, static.doc_lens, NO_FLAGS)
    return problem_of(tensors, q, v, *rest, static.query_lens, static.offsets, SparseProblem)


def _finite(problem: Problem, *tensors: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Packed documents: 0 for what is not finite, and the rows that would have seen it.

    A tile may hold two documents, and 0 * NaN would cross.
    """
    if len(problem.doc_lens) == 1:
        return list(tensors), None
    assert problem.documents is not None
    return finite_only(problem.documents, tensors, (QUERY, RAW, RAW, QUERY)[: len(tensors)])


def _stats(
    problem: Problem, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None
) -> Tensor:  # [B, Hq, S, 4] fp32, or [B, S, Hq, 4] for the kernel in Gluon
    by_token = problem.in_gluon
    size = (problem.seq_len, problem.num_heads) if by_token else lse.shape[1:]
    stats = problem.empty(problem.batch, *size, 4, dtype=torch.float32)
    num_rows = problem.batch * problem.seq_len * problem.num_heads
    given = None if dlse is None else dlse.float().contiguous()
    start(
        problem.memo,
        ("stats", given is None),
        row_stats,
        (out, dout, lse, given, stats, problem.row_shift),
        lambda: Launch.plain(
            (ceil_div(num_rows, ROWS),),
            (num_rows, problem.num_heads, problem.seq_len, *dout.stride()[:3]),
            {"DV": problem.d_v, "DV_PAD": padded(problem.d_v), "BY_TOKEN": by_token, "ROWS": ROWS},
        ),
    )
    return stats

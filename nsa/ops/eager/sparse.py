"""The torch path of sparse_attention: each query fetches the tokens of its blocks.

Queries are processed a chunk at a time. The backward pass fetches again and recomputes the
probabilities from the saved log-sum-exp, so memory is that of one chunk.

Shapes: H heads have an index of their own (KV heads, or query heads where each has one), R query
heads share it, and K = n * block tokens are fetched for each query.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.checks import Layout
from nsa.ops.eager.attention import compute_dtype
from nsa.ops.eager.rows import distinct_blocks

CHUNK_NUMBERS = 1 << 22
"""Numbers of keys and values that one chunk fetches."""


class Problem(NamedTuple):
    """The arguments that are not tensors with a gradient."""

    block: int
    scale: float
    places: Places


class Places(NamedTuple):
    """For every query: its position, where the keys of its document begin, and their number."""

    position: Tensor  # [B, Sq] int64
    first_key: Tensor  # [1, Sq] int64
    num_keys: Tensor  # [1, Sq] int64


class Fetched(NamedTuple):
    """The keys and values of a chunk of queries."""

    k: Tensor  # [B, H, T, K, Dk]
    v: Tensor  # [B, H, T, K, Dv]  0 where it is not finite
    visible: Tensor  # [B, H, T, K] bool
    bad: Tensor  # [B, H, T] bool  whether the query sees a value that is not finite
    where: tuple[Tensor, Tensor, Tensor]  # batch element, KV head and token of each key


def sparse_attention(
    q: Tensor,  # [B, Sq, Hq, Dk]
    k: Tensor,  # [B, Sk, Hkv, Dk]
    v: Tensor,  # [B, Sk, Hkv, Dv]
    index: Tensor,  # [B, Sq, H, n] int32, H = 1, Hkv or Hq
    *,
    block: int,
    scale: float,
    sink: Tensor | None,  # [Hq]
    layout: Layout,
) -> tuple[Tensor, Tensor]:  # [B, Sq, Hq, Dv], [B, Sq, Hq]
    """Attention to the tokens of the chosen blocks up to the query, and its log-sum-exp."""
    problem = Problem(block, scale, _places(layout, q.shape[0], q.device))
    # Autocast would round the fp32 products of this path to 16 bit.
    with torch.autocast(q.device.type, enabled=False):
        out, lse = _Sparse.apply(q, k, v, sink, _ids(index, k.shape[2]), problem)
    return out, lse


def _places(layout: Layout, batch: int, device: torch.device) -> Places:
    query_lens = torch.tensor(layout.query_lens, device=device)
    key_lens = torch.tensor(layout.key_lens, device=device)

    def per_query(values: Tensor) -> Tensor:  # [docs] -> [1, Sq]
        return values.repeat_interleave(query_lens, output_size=sum(layout.query_lens))[None]

    # The row's number within its document: [1, Sq].
    row = torch.arange(sum(layout.query_lens), device=device)[None]
    row = row - per_query(query_lens.cumsum(0) - query_lens)
    first_key, num_keys = per_query(key_lens.cumsum(0) - key_lens), per_query(key_lens)
    offset = layout.offset
    if isinstance(offset, Tensor):
        offset = offset.to(device).long()
        offset = per_query(offset) if len(layout.query_lens) > 1 else offset[:, None]
    return Places((row + offset).expand(batch, -1), first_key, num_keys)


def _ids(index: Tensor, num_groups: int) -> Tensor:
    """[B, Sq, H, n] -> [B, H, Sq, n] int64, each id once; one head stands for all KV heads."""
    ids = distinct_blocks(index).long().transpose(1, 2)
    return ids.expand(-1, num_groups, -1, -1) if ids.shape[1] == 1 else ids


class _Sparse(torch.autograd.Function):
    """Forward and backward over chunks; saves the inputs and the log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        ids: Tensor,
        problem: Problem,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(q.dtype)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=dtype)
        for rows in _chunks(ids, problem.block, k.shape[3] + v.shape[3]):
            some = _fetch(k, v, ids[:, :, rows], problem, rows, dtype)
            heads = _grouped(q[:, rows], ids.shape[1], dtype)
            logits = _logits(heads, some, problem.scale)
            found = logits.logsumexp(dim=-1)  # [B, H, T, R]; -inf: no key is visible
            if sink is not None:
                with_sink = torch.logaddexp(found, _per_head(sink, heads))
                found = with_sink.masked_fill(found == -math.inf, -math.inf)
            probs = _probabilities(logits, found)
            part = (probs @ some.v).masked_fill(some.bad[..., None, None], math.nan)
            out[:, rows] = _ungrouped(part).to(q.dtype)
            lse[:, rows] = _ungrouped(found[..., None])[..., 0]
        ctx.save_for_backward(q, k, v, sink, ids, lse)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, ids, lse = ctx.saved_tensors
        problem, dtype = ctx.problem, compute_dtype(q.dtype)
        dq = torch.zeros_like(q, dtype=dtype)
        # [B, Hkv, Sk, D], so that a key is one row.
        dk, dv = (x.new_zeros(x.transpose(1, 2).shape, dtype=dtype) for x in (k, v))
        dsink = None if sink is None else torch.zeros_like(sink, dtype=dtype)
        for rows in _chunks(ids, problem.block, k.shape[3] + v.shape[3]):
            some = _fetch(k, v, ids[:, :, rows], problem, rows, dtype)
            heads = _grouped(q[:, rows], ids.shape[1], dtype)
            found = _grouped(lse[:, rows, :, None], ids.shape[1], dtype)[..., 0]
            probs = _probabilities(_logits(heads, some, problem.scale), found)
            # dS = P * (dP - <P, dP> + d lse); the sink has the same with dP = 0.
            moved = (
                torch.zeros_like(found)
                if dlse is None
                else _grouped(dlse[:, rows, :, None], ids.shape[1], dtype)[..., 0]
            )
            dprobs = torch.zeros_like(probs)
            if dout is not None:
                grad = _grouped(dout[:, rows], ids.shape[1], dtype)
                grad = grad.masked_fill(some.bad[..., None, None], 0.0)  # NaN rows: no gradient
                dprobs = grad @ some.v.mT
                dv.index_put_(some.where, probs.mT @ grad, accumulate=True)
            moved = moved - torch.linalg.vecdot(probs, dprobs)
            dlogits = probs * (dprobs + moved[..., None]) * problem.scale
            dq[:, rows] = _ungrouped(dlogits @ some.k)
            dk.index_put_(some.where, dlogits.mT @ heads, accumulate=True)
            if dsink is not None:
                share = (_per_head(sink, heads) - found).exp().masked_fill(found == -math.inf, 0.0)
                dsink += (share * moved).sum(dim=(0, 2)).flatten()
        grads = dq.to(q.dtype), dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)
        return *grads, None if dsink is None else dsink.to(sink.dtype), None, None


def _chunks(ids: Tensor, block: int, width: int) -> Iterator[slice]:
    """Slices of the queries whose fetched keys and values are at most CHUNK_NUMBERS."""
    batch, heads, num_queries, n = ids.shape
    size = max(CHUNK_NUMBERS // max(batch * heads * n * block * width, 1), 1)
    for first in range(0, num_queries, size):
        yield slice(first, min(first + size, num_queries))


def _fetch(
    k: Tensor, v: Tensor, ids: Tensor, problem: Problem, rows: slice, dtype: torch.dtype
) -> Fetched:
    batch, heads = ids.shape[:2]
    position, first, count = (x[:, None, rows, None] for x in problem.places)
    token = ids[..., None] * problem.block + torch.arange(problem.block, device=ids.device)
    token = token.flatten(-2)  # [B, H, T, K]
    visible = (token >= 0) & (token <= position) & (token < count)
    # Nothing outside the document is read: what is not visible reads its first key.
    token = (token * visible + first).clamp(max=k.shape[1] - 1)
    element = torch.arange(batch, device=ids.device)[:, None, None, None].expand_as(token)
    group = torch.arange(heads, device=ids.device) * k.shape[2] // heads
    where = element, group[None, :, None, None].expand_as(token), token
    keys, values = (x.transpose(1, 2)[where].to(dtype) for x in (k, v))
    keys = keys.masked_fill(~visible[..., None], 0.0)  # 0 * NaN would reach the gradient of q
    bad = ~values.isfinite().all(dim=-1)
    values = values.masked_fill(bad[..., None], 0.0)
    return Fetched(keys, values, visible, (bad & visible).any(dim=-1), where)


def _logits(q: Tensor, some: Fetched, scale: float) -> Tensor:  # [B, H, T, R, K]
    return (q @ some.k.mT * scale).masked_fill(~some.visible[..., None, :], -math.inf)


def _probabilities(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse), and 0 where no key is visible."""
    return (logits - lse.masked_fill(lse == -math.inf, math.inf)[..., None]).exp()


def _grouped(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """[B, T, Hq, D] -> [B, H, T, R, D]."""
    return x.to(dtype).unflatten(2, (heads, -1)).transpose(1, 2)


def _ungrouped(x: Tensor) -> Tensor:
    """[B, H, T, R, D] -> [B, T, Hq, D]."""
    return x.transpose(1, 2).flatten(2, 3)


def _per_head(sink: Tensor, heads: Tensor) -> Tensor:
    """[Hq] -> [H, 1, R], in the dtype of `heads` [B, H, T, R, D]."""
    return sink.to(heads.dtype).view(heads.shape[1], 1, heads.shape[3])

"""The torch path of sparse_attention: each query fetches the tokens of its blocks.

Queries are processed a chunk at a time. The backward pass fetches again and recomputes the
probabilities from the saved log-sum-exp, so memory is that of one chunk. On a CPU, where a query
reads a good part of all keys, all of them are multiplied in place under a mask instead: fetching
costs more than products.

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
"""Numbers of keys and values that one chunk fetches, or logits that it computes in place."""
FETCH_COST = 8
"""All keys are read in place up to this many times those that a query fetches. On one core, forward
and backward at D 64 take as long either way at about 13."""


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
    """The keys and values of a chunk of queries, a copy for each query."""

    k: Tensor  # [B, H, T, K, Dk]
    v: Tensor  # [B, H, T, K, Dv]  0 where it is not finite
    visible: Tensor  # [B, H, T, K] bool
    bad: Tensor  # [B, H, T] bool  whether the query sees a value that is not finite
    where: tuple[Tensor, Tensor, Tensor]  # batch element, KV head and token of each key

    def times_k(self, q: Tensor) -> Tensor:  # [B, H, T, R, Dk] -> [B, H, T, R, K]
        return q @ self.k.mT

    def times_v(self, grad: Tensor) -> Tensor:  # [B, H, T, R, Dv] -> [B, H, T, R, K]
        return grad @ self.v.mT

    def sum_k(self, weights: Tensor) -> Tensor:  # [B, H, T, R, K] -> [B, H, T, R, Dk]
        return weights @ self.k

    def sum_v(self, weights: Tensor) -> Tensor:  # [B, H, T, R, K] -> [B, H, T, R, Dv]
        return weights @ self.v

    def add(self, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        """Add weights^T rows to the keys of total [B, Hkv, Sk, D]."""
        total.index_put_(self.where, weights.mT @ rows, accumulate=True)


class InPlace(NamedTuple):
    """All keys and values, and which of them each query of a chunk reads.

    What is not finite reaches the rows that see it. No bit of another row depends on it.
    """

    k: Tensor  # [B, H, Sk, Dk]
    finite_k: Tensor  # [B, H, Sk, Dk]  0 for a key that is not finite
    v: Tensor  # [B, H, Sk, Dv]  0 for a value that is not finite
    visible: Tensor  # [B, H, T, Sk] bool
    bad: Tensor  # [B, H, T] bool  whether the query sees a value that is not finite
    is_finite: bool  # whether all keys and values are

    def times_k(self, q: Tensor) -> Tensor:  # [B, H, T, R, Dk] -> [B, H, T, R, Sk]
        return (q.flatten(2, 3) @ self.k.mT).unflatten(2, q.shape[2:4])

    def times_v(self, grad: Tensor) -> Tensor:
        return (grad.flatten(2, 3) @ self.v.mT).unflatten(2, grad.shape[2:4])

    def sum_k(self, weights: Tensor) -> Tensor:
        return (weights.flatten(2, 3) @ self.finite_k).unflatten(2, weights.shape[2:4])

    def sum_v(self, weights: Tensor) -> Tensor:
        return (weights.flatten(2, 3) @ self.v).unflatten(2, weights.shape[2:4])

    def add(self, total: Tensor, weights: Tensor, rows: Tensor) -> None:
        if not self.is_finite:  # weights of a row of NaN are NaN for all keys
            weights = weights.masked_fill(~self.visible[..., None, :], 0.0)
        # Heads of a group that have an index of their own share a KV head of the total.
        share = weights.flatten(2, 3).mT @ rows.flatten(2, 3)  # [B, H, Sk, D]
        total += share.unflatten(1, (total.shape[1], -1)).sum(dim=2)


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
        for rows, some in _keys(q, k, v, ids, problem, dtype):
            heads = _grouped(q[:, rows], ids.shape[1], dtype)
            logits = _logits(heads, some, problem.scale)
            found = logits.logsumexp(dim=-1)  # [B, H, T, R]; -inf: no key is visible
            if sink is not None:
                with_sink = torch.logaddexp(found, _per_head(sink, heads))
                found = with_sink.masked_fill(found == -math.inf, -math.inf)
            probs = _probabilities(logits, found)
            part = some.sum_v(probs).masked_fill(some.bad[..., None, None], math.nan)
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
        for rows, some in _keys(q, k, v, ids, problem, dtype):
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
                dprobs = some.times_v(grad)
                some.add(dv, probs, grad)
            moved = moved - torch.linalg.vecdot(probs, dprobs)
            dlogits = probs * (dprobs + moved[..., None]) * problem.scale
            dq[:, rows] = _ungrouped(some.sum_k(dlogits))
            some.add(dk, dlogits, heads)
            if dsink is not None:
                share = (_per_head(sink, heads) - found).exp().masked_fill(found == -math.inf, 0.0)
                dsink += (share * moved).sum(dim=(0, 2)).flatten()
        grads = dq.to(q.dtype), dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)
        return *grads, None if dsink is None else dsink.to(sink.dtype), None, None


def _keys(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, problem: Problem, dtype: torch.dtype
) -> Iterator[tuple[slice, Fetched | InPlace]]:
    """Chunks of the queries, with what they read."""
    num_heads, num_fetched = ids.shape[1], ids.shape[3] * problem.block
    in_place = q.device.type == "cpu" and k.shape[1] <= FETCH_COST * num_fetched
    # Never by the data: the two ways round differently.
    if in_place:
        per_head = num_heads // k.shape[2]
        keys, values = (
            x.transpose(1, 2).to(dtype).repeat_interleave(per_head, dim=1) for x in (k, v)
        )
        bad_k, bad_v = (~x.isfinite().all(dim=-1) for x in (keys, values))  # [B, H, Sk]
        is_finite = not bool(bad_k.any() | bad_v.any())
        finite_k = keys if is_finite else keys.masked_fill(bad_k[..., None], 0.0)
        values = values if is_finite else values.masked_fill(bad_v[..., None], 0.0)
        for rows in _chunks(ids.shape[2], q.shape[0] * q.shape[2] * k.shape[1]):
            visible = _visible(ids[:, :, rows], problem, rows, k.shape[1])
            bad = visible.new_zeros(visible.shape[:3])
            if not is_finite:
                bad = (visible & bad_v[:, :, None, :]).any(dim=-1)
            yield rows, InPlace(keys, finite_k, values, visible, bad, is_finite)
        return
    width = num_fetched * (k.shape[3] + v.shape[3])
    for rows in _chunks(ids.shape[2], q.shape[0] * num_heads * width):
        yield rows, _fetch(k, v, ids[:, :, rows], problem, rows, dtype)


def _chunks(num_queries: int, each: int) -> Iterator[slice]:
    """Slices of the queries, each of which needs so many numbers, of at most CHUNK_NUMBERS."""
    size = max(CHUNK_NUMBERS // max(each, 1), 1)
    for first in range(0, num_queries, size):
        yield slice(first, min(first + size, num_queries))


def _visible(ids: Tensor, problem: Problem, rows: slice, num_keys: int) -> Tensor:
    """Which keys each query of a chunk reads: [B, H, T, Sk] bool."""
    position, first, count = (x[:, None, rows, None] for x in problem.places)
    num_blocks = -(-num_keys // problem.block)
    # Ids that do not exist, -1 among them, go to a column that is cut off.
    known = torch.where((ids >= 0) & (ids < num_blocks), ids, num_blocks)
    chosen = torch.zeros(*ids.shape[:3], num_blocks + 1, dtype=torch.bool, device=ids.device)
    chosen.scatter_(-1, known, True)
    token = torch.arange(num_keys, device=ids.device) - first  # within the query's document
    in_block = torch.where(token >= 0, token // problem.block, num_blocks)
    chosen[..., -1] = False
    read = chosen.gather(-1, in_block.expand(*ids.shape[:3], -1))
    return read & (token <= position) & (token < count)


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


def _logits(q: Tensor, some: Fetched | InPlace, scale: float) -> Tensor:  # [B, H, T, R, K]
    return (some.times_k(q) * scale).masked_fill(~some.visible[..., None, :], -math.inf)


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

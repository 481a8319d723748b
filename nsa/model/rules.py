"""Rules: how a layer chooses the blocks that its queries read.

A rule summarizes the keys, scores blocks for every query, and keeps the best n_sel. Attention then
reads those blocks with `nsa.sparse_attention`, whatever the rule. Scores take one chunk of queries
at a time: no tensor of S x S exists.

    nsa     softmax over mean-pooled keys, summed over heads and overlaps (Eq. 9 to 12 of NSA)
    infllm  the same softmax, and the largest of a block's pools (InfLLM-V2)
    moba    query times mean key of a large block, for each query head (MoBA)
    msa     a learned indexer: the best token of a block (MiniMax Sparse Attention)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.config.schema import POOLS
from nsa.model.rope import LINEAR, Rope, RopeScaling, apply_rope, document_positions, rope_tables
from nsa.ops import BlockSpec, compress, select_blocks, sparse_attention
from nsa.ops.eager.attention import compute_dtype
from nsa.ops.eager.rows import (
    KeyValues,
    choose_blocks,
    compressed_keys,
    probabilities,
    score_blocks,
)
from nsa.ops.plan import plan_scoring

CHUNK_SCORES = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Scores (heads * queries * keys) of one chunk: what a CPU's cache holds, what keeps a GPU busy."""


class Span(NamedTuple):
    """Where the queries of a call are: the first position, or the documents of a packed row.

    `queries` and `summarize` of a learned rule take both: tokens from place `first` of the row on.
    """

    first: int = 0
    cu_seqlens: Tensor | None = None
    """[docs + 1] int32, on any device; queries and keys are then the same tokens."""

    def doc_lens(self, num_queries: int) -> list[int]:
        """Lengths of the documents; one without bounds."""
        if self.cu_seqlens is None:
            return [num_queries]
        return self.cu_seqlens.diff().tolist()


class Rule(nn.Module):
    """Base of the rules: documents, chunks of queries, and the choice by score."""

    learns = False
    """Whether the rule has weights, trained by `loss`."""
    stride = 1
    """Tokens from one summary to the next."""
    backend = "auto"
    """Of the choice: auto, triton, torch or reference."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.spec = spec

    def num_summaries(self, num_tokens: int) -> int:
        """Summaries that so many tokens complete."""
        raise NotImplementedError

    def summarize(self, k: Tensor, x: Tensor, span: Span) -> Tensor:
        """What queries are compared with: keys [B, S, Hkv, Dk], inputs [B, S, dim] ->
        [B, N, H, D], of whole documents or of tokens from `span.first` on."""
        raise NotImplementedError

    def queries(self, q: Tensor, x: Tensor, span: Span) -> Tensor:
        """What is compared with the summaries: [B, T, heads, D]. The layer's own queries."""
        return q

    def index(self, q: Tensor, k: Tensor, x: Tensor, span: Span | None = None) -> Tensor:
        """The blocks of every query of whole sequences: [B, S, H, n_sel] int32."""
        span = span or Span()
        return self.choose(self.queries(q, x, span), self.summarize(k, x, span), k.shape[2], span)

    @torch.no_grad()
    def choose(
        self, q: Tensor, summary: Tensor, num_groups: int, span: Span
    ) -> Tensor:  # [B, T, heads, D], [B, N, H, D] -> [B, T, H, n_sel] int32, ascending, then -1
        """The blocks that each query reads: the forced ones, then the best scores."""
        with torch.autocast(q.device.type, enabled=False):
            parts, row, place = [], 0, 0
            for length in span.doc_lens(q.shape[1]):
                num = self.num_summaries(span.first + length)
                keys = summary[:, place : place + num].to(compute_dtype(q.dtype))
                rows = q[:, row : row + length].to(keys.dtype)
                parts += self._of_document(rows, keys, num_groups, span.first)
                row, place = row + length, place + num
            return torch.cat(parts, dim=1)

    def _of_document(
        self, q: Tensor, summary: Tensor, num_groups: int, first: int
    ) -> list[Tensor]:  # each [B, T, H, n_sel]
        most = CHUNK_SCORES["cuda" if q.is_cuda else "cpu"]
        size = max(most // (q.shape[0] * q.shape[2] * max(summary.shape[1], 1)), 1)
        chosen = []
        for start in range(0, q.shape[1], size):
            rows = q[:, start : start + size].unflatten(2, (num_groups, -1)).transpose(1, 2)
            ids = self._choose_chunk(rows, summary, first + start)  # [B, H, T, n_sel]
            chosen.append(ids.transpose(1, 2))
        return chosen

    def _choose_chunk(self, q: Tensor, summary: Tensor, first: int) -> Tensor:
        """Blocks of a chunk of queries [B, Hkv, T, G, D] from position `first` on."""
        num_blocks = self.spec.num_blocks(first + q.shape[2])
        return choose_blocks(self.scores(q, summary, first, num_blocks), first, self.spec)

    def scores(self, q: Tensor, summary: Tensor, first: int, num_blocks: int) -> Tensor:
        """Scores [B, Hkv, T, num_blocks] of the blocks; a block of the future may have any."""
        raise NotImplementedError

    def _has_kernels(self, q: Tensor, span: Span) -> bool:
        """Whether the Triton kernels choose: for whole sequences, where the plan takes them."""
        if span.first:
            return False
        return plan_scoring(q.device, q.dtype, self.backend, (q.shape[-1],))[0] == "triton"

    def extra_repr(self) -> str:
        spec = self.spec
        return f"block={spec.l_sel}, n={spec.n_sel}, forced={spec.num_first}+{spec.num_local}"


class MeanPools(Rule):
    """Base of the rules that compare queries with means of l keys, stride d, by softmax."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__(spec)
        self.stride = spec.d

    def num_summaries(self, num_tokens: int) -> int:
        return self.spec.num_cmp(num_tokens)

    def summarize(self, k: Tensor, x: Tensor, span: Span) -> Tensor:
        return compress(k.detach(), self.spec, cu_seqlens=span.cu_seqlens, backend="auto")

    def scores(self, q: Tensor, summary: Tensor, first: int, num_blocks: int) -> Tensor:
        pools = summary.transpose(1, 2)
        keys, visible = compressed_keys(KeyValues(pools, pools), first, q.shape[2], self.spec)
        probs, _ = probabilities(q, keys.k, visible, 1 / math.sqrt(q.shape[-1]))
        return self.pool(probs, num_blocks)  # probs: [B, Hkv, T, G, N]

    def pool(self, probs: Tensor, num_blocks: int) -> Tensor:
        """Scores of blocks from probabilities of pools."""
        raise NotImplementedError


class NSARule(MeanPools):
    """A block's score is the sum over heads and overlapping pools (Eq. 9 and 10)."""

    @torch.no_grad()
    def choose(self, q: Tensor, summary: Tensor, num_groups: int, span: Span) -> Tensor:
        if span.first or not (q.is_cuda or self._has_kernels(q, span)):
            return super().choose(q, summary, num_groups, span)
        options: dict[str, Any] = {"cu_seqlens": span.cu_seqlens, "backend": self.backend}
        return select_blocks(q, summary, self.spec, **options)

    def pool(self, probs: Tensor, num_blocks: int) -> Tensor:
        return score_blocks(probs, num_blocks, self.spec)


class InfLLMRule(MeanPools):
    """A block's score is the largest of its overlapping pools, summed over the heads of a group."""

    @torch.no_grad()
    def choose(self, q: Tensor, summary: Tensor, num_groups: int, span: Span) -> Tensor:
        if not self._has_kernels(q, span):
            return super().choose(q, summary, num_groups, span)
        from nsa.ops.triton import operators  # Triton exists for Linux only

        scale, docs = 1 / math.sqrt(q.shape[-1]), span.doc_lens(q.shape[1])
        return operators.select_blocks(
            q, summary, self.spec, scale=scale, doc_lens=docs, largest=True
        )

    def pool(self, probs: Tensor, num_blocks: int) -> Tensor:
        spec, summed = self.spec, probs.sum(dim=3)  # [B, Hkv, T, N]
        # Pool i covers strides i .. i + l/d - 1, a block l_sel/d of them: pools from
        # j l_sel/d - (l/d - 1) to (j + 1) l_sel/d - 1 overlap block j.
        before, per_block = spec.l // spec.d - 1, spec.l_sel // spec.d
        width = num_blocks * per_block
        padded = F.pad(summed, (before, max(width - summed.shape[-1], 0)))[..., : before + width]
        return padded.unfold(-1, before + per_block, per_block).amax(dim=-1)


class MoBARule(Rule):
    """Each query head compares itself with the mean key of every large block before its own.

    The own block is always read. A large block is `pool_block` tokens, and is chosen as all of its
    blocks of l_sel. num_first and num_local do not apply.
    """

    def __init__(self, spec: BlockSpec, pool_block: int) -> None:
        super().__init__(spec)
        if pool_block % spec.l_sel or (spec.n_sel * spec.l_sel) % pool_block:
            raise ValueError(
                f"pool_block={pool_block} with l_sel={spec.l_sel} and n_sel={spec.n_sel}; it must "
                f"be a multiple of l_sel, and n_sel * l_sel a multiple of it: use {spec.l_sel}, "
                f"or a larger n_sel"
            )
        self.stride = self.pool_block = pool_block

    def num_summaries(self, num_tokens: int) -> int:
        return num_tokens // self.pool_block  # the own block is not scored: only whole ones

    def summarize(self, k: Tensor, x: Tensor, span: Span) -> Tensor:
        means = []
        for doc in k.detach().split(span.doc_lens(k.shape[1]), dim=1):
            whole = doc[:, : self.num_summaries(doc.shape[1]) * self.pool_block]
            blocks = whole.to(compute_dtype(k.dtype)).unflatten(1, (-1, self.pool_block))
            means.append(blocks.mean(dim=2).to(k.dtype))
        return torch.cat(means, dim=1)

    def _choose_chunk(self, q: Tensor, summary: Tensor, first: int) -> Tensor:
        num_queries, per_block = q.shape[2], self.pool_block // self.spec.l_sel
        scores = torch.einsum("bhtgd,bnhd->bhgtn", q, summary).flatten(1, 2)  # [B, Hq, T, N]
        # One more block: the own one is the last that a query may read, and may be unfinished.
        num_large = -(-(first + num_queries) // self.pool_block)
        scores = F.pad(scores, (0, num_large - scores.shape[-1]), value=-math.inf)
        large = BlockSpec(
            l=self.pool_block, d=self.pool_block, l_sel=self.pool_block,
            n_sel=self.spec.n_sel // per_block, num_first=0, num_local=1,
        )  # fmt: skip
        chosen = choose_blocks(scores, first, large)  # [B, Hq, T, n]
        ids = chosen[..., None] * per_block + torch.arange(per_block, device=q.device)
        ids = ids.masked_fill(chosen[..., None] < 0, -1).flatten(-2).to(torch.int32)
        # The own large block may have blocks after the query.
        own = torch.arange(first, first + num_queries, device=q.device) // self.spec.l_sel
        return ids.masked_fill(ids > own[:, None], -1)


class MSARule(Rule):
    """A learned indexer: one index query for each KV head and one index key for all, normed and
    rotated. A block's score is its best visible token.

    The indexer reads a detached input: `loss` trains it, and nothing else.
    """

    learns = True

    def __init__(
        self,
        spec: BlockSpec,
        dim: int,
        num_groups: int,
        d_index: int,
        base: float,
        scale: float,
        scaling: RopeScaling = LINEAR,
    ) -> None:
        super().__init__(spec)
        if d_index < 2 or d_index % 2:
            raise ValueError(f"d_index={d_index}; RoPE rotates pairs: use an even number >= 2")
        self.num_groups, self.d_index = num_groups, d_index
        self.rope_base, self.rope_scale, self.rope_scaling = base, scale, scaling
        self.proj_q = nn.Linear(dim, num_groups * d_index, bias=False)
        self.proj_k = nn.Linear(dim, d_index, bias=False)
        self.norm_q = nn.RMSNorm(d_index, eps=1e-6)
        self.norm_k = nn.RMSNorm(d_index, eps=1e-6)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.proj_q, self.proj_k):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        for norm in (self.norm_q, self.norm_k):
            nn.init.ones_(norm.weight)

    def num_summaries(self, num_tokens: int) -> int:
        return num_tokens

    def summarize(self, k: Tensor, x: Tensor, span: Span) -> Tensor:  # [B, S, 1, d_index]
        return self._normed(self.proj_k(x.detach()), self.norm_k, span)

    def queries(self, q: Tensor, x: Tensor, span: Span) -> Tensor:  # [B, T, Hkv, d_index]
        return self._normed(self.proj_q(x.detach()), self.norm_q, span)

    def _normed(self, heads: Tensor, norm: nn.RMSNorm, span: Span) -> Tensor:
        heads = heads.unflatten(-1, (-1, self.d_index))
        wide = heads.to(compute_dtype(heads.dtype))
        weight = self.norm_weight(norm).to(wide.dtype)
        normed = F.rms_norm(wide, (self.d_index,), weight, norm.eps)
        return apply_rope(normed.to(heads.dtype), self._rope(heads, span))

    def norm_weight(self, norm: nn.RMSNorm) -> Tensor:  # [d_index]
        """The weight of a norm, which all heads share."""
        return norm.weight

    def _rope(self, heads: Tensor, span: Span) -> Rope:
        places = document_positions(heads.shape[1], span.cu_seqlens, heads.device, span.first)
        kind = compute_dtype(heads.dtype)
        return rope_tables(
            places, self.d_index, base=self.rope_base, scale=self.rope_scale,
            scaling=self.rope_scaling, dtype=kind,
        )  # fmt: skip

    @torch.no_grad()
    def choose(self, q: Tensor, summary: Tensor, num_groups: int, span: Span) -> Tensor:
        if not self._has_kernels(q, span):
            return super().choose(q, summary, num_groups, span)
        from nsa.ops.triton import operators, tiles  # Triton exists for Linux only

        kind = (q.shape[-1], self.spec.l_sel, q.dtype, tiles.capability_of(q.device))
        if tiles.token_tiles(*kind) is None:
            return super().choose(q, summary, num_groups, span)
        docs = span.doc_lens(q.shape[1])
        pairs = zip(q.split(docs, dim=1), summary.split(docs, dim=1), strict=True)
        parts = [operators.select_by_tokens(*pair, self.spec) for pair in pairs]
        return torch.cat(parts, dim=1)

    def scores(self, q: Tensor, summary: Tensor, first: int, num_blocks: int) -> Tensor:
        size = num_blocks * self.spec.l_sel
        summary = summary[:, :size]  # no query of this chunk sees more
        num_queries, num_keys = q.shape[2], summary.shape[1]
        # [B, Hkv, T, S]: one index query for each KV head, one key for all.
        logits = q[:, :, :, 0] @ summary.transpose(1, 2).mT
        token = torch.arange(num_keys, device=q.device)
        places = torch.arange(first, first + num_queries, device=q.device)
        logits = logits.masked_fill(token > places[:, None], -math.inf)
        logits = F.pad(logits, (0, size - num_keys), value=-math.inf)
        return logits.unflatten(-1, (num_blocks, self.spec.l_sel)).amax(dim=-1)

    def loss(
        self,
        q: Tensor,  # [B, S, Hq, Dk]  of the attention, rotated
        k: Tensor,  # [B, Sk, Hkv, Dk]
        index: Tensor,  # [B, S, Hkv, n] int32, or H = 1: the blocks that attention has read
        lse: Tensor,  # [B, S, Hq]  the log-sum-exp of that attention
        index_q: Tensor,  # [B, S, Hkv, d_index]
        index_k: Tensor,  # [B, Sk, 1, d_index]
        *,
        q_offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:  # [] fp32
        """KL from the attention of each head to the indexer, over the tokens that were read.

        Mean over queries and heads; their places among the keys as in `nsa.sparse_attention`. Its
        gradient is that of the KL from the mean of a group's heads; its value is larger by how much
        these heads differ. It reaches the indexer alone.

        With p the attention of a head and s = index_q . index_k / sqrt(d_index):
            KL = sum p log p - sum p log softmax(s)
               = scale q . (sum p k) - lse  -  index_q . (sum p index_k) / sqrt(d) + lse(s)
        Both sums over p are attention with other values, and lse(s) is that of another attention:
        nothing of size S x S is needed.
        """
        kind = compute_dtype(q.dtype)
        groups, per_group = k.shape[2], q.shape[2] // k.shape[2]
        q, k, lse = q.detach(), k.detach(), lse.detach().to(kind)
        # The same attention with k and with index_k as values. Apart, for heads of a size that the
        # kernels take; the first has no gradient.
        options: dict[str, Any] = {"q_offset": q_offset, "cu_seqlens": cu_seqlens}
        options |= {"cu_seqlens_k": cu_seqlens_k, "backend": backend, "block": self.spec.l_sel}
        mean_k = sparse_attention(q, k, k, index, **options).to(kind)
        shared = index_k.to(k.dtype).expand(-1, -1, groups, -1)
        mean_index = sparse_attention(q, k, shared, index, **options).to(kind)
        known = (q.to(kind) * mean_k).sum(-1) / math.sqrt(q.shape[-1]) - lse  # [B, S, Hq]
        _, own_lse = sparse_attention(
            index_q.to(k.dtype), index_k.to(k.dtype), index_k.detach().to(k.dtype), index,
            **options, return_lse=True,
        )  # fmt: skip
        # The teacher of a KV head: the mean of its query heads.
        taught = mean_index.unflatten(2, (groups, per_group)).mean(dim=3)
        agrees = (index_q.to(kind) * taught).sum(-1) / math.sqrt(self.d_index)  # [B, S, Hkv]
        return (known.mean() + (own_lse.to(kind) - agrees).mean()).float()


def make_rule(
    name: str,
    spec: BlockSpec,
    *,
    pool: str,
    pool_block: int,
    dim: int,
    num_groups: int,
    d_index: int,
    rope_base: float,
    rope_scale: float,
    rope_scaling: RopeScaling = LINEAR,
) -> Rule | None:
    """The rule of a layer; None for `reuse`, which takes the blocks of an earlier layer."""
    if name == "reuse":
        return None
    if name == "msa":
        return MSARule(spec, dim, num_groups, d_index, rope_base, rope_scale, rope_scaling)
    if name == "nsa":
        return NSARule(spec)
    if name == "pooled" and pool in POOLS:
        return InfLLMRule(spec) if pool == "infllm" else MoBARule(spec, pool_block)
    raise ValueError(
        f"rule={name!r} with pool={pool!r}; use nsa, pooled (pool {' or '.join(POOLS)}), msa or "
        f"reuse"
    )

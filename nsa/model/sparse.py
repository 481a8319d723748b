"""SparseAttention: one K and V, and a rule that chooses the blocks each query reads.

Its weights are those of DenseAttention, and of the rule if it learns: with all blocks chosen it is
dense attention. There are no branches and no gates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa.model.cache import cache_dtype, check_one_token
from nsa.model.dense import DenseAttention, DenseCache
from nsa.model.rope import LINEAR, Rope, RopeScaling, document_positions
from nsa.model.rules import MSARule, Rule, Span, make_rule
from nsa.model.stats import AttentionStats
from nsa.ops import BlockSpec, sparse_attention
from nsa.ops.checks import check_block, check_documents
from nsa.ops.fallbacks import in_layer

Attended = tuple[Tensor, Tensor, Tensor | None]
"""What a layer gives to the next ones and to the loss: its output [B, S, dim], the index
[B, S, H, n_sel] int32 for layers that reuse it, and in training the loss [] of its indexer.

A plain tuple: where a compiled layer returns a NamedTuple, the compiler of torch 2.11 fails.
"""


class SparseCache(DenseCache):
    """Keys and values of one layer, the summaries of its rule, and the blocks of the last call."""

    def __init__(self, *, rule: Rule | None, summary: Tensor, **sizes: object) -> None:
        super().__init__(**sizes)  # type: ignore[arg-type]
        self.rule, self.summary = rule, summary
        self.index: Tensor | None = None  # [B, T, H, n_sel] int32

    def nbytes(self) -> int:
        """Memory of all buffers."""
        return super().nbytes() + self.summary.nbytes

    def fill(self, k: Tensor, v: Tensor, *learned: Tensor) -> None:  # [B, T, H, D]
        """Take T tokens that were computed elsewhere, and the index keys of a learned rule."""
        super().fill(k.transpose(1, 2), v.transpose(1, 2))
        if self.rule is not None:
            (summary,) = learned or (self.rule.summarize(k, k, Span()),)
            self.summary[:, : summary.shape[1]] = summary

    def summarize(self, x: Tensor, first: int) -> Tensor:
        """Add the summaries that the tokens x [B, T, dim] complete; return those of all tokens."""
        assert self.rule is not None
        start, end = (self.rule.num_summaries(n) for n in (first, self.length))
        if end > start:
            place = start * self.rule.stride
            keys = self.k[:, :, place : self.length].transpose(1, 2)
            self.summary[:, start:end] = self.rule.summarize(keys, x, Span(place))
        return self.summary[:, :end]


class SparseAttention(DenseAttention):
    """Causal grouped-query attention to the blocks that a rule chooses: [B, S, dim] -> the same."""

    is_one_graph = False

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_groups: int,
        d_k: int,
        d_v: int,
        spec: BlockSpec,
        rule: str,
        *,
        pool: str = "infllm",
        pool_block: int = 512,
        d_index: int = 64,
        rope_base: float = 10000.0,
        rope_scale: float = 1.0,
        rope_scaling: RopeScaling = LINEAR,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            dim, n_heads, n_kv_groups, d_k, d_v, rope_base=rope_base, rope_scale=rope_scale,
            rope_scaling=rope_scaling, qkv_bias=qkv_bias, qk_norm=qk_norm, norm_eps=norm_eps,
        )  # fmt: skip
        check_block(spec.l_sel, "l_sel", " with one K and V (kv=shared, or a rule other than nsa)")
        self.spec, self.backend = spec, backend
        self.rule = make_rule(
            rule, spec, pool=pool, pool_block=pool_block, dim=dim, num_groups=n_kv_groups,
            d_index=d_index, rope_base=rope_base, rope_scale=rope_scale, rope_scaling=rope_scaling,
        )  # fmt: skip
        if self.rule is not None:
            self.rule.backend = backend

    @property
    def learns(self) -> bool:
        """Whether the layer has an indexer to train."""
        return self.rule is not None and self.rule.learns

    def forward(  # type: ignore[override]
        self,
        x: Tensor,  # [B, S, dim]
        *,
        cu_seqlens: Tensor | None = None,  # [docs + 1] int32
        rope: Rope | None = None,  # tables of all positions; None: computed here
        stats: AttentionStats | None = None,
        layer: int | None = None,
        index: Tensor | None = None,  # [B, S, H, n_sel] int32, of an earlier layer
        warm_up: bool = False,
    ) -> Attended:
        """Attention over whole sequences; packed documents do not see each other.

        `warm_up`: read all blocks, so that the indexer learns from dense attention.
        """
        check_documents(cu_seqlens, x.shape[0], x.shape[1], x.device)
        if rope is None:
            rope = self.rope(document_positions(x.shape[1], cu_seqlens, x.device), x.dtype)
        # [B, S, H, D]
        q, k, v = (t.transpose(1, 2) for t in self._project(x, rope))
        given = (q, k, v, x, Span(0, cu_seqlens), index, warm_up, stats, layer)
        out, blocks, loss = outside_graphs(self.attend, *given)
        return self.out(out), blocks, loss

    def attend(
        self,
        q: Tensor,  # [B, S, Hq, Dk]
        k: Tensor,  # [B, S, Hkv, Dk]
        v: Tensor,  # [B, S, Hkv, Dv]
        x: Tensor,  # [B, S, dim]
        span: Span,
        index: Tensor | None,
        warm_up: bool,
        stats: AttentionStats | None,
        layer: int | None,
    ) -> Attended:  # its output: [B, S, Hq * Dv]
        """Choose and read the blocks. A compiled layer calls this outside of its graphs."""
        cu_seqlens, asked, summary = span.cu_seqlens, None, None
        if self.rule is not None:
            asked, summary = self.rule.queries(q, x, span), self.rule.summarize(k, x, span)
            index = self.rule.choose(asked, summary, self.num_groups, span)
        index = given_index(index)
        read = all_blocks(index, self.spec.num_blocks(x.shape[1])) if warm_up else index
        with in_layer(layer):
            out, lse = sparse_attention(
                q, k, v, read, block=self.spec.l_sel, cu_seqlens=cu_seqlens, backend=self.backend,
                return_lse=True,
            )  # fmt: skip
        loss = None
        if isinstance(self.rule, MSARule) and self.training and torch.is_grad_enabled():
            assert asked is not None and summary is not None
            loss = self.rule.loss(
                q, k, read, lse, asked, summary, cu_seqlens=cu_seqlens, backend=self.backend
            )
        if stats is not None:
            tokens = self.spec.l_sel
            stats.record(layer or 0, None, index, block_tokens=tokens, cu_seqlens=cu_seqlens)
        return out.flatten(2), index, loss

    def new_cache(self, batch: int, max_len: int) -> SparseCache:
        """An empty cache for `batch` sequences of at most `max_len` tokens."""
        weight = self.qkv.weight
        dtype, device = cache_dtype(weight), weight.device
        num = 0 if self.rule is None else self.rule.num_summaries(max_len)
        width = (self.num_groups, self.d_k)
        if isinstance(self.rule, MSARule):
            width = (1, self.rule.d_index)
        return SparseCache(
            rule=self.rule,
            summary=torch.empty(batch, num, *width, dtype=dtype, device=device),
            batch=batch,
            max_len=max_len,
            num_groups=self.num_groups,
            d_k=self.d_k,
            d_v=self.d_v,
            dtype=dtype,
            device=device,
        )

    @torch.no_grad()
    def prefill(  # type: ignore[override]
        self, x: Tensor, cache: SparseCache, index: Tensor | None = None
    ) -> Tensor:  # [B, T, dim] -> [B, T, dim]
        """Append T tokens; on a filled cache this is chunked prefill."""
        size = self._tile or x.shape[1]
        indices = [None] * len(x.split(size, dim=1)) if index is None else index.split(size, dim=1)
        outs, chosen = [], []
        for part, blocks in zip(x.split(size, dim=1), indices, strict=True):
            outs.append(self._append_chosen(part, cache, None, blocks))
            chosen.append(cache.index)
        cache.index = torch.cat([ids for ids in chosen if ids is not None], dim=1)
        return torch.cat(outs, dim=1)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, x: Tensor, cache: SparseCache, rope: Rope | None = None, index: Tensor | None = None
    ) -> Tensor:  # [B, 1, dim] -> [B, 1, dim]
        """Append one token per sequence; `rope` are the tables of the positions."""
        check_one_token(x)
        return self._append_chosen(x, cache, rope, index)

    def _append_chosen(
        self, x: Tensor, cache: SparseCache, rope: Rope | None, index: Tensor | None
    ) -> Tensor:
        cache.check(x)
        first = cache.length
        positions = document_positions(x.shape[1], None, x.device, first)
        projected = self._project(x, rope or self.rope(positions, x.dtype))
        q, k, v = cache.in_dtype(self.qkv.weight, *projected)
        k, v = (t.transpose(1, 2) for t in cache.append(k, v))
        q = q.transpose(1, 2)
        if self.rule is not None:
            span, summary = Span(first), cache.summarize(x, first)
            asked = self.rule.queries(q, x, span)
            index = self.rule.choose(asked, summary, self.num_groups, span)
        cache.index = given_index(index)
        # The kernels take an index of where queries lie, as long as the past and made on the host.
        backend = "torch" if x.shape[1] == 1 and self.backend != "reference" else self.backend
        out = sparse_attention(
            q, k, v, cache.index, block=self.spec.l_sel, q_offset=first, backend=backend
        )
        return self.out(out.flatten(2))


def outside_graphs(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function; from a layer that is being compiled, as it is."""
    if torch.compiler.is_compiling():
        from nsa.ops.traced import call_eagerly  # only here: it loads torch._dynamo

        return call_eagerly(function, *given)
    return function(*given)


def given_index(index: Tensor | None) -> Tensor:
    """The index; refused where a layer that reuses one got none."""
    if index is None:
        raise ValueError(
            "a layer with rule 'reuse' got no index; it takes the one of an earlier layer: pass "
            "index=, as TinyLM does"
        )
    return index


def all_blocks(index: Tensor, num_blocks: int) -> Tensor:
    """An index of the same queries with every block: [B, S, 1, num_blocks] int32."""
    ids = torch.arange(num_blocks, dtype=torch.int32, device=index.device)
    return ids.expand(*index.shape[:2], 1, -1)

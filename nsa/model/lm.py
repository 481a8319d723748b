"""TinyLM: a decoder-only language model on NSA, other sparse rules, or dense attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa.config import Config, parse_layers
from nsa.config.env import read
from nsa.config.schema import ATTENTIONS, KVS, MLPS, ROPE_SCALINGS, ModelConfig
from nsa.model.attention import NSAAttention
from nsa.model.block import Attention, Block, SparseBlock
from nsa.model.dense import DenseAttention
from nsa.model.paged import PagedModelCache, Pages
from nsa.model.rope import RMSNorm, RopeScaling, document_positions
from nsa.model.sparse import SparseAttention
from nsa.model.stats import AttentionStats
from nsa.ops import BlockSpec

EMBED_STD = 0.02
"""Initial standard deviation of the embedding and of the output head."""
PREFILL_TILE = 2048
"""Tokens of a prompt that go through the model at once; NSA_PREFILL_TILE overrides it."""


class ModelCache:
    """One cache per layer, of the type of its attention; all hold the same tokens."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        # Layers run one after another: one set of buffers between launches is enough.
        for layer in layers[1:]:
            layer.workspace = layers[0].workspace

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.layers[0].length

    @property
    def max_len(self) -> int:
        """Capacity in tokens."""
        return self.layers[0].max_len

    def clear(self) -> None:
        """Drop all tokens and keep the memory, for another prompt."""
        for layer in self.layers:
            layer.clear()

    def nbytes(self) -> int:
        """Memory of all layers."""
        return sum(layer.nbytes() for layer in self.layers)


class TinyLM(nn.Module):
    """Embedding, blocks, norm, output head: ids [B, S] -> logits [B, S, V]."""

    def __init__(
        self,
        vocab: int,
        dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_groups: int,
        d_k: int,
        d_v: int,
        l: int = 32,
        d: int = 16,
        l_sel: int = 64,
        n_sel: int = 16,
        w: int = 512,
        grad_checkpointing: bool = False,
        *,
        gc_layers: tuple[int, int] | None = None,
        phi: str = "avg",
        gate: str = "softmax",
        rope_base: float = 10000.0,
        rope_scale: float = 1.0,
        tie_embeddings: bool = False,
        backend: str = "auto",
        attention: str = "nsa",
        embed_std: float = EMBED_STD,
        rule: str = "nsa",
        kv: str = "separate",
        num_first: int = 1,
        num_local: int = 2,
        pool: str = "infllm",
        pool_block: int = 512,
        d_index: int = 64,
        mlp_dim: int = 0,
        mlp: str = "plain",
        norm_eps: float = 1e-6,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        rope_scaling: str = "linear",
        rope_original_len: int = 8192,
        rope_low_freq: float = 1.0,
        rope_high_freq: float = 4.0,
    ) -> None:
        """`attention` "dense" ignores the settings of NSA: blocks, phi, gate, backend and rules.

        `rule` is that of all layers, or a list such as "msa,reuse" that repeats over them. Layers
        with rule "nsa" have three branches unless `kv` is "shared"; all others have one K and V and
        no gates, and those with rule "dense" read all tokens. `embed_std` is that of the embedding;
        an untied head keeps EMBED_STD. `mlp_dim` 0 is 4 * dim.
        """
        super().__init__()
        choices = (("attention", attention, ATTENTIONS), ("kv", kv, KVS), ("mlp", mlp, MLPS))
        for name, choice, known in (*choices, ("rope_scaling", rope_scaling, ROPE_SCALINGS)):
            if choice not in known:
                listed = ", ".join(known)
                raise ValueError(f"{name}={choice!r} is not known; use one of {listed}")
        for name, value in (("vocab", vocab), ("n_layers", n_layers)):
            if value < 1:
                raise ValueError(f"{name}={value}; give a positive size")
        self.vocab = vocab
        self._tile = read("NSA_PREFILL_TILE") or PREFILL_TILE
        """Tokens of a prompt that go through the model at a time, as set when it is built."""
        self.checkpointed = _checkpointed_layers(n_layers, grad_checkpointing, gc_layers)

        scaling = RopeScaling(rope_scaling, rope_original_len, rope_low_freq, rope_high_freq)
        # Built for its checks, too.
        shape = ModelConfig(
            attention=attention, rule=rule, kv=kv, n_layers=n_layers, norm_eps=norm_eps,
            rope_scaling=rope_scaling, rope_original_len=rope_original_len,
            rope_low_freq=rope_low_freq, rope_high_freq=rope_high_freq,
        )  # fmt: skip
        new_attention = partial(
            _new_attention,
            heads={"dim": dim, "n_heads": n_heads, "n_kv_groups": n_kv_groups}
            | {"d_k": d_k, "d_v": d_v, "qkv_bias": qkv_bias}
            | {"qk_norm": qk_norm, "norm_eps": norm_eps},
            sizes={"l": l, "d": d, "l_sel": l_sel, "n_sel": n_sel, "w": w}
            | {"num_first": num_first, "num_local": num_local},
            branches={"phi": phi, "gate": gate},
            choice={"pool": pool, "pool_block": pool_block, "d_index": d_index},
            rope={"rope_base": rope_base, "rope_scale": rope_scale, "rope_scaling": scaling},
            backend=backend,
        )

        def new_block(layer: int) -> Block:
            attn = new_attention(shape, layer)
            kind = SparseBlock if isinstance(attn, SparseAttention) else Block
            return kind(dim, attn, layer, mlp_dim, gated=mlp == "gated", norm_eps=norm_eps)

        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(new_block(i) for i in range(n_layers))
        self.norm = RMSNorm(dim, norm_eps)
        self.lm_head = None if tie_embeddings else nn.Linear(dim, vocab, bias=False)
        self._scale_init(n_layers, embed_std)
        self.index_warm_up = False
        """Whether layers with an indexer read all blocks, while it learns; set by the trainer."""
        self.compiled: list[Callable[..., Tensor]] = []
        """The compiled blocks, for training. A plain list: parameter names do not change."""

    @classmethod
    def from_config(cls, cfg: Config, vocab: int) -> TinyLM:
        """The model that a resolved configuration describes."""
        return cls(**cls.arguments(cfg, vocab))

    @staticmethod
    def arguments(cfg: Config, vocab: int) -> dict[str, Any]:
        """The arguments with which a resolved configuration builds the model."""
        gc_layers = cfg.runtime.gc_layers
        return dict(
            vocab=vocab,
            dim=cfg.model.dim,
            n_layers=cfg.model.n_layers,
            n_heads=cfg.model.n_heads,
            n_kv_groups=cfg.model.n_kv_groups,
            d_k=cfg.model.d_k,
            d_v=cfg.model.d_v,
            l=cfg.nsa.l,
            d=cfg.nsa.d,
            l_sel=cfg.nsa.l_sel,
            n_sel=cfg.nsa.n_sel,
            w=cfg.nsa.w,
            grad_checkpointing=cfg.runtime.gradient_checkpointing,
            gc_layers=parse_layers(gc_layers) if gc_layers else None,
            phi=cfg.nsa.phi,
            gate=cfg.nsa.gate,
            rope_base=cfg.model.rope_base,
            rope_scale=cfg.model.rope_scale,
            tie_embeddings=cfg.model.tie_embeddings,
            backend=cfg.runtime.attention_backend,
            attention=cfg.model.attention,
            embed_std=cfg.model.embed_std,
            rule=cfg.model.rule,
            kv=cfg.model.kv,
            num_first=cfg.nsa.num_first,
            num_local=cfg.nsa.num_local,
            pool=cfg.nsa.pool,
            pool_block=cfg.nsa.pool_block,
            d_index=cfg.nsa.d_index,
            mlp_dim=cfg.model.mlp_dim,
            mlp=cfg.model.mlp,
            norm_eps=cfg.model.norm_eps,
            qkv_bias=cfg.model.qkv_bias,
            qk_norm=cfg.model.qk_norm,
            rope_scaling=cfg.model.rope_scaling,
            rope_original_len=cfg.model.rope_original_len,
            rope_low_freq=cfg.model.rope_low_freq,
            rope_high_freq=cfg.model.rope_high_freq,
        )

    def forward(
        self,
        ids: Tensor,  # [B, S] integer
        *,
        cu_seqlens: Tensor | None = None,  # [docs + 1] int32
        stats: AttentionStats | None = None,
    ) -> Tensor:  # [B, S, V]
        return self.head(self.hidden(ids, cu_seqlens=cu_seqlens, stats=stats))

    def hidden(
        self,
        ids: Tensor,  # [B, S] integer
        *,
        cu_seqlens: Tensor | None = None,  # [docs + 1] int32
        stats: AttentionStats | None = None,
        index_losses: list[Tensor] | None = None,
    ) -> Tensor:  # [B, S, dim]
        """Everything before the output head; in training, the losses of indexers are appended to
        `index_losses`."""
        x = self._embed(ids)
        # One RoPE table for all layers.
        rope = self.layers[0].attn.rope(self.positions(ids, cu_seqlens), x.dtype)
        trains = self.training and torch.is_grad_enabled()
        blocks: Sequence[Callable[..., Any]] = self.layers
        if self.compiled and trains and stats is None:
            blocks = self.compiled
        # No dropout anywhere, so recomputation does not need the RNG state.
        index: Tensor | None = None
        for i, block in enumerate(blocks):
            given: tuple[Any, ...] = (x, rope, cu_seqlens, stats)
            if isinstance(self.blocks[i], SparseBlock):
                given = (*given, index, self.index_warm_up and trains)
            if trains and i in self.checkpointed:
                done = checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                done = block(*given)
            if not isinstance(done, tuple):
                x = done
                continue
            x, index, loss = done
            if index_losses is not None and loss is not None:
                index_losses.append(loss)
        return self.norm(x)

    def positions(self, ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:  # [B, S] -> [S]
        """Where the tokens are in their documents."""
        return document_positions(ids.shape[1], cu_seqlens, ids.device)

    def own_tokens(self, x: Tensor) -> Tensor:  # [B, S] -> [B, T]
        """What this process computes of a row: all tokens, or its parts (nsa.parallel)."""
        return x

    @property
    def layers(self) -> list[Block]:
        """The blocks as a typed list; ModuleList hides their type."""
        return cast("list[Block]", list(self.blocks))

    def indexer_parameters(self) -> Iterator[nn.Parameter]:
        """The weights of all rules that learn."""
        for block in self.layers:
            rule = block.attn.rule if isinstance(block, SparseBlock) else None
            if rule is not None and rule.learns:
                yield from rule.parameters()

    def head(self, hidden: Tensor) -> Tensor:  # [B, S, dim] -> [B, S, V]
        """Logits by the output head: its own matrix, or the tied embedding."""
        return nn.functional.linear(hidden, self.head_weight)

    @property
    def head_weight(self) -> Tensor:  # [V, dim]
        """The matrix of the output head."""
        return self.embed.weight if self.lm_head is None else self.lm_head.weight

    def mean_loss(
        self,
        hidden: Tensor,  # [N, dim]
        targets: Tensor,  # [N] integer
        loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:  # []
        """`loss` of hidden states, head matrix [V, dim] and targets: a mean over targets >= 0."""
        return loss(hidden, self.head_weight, targets)

    def new_cache(self, batch: int, max_len: int) -> ModelCache:
        """An empty cache for `batch` sequences of at most `max_len` tokens.

        Its dtype is that of the keys which the model computes: autocast's where it is on.
        """
        return ModelCache([block.attn.new_cache(batch, max_len) for block in self.layers])

    def new_paged_cache(self, num_places: int, max_len: int, num_pages: int) -> PagedModelCache:
        """A paged cache for sequences of different lengths: at most `num_places` at a time, of at
        most `max_len` tokens, in `num_pages` pages of one selection block each."""
        first = self.layers[0].attn
        if not all(isinstance(block.attn, NSAAttention) for block in self.layers):
            raise ValueError(
                "only layers with the branches of NSA have a paged cache, not dense ones or those "
                "of another rule; use new_cache()"
            )
        device = self.embed.weight.device
        pages = Pages(num_pages, num_places, max_len, first.spec.l_sel, device)
        return PagedModelCache(pages, [block.attn.new_paged_cache(pages) for block in self.layers])

    @torch.no_grad()
    def prefill(self, ids: Tensor, cache: ModelCache) -> Tensor:  # [B, T] -> [B, T, V]
        """Append T tokens to the cache; on a cache with tokens this is chunked prefill."""
        return self.head(self.norm(self._prefill(ids, cache)))

    def _prefill(self, ids: Tensor, cache: ModelCache) -> Tensor:  # [B, T] -> [B, T, dim]
        x, before = self._embed(ids), None
        for block, layer in zip(self.layers, cache.layers, strict=True):
            x = block.prefill(x, layer, *_reused(block, before))
            before = layer
        return x

    @torch.no_grad()
    def prefill_last(self, ids: Tensor, cache: ModelCache) -> Tensor:  # [B, T] -> [B, V]
        """Append a prompt of any length tile by tile; return the logits of the next token only.

        Memory beside the cache is that of one tile: the logits of a prompt of 64k tokens with
        GPT-2's vocabulary would take 13 GB.
        """
        # Checked here, so that a prompt that is too long fails before its first tile.
        if cache.length + ids.shape[-1] > cache.max_len:
            raise ValueError(
                f"{cache.length} + {ids.shape[-1]} tokens do not fit a cache for {cache.max_len}; "
                f"make it with max_len >= {cache.length + ids.shape[-1]}"
            )
        for part in ids.split(self._tile, dim=-1):
            x = self._prefill(part, cache)
        return self.head(self.norm(x[:, -1]))

    @torch.no_grad()
    def append(
        self, ids: Tensor, cache: ModelCache | PagedModelCache
    ) -> Tensor:  # [B, T] -> [B, T, dim]
        """Append T tokens and return their hidden states, for `head`: a prompt tile by tile, one
        more token by a decode step. A paged cache takes one token."""
        if isinstance(cache, PagedModelCache) or (ids.shape[-1] == 1 and cache.length):
            return self.norm(self._step(ids, cache))
        parts = ids.split(self._tile, dim=-1)
        return self.norm(torch.cat([self._prefill(part, cache) for part in parts], dim=1))

    @torch.no_grad()
    def step(
        self, ids: Tensor, cache: ModelCache | PagedModelCache
    ) -> Tensor:  # [B] or [B, 1] -> [B, V]
        """Append one token per sequence; return the logits of the next one."""
        return self.head(self.norm(self._step(ids, cache)))[:, 0]

    def _step(self, ids: Tensor, cache: ModelCache | PagedModelCache) -> Tensor:  # -> [B, 1, dim]
        x = self._embed(ids[:, None] if ids.dim() == 1 else ids)
        rope = self.layers[0].attn.rope_of_each(cache.layers[0].lengths, x.dtype)
        before = None
        for block, layer in zip(self.layers, cache.layers, strict=True):
            x = block.step(x, layer, rope, *_reused(block, before))
            before = layer
        return x

    def _embed(self, ids: Tensor) -> Tensor:
        if ids.dim() != 2 or ids.shape[0] == 0 or ids.shape[1] == 0:
            raise ValueError(f"ids has shape {list(ids.shape)}; give [B, S] with B, S >= 1")
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"ids has dtype {ids.dtype}; give integer token ids")
        return self.embed(ids)

    def _scale_init(self, n_layers: int, embed_std: float) -> None:
        """A small head (first loss near ln V); residual branches scaled by 1 / sqrt(2 * layers)."""
        nn.init.normal_(self.embed.weight, std=embed_std)
        if self.lm_head is not None:
            nn.init.normal_(self.lm_head.weight, std=EMBED_STD)
        if self.embed.weight.is_meta:
            return  # a meta tensor has no values, and the division would make torch load sympy
        with torch.no_grad():
            # Two residual branches per layer: attention and MLP.
            for block in self.layers:
                block.attn.out.weight /= math.sqrt(2 * n_layers)
                block.mlp.fc2.weight /= math.sqrt(2 * n_layers)


def _new_attention(
    shape: ModelConfig,  # attention, rules and kv of the layers
    layer: int,
    *,
    heads: dict[str, Any],
    sizes: dict[str, Any],  # of BlockSpec
    branches: dict[str, Any],
    choice: dict[str, Any],
    rope: dict[str, Any],
    backend: str,
) -> Attention:
    """The attention of a layer: dense, NSA with its branches, or a rule with one K and V."""
    place = layer % len(shape.rules)
    if shape.attention == "dense" or shape.rules[place] == "dense":
        return DenseAttention(**heads, **rope)
    if not shape.branched[place]:
        spec, rule = BlockSpec(**sizes), shape.rules[place]
        return SparseAttention(**heads, spec=spec, rule=rule, backend=backend, **choice, **rope)
    return NSAAttention(**heads, **sizes, **branches, **rope, backend=backend)


def _reused(block: Block, before: Any) -> tuple[Tensor, ...]:
    """The index of the layer before, for a layer that takes it; `before` is that layer's cache."""
    if isinstance(block, SparseBlock) and block.attn.rule is None:
        return (before.index,)
    return ()


def _checkpointed_layers(
    n_layers: int, grad_checkpointing: bool, gc_layers: tuple[int, int] | None
) -> range:
    """Layers that recompute in backward: none, all, or first .. last - 1 of `gc_layers`."""
    if not grad_checkpointing:
        return range(0)
    first, last = gc_layers or (0, n_layers)
    if not 0 <= first < last <= n_layers:
        raise ValueError(
            f"gc_layers={first}:{last} does not fit {n_layers} layers; give first:last with "
            f"0 <= first < last <= {n_layers}"
        )
    return range(first, last)

"""DenseAttention: causal attention to every earlier token, with NSAAttention's interface.

The baseline for NSA: the same heads, head dims, positions and initial scales, but one K and V
instead of three, and no gates.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.config.env import read
from nsa.model.attention import check_sizes
from nsa.model.cache import Cache, cache_dtype, check_one_token
from nsa.model.rope import LINEAR, Rope, RopeScaling, Rotary, apply_rope, document_positions
from nsa.model.stats import AttentionStats
from nsa.ops.checks import check_documents
from nsa.ops.plan import Switches, read_switches

NOT_FLASH = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


class DenseCache(Cache):
    """Keys and values of one layer for `batch` sequences of equal length, at most `max_len`."""

    def __init__(
        self,
        *,
        batch: int,
        max_len: int,
        num_groups: int,
        d_k: int,
        d_v: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(batch, max_len, dtype, device)
        size = (batch, num_groups, max_len)
        self.k = torch.empty(*size, d_k, dtype=dtype, device=device)
        self.v = torch.empty(*size, d_v, dtype=dtype, device=device)

    def nbytes(self) -> int:
        """Memory of both buffers."""
        return self.k.nbytes + self.v.nbytes

    def fill(self, k: Tensor, v: Tensor) -> None:  # [B, Hkv, T, D]
        """Take T tokens that were computed elsewhere, into an empty cache."""
        assert self.length == 0, "fill is for an empty cache"
        self.append(k, v)

    def append(
        self, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:  # [B, Hkv, T, D] -> [B, Hkv, all, D]
        """Append T tokens; return the keys and values of all tokens."""
        end = self.length + k.shape[2]
        self.k[:, :, self.length : end], self.v[:, :, self.length : end] = k, v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


class DenseAttention(Rotary):
    """Causal grouped-query attention with its own projections: [B, S, dim] -> [B, S, dim]."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_groups: int,
        d_k: int,
        d_v: int,
        *,
        rope_base: float = 10000.0,
        rope_scale: float = 1.0,
        rope_scaling: RopeScaling = LINEAR,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(d_k, rope_base, rope_scale, rope_scaling)
        check_sizes(dim, n_heads, n_kv_groups, d_k, d_v, rope_base, rope_scale)
        self.num_heads, self.num_groups, self.d_v = n_heads, n_kv_groups, d_v
        # The environment as it is now: no later change reaches this module.
        self._tile = read("NSA_PREFILL_TILE") if read("NSA_PREFILL_BATCHED") else 1
        self._backends = _allowed_backends(read_switches())
        self.qkv = nn.Linear(dim, n_heads * d_k + n_kv_groups * (d_k + d_v), bias=qkv_bias)
        self.add_head_norms(qk_norm, norm_eps)
        self.out = nn.Linear(n_heads * d_v, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Projections at half of unit gain, as in NSAAttention."""
        nn.init.normal_(self.qkv.weight, std=0.5 * self.qkv.in_features**-0.5)
        nn.init.normal_(self.out.weight, std=0.5 * self.out.in_features**-0.5)
        if self.qkv.bias is not None:
            nn.init.zeros_(self.qkv.bias)

    def forward(
        self,
        x: Tensor,  # [B, S, dim]
        *,
        cu_seqlens: Tensor | None = None,  # [docs + 1] int32
        rope: Rope | None = None,  # tables of all positions; None: computed here
        stats: AttentionStats | None = None,
        layer: int | None = None,
    ) -> Tensor:  # [B, S, dim]
        """Attention over whole sequences; packed documents do not see each other.

        There are no gates and no selection, so nothing is recorded in `stats`.
        """
        doc_lens = check_documents(cu_seqlens, x.shape[0], x.shape[1], x.device)
        if rope is None:
            rope = self.rope(document_positions(x.shape[1], cu_seqlens, x.device), x.dtype)
        q, k, v = self._project(x, rope)
        if len(doc_lens) == 1:
            return self._merge(self._attend(q, k, v, is_causal=True))
        documents = zip(*(t.split(doc_lens, dim=2) for t in (q, k, v)), strict=True)
        outs = [self._attend(*document, is_causal=True) for document in documents]
        return self._merge(torch.cat(outs, dim=2))

    def new_cache(self, batch: int, max_len: int) -> DenseCache:
        """An empty cache for `batch` sequences of at most `max_len` tokens."""
        weight = self.qkv.weight
        return DenseCache(
            batch=batch,
            max_len=max_len,
            num_groups=self.num_groups,
            d_k=self.d_k,
            d_v=self.d_v,
            dtype=cache_dtype(weight),
            device=weight.device,
        )

    @torch.no_grad()
    def prefill(self, x: Tensor, cache: DenseCache) -> Tensor:  # [B, T, dim] -> [B, T, dim]
        """Append T tokens; on a filled cache this is chunked prefill."""
        parts = x.split(self._tile or x.shape[1], dim=1)
        return torch.cat([self._append(part, cache) for part in parts], dim=1)

    @torch.no_grad()
    def step(
        self, x: Tensor, cache: DenseCache, rope: Rope | None = None
    ) -> Tensor:  # [B, 1, dim] -> [B, 1, dim]
        """Append one token per sequence; `rope` are the tables of the positions."""
        check_one_token(x)
        return self._append(x, cache, rope)

    def _append(self, x: Tensor, cache: DenseCache, rope: Rope | None = None) -> Tensor:
        cache.check(x)
        first, num_tokens = cache.length, x.shape[1]
        positions = document_positions(num_tokens, None, x.device, first)
        projected = self._project(x, rope or self.rope(positions, x.dtype))
        q, k, v = cache.in_dtype(self.qkv.weight, *projected)
        k, v = cache.append(k, v)
        if num_tokens == 1:
            return self._merge(self._attend(q, k, v))  # the newest token sees every key: no mask
        if first == 0:
            return self._merge(self._attend(q, k, v, is_causal=True))
        # Chunked prefill: is_causal would align the mask with the first key, not with the last.
        seen = torch.arange(cache.length, device=x.device) <= positions[:, None]  # [T, all]
        return self._merge(self._attend(q, k, v, attn_mask=seen))

    def _project(
        self, x: Tensor, rope: Rope
    ) -> tuple[Tensor, Tensor, Tensor]:  # [B, Hq, S, Dk], [B, Hkv, S, Dk], [B, Hkv, S, Dv]
        """One matrix product; q and k are adjacent columns, rotated together."""
        num_keys = self.num_heads + self.num_groups
        heads, v = self.qkv(x).split([num_keys * self.d_k, self.num_groups * self.d_v], dim=-1)
        heads = self.norm_heads(heads.unflatten(-1, (num_keys, self.d_k)), self.num_heads)
        rotated = apply_rope(heads, rope)
        q, k = rotated.transpose(1, 2).split([self.num_heads, self.num_groups], dim=1)
        return q, k, v.unflatten(-1, (self.num_groups, self.d_v)).transpose(1, 2)

    def _attend(
        self,
        q: Tensor,  # [B, Hq, T, Dk]
        k: Tensor,  # [B, Hkv, K, Dk]
        v: Tensor,  # [B, Hkv, K, Dv]
        *,
        is_causal: bool = False,
        attn_mask: Tensor | None = None,  # [T, K] bool
    ) -> Tensor:  # [B, Hq, T, Dv]
        with sdpa_kernel(self._backends) if self._backends else nullcontext():
            return F.scaled_dot_product_attention(
                *(q, k, v),
                attn_mask=attn_mask,
                is_causal=is_causal,
                enable_gqa=q.shape[1] != k.shape[1],
            )

    def _merge(self, out: Tensor) -> Tensor:  # [B, Hq, S, Dv] -> [B, S, dim]
        return self.out(out.transpose(1, 2).flatten(2))


def describe_backends() -> str:
    """The backends of dense attention, for the line that a run prints."""
    switches = read_switches()
    allowed = "no flash" if switches.no_flash else "flash only" if switches.flash_only else "any"
    return f"scaled_dot_product_attention (backends: {allowed})"


def _allowed_backends(switches: Switches) -> list[SDPBackend]:
    """What NSA_SDPA_NO_FLASH and NSA_SDPA_FLASH_ONLY allow; empty: whatever the caller allows."""
    if switches.flash_only:
        return [SDPBackend.FLASH_ATTENTION]
    return list(NOT_FLASH) if switches.no_flash else []

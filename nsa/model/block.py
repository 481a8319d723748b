"""One transformer block: RMSNorm, attention and MLP, each with a residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.config.schema import MLP_RATIO
from nsa.model.attention import NSAAttention
from nsa.model.dense import DenseAttention
from nsa.model.rope import Rope
from nsa.model.sparse import Attended, SparseAttention
from nsa.model.stats import AttentionStats


class RMSNorm(nn.Module):
    """x / rms(x) * weight, eps 1e-6, computed in fp32 (or float64), whatever the model's dtype.

    Under autocast the result has autocast's dtype: only products read it, and each of them would
    otherwise make its own rounded copy.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if x.is_cuda and x.dtype == self.weight.dtype and not torch.is_autocast_enabled(kind):
            # torch's fused kernel computes in fp32 and rounds once, without a copy of x.
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        wide = x if x.dtype == torch.float64 else x.float()
        normed = F.rms_norm(wide, (x.shape[-1],), self.weight.to(wide.dtype), self.eps)
        rounded = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return normed.to(rounded)


# --- The block ---

Attention = NSAAttention | DenseAttention
"""Both, and SparseAttention, have the same methods; each makes caches of its own type."""


class MLP(nn.Module):
    """fc2(silu(fc1(x))), not gated, no bias."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, width, bias=False)
        self.fc2 = nn.Linear(width, dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.fc1, self.fc2):
            nn.init.normal_(layer.weight, std=0.5 * layer.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, dim] -> [B, S, dim]
        return self.fc2(nn.functional.silu(self.fc1(x)))


class Block(nn.Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(self, dim: int, attn: Attention, layer: int, mlp_dim: int = 0) -> None:
        """`mlp_dim` 0 is 4 * dim."""
        super().__init__()
        self.layer = layer
        self.norm1 = RMSNorm(dim)
        self.attn: Any = attn
        self.norm2 = RMSNorm(dim)
        self.mlp = MLP(dim, mlp_dim or MLP_RATIO * dim)

    def forward(
        self,
        x: Tensor,  # [B, S, dim]
        rope: Rope | None = None,
        cu_seqlens: Tensor | None = None,  # [docs + 1] int32
        stats: AttentionStats | None = None,
    ) -> Tensor:  # [B, S, dim]
        """A block without an index to give or take."""
        # The layer index is a constant to Dynamo: passing it would compile every layer anew.
        layer = None if torch.compiler.is_compiling() else self.layer
        attended = self.attn(
            self.norm1(x), rope=rope, cu_seqlens=cu_seqlens, stats=stats, layer=layer
        )
        return self._add_mlp(x + attended)

    def prefill(self, x: Tensor, cache: Any) -> Tensor:  # [B, T, dim] -> [B, T, dim]
        return self._add_mlp(x + self.attn.prefill(self.norm1(x), cache))

    def step(
        self, x: Tensor, cache: Any, rope: Rope | None = None
    ) -> Tensor:  # [B, 1, dim] -> [B, 1, dim]
        return self._add_mlp(x + self.attn.step(self.norm1(x), cache, rope))

    def _add_mlp(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm2(x))


class SparseBlock(Block):
    """A block whose attention gives its index to later layers, or takes that of an earlier one."""

    attn: SparseAttention

    def forward(  # type: ignore[override]
        self,
        x: Tensor,  # [B, S, dim]
        rope: Rope | None = None,
        cu_seqlens: Tensor | None = None,  # [docs + 1] int32
        stats: AttentionStats | None = None,
        index: Tensor | None = None,  # [B, S, H, n_sel] int32
        warm_up: bool = False,
    ) -> Attended:
        """The block's output, its index, and the loss of its indexer."""
        layer = None if torch.compiler.is_compiling() else self.layer  # see Block.forward
        out, blocks, loss = self.attn(
            self.norm1(x), rope=rope, cu_seqlens=cu_seqlens, stats=stats, layer=layer, index=index,
            warm_up=warm_up,
        )  # fmt: skip
        return self._add_mlp(x + out), blocks, loss

    def prefill(self, x: Tensor, cache: Any, index: Tensor | None = None) -> Tensor:
        return self._add_mlp(x + self.attn.prefill(self.norm1(x), cache, index))

    def step(
        self, x: Tensor, cache: Any, rope: Rope | None = None, index: Tensor | None = None
    ) -> Tensor:  # [B, 1, dim] -> [B, 1, dim]
        return self._add_mlp(x + self.attn.step(self.norm1(x), cache, rope, index))

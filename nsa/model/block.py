"""One transformer block: RMSNorm, attention and MLP, each with a residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nsa.config.schema import MLP_RATIO
from nsa.model.attention import NSAAttention
from nsa.model.dense import DenseAttention
from nsa.model.fused import add_product, norm_and_activate
from nsa.model.rope import RMSNorm, Rope
from nsa.model.sparse import Attended, SparseAttention
from nsa.model.stats import AttentionStats

Attention = NSAAttention | DenseAttention
"""Both, and SparseAttention, have the same methods; each makes caches of its own type."""


class MLP(nn.Module):
    """fc2(silu(fc1(x))); gated: fc2(silu(gate(x)) * fc1(x)). No bias."""

    def __init__(self, dim: int, width: int, *, gated: bool = False) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, width, bias=False)
        self.fc2 = nn.Linear(width, dim, bias=False)
        self.gate = nn.Linear(dim, width, bias=False) if gated else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for layer in (self.fc1, self.fc2, self.gate):
            if layer is not None:
                nn.init.normal_(layer.weight, std=0.5 * layer.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, dim] -> [B, S, dim]
        if self.gate is None:
            return self.fc2(nn.functional.silu(self.fc1(x)))
        return self.fc2(nn.functional.silu(self.gate(x)) * self.fc1(x))

    def add_step(self, x: Tensor, norm: RMSNorm) -> Tensor:  # [B, 1, dim] -> [B, 1, dim]
        """x + mlp(norm(x)), in a decode step."""
        if type(self) is not MLP or self._forward_hooks or self._forward_pre_hooks:
            return x + self(norm(x))
        return add_product(x, self.fc2, norm_and_activate(x, norm, self.fc1, self.gate))


class Block(nn.Module):
    """x + attn(norm1(x)), then x + mlp(norm2(x))."""

    def __init__(
        self,
        dim: int,
        attn: Attention,
        layer: int,
        mlp_dim: int = 0,
        *,
        gated: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        """`mlp_dim` 0 is 4 * dim."""
        super().__init__()
        self.layer = layer
        self.norm1 = RMSNorm(dim, norm_eps)
        self.attn: Any = attn
        self.norm2 = RMSNorm(dim, norm_eps)
        self.mlp = MLP(dim, mlp_dim or MLP_RATIO * dim, gated=gated)

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
        return self.mlp.add_step(self.attn.add_step(x, self.norm1, cache, rope), self.norm2)

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
        return self.mlp.add_step(self.attn.add_step(x, self.norm1, cache, rope, index), self.norm2)

"""Queries and keys before attention: the norm of heads (QK-norm), and rotary positions (RoPE) in
the half-split layout of Llama and Hugging Face models."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.ops.checks import refuse_captured_documents
from nsa.ops.eager.attention import compute_dtype


class Rope(NamedTuple):
    """Cosines and sines of the positions of a sequence."""

    cos: Tensor  # [S, Dk / 2], or [B, S, Dk / 2]
    sin: Tensor


class RopeScaling(NamedTuple):
    """How `scale` stretches a context: all pairs alike, or only those that turn slowly."""

    kind: str = "linear"
    """linear, llama3 or yarn."""
    original_len: int = 8192
    """llama3, yarn: context of the first training, in tokens."""
    low_freq: float = 1.0
    """Pairs with at most so many turns in that context are divided by the scale."""
    high_freq: float = 4.0
    """Pairs with at least so many turns stay as they are; those between are mixed."""


LINEAR = RopeScaling()


def rope_tables(
    positions: Tensor,  # [S] integer
    dim: int,
    *,
    base: float,
    scale: float,
    scaling: RopeScaling = LINEAR,
    dtype: torch.dtype = torch.float32,
) -> Rope:
    """Tables for positions / scale. Angles are formed in float64: fp32 loses them at 64k tokens."""
    # angle(t, i) = t / scale * base^(-2 i / dim) for the pairs i < dim / 2: [S, dim / 2].
    pair = torch.arange(dim // 2, device=positions.device, dtype=torch.float64)
    frequency = base ** (-2 * pair / dim)
    if scaling.kind == "linear":
        angle = (positions.double() / scale)[:, None] * frequency
        return Rope(angle.cos().to(dtype), angle.sin().to(dtype))
    kept = _kept_by_llama3(frequency, scaling)
    if scaling.kind == "yarn":
        kept = _kept_by_yarn(pair, dim, base, scaling)
    # A weighted mean of the frequency as it is and divided by the scale.
    angle = positions.double()[:, None] * frequency * (kept + (1 - kept) / scale)
    # YaRN also sharpens the softmax: q and k grow by the same factor.
    size = 0.1 * math.log(scale) + 1 if scaling.kind == "yarn" and scale > 1 else 1.0
    return Rope((size * angle.cos()).to(dtype), (size * angle.sin()).to(dtype))


def _kept_by_llama3(frequency: Tensor, scaling: RopeScaling) -> Tensor:  # [dim / 2] -> the same
    """How much of each frequency stays, 0 to 1: by its turns in the original context."""
    turns = scaling.original_len * frequency / (2 * math.pi)
    return ((turns - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)).clamp(0, 1)


def _kept_by_yarn(
    pair: Tensor, dim: int, base: float, scaling: RopeScaling
) -> Tensor:  # [dim / 2] -> the same
    """The same by the number of the pair, between the whole pairs nearest to both limits."""

    def place(turns: float) -> float:  # the pair with so many turns in the original context
        return dim * math.log(scaling.original_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(place(scaling.high_freq)), 0)
    last = min(math.ceil(place(scaling.low_freq)), dim - 1)
    return 1 - ((pair - first) / max(last - first, 1e-3)).clamp(0, 1)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 (or float64), whatever the model's dtype.

    Under autocast the result has autocast's dtype: only products read it, and each of them would
    otherwise make its own rounded copy.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., D], [D] -> [..., D]
    """RMSNorm with a weight as it is given."""
    kind = x.device.type
    if x.is_cuda and x.dtype == weight.dtype and not torch.is_autocast_enabled(kind):
        # torch's fused kernel computes in fp32 and rounds once, without a copy of x.
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x if x.dtype == torch.float64 else x.float()
    normed = F.rms_norm(wide, (x.shape[-1],), weight.to(wide.dtype), eps)
    rounded = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return normed.to(rounded)


class Rotary(nn.Module):
    """Base of the attention layers: heads are normed if asked for, and rotated by position."""

    step: Any
    """Appends one token per sequence to a cache: [B, 1, dim] -> [B, 1, dim]."""
    is_one_graph = True
    """Whether torch.compile makes one graph of the layer; otherwise it leaves it for `attend`."""

    def __init__(self, d_k: int, base: float, scale: float, scaling: RopeScaling = LINEAR) -> None:
        super().__init__()
        self.d_k, self.rope_base, self.rope_scale, self.rope_scaling = d_k, base, scale, scaling

    def add_head_norms(self, qk_norm: bool, eps: float) -> None:
        """With `qk_norm`, queries and keys have a norm of their own over the d_k of a head."""
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm, self.k_norm = RMSNorm(self.d_k, eps), RMSNorm(self.d_k, eps)

    def norm_heads(self, heads: Tensor, num_queries: int) -> Tensor:  # [B, S, H, Dk] -> the same
        """Norm the heads, of which the first are queries and all others keys."""
        if not self.qk_norm:
            return heads
        q, k = heads.split([num_queries, heads.shape[2] - num_queries], dim=2)
        return torch.cat([self.q_norm(q), self.k_norm(k)], dim=2)

    def add_step(self, x: Tensor, norm: RMSNorm, *rest: Any) -> Tensor:  # [B, 1, dim] -> the same
        """x + step(norm(x)): the attention of a block in a decode step."""
        attended: Tensor = self.step(norm(x), *rest)
        return x + attended

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Tables for positions [S]; fp32, or float64 for a float64 model."""
        return rope_tables(
            positions,
            self.d_k,
            base=self.rope_base,
            scale=self.rope_scale,
            scaling=self.rope_scaling,
            dtype=compute_dtype(dtype),
        )

    def rope_of_each(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Tables for one token of every sequence, at positions [B] of its own: [B, 1, Dk / 2]."""
        cos, sin = self.rope(positions, dtype)
        return Rope(cos[:, None], sin[:, None])


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate [B, S, H, Dk]; computed in the tables' dtype, returned in x's."""
    cos, sin = rope.cos.unsqueeze(-2), rope.sin.unsqueeze(-2)
    # A compiler fuses the passes and their casts; it needs no autograd function.
    if torch.compiler.is_compiling():
        return _rotate(x.to(cos.dtype), cos, sin).to(x.dtype)
    rotated: Tensor = _Rotation.apply(x, cos, sin)
    return rotated


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the inverse rotation: one pass, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x1 cos - x2 sin, x2 cos + x1 sin; x is not copied to the tables' dtype, products promote."""
    first, second = x.chunk(2, dim=-1)
    turned = (
        torch.addcmul(first * cos, second, sin, value=-1),
        torch.addcmul(second * cos, first, sin),
    )
    return torch.cat([half.to(x.dtype) for half in turned], dim=-1)


def document_positions(
    seq_len: int, cu_seqlens: Tensor | None, device: torch.device, first: int = 0
) -> Tensor:
    """Positions [S] from `first`, counted from the start of each packed document."""
    if cu_seqlens is None:
        return torch.arange(first, first + seq_len, device=device)
    refuse_captured_documents(device)
    token = torch.arange(first, first + seq_len, device=device)
    if device.type == "cuda" and not cu_seqlens.is_cuda:
        # From pinned memory the copy is asynchronous.
        cu_seqlens = cu_seqlens.pin_memory()
    cu_seqlens = cu_seqlens.to(device, non_blocking=True)
    document = torch.bucketize(token, cu_seqlens[1:], right=True)
    return token - cu_seqlens[document]

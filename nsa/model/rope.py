"""Rotary positions (RoPE) per head, in the half-split layout of Llama and Hugging Face models."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nsa.ops.checks import refuse_captured_documents
from nsa.ops.eager.attention import compute_dtype


class Rope(NamedTuple):
    """Cosines and sines of the positions of a sequence."""

    cos: Tensor  # [S, Dk / 2], or [B, S, Dk / 2]
    sin: Tensor


def rope_tables(
    positions: Tensor,  # [S] integer
    dim: int,
    *,
    base: float,
    scale: float,
    dtype: torch.dtype = torch.float32,
) -> Rope:
    """Tables for positions / scale. Angles are formed in float64: fp32 loses them at 64k tokens."""
    # angle(t, i) = t / scale * base^(-2 i / dim) for the pairs i < dim / 2: [S, dim / 2].
    pair = torch.arange(dim // 2, device=positions.device, dtype=torch.float64)
    frequency = base ** (-2 * pair / dim)
    angle = (positions.double() / scale)[:, None] * frequency
    return Rope(angle.cos().to(dtype), angle.sin().to(dtype))


class Rotary(nn.Module):
    """Base of the attention layers: a module whose heads are rotated by position."""

    def __init__(self, d_k: int, base: float, scale: float) -> None:
        super().__init__()
        self.d_k, self.rope_base, self.rope_scale = d_k, base, scale

    def rope(self, positions: Tensor, dtype: torch.dtype) -> Rope:
        """Tables for positions [S]; fp32, or float64 for a float64 model."""
        return rope_tables(
            positions,
            self.d_k,
            base=self.rope_base,
            scale=self.rope_scale,
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

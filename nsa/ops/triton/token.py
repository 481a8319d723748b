"""Launching what a new token needs before attention."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.triton.kernels import token
from nsa.ops.triton.start import Launch, Memo, form, start
from nsa.ops.triton.tiles import padded

_memo: Memo = {}


def rotate_and_gate(
    heads: Tensor,  # [B, 1, H, D]
    tables: tuple[Tensor, Tensor],  # cosines and sines [B, 1, D / 2] fp32
    logits: Tensor,  # [B, 1, 3 * Hq]
    num_rotated: int,
    *,
    softmax: bool,  # else sigmoid
) -> tuple[Tensor, Tensor]:  # [B, 1, H, D], [B, 1, Hq, 3]
    """The heads, the first of them rotated, and the gates of the query heads, in one launch.

    Gates are fp32 beside bf16, of the heads' dtype otherwise.
    """
    batch, _, num_heads, dim = heads.shape
    num_gated = logits.shape[2] // 3
    rotated = torch.empty((batch, 1, num_heads, dim), dtype=heads.dtype, device=heads.device)
    wide = torch.float32 if heads.dtype == torch.bfloat16 else heads.dtype
    gates = torch.empty((batch, 1, num_gated, 3), dtype=wide, device=heads.device)
    cos, sin = tables
    start(
        _memo, (form(heads, cos, sin, logits), num_rotated, softmax), token.rotate_and_gate,
        (heads, cos, sin, logits, rotated, gates),
        lambda: Launch.plain(
            (num_heads, batch),
            (
                num_heads, num_gated, num_rotated, heads.stride(0), heads.stride(2),
                cos.stride(0), logits.stride(0),
            ),
            {"D": dim, "HALF_PAD": padded(dim // 2), "SOFTMAX": softmax},
            num_warps=1,
        ),
    )  # fmt: skip
    return rotated, gates

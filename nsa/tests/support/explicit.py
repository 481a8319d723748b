"""NSAAttention written out from its weights.

Nothing is shared with how the layer projects, rotates and gates: a mistake there cannot be on both
sides of a comparison.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from nsa import NSAAttention, nsa_attention
from nsa.model.rope import RMSNorm


def explicit_attention(module: NSAAttention, x: Tensor) -> Tensor:  # [B, S, dim] -> [B, S, dim]
    """The layer on one document: each query and key turned by its position, then the oracle.

    The mean of a block is taken of turned keys; the learned phi turns what it makes of a block, by
    the position of the block's first token.
    """
    q, k_sel, k_win, k_cmp, v_cmp, v_sel, v_win = _streams(module, x)
    token = torch.arange(x.shape[1])
    start = torch.arange(module.spec.num_cmp(x.shape[1])) * module.spec.d
    turn, blocks = partial(_turn, module), partial(_compress, module, start.tolist())
    learned = module.phi == "mlp"
    k_cmp = turn(blocks(k_cmp, "phi_k"), start) if learned else blocks(turn(k_cmp, token))
    v_cmp = blocks(v_cmp, "phi_v") if learned else blocks(v_cmp)
    q, k_sel, k_win = (turn(heads, token) for heads in (q, k_sel, k_win))
    logits = (x @ module.gate.weight.T + module.gate.bias).unflatten(-1, (-1, 3))
    gates = logits.softmax(dim=-1) if module.gate_kind == "softmax" else logits.sigmoid()
    streams = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    out = nsa_attention(*streams, module.spec, backend="reference")
    return out.flatten(2) @ module.out.weight.T


def _streams(module: NSAAttention, x: Tensor) -> list[Tensor]:
    """q, k_sel, k_win, k_cmp, v_cmp, v_sel, v_win, each [B, S, H, D]: the columns of qkv."""
    heads = [module.num_heads] + 6 * [module.num_groups]
    dims = 4 * [module.d_k] + 3 * [module.d_v]
    sizes = [h * dim for h, dim in zip(heads, dims, strict=True)]
    bias = 0 if module.qkv.bias is None else module.qkv.bias
    columns = (x @ module.qkv.weight.T + bias).split(sizes, dim=-1)
    streams = [y.unflatten(-1, (-1, dim)) for y, dim in zip(columns, dims, strict=True)]
    if not module.qk_norm:
        return streams
    norms = [module.q_norm] + 3 * [module.k_norm]
    return [_norm(y, n) for y, n in zip(streams[:4], norms, strict=True)] + streams[4:]


def _norm(x: Tensor, norm: RMSNorm) -> Tensor:  # [B, S, H, Dk]
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def _compress(
    module: NSAAttention, starts: list[int], x: Tensor, phi: str | None = None
) -> Tensor:  # [B, S, H, D] -> [B, N, H, D]
    """Block by block: the learned phi of that name, or the mean."""
    length, made = module.spec.l, [x[:, :0]]
    for start in starts:
        block = x[:, start : start + length]
        made.append(getattr(module, phi)(block, [length]) if phi else block.mean(1, keepdim=True))
    return torch.cat(made, dim=1)


def _turn(module: NSAAttention, x: Tensor, positions: Tensor) -> Tensor:
    """All heads of [B, S, H, Dk]: its halves are complex numbers, multiplied by e^(i angle)."""
    half = module.d_k // 2
    frequency = module.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    if module.rope_scaling.kind == "llama3":
        frequency = torch.stack([_llama3(f, module) for f in frequency])
    else:
        frequency = frequency / module.rope_scale
    angle = positions[:, None, None] * frequency  # [S, 1, Dk / 2]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _llama3(frequency: Tensor, module: NSAAttention) -> Tensor:  # []
    """One pair: long waves are stretched, short ones are not, those between are mixed."""
    _, length, low, high = module.rope_scaling
    wave = 2 * math.pi / frequency
    if wave < length / high:
        return frequency
    if wave > length / low:
        return frequency / module.rope_scale
    mixed = (length / wave - low) / (high - low)
    return (1 - mixed) * frequency / module.rope_scale + mixed * frequency

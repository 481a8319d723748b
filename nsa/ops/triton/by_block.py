"""Selected attention in key-block order: chunks, work lists and launches."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from nsa.ops.spec import BlockSpec
from nsa.ops.triton.inverse import Blocks, cut, invert
from nsa.ops.triton.kernels import by_block
from nsa.ops.triton.tiles import block_tiles, padded

PART_BYTES = 1 << 30
"""Workspace for the partial outputs; longer sequences go in chunks of queries."""
PIECE = 1024
"""Queries of one program of the backward: a block's own share when choices are spread evenly."""


def forward(
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, S, Hkv, Dk]
    v: Tensor,  # [B, S, Hkv, Dv]
    selection: Tensor,  # [B, S, Hkv, n_sel] int32
    blocks: Blocks,
    scale_log2: float,
    upcast: bool,
    spec: BlockSpec,
) -> tuple[Tensor, Tensor]:  # [B, S, Hq, Dv], [B, Hq, S] fp32
    """Output and log-sum-exp of the selected branch."""
    batch, seq_len, num_heads, d_k = q.shape
    num_groups, d_v = v.shape[2:]
    per_group, n_sel = num_heads // num_groups, spec.n_sel
    out = torch.empty(batch, seq_len, num_heads, d_v, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_heads, seq_len, dtype=torch.float32, device=q.device)
    tiles = block_tiles(d_k, d_v, per_group, spec.l_sel, q.dtype)
    chunk = max(PART_BYTES // (batch * num_heads * n_sel * d_v * q.element_size()), 1024)
    chunk = min(triton.cdiv(seq_len, triton.cdiv(seq_len, chunk)), seq_len)
    part = torch.empty(batch * num_heads * chunk * n_sel, d_v, dtype=q.dtype, device=q.device)
    part_lse = torch.empty(len(part), dtype=torch.float32, device=q.device)
    for first in range(0, seq_len, chunk):
        rows = min(chunk, seq_len - first)
        inverse = invert(selection[:, first : first + rows], blocks, first)
        items = cut(inverse, tiles.BM // per_group)
        by_block.block_forward[(items.block.shape[1], batch * num_groups)](
            q, k, v, part, part_lse, inverse.entries, inverse.offsets, items.block, items.first,
            blocks.start, blocks.stop,
            first, rows * n_sel, blocks.num, items.block.shape[1], num_groups, per_group,
            scale_log2,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            **_constants(d_k, d_v, n_sel, upcast), **tiles._asdict(),
        )  # fmt: skip
        by_block.merge_parts[(rows * per_group, batch * num_groups)](
            part, part_lse, selection, out, lse,
            first, rows, rows * n_sel, seq_len, num_groups, per_group,
            DV=d_v, DV_PAD=padded(d_v), N_SEL=n_sel, N_SEL_PAD=padded(n_sel), num_warps=1,
        )  # fmt: skip
    return out, lse


def backward(
    branch: Any,
    selection: Tensor,  # [B, S, Hkv, n_sel] int32
    blocks: Blocks,
    dq: Tensor,  # [B, S, Hq, Dk] fp32, added to
    scale: float,
    scale_log2: float,
    upcast: bool,
    spec: BlockSpec,
) -> tuple[Tensor, Tensor]:  # gradients of k and v
    """Gradients of the selected branch."""
    q, k, v = branch.q, branch.k, branch.v
    batch, seq_len, num_heads, d_k = q.shape
    num_groups, d_v = v.shape[2:]
    per_group = num_heads // num_groups
    tiles = block_tiles(d_k, d_v, per_group, spec.l_sel, q.dtype, backward=True)
    inverse = invert(selection, blocks, 0)
    items = cut(inverse, PIECE)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    dv = torch.zeros(v.shape, dtype=torch.float32, device=q.device)
    by_block.block_backward[(items.block.shape[1], batch * num_groups)](
        q, k, v, branch.dout, branch.lse, branch.delta, branch.gates, dq, dk, dv,
        inverse.entries, inverse.offsets, items.block, items.first, blocks.start, blocks.stop,
        seq_len * spec.n_sel, blocks.num, items.block.shape[1], PIECE, seq_len, num_groups,
        per_group, scale, scale_log2,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *branch.dout.stride()[:3],
        *branch.gates.stride()[:3],
        **_constants(d_k, d_v, spec.n_sel, upcast), **tiles._asdict(),
    )  # fmt: skip
    return dk.to(k.dtype), dv.to(v.dtype)


def _constants(d_k: int, d_v: int, n_sel: int, upcast: bool) -> dict[str, Any]:
    return {
        "DK": d_k,
        "DV": d_v,
        "DK_PAD": padded(d_k),
        "DV_PAD": padded(d_v),
        "N_SEL": n_sel,
        "UPCAST": upcast,
    }

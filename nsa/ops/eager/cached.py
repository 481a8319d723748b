"""Queries that continue a cached sequence: chunked prefill and decode, by the rows of training."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.eager.launch import chunk_size, compute_dtype, gated_sum, merge_heads, split_heads
from nsa.ops.eager.rows import Branches, forward_rows
from nsa.ops.spec import BlockSpec


@torch.no_grad()
def attend_cached(
    q: Tensor,  # [B, T, Hq, Dk]
    branches: Branches,  # keys and values of the sequence, these T tokens included
    gates: Tensor,  # [B, T, Hq, 3]
    first: int,  # position of the first query
    spec: BlockSpec,
    scale: float,
) -> tuple[Tensor, Tensor]:  # [B, T, Hq, Dv], [B, Hkv, 3] int64
    """Output, and the tokens read by each KV head in each branch, counted from the masks used."""
    batch, num_queries, num_heads, _ = q.shape
    num_groups = branches.sel.k.shape[1]
    dtype = compute_dtype(q.dtype)
    out = q.new_empty((batch, num_queries, num_heads, branches.sel.v.shape[-1]))
    reads = torch.zeros((batch, num_groups, 3), dtype=torch.int64, device=q.device)
    size = chunk_size(first + num_queries, batch * num_heads)
    with torch.autocast(q.device.type, enabled=False):
        for start in range(0, num_queries, size):
            rows = slice(start, start + size)
            q_rows = split_heads(q[:, rows], num_groups, dtype)
            chunk = forward_rows(q_rows, branches, first + start, spec, scale, None)
            gate = split_heads(gates[:, rows], num_groups, dtype)
            out[:, rows] = merge_heads(gated_sum(chunk.outs, gate))
            for branch, visible in enumerate(chunk.visible):
                reads[..., branch] += _tokens_read(visible, batch, num_groups)
    return out, reads


def _tokens_read(visible: Tensor, batch: int, num_groups: int) -> Tensor:
    """Visible keys summed over the queries of a chunk: [B, Hkv]."""
    if visible.dim() == 2:  # the same for every batch element and KV head
        return visible.sum().expand(batch, num_groups)
    return visible.flatten(2).sum(dim=-1)

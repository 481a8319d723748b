"""Mean compression (phi = avg) with ordinary torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.eager.launch import compute_dtype
from nsa.ops.spec import BlockSpec


def compress(x: Tensor, spec: BlockSpec, *, doc_lens: list[int]) -> Tensor:
    """Mean of every complete block of l tokens, stride d: [B, S, H, D] -> [B, N, H, D]."""
    docs = x.split(doc_lens, dim=1)
    return torch.cat([_one_document(doc, spec) for doc in docs], dim=1)


def _one_document(x: Tensor, spec: BlockSpec) -> Tensor:
    num_cmp = spec.num_cmp(x.shape[1])
    if num_cmp == 0:
        return x[:, :0]
    strides_per_block = spec.l // spec.d
    num_strides = num_cmp + strides_per_block - 1
    strides = x[:, : num_strides * spec.d].to(compute_dtype(x.dtype))
    sums = strides.unflatten(1, (num_strides, spec.d)).sum(dim=2)
    total = sums[:, :num_cmp]
    for offset in range(1, strides_per_block):
        total = total + sums[:, offset : offset + num_cmp]
    return (total / spec.l).to(x.dtype)

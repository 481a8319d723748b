"""Block scores and the choice of blocks (Eq. 9 to 12) for one chunk of queries, in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa.ops.spec import BlockSpec


def score_blocks(
    probs: Tensor,  # [B, Hkv, T, G, N]  p_cmp
    num_blocks: int,
    spec: BlockSpec,
) -> Tensor:  # [B, Hkv, T, num_blocks]
    """Sum over the heads of a group, and over blocks, of p_cmp * overlap / d.

    In units of the stride d, compression block i covers strides i .. i + l/d - 1 and selection
    block j covers l_sel/d strides: add p_cmp to every stride it covers, then add up the strides of
    each selection block. Whole tensors are added one after another, never reduced along a
    dimension: equal probabilities give bit-equal scores at any index, so ties are exact.
    """
    # Eq. 10: sum over the heads of a group.
    per_head = probs.unbind(dim=3)
    group_probs = per_head[0].clone()
    for head in per_head[1:]:
        group_probs += head
    *lead, num_cmp = group_probs.shape
    # Eq. 9, first spread over the strides, then summed by block.
    strides_per_block = spec.l_sel // spec.d
    per_stride = group_probs.new_zeros(*lead, num_blocks * strides_per_block)
    for offset in range(spec.l // spec.d):
        width = min(num_cmp, per_stride.shape[-1] - offset)
        per_stride[..., offset : offset + width] += group_probs[..., :width]
    scores = per_stride[..., ::strides_per_block].clone()
    for offset in range(1, strides_per_block):
        scores += per_stride[..., offset::strides_per_block]
    return scores


def choose_blocks(
    scores: Tensor,  # [B, Hkv, T, num_blocks]
    first: int,  # position of the chunk's first query in its document
    spec: BlockSpec,
) -> Tensor:  # [B, Hkv, T, n_sel] int32  ids ascending, then -1
    """Forced blocks first, then the best scores; a tie goes to the lower block."""
    num_queries, num_blocks = scores.shape[-2:]
    block = torch.arange(num_blocks, device=scores.device)
    current = current_block(first, num_queries, spec, scores.device)[:, None]
    forced = (block == 0) | (block == current - 1) | (block == current)
    rank = scores.masked_fill(scores.isnan(), -math.inf)
    rank = rank.masked_fill(forced, math.inf).masked_fill(block > current, -math.inf)
    # A stable sort keeps equal scores in block order. Blocks of the future rank last, at -inf.
    best = rank.sort(dim=-1, descending=True, stable=True).indices[..., : spec.n_sel]
    chosen = torch.where(best <= current, best, num_blocks).sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == num_blocks, -1).to(torch.int32)
    missing = spec.n_sel - chosen.shape[-1]
    return torch.nn.functional.pad(chosen, (0, missing), value=-1) if missing else chosen


def distinct_blocks(
    selection: Tensor,  # [..., n_sel] int32, in any order
) -> Tensor:  # [..., n_sel] int32
    """A given selection without repeated blocks: repetitions become -1."""
    ordered = selection.sort(dim=-1).values
    again = ordered[..., 1:] == ordered[..., :-1]
    return ordered.masked_fill(torch.nn.functional.pad(again, (1, 0)), -1)


def current_block(first: int, num_queries: int, spec: BlockSpec, device: torch.device) -> Tensor:
    """Block of each query of a chunk: [T]."""
    return torch.arange(first, first + num_queries, device=device) // spec.l_sel

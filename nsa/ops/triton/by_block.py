"""Launching the selected branch by key blocks: groups of chunks and their partial results."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.triton.band import Gated
from nsa.ops.triton.inverse import (
    PART_BYTES,
    SUBS,
    Inverse,
    chunk_size,
    part_bytes,
    piece_size,
)
from nsa.ops.triton.kernels import by_block
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.select import Selection
from nsa.ops.triton.start import Launch, ceil_div, start
from nsa.ops.triton.tiles import Tiles, fitted_block_tiles, padded

WIDE = 1 << 31
"""Offsets from here on need 64 bits."""


class Group(NamedTuple):
    """Chunks whose partial results are in the workspace together."""

    first_chunk: int
    num_chunks: int
    first_row: int
    num_rows: int


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Selection,
    inverse: Inverse,
    lse: Tensor,  # [B, Hq, S] fp32, written
    gated: Gated,
) -> Tensor:  # [B, S, Hq, Dv]
    """Output of the selected branch; finishes the gated sum."""
    out = torch.empty_like(gated.out)
    tiles = _tiles(problem)
    groups = _groups(problem, inverse, part_bytes(problem, problem.d_v))
    size = problem.num_segments * groups[0].num_rows * problem.spec.n_sel * problem.per_group
    part, part_lse = problem.empty(size, problem.d_v), problem.empty(size, dtype=torch.float32)
    for group in groups:
        _forward_group(problem, group, tiles, q, k, v, inverse, part, part_lse)
        _merge_group(problem, group, part, part_lse, chosen, out, lse, gated)
    return out


def _forward_group(
    problem: Problem,
    group: Group,
    tiles: Tiles,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inverse: Inverse,
    part: Tensor,
    part_lse: Tensor,
) -> None:
    start(
        problem.memo,
        ("by block", group),
        by_block.block_forward,
        (
            q, *problem.keys(k, v, tiles.BN), part, part_lse, inverse.queries, inverse.places,
            inverse.item_block, inverse.item_ends, inverse.ends, *problem.block_index(q),
        ),
        lambda: Launch.tiled(
            (inverse.item_block.shape[2], group.num_chunks, problem.num_segments),
            (*_sizes(problem, inverse, group), problem.scale_log2, *q.stride()[:3]),
            _constants(problem, q),
            tiles,
        ),
    )  # fmt: skip


def _merge_group(
    problem: Problem,
    group: Group,
    part: Tensor,
    part_lse: Tensor,
    chosen: Selection,
    out: Tensor,
    lse: Tensor,
    gated: Gated,
) -> None:
    start(
        problem.memo,
        ("merge", group),
        by_block.merge_parts,
        (part, part_lse, chosen.num_chosen, out, lse, *gated),
        lambda: Launch.plain(
            (group.num_rows, problem.num_segments),
            (
                group.first_row, group.num_rows, problem.seq_len, problem.num_groups,
                problem.per_group, *gated.gates.stride()[:3],
            ),
            {"DV": problem.d_v, "DV_PAD": padded(problem.d_v), "N_SEL": problem.spec.n_sel}
            | {"G_PAD": 1 << (problem.per_group - 1).bit_length()},
            num_warps=1,
        ),
    )  # fmt: skip


def backward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,  # [B, Hq, S, 4] fp32, of this branch
    chosen: Selection,
    inverse: Inverse,
    *,
    ordered: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # the first fp32
    """Gradients of q, k and v.

    Those of k and v are sums of several programs, which meet in memory in no fixed order, or,
    `ordered`, each in a place of its own.
    """
    sums = _zeros(k), _zeros(v)
    dq = problem.empty(*q.shape, dtype=torch.float32)
    groups = _groups(problem, inverse, part_bytes(problem, problem.d_k), ordered)
    size = problem.num_segments * groups[0].num_rows * problem.spec.n_sel * problem.per_group
    part = problem.empty(size, problem.d_k)
    slots = _slots(problem, inverse, groups[0]) if ordered else None
    for group in groups:
        _backward_group(problem, group, q, k, v, dout, stats, inverse, slots or sums, part, ordered)
        _sum_group(problem, group, part, chosen, dq)
        if slots:
            _sum_slots(problem, group, q, inverse, slots, sums)
    return dq, sums[0].to(k.dtype), sums[1].to(v.dtype)


def backward_kv(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    inverse: Inverse,
    *,
    ordered: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradients of k and v alone."""
    sums = _zeros(k), _zeros(v)
    groups = _groups(problem, inverse, 0, ordered)
    slots = _slots(problem, inverse, groups[0]) if ordered else None
    for group in groups:
        _backward_group(problem, group, q, k, v, dout, stats, inverse, slots or sums, None, ordered)
        if slots:
            _sum_slots(problem, group, q, inverse, slots, sums)
    return sums[0].to(k.dtype), sums[1].to(v.dtype)


def _backward_group(
    problem: Problem,
    group: Group,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,
    inverse: Inverse,
    grads: tuple[Tensor, Tensor],  # of k and v: their sums, or the slots of the items
    part: Tensor | None,  # partial gradients of q; None: none
    ordered: bool,
) -> None:
    start(
        problem.memo,
        ("backward by block", group, ordered),
        by_block.block_backward,
        (
            q, k, v, dout, stats, *grads, q if part is None else part,
            inverse.queries, inverse.places, inverse.item_block, inverse.item_ends, inverse.ends,
            *problem.block_index(q),
        ),
        lambda: Launch.tiled(
            (inverse.item_block.shape[2], group.num_chunks, problem.num_segments),
            (
                *_sizes(problem, inverse, group), problem.scale, problem.scale_log2,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *dout.stride()[:3],
            ),
            {**_constants(problem, q, dout), "WITH_DQ": part is not None, "ORDERED": ordered},
            _tiles(problem, "dkv" if part is None else "backward"),
        ),
    )  # fmt: skip


def _sum_group(problem: Problem, group: Group, part: Tensor, chosen: Selection, dq: Tensor) -> None:
    start(
        problem.memo,
        ("sum of places", group),
        by_block.sum_places,
        (part, chosen.num_chosen, dq),
        lambda: Launch.plain(
            (group.num_rows, problem.num_segments),
            (
                group.first_row, group.num_rows, problem.seq_len, problem.num_groups,
                problem.per_group,
            ),
            {"DK": problem.d_k, "DK_PAD": padded(problem.d_k), "N_SEL": problem.spec.n_sel}
            | {"G_PAD": 1 << (problem.per_group - 1).bit_length()},
            num_warps=1,
        ),
    )  # fmt: skip


def _slots(problem: Problem, inverse: Inverse, group: Group) -> tuple[Tensor, Tensor]:
    """Memory for the gradients of k and v of every item of a group."""
    num_items = problem.num_segments * group.num_chunks * inverse.item_block.shape[2]
    keys = padded(problem.spec.l_sel)
    return (
        problem.empty(num_items, keys, problem.d_k, dtype=torch.float32),
        problem.empty(num_items, keys, problem.d_v, dtype=torch.float32),
    )


def _sum_slots(
    problem: Problem,
    group: Group,
    q: Tensor,
    inverse: Inverse,
    slots: tuple[Tensor, Tensor],
    sums: tuple[Tensor, Tensor],
) -> None:
    for name, slot, total in zip("kv", slots, sums, strict=True):
        _sum_slots_of(problem, group, name, slot, total, inverse, problem.block_index(q))


def _sum_slots_of(
    problem: Problem,
    group: Group,
    name: str,
    slots: Tensor,
    total: Tensor,
    inverse: Inverse,
    block_index: tuple[Tensor, ...],
) -> None:
    _, num_chunks, num_items = inverse.item_block.shape
    start(
        problem.memo,
        ("sum of slots", name, group),
        by_block.sum_items,
        (slots, total, inverse.item_ends, *block_index),
        lambda: Launch.plain(
            (problem.num_blocks, problem.num_segments),
            (
                group.first_chunk, num_chunks, group.num_chunks, problem.seq_len,
                problem.num_blocks, num_items, problem.num_groups,
            ),
            {"D": total.shape[3], "D_PAD": padded(total.shape[3]), "L_SEL": problem.spec.l_sel}
            | {"HAS_DOCS": problem.packed, "BN": padded(problem.spec.l_sel)},
        ),
    )  # fmt: skip


def _groups(
    problem: Problem, inverse: Inverse, row_bytes: int, ordered: bool = False
) -> list[Group]:
    """Chunks in groups whose partial results fit the workspace.

    A query has `row_bytes` of them; an item, `ordered`, its slot.
    """
    chunk, seq_len = chunk_size(problem), problem.seq_len
    chunk_bytes = row_bytes * chunk
    if ordered:
        width = padded(problem.spec.l_sel) * (problem.d_k + problem.d_v)
        slot_bytes = problem.num_segments * inverse.item_block.shape[2] * width * 4
        chunk_bytes = max(chunk_bytes, slot_bytes)
    num_chunks = ceil_div(seq_len, chunk)
    together = max(PART_BYTES // chunk_bytes, 1) if chunk_bytes else num_chunks
    return [
        Group(
            first,
            min(together, num_chunks - first),
            first * chunk,
            min(together * chunk, seq_len - first * chunk),
        )
        for first in range(0, num_chunks, together)
    ]


def _sizes(problem: Problem, inverse: Inverse, group: Group) -> tuple[int, ...]:
    """The numbers that the kernels begin with."""
    _, num_chunks, num_items = inverse.item_block.shape
    return (
        group.first_chunk, num_chunks, group.first_row, group.num_rows, problem.seq_len,
        inverse.queries.shape[1], problem.num_blocks, num_items, piece_size(problem),
        problem.num_groups, problem.per_group,
    )  # fmt: skip


def _tiles(problem: Problem, purpose: str = "forward") -> Tiles:
    tiles = fitted_block_tiles(*problem.sizes, purpose, problem.capability)
    assert tiles is not None, "a problem whose blocks do not fit is masked"
    return tiles


def _constants(problem: Problem, *gathered: Tensor) -> dict[str, Any]:
    """In the order of the kernels, which gather rows of some tensors."""
    return {
        **problem.dims(),
        "N_SEL": problem.spec.n_sel,
        "L_SEL": problem.spec.l_sel,
        "SUBS": SUBS,
        "HAS_DOCS": problem.packed,
        "UPCAST": problem.upcast,
        "NARROW": all(_extent(x) < WIDE for x in gathered),
    }


def _extent(x: Tensor) -> int:
    """Numbers from the first to the last of one batch element of [B, S, H, D]."""
    return sum(
        (size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)
    )


def _zeros(x: Tensor) -> Tensor:
    """Where sums of several programs begin."""
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)

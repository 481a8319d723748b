"""Launching the band kernels: grids, descriptors and partial sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.triton.kernels import band, band_backward, sums
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.start import Launch, ceil_div, start
from nsa.ops.triton.tiles import dkv_tiles, dq_tiles, forward_tiles

BUSY = 264
"""Programs that keep every processor of a large GPU at work: two for each."""
SLICE_TILES = 8
"""Tiles of queries that a program shall have at least."""
SUM_BLOCK = 1024
NONE = (None, None, None)
"""Keys and values of a branch that a kernel does not walk."""


class Gated(NamedTuple):
    """What the selected branch, the last one, needs to finish the gated sum."""

    gates: Tensor  # [B, S, Hq, 3]
    o_cmp: Tensor  # [B, S, Hq, Dv]
    o_win: Tensor  # [B, S, Hq, Dv]
    out: Tensor  # [B, S, Hq, Dv], written


def forward(
    problem: Problem,
    branch: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,  # [B, Hq, S] fp32, written
    bits: Tensor | None = None,
    gated: Gated | None = None,
) -> Tensor:  # [B, S, Hq, Dv]
    """Output of one branch; the selected one, given bits, also finishes the gated sum."""
    out = problem.empty(problem.batch, problem.seq_len, problem.num_heads, v.shape[3])
    if k.shape[1] == 0:  # nobody sees anything
        lse.fill_(torch.inf)
        return out.zero_()
    sizes = (problem.d_k, v.shape[3], problem.dtype, branch, problem.capability)
    tiles = forward_tiles(*sizes, words=bits is not None and problem.words)
    rest = (q,) * 4 if gated is None else gated
    start(
        problem.memo,
        ("forward", branch, bits is None),
        band.band_forward,
        (
            q, *problem.keys(k, v, tiles.BN), out, lse, q if bits is None else bits,
            *problem.row_index(branch, q), *rest,
        ),
        lambda: Launch.tiled(
            (ceil_div(problem.seq_len, tiles.BM), problem.batch * problem.num_heads),
            (
                problem.seq_len, k.shape[1], problem.num_heads, problem.per_group,
                problem.scale_log2, *q.stride()[:3], *rest[0].stride()[:3],
                *problem.bands[branch][:3], problem.num_words,
            ),
            {**problem.dims(v.shape[3]), **_branch_constants(problem, bits is not None)},
            tiles,
        ),
    )  # fmt: skip
    return out


def backward_kv(
    problem: Problem,
    branch: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,  # [3, B, Hq, S, 4] fp32
    bits: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v of one branch."""
    num_keys = k.shape[1]
    if num_keys == 0:
        return torch.zeros_like(k), torch.zeros_like(v)
    words = problem.bands[branch].SELECT and problem.words
    tiles = dkv_tiles(*problem.heads, problem.capability, words=words)
    num_tiles = ceil_div(num_keys, tiles.BN) * problem.num_segments
    shares, slices = _parts(problem, branch, num_tiles, tiles.BM)
    parts = shares * slices
    dtype = problem.dtype if parts == 1 else torch.float32
    dk = problem.empty(problem.batch, parts, *k.shape[1:], dtype=dtype)
    dv = problem.empty(problem.batch, parts, *v.shape[1:], dtype=dtype)
    start(
        problem.memo,
        ("dkv", branch),
        band_backward.band_dkv,
        (
            *problem.rows_k(q, tiles.BM), problem.rows_v(dout, tiles.BM), k, v, stats[branch],
            dk, dv, bits, *problem.row_index(branch, q), *problem.key_index(branch, q),
        ),
        lambda: Launch.tiled(
            (num_tiles * parts,),
            (
                problem.seq_len, num_keys, problem.num_groups, problem.per_group,
                problem.scale, problem.scale_log2, *k.stride()[:3], *v.stride()[:3],
                *problem.bands[branch][:3], problem.num_words,
                problem.num_segments, problem.per_group // shares, slices,
            ),
            {**problem.dims(), **_branch_constants(problem, problem.bands[branch].SELECT)},
            tiles,
        ),
    )  # fmt: skip
    return _sum_parts(problem, branch, dk, dv)


def backward_q(
    problem: Problem,
    q: Tensor,
    keys: tuple[tuple[Tensor, Tensor], ...],  # k and v of the three branches
    dout: Tensor,
    stats: Tensor,  # [3, B, Hq, S, 4] fp32
    bits: Tensor,
    dq_sel: Tensor | None,  # [B, S, Hq, Dk] fp32
    dq_more: Tensor | None = None,  # [B, S, Hq, Dk], contiguous
    *,
    skip_cmp: bool = False,
) -> Tensor:
    """Gradient of q from all branches; without `dq_sel` the selected one masks the past.

    `dq_more` is what branches got elsewhere; `skip_cmp`: the compressed one did.
    """
    words = dq_sel is None and problem.words
    tiles = dq_tiles(*problem.heads, problem.capability, words=words)
    dq = problem.empty(*q.shape)
    has_cmp = keys[0][0].shape[1] > 0 and not skip_cmp
    # An empty tensor has no descriptor; what stands for it is not read.
    keys = keys if has_cmp else (keys[1], *keys[1:])
    walked = (keys[0], keys[1] if dq_sel is None else None, keys[2])
    start(
        problem.memo,
        ("dq", dq_sel is None, dq_more is None, has_cmp),
        band_backward.band_dq,
        (
            q, dout, *(x for kv in walked for x in (problem.keys(*kv, tiles.BN) if kv else NONE)),
            stats, bits, stats if dq_sel is None else dq_sel, dq_more, dq, *problem.row_index(0, q),
        ),
        lambda: Launch.tiled(
            (ceil_div(problem.seq_len, tiles.BM), problem.batch * problem.num_heads),
            (
                problem.seq_len, keys[0][0].shape[1], problem.num_heads, problem.per_group,
                stats[0].numel(), problem.scale, problem.scale_log2,
                *q.stride()[:3], *dout.stride()[:3],
                *problem.bands[0][:2], problem.spec.w, problem.num_words,
            ),
            {**problem.dims(), **_branch_constants(problem, dq_sel is None), "HAS_CMP": has_cmp},
            tiles,
        ),
    )  # fmt: skip
    return dq


def _branch_constants(problem: Problem, select: bool) -> dict[str, Any]:
    return {
        "L_SEL": problem.spec.l_sel,
        "SELECT": select,
        "HAS_DOCS": problem.packed,
        "UPCAST": problem.upcast,
    }


def _parts(problem: Problem, branch: int, num_tiles: int, num_rows: int) -> tuple[int, int]:
    """Among how many programs the heads of a group are shared out, and in how many the queries.

    Compressed tokens are few and each is seen by many queries: there, every head gets its own.
    """
    per_group = problem.per_group
    if branch != 0:
        divisors = (n for n in range(1, per_group + 1) if per_group % n == 0)
        return next((n for n in divisors if n * num_tiles >= BUSY), per_group), 1
    slices, row_tiles = 1, ceil_div(problem.seq_len, num_rows)
    while slices * num_tiles * per_group < 3 * BUSY // 2 and slices * 2 * SLICE_TILES <= row_tiles:
        slices *= 2
    return per_group, slices


def _sum_parts(problem: Problem, branch: int, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
    """[B, parts, K, Hkv, D] -> [B, K, Hkv, D] in the dtype of the inputs."""
    parts = dk.shape[1]
    if parts == 1:
        return dk.squeeze(1), dv.squeeze(1)
    totals = (
        problem.empty(problem.batch, *dk.shape[2:]),
        problem.empty(problem.batch, *dv.shape[2:]),
    )
    sizes = (totals[0][0].numel(), totals[1][0].numel())
    start(
        problem.memo,
        ("sums", branch),
        sums.sum_parts,
        (dk, dv, *totals),
        lambda: Launch.plain(
            (sum(ceil_div(size, SUM_BLOCK) for size in sizes), problem.batch),
            (*sizes, parts),
            {"BLOCK": SUM_BLOCK},
        ),
    )
    return totals

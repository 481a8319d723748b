"""Launching the selected branch by queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.ops.triton.band import Gated
from nsa.ops.triton.kernels import by_query
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.select import Selection
from nsa.ops.triton.start import Launch, start
from nsa.ops.triton.tiles import Tiles, query_tiles


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Selection,
    lse: Tensor,  # [B, Hq, S] fp32, written
    gated: Gated,
) -> Tensor:  # [B, S, Hq, Dv]
    """Output of the selected branch; finishes the gated sum."""
    out = torch.empty_like(gated.out)
    tiles = _tiles(problem)
    start(
        problem.memo,
        "by query",
        by_query.query_forward,
        (
            q, *problem.keys(k, v, tiles.BN), chosen.ids, chosen.num_chosen,
            *problem.row_index(1, q)[:2], out, lse, *gated,
        ),
        lambda: Launch.tiled(
            (problem.seq_len, problem.num_segments),
            (
                problem.seq_len, problem.num_groups, problem.per_group, problem.scale_log2,
                *q.stride()[:3], *gated.gates.stride()[:3],
            ),
            _constants(problem),
            tiles,
        ),
    )  # fmt: skip
    return out


def backward_q(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,  # [B, Hq, S, 4] fp32, of this branch
    chosen: Selection,
) -> Tensor:  # [B, S, Hq, Dk] fp32
    """Gradient of q from the selected branch."""
    tiles = _tiles(problem, backward=True)
    dq = problem.empty(*q.shape, dtype=torch.float32)
    start(
        problem.memo,
        "dq by query",
        by_query.query_dq,
        (
            q, *problem.keys(k, v, tiles.BN), dout, stats, chosen.ids, chosen.num_chosen,
            problem.row_index(1, q)[0], dq,
        ),
        lambda: Launch.tiled(
            (problem.seq_len, problem.num_segments),
            (
                problem.seq_len, problem.num_groups, problem.per_group,
                problem.scale, problem.scale_log2, *q.stride()[:3], *dout.stride()[:3],
            ),
            _constants(problem),
            tiles,
        ),
    )  # fmt: skip
    return dq


def _tiles(problem: Problem, *, backward: bool = False) -> Tiles:
    return query_tiles(*problem.sizes, problem.capability, backward=backward)


def _constants(problem: Problem) -> dict[str, Any]:
    """In the order of the kernels."""
    return {
        **problem.dims(),
        "N_SEL": problem.spec.n_sel,
        "L_SEL": problem.spec.l_sel,
        "HAS_DOCS": problem.packed,
        "UPCAST": problem.upcast,
    }

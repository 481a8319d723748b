"""Scores of the selection blocks, from the compressed branch (Eq. 9) or from tokens.

group_scores recomputes the probabilities from the log-sum-exp, a tile at a time, sums them over the
heads of a group and folds them into selection blocks in registers. token_scores takes the largest
product of a query with a token of the block. Launchers are below the kernels; they take a chunk of
queries at a time, so that the scores have a bounded workspace.

A compressed token counts for every block that it overlaps: its own, in which it starts, and later
ones. So a block adds LEVELS parts: level k of block j is what the tokens that start in block j give
to block j + k. All sums are fp32, in the same order for every block: equal scores tie exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.launcher import Launch, ceil_div, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.tile import COUNTS, _band, _dot, _dot_add, _rows
from nsa.ops.triton.tiles import Tiles, parts_of, score_tiles


@triton.jit
def _head_rows(t, i_b, i_h, row, column: tl.constexpr, BM: tl.constexpr, D: tl.constexpr):
    """BM rows of one head, as tile._rows reads them, from a descriptor whose rows are one after
    the other: such a tile is an operand without passing through registers."""
    b = t.load([tl.cast(i_b, tl.int32), tl.cast(i_h, tl.int32), tl.cast(row, tl.int32), column])
    return tl.reshape(b, [BM, D])


@triton.jit(do_not_specialize=COUNTS)
def group_scores(
    t_q_heads, t_q2_heads, t_k, t_k2, p_lse, p_scores, p_row_start, p_row_key,
    first_row, stop_row, S, Hkv, G, WIDTH, scale_log2,
    OFF, STEP,
    DK1: tl.constexpr, DK2: tl.constexpr,
    STRIDES: tl.constexpr, OVERLAP: tl.constexpr, LEVELS: tl.constexpr, LARGEST: tl.constexpr,
    HAS_DOCS: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scores of BM queries and BN compressed tokens, for the rows first_row .. stop_row - 1.

    LEVELS > 0: parts of the block scores, fp32 [B * Hkv, LEVELS, rows, WIDTH]; the part of level k
    that block j gets is number j of its row. LEVELS = 0: the probabilities, [B * Hkv, rows, WIDTH].
    Tiles that no query sees are neither read nor written.
    """
    i_bg = tl.program_id(2).to(tl.int64)
    i_b, i_g = i_bg // Hkv, i_bg % Hkv
    r0 = tl.program_id(1) * BM
    o_m = tl.arange(0, BM)
    t0 = first_row + r0
    o_t = t0 + o_m
    m_t = o_t < stop_row
    k0 = tl.program_id(0) * BN
    # Last visible token of the first and of the last row, as scalars.
    begin, reach = _band(t0, t0 < S, p_row_start, p_row_key, OFF, STEP, 0, HAS_DOCS)
    t = tl.minimum(t0 + BM, stop_row) - 1
    _, last_reach = _band(t, t < S, p_row_start, p_row_key, OFF, STEP, 0, HAS_DOCS)
    if (k0 > last_reach) | (k0 + BN <= begin):
        return  # no row sees these tokens, and choose_blocks does not read this part
    # k: [BN, DK1] and [BN, DK2], read once for all heads of the group.
    b_k = _rows(t_k, i_b, k0, i_g, 0, BN, DK1)
    if DK2 > 0:
        b_k2 = _rows(t_k2, i_b, k0, i_g, DK1, BN, DK2)
    p_lse += i_bg * G * S + o_t
    b_sum = tl.zeros([BM, BN], tl.float32)
    for g in range(0, G):
        # p_cmp = exp2(q k^T * scale_log2 - lse): [BM, BN]. The keys stay, the heads change.
        b_q = _head_rows(t_q_heads, i_b, i_g * G + g, t0, 0, BM, DK1)
        lse = tl.load(p_lse, mask=m_t, other=float("inf"))
        b_s = _dot(b_q, tl.trans(b_k), UPCAST)
        if DK2 > 0:
            b_q2 = _head_rows(t_q2_heads, i_b, i_g * G + g, t0, DK1, BM, DK2)
            b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
        b_sum += tl.math.exp2(b_s * scale_log2 - lse[:, None])
        p_lse += S
    # What a query sees is the same for all heads, so that their sum is masked, and only where a
    # query does not see all BN tokens. Block scores are folded for one document alone; queries with
    # an offset are packed, too.
    if k0 + BN - 1 > reach or (HAS_DOCS and LEVELS == 0):
        first, last = _band(o_t, m_t, p_row_start, p_row_key, OFF, STEP, 0, HAS_DOCS)
        o_k = k0 + tl.arange(0, BN)
        visible = (o_k[None, :] >= first[:, None]) & (o_k[None, :] <= last[:, None])
        b_sum = tl.where(visible, b_sum, 0.0)
    # Store [BM, BN] probabilities, or fold them into [BM, BLOCKS] for each level. Rows of a tile
    # are near each other: int32 offsets.
    num_rows = stop_row - first_row
    if LEVELS == 0:
        o_k = k0 + tl.arange(0, BN)
        p_scores += (i_bg * num_rows + r0) * WIDTH
        at = o_m[:, None] * WIDTH + o_k[None, :]
        tl.store(p_scores + at, b_sum, mask=m_t[:, None] & (o_k < WIDTH)[None, :])
    else:
        BLOCKS: tl.constexpr = BN // STRIDES
        o_s = tl.arange(0, STRIDES)
        # Eq. 9: the score of block j is the sum of p_cmp * overlap / d. In strides of d tokens, a
        # block is STRIDES long and a compressed token OVERLAP.
        b_tokens = tl.reshape(b_sum, [BM, BLOCKS, STRIDES])
        for level in tl.static_range(LEVELS):
            # Token s of a block covers the strides s .. s + OVERLAP - 1 after the block's start;
            # its weight is how many of them lie in the block `level` further on.
            stop = tl.minimum(o_s + OVERLAP, level * STRIDES + STRIDES)
            weight = tl.maximum(stop - tl.maximum(o_s, level * STRIDES), 0).to(tl.float32)
            if LARGEST:
                b_part = tl.max(tl.where((weight > 0.0)[None, None, :], b_tokens, 0.0), axis=2)
            else:
                b_part = tl.sum(b_tokens * weight[None, None, :], axis=2)
            p_rows = p_scores + ((i_bg * LEVELS + level) * num_rows + r0) * WIDTH
            o_j = k0 // STRIDES + tl.arange(0, BLOCKS) + level
            at = o_m[:, None] * WIDTH + o_j[None, :]
            tl.store(p_rows + at, b_part, mask=m_t[:, None] & (o_j < WIDTH)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def token_scores(
    t_q, t_q2, t_k, t_k2, p_scores, first_row, stop_row, Hkv, WIDTH,
    DK1: tl.constexpr, DK2: tl.constexpr, L_SEL: tl.constexpr, TILES: tl.constexpr,
    UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scores of one block for TILES tiles of queries: the largest product with a token of it.

    There is one head of keys for all. Stored as numbers >= 0 in the same order, which is what
    choose_blocks ranks: fp32 [B * Hkv, rows, WIDTH], for blocks that end before the query.
    """
    i_bg = tl.program_id(2).to(tl.int64)
    i_b, i_g = i_bg // Hkv, i_bg % Hkv
    block = tl.program_id(0)
    o_m = tl.arange(0, BM)
    # Tiles of this program whose queries see the whole block.
    r0 = tl.program_id(1) * BM * TILES
    first = tl.maximum(r0, (block * L_SEL + L_SEL - 1 - first_row) // BM * BM)
    stop = tl.minimum(r0 + BM * TILES, stop_row - first_row)
    b_k = _rows(t_k, i_b, block * L_SEL, 0, 0, BN, DK1)
    b_k2 = b_k
    if DK2 > 0:
        b_k2 = _rows(t_k2, i_b, block * L_SEL, 0, DK1, BN, DK2)
    num_rows = stop_row - first_row
    for row in range(first, stop, BM):
        # s = q k^T: [BM, BN].
        b_q = _rows(t_q, i_b, first_row + row, i_g, 0, BM, DK1)
        b_s = _dot(b_q, tl.trans(b_k), UPCAST)
        if DK2 > 0:
            b_q2 = _rows(t_q2, i_b, first_row + row, i_g, DK1, BM, DK2)
            b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
        if L_SEL < BN:
            b_s = tl.where((tl.arange(0, BN) < L_SEL)[None, :], b_s, float("-inf"))
        # The bits of a negative number, all but the sign inverted, have its order as an integer.
        # Two bits less, and moved above 0, they are those of a number below 2.
        bits = tl.max(b_s, axis=1).to(tl.int32, bitcast=True)
        ordered = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 2) + (1 << 29)
        p = p_scores + (i_bg * num_rows + row + o_m) * WIDTH + block
        tl.store(p, ordered.to(tl.float32, bitcast=True), mask=row + o_m < num_rows)


# --- Launchers ---

SCORE_BYTES = 256 << 20
"""Limit of the workspace for scores; longer sequences are split into chunks of queries."""
TOKEN_TILES = 16
"""Tiles of queries that a program of token_scores takes with one block."""
ROWS = 128
"""Chunk lengths are multiples of this, so that no chunk ends within a tile."""


class Chunk(NamedTuple):
    """Rows whose scores are in the workspace at a time."""

    first: int
    stop: int
    width: int  # numbers per row and level: blocks up to `stop`, or tokens of all documents, padded
    num_cmp: int  # compressed tokens that the rows can see


def chunks_of(problem: Problem, levels: int) -> list[Chunk]:
    """Chunks of rows whose scores fit the workspace."""
    spec, seq_len = problem.spec, problem.seq_len
    num_cmp = sum(spec.num_cmp(length) for length in problem.doc_lens)
    # Parts of later levels are stored for the block that gets them, up to levels - 1 further on.
    widest = (spec.num_blocks(problem.doc_lens[0]) + levels - 1) * levels if levels else num_cmp
    rows = SCORE_BYTES // (4 * problem.num_segments * max(widest, 1)) // ROWS * ROWS
    rows = max(rows, ROWS)
    stops = [*range(rows, seq_len, rows), seq_len]
    return [
        Chunk(
            max(stop - rows, 0) if stop < seq_len else (seq_len - 1) // rows * rows,
            stop,
            # Rows of a multiple of 16 numbers: aligned loads, and one form of the kernels.
            ceil_div(_width(problem, stop) + levels - 1 if levels else num_cmp, 16) * 16,
            num_cmp if problem.packed else spec.num_cmp(stop),
        )
        for stop in stops
    ]


def num_levels(problem: Problem) -> int:
    """Levels of the block scores (module docstring); 0: the probabilities are stored unfolded.

    Folding needs blocks that are aligned with the tiles, which those of packed documents are not.
    """
    spec = problem.spec
    strides, overlap = spec.l_sel // spec.d, spec.l // spec.d
    in_step = strides & (strides - 1) == 0 and strides <= _tiles(problem).BN
    return 1 + ceil_div(overlap - 1, strides) if in_step and problem.aligned else 0


def _width(problem: Problem, stop: int) -> int:
    """Blocks of a document up to its query `stop`; all of them, where queries have an offset."""
    return problem.spec.num_blocks(problem.doc_lens[0] if problem.packed else stop)


def score(
    problem: Problem,
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    scores: Tensor,
    chunk: Chunk,
    levels: int,
) -> None:
    """Scores of a chunk by the compressed branch."""
    tiles = _tiles(problem)
    start(
        problem.memo,
        ("score", chunk),
        group_scores,
        (
            *problem.rows_k(q, tiles.BM, by_head=True), *problem.rows_k(k_cmp, tiles.BN), lse,
            scores, *problem.row_index(0, q),
        ),
        lambda: Launch.tiled(
            (
                ceil_div(chunk.num_cmp, tiles.BN),
                ceil_div(chunk.stop - chunk.first, tiles.BM),
                problem.num_segments,
            ),
            (
                chunk.first, chunk.stop, problem.seq_len, problem.num_groups, problem.per_group,
                chunk.width, problem.scale_log2, *problem.bands[0][:2],
            ),
            dict(zip(("DK1", "DK2"), parts_of(problem.d_k), strict=True))
            | stride_constants(problem, levels)
            | {"HAS_DOCS": problem.packed, "UPCAST": problem.upcast},
            tiles,
        ),
    )  # fmt: skip


def score_tokens(
    problem: Problem, q: Tensor, k: Tensor, scores: Tensor, chunk: Chunk, tiles: Tiles
) -> None:
    """Scores of a chunk by the products with tokens."""
    start(
        problem.memo,
        ("tokens", chunk),
        token_scores,
        (*problem.rows_k(q, tiles.BM), *problem.rows_k(k, tiles.BN), scores),
        lambda: Launch.tiled(
            (
                chunk.num_cmp,
                ceil_div(chunk.stop - chunk.first, tiles.BM * TOKEN_TILES),
                problem.num_segments,
            ),
            (chunk.first, chunk.stop, problem.num_groups, chunk.width),
            dict(zip(("DK1", "DK2"), parts_of(problem.d_k), strict=True))
            | {"L_SEL": problem.spec.l_sel, "TILES": TOKEN_TILES, "UPCAST": problem.upcast},
            tiles,
        ),
    )


def _tiles(problem: Problem) -> Tiles:
    return score_tiles(problem.d_k, problem.dtype, problem.capability, problem.per_group)


def stride_constants(problem: Problem, levels: int) -> dict[str, int]:
    """How blocks and compressed tokens overlap, for group_scores and choose_blocks."""
    spec = problem.spec
    sizes = {"STRIDES": spec.l_sel // spec.d, "OVERLAP": spec.l // spec.d, "LEVELS": levels}
    return sizes | {"LARGEST": problem.largest}

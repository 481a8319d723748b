"""Launching the scores and the choice of blocks, a bounded chunk of queries at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.config.env import read
from nsa.ops.checks import assert_selection
from nsa.ops.ranges import nvtx
from nsa.ops.triton.kernels import score
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.start import Launch, ceil_div, start
from nsa.ops.triton.tiles import Tiles, padded, parts_of, score_tiles

SCORE_BYTES = 256 << 20
"""Workspace for the scores; longer sequences go in chunks of queries."""
ROWS = 128
"""Chunks are multiples of this, so that their tiles are whole."""


class Selection(NamedTuple):
    """The chosen blocks in the forms that the kernels read."""

    ids: Tensor  # [B, S, Hkv, n_sel] int32, ascending, then -1
    num_chosen: Tensor  # [B, Hkv, S] int32
    bits: Tensor  # [B, Hkv, words, S] int32: a bit per block of all documents
    before: Tensor  # [B, Hkv, words, S] int16: chosen blocks in the words before


class Chunk(NamedTuple):
    """Rows whose scores are in the workspace at a time."""

    first: int
    stop: int
    width: int  # numbers per row and level: blocks up to `stop`, or tokens of all documents
    num_cmp: int  # compressed tokens that the rows can see


def choose(problem: Problem, q: Tensor, k_cmp: Tensor, lse: Tensor) -> Selection:
    """Score the blocks by the compressed branch, whose log-sum-exp is given, and choose."""
    levels = _num_levels(problem)
    chunks = _chunks(problem, levels)
    chosen = _empty(problem, zero=problem.packed or len(chunks) > 1)
    size = max((chunk.stop - chunk.first) * chunk.width for chunk in chunks)
    scores = problem.empty(problem.num_segments * size * max(levels, 1), dtype=torch.float32)
    for chunk in chunks:
        if chunk.num_cmp:
            with nvtx("map_pcmp_to_pslc"):
                _score(problem, q, k_cmp, lse, scores, chunk, levels)
        with nvtx("topk+ranges"):
            _choose(problem, q, scores, chosen, chunk, levels)
    if read("NSA_STRICT_ASSERTS"):
        position = torch.arange(problem.seq_len, device=problem.device)
        if problem.packed:
            position = position - problem.row_index(0, q)[0]
        assert_selection(chosen.ids.transpose(1, 2), position, problem.spec)
    return chosen


def _score(
    problem: Problem,
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    scores: Tensor,
    chunk: Chunk,
    levels: int,
) -> None:
    tiles = _tiles(problem)
    start(
        problem.memo,
        ("score", chunk),
        score.group_scores,
        (
            *problem.rows_k(q, tiles.BM), *problem.rows_k(k_cmp, tiles.BN), lse, scores,
            *problem.row_index(0, q)[:2],
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
            | _strides(problem, levels)
            | {"HAS_DOCS": problem.packed, "UPCAST": problem.upcast},
            tiles,
        ),
    )  # fmt: skip


def _choose(
    problem: Problem, q: Tensor, scores: Tensor, chosen: Selection, chunk: Chunk, levels: int
) -> None:
    spec = problem.spec
    num_blocks = spec.num_blocks(max(problem.doc_lens) if problem.packed else chunk.stop)
    # A document may begin in the middle of a word.
    num_blocks = padded(max(num_blocks + 31 * problem.packed, 32))
    start(
        problem.memo,
        ("choose", chunk),
        score.choose_blocks,
        (scores, *chosen, *problem.row_index(0, q)),
        lambda: Launch.plain(
            (chunk.stop - chunk.first, problem.num_segments),
            (
                chunk.first, chunk.stop - chunk.first, problem.seq_len, problem.num_groups,
                chunk.width, *problem.bands[0][:2], problem.num_words,
            ),
            {"L_SEL": spec.l_sel, "N_SEL": spec.n_sel, "N_SEL_PAD": padded(spec.n_sel)}
            | _strides(problem, levels)
            | {"NB": num_blocks, "NW": num_blocks // 32, "HAS_DOCS": problem.packed},
            num_warps=1,
        ),
    )  # fmt: skip


def given(problem: Problem, selection: Tensor) -> Selection:
    """A selection from outside, without repeated blocks and blocks of the future."""
    selection = selection.contiguous()
    chosen = _empty(problem, zero=False)
    row_start, _, row_block = problem.row_index(1, selection)
    spec = problem.spec
    start(
        problem.memo,
        "given",
        score.pack_selection,
        (selection, *chosen, row_start, row_block),
        lambda: Launch.plain(
            (problem.seq_len, problem.num_segments),
            (problem.seq_len, problem.num_groups, problem.num_words),
            {"L_SEL": spec.l_sel, "N_SEL": spec.n_sel, "N_SEL_PAD": padded(spec.n_sel)}
            | {"NW": padded(problem.num_words), "HAS_DOCS": problem.packed},
            num_warps=1,
        ),
    )
    return chosen


def _tiles(problem: Problem) -> Tiles:
    return score_tiles(problem.d_k, problem.dtype, problem.capability)


def _strides(problem: Problem, levels: int) -> dict[str, int]:
    spec = problem.spec
    return {"STRIDES": spec.l_sel // spec.d, "OVERLAP": spec.l // spec.d, "LEVELS": levels}


def _num_levels(problem: Problem) -> int:
    """Into how many parts a tile of scores is added up by blocks; 0: it is kept as it is.

    Blocks must lie in step with the tiles, so documents behind each other cannot be added up.
    """
    spec = problem.spec
    strides, overlap = spec.l_sel // spec.d, spec.l // spec.d
    in_step = strides & (strides - 1) == 0 and strides <= _tiles(problem).BN
    return 1 + ceil_div(overlap - 1, strides) if in_step and not problem.packed else 0


def _chunks(problem: Problem, levels: int) -> list[Chunk]:
    """Chunks of rows whose scores fit the workspace."""
    spec, seq_len = problem.spec, problem.seq_len
    num_cmp = sum(spec.num_cmp(length) for length in problem.doc_lens)
    widest = spec.num_blocks(seq_len) * levels if levels else num_cmp
    rows = SCORE_BYTES // (4 * problem.num_segments * max(widest, 1)) // ROWS * ROWS
    rows = max(rows, ROWS)
    stops = [*range(rows, seq_len, rows), seq_len]
    return [
        Chunk(
            max(stop - rows, 0) if stop < seq_len else (seq_len - 1) // rows * rows,
            stop,
            spec.num_blocks(stop) if levels else num_cmp,
            num_cmp if problem.packed else spec.num_cmp(stop),
        )
        for stop in stops
    ]


def _empty(problem: Problem, *, zero: bool) -> Selection:
    """Memory for a choice; `zero` where no kernel writes every word."""
    batch, groups, seq_len = problem.batch, problem.num_groups, problem.seq_len
    make = torch.zeros if zero else torch.empty
    words = (batch, groups, problem.num_words, seq_len)
    return Selection(
        problem.empty(batch, seq_len, groups, problem.spec.n_sel, dtype=torch.int32),
        problem.empty(batch, groups, seq_len, dtype=torch.int32),
        make(words, dtype=torch.int32, device=problem.device),
        problem.empty(*words, dtype=torch.int16),
    )

"""The choice of blocks by their scores: the kernel alone, on scores that a model rarely has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists for Linux only")

from nsa.ops.spec import BlockSpec
from nsa.ops.triton.choice import best

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE_BLOCKS = 32
"""Blocks of a tile of group_scores: what it writes of a row ends with such a tile."""


def _near(size: tuple[int, ...]) -> Tensor:
    return 1 + torch.rand(size) / 100


def _far(size: tuple[int, ...]) -> Tensor:
    return (torch.randn(size) * 8).exp()


def _three_values(size: tuple[int, ...]) -> Tensor:
    return torch.randint(3, size).float()


def _with_nan(size: tuple[int, ...]) -> Tensor:
    return torch.rand(size).masked_fill(torch.rand(size) < 0.1, torch.nan)


def _best_in_one_column(size: tuple[int, ...]) -> Tensor:
    scores = torch.rand(size)
    scores[..., 5::128] += 2
    return scores


def _equal_in_two_columns(size: tuple[int, ...]) -> Tensor:
    scores = torch.rand(size)
    scores[..., 5::128] = scores[..., 7::128] = 2
    return scores


SCORES: list[Callable[[tuple[int, ...]], Tensor]] = [
    *(_near, _far, _three_values, torch.zeros, _with_nan),
    *(_best_in_one_column, _equal_in_two_columns),
]
LONG_TOKENS, NO_OVERLAP = BlockSpec(l=128), BlockSpec(l=64, d=64)
SHAPES = {
    "4 queries together": (BlockSpec(), 64, 60, False),
    "few blocks": (BlockSpec(), 32, 32, False),
    "few blocks, most of them chosen": (BlockSpec(n_sel=30), 32, 31, False),
    "queries that read all": (BlockSpec(), 64, 4, False),
    "two rounds": (BlockSpec(), 256, 250, False),
    "eight rounds": (BlockSpec(), 1024, 700, False),
    "more rounds than bytes": (BlockSpec(), 2048, 1500, False),
    "forced blocks alone": (BlockSpec(n_sel=3), 256, 200, False),
    "more blocks than columns": (BlockSpec(n_sel=200), 256, 250, False),
    "long compressed tokens": (LONG_TOKENS, 256, 250, False),
    "the largest part": (NO_OVERLAP, 256, 250, True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_best_blocks_are_chosen_and_of_equal_ones_the_lower(name):
    spec, padded_blocks, num_blocks, largest = SHAPES[name]
    torch.manual_seed(0)
    for make in SCORES if padded_blocks <= 1024 else SCORES[-1:]:
        num_rows = 5
        first_row = num_blocks * spec.l_sel - num_rows
        parts, scores = _parts(spec, make, first_row, num_rows, num_blocks, largest)
        expected = [
            _best(row.tolist(), (first_row + i) // spec.l_sel, spec) for i, row in enumerate(scores)
        ]
        ids, num_chosen = _run(spec, parts, first_row, padded_blocks, largest)
        found = [row[:count] for row, count in zip(ids.tolist(), num_chosen.tolist(), strict=True)]
        assert found == expected, make
        assert all(
            set(row[len(best) :]) <= {-1} for row, best in zip(ids.tolist(), expected, strict=True)
        )


def _parts(
    spec: BlockSpec,
    make: Callable[[tuple[int, ...]], Tensor],
    first_row: int,
    num_rows: int,
    num_blocks: int,
    largest: bool,
) -> tuple[Tensor, Tensor]:
    """Parts [levels, rows, width] as group_scores leaves them, NaN where it writes nothing, and
    the scores of the blocks [rows, width]."""
    strides = spec.l_sel // spec.d
    levels = 1 + -(-(spec.l // spec.d - 1) // strides)
    block = torch.arange(-(-(num_blocks + levels - 1) // 16) * 16)
    rows = first_row + torch.arange(num_rows)[:, None]
    num_seen = -(-((rows - spec.l + 1 + spec.d) // spec.d).clamp(min=0) // strides)
    num_written = -(-num_seen // TILE_BLOCKS) * TILE_BLOCKS
    parts = make((levels, num_rows, len(block)))
    for level, part in enumerate(parts):
        of = block - level
        part.masked_fill_((of < 0) | (of >= num_seen), 0.0)
    summed = parts.nan_to_num(0.0).amax(dim=0) if largest else parts.sum(dim=0)
    for level, part in enumerate(parts):
        of = block - level
        part.masked_fill_((of < 0) | (of >= num_written), torch.nan)
    return parts, summed


def _best(scores: list[float], current: int, spec: BlockSpec) -> list[int]:
    """The choice of a query in block `current`, by a sort."""
    legal = range(current + 1)
    forced = [j for j in legal if j < spec.num_first or j > current - spec.num_local]
    rest = sorted((-_rank(scores[j]), j) for j in legal if j not in forced)
    return sorted(forced + [j for _, j in rest[: max(spec.n_sel - len(forced), 0)]])


def _rank(score: float) -> float:
    return 0.0 if score != score else score  # a NaN is last


def _run(
    spec: BlockSpec, parts: Tensor, first_row: int, padded_blocks: int, largest: bool
) -> tuple[Tensor, Tensor]:
    """Ids [rows, n_sel] and their number [rows], by the kernel."""
    levels, num_rows, width = parts.shape
    seq_len, parts = first_row + num_rows, parts.to(DEVICE).contiguous()
    ids = torch.full((seq_len, spec.n_sel), -7, dtype=torch.int32, device=DEVICE)
    num_chosen = ids.new_full((seq_len,), -7)
    together = min(max(best.BLOCKS_TOGETHER // padded_blocks, 1), best.MOST_TOGETHER)
    best.choose_blocks[-(-num_rows // together), 1](
        *(parts, ids, num_chosen, ids, ids, ids, first_row, num_rows, seq_len, 1, width),
        *(spec.l - 1, spec.d, 0),
        L_SEL=spec.l_sel,
        N_SEL=spec.n_sel,
        N_SEL_PAD=1 << (spec.n_sel - 1).bit_length(),
        NUM_FIRST=spec.num_first,
        NUM_LOCAL=spec.num_local,
        STRIDES=spec.l_sel // spec.d,
        OVERLAP=spec.l // spec.d,
        LEVELS=levels,
        LARGEST=largest,
        NB=padded_blocks,
        NW=padded_blocks // 32,
        HAS_DOCS=False,
        HAS_BITS=False,
        BQ=together,
        **best._options(padded_blocks),
    )
    return ids[first_row:].cpu(), num_chosen[first_row:].cpu()

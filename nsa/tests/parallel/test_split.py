"""A sequence in parts: every token has one owner, and what a part needs from its left is known."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nsa import BlockSpec
from nsa.model import NSAAttention
from nsa.model.rope import document_positions
from nsa.parallel import PARTS, Split, shard_sequence
from nsa.parallel.attention import received_bytes
from nsa.parallel.exchange import received_rows_of_halo
from nsa.parallel.split import (
    block_starts,
    num_blocks,
    plan_halo,
    visible_blocks,
    window_starts,
)

SPEC = BlockSpec(l=8, d=4, l_sel=8, n_sel=3, w=10)
SPLITS = [
    Split(96, 2),
    Split(96, 4),
    Split(96, 4, "contiguous"),
    Split(104, 4, "two_ended", (0, 3, 22, 83, 88, 104)),
    Split(104, 4, "contiguous", (0, 3, 22, 83, 88, 104)),
    Split(16, 8, "two_ended", (0, 16)),
    Split(7, 1, "contiguous"),
]


class OneOf(NamedTuple):
    """A rank's view of a mesh: all that shard_sequence asks for."""

    rank: int
    num_ranks: int

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.num_ranks


def bounds_of(split: Split) -> list[int]:
    return list(split.bounds or (0, split.num_tokens))


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_token_has_one_owner_and_its_own_position(split: Split) -> None:
    row = torch.arange(split.num_tokens)
    ranks: list[Any] = [OneOf(rank, split.num_ranks) for rank in range(split.num_ranks)]
    batch = {"ids": row[None], "cu_seqlens": row}
    shards = [shard_sequence(batch, rank, parts=split.parts) for rank in ranks]
    held = torch.cat([shard["ids"][0] for shard in shards])
    assert torch.equal(held.sort().values, row)
    assert all(torch.equal(shard["cu_seqlens"], row) for shard in shards)
    cu_seqlens = torch.tensor(bounds_of(split), dtype=torch.int32)
    positions = document_positions(split.num_tokens, cu_seqlens, row.device)
    for rank, shard in enumerate(shards):
        assert torch.equal(split.positions(rank, row.device), positions[shard["ids"][0]])
    for part in range(split.num_parts):
        rank, place = split.owner(part)
        assert split.parts_of(rank)[place] == part


def test_two_ended_parts_give_every_rank_as_many_pairs_of_query_and_key() -> None:
    def pairs(parts: str, rank: int) -> int:
        return int((Split(64, 4, parts).positions(rank, torch.device("cpu")) + 1).sum())

    assert len({pairs("two_ended", rank) for rank in range(4)}) == 1
    assert pairs("contiguous", 3) > 4 * pairs("contiguous", 0)


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_halo_brings_exactly_the_tokens_before_a_part(split: Split) -> None:
    """Played through: what all ranks send, in order of receivers, is what each takes apart."""
    rows = [
        torch.cat([torch.arange(split.num_tokens)[split.tokens(p)] for p in split.parts_of(rank)])
        for rank in range(split.num_ranks)
    ]
    for starts in (
        window_starts(split, SPEC.w),
        window_starts(split, 200),
        block_starts(split, SPEC),
    ):
        halos = [plan_halo(split, rank, starts) for rank in range(split.num_ranks)]
        sent = [
            torch.cat([own[:0], *(own[run] for run in halo.sends)]).split(halo.to_each)
            for own, halo in zip(rows, halos, strict=True)
        ]
        for rank, halo in enumerate(halos):
            assert halo.from_each == [len(of_sender[rank]) for of_sender in sent]
            runs = torch.cat([of_sender[rank] for of_sender in sent]).split(halo.lengths)
            for part, before in zip(split.parts_of(rank), halo.runs, strict=True):
                found = torch.cat([rows[0][:0], *(runs[i] for i in before)])
                expected = torch.arange(starts[part], split.tokens(part).start)
                assert torch.equal(found, expected)


def last_tokens(split: Split) -> Tensor:
    """The last token of each compression block of the row, document by document."""
    bounds = bounds_of(split)
    return torch.cat([
        start + SPEC.d * torch.arange(SPEC.num_cmp(stop - start)) + SPEC.l - 1
        for start, stop in pairwise(bounds)
    ])  # fmt: skip


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_compression_block_belongs_to_the_part_of_its_last_token(split: Split) -> None:
    ends = last_tokens(split)
    owners = ends // split.part_len
    assert num_blocks(split, SPEC) == tuple(
        int((owners == part).sum()) for part in range(split.num_parts)
    )
    starts, spans = block_starts(split, SPEC), visible_blocks(split, SPEC)
    for part in range(split.num_parts):
        pieces = split.pieces[part]
        seen = (ends > pieces[0].start) & (ends < pieces[-1].stop)
        assert torch.equal(ends[spans[part]], ends[seen])
        own = ends[owners == part]
        if len(own):
            assert starts[part] <= int(own[0]) - SPEC.l + 1
        assert split.tokens(part).start - starts[part] <= SPEC.l - 1


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_rows_received_of_a_halo_are_those_of_its_plan(split: Split) -> None:
    for starts in (window_starts(split, 27), block_starts(split, SPEC)):
        for rank in range(split.num_ranks):
            from_each = plan_halo(split, rank, starts).from_each
            others = sum(from_each) - from_each[rank]
            assert received_rows_of_halo(split, rank, starts) == others


def test_aligned_borders_need_l_minus_d_tokens() -> None:
    split = Split(96, 4, "contiguous")
    needed = [split.tokens(p).start - first for p, first in enumerate(block_starts(split, SPEC))]
    assert needed == [0, 4, 4, 4]


def test_bytes_of_a_layer_follow_the_formula_of_the_design() -> None:
    """For a rank with left neighbours, borders at multiples of d, and one document."""
    layer = NSAAttention(16, 4, 2, 8, 4, l=8, d=4, l_sel=8, n_sel=3, w=10)
    found = received_bytes(layer, Split(96, 4, "contiguous"), 2, batch=3, number_bytes=2)
    num_tokens = 96 * 3 // 4 + 96 // 4 * 3 // 4 + (10 - 1) + (8 - 4)
    assert found == 2 * 3 * 2 * (8 + 4) * num_tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((100, 8), "100 tokens cannot be split into 16 equal parts .8 ranks, .*96 or 112, or"),
        ((100, 8, "contiguous"), "100 tokens .* into 8 equal parts .* such as 96 or 104"),
        ((3, 2), "multiple of 4, such as 4, or another number of ranks"),
        ((96, 2, "striped"), "parts='striped' is not known; use one of two_ended, contiguous"),
        (
            (96, 2, "two_ended", (0, 48)),
            "from 0 to 48; .* whole row, .* to 96: they are not sharded",
        ),
        ((96, 2, "two_ended", (0, 50, 50, 96)), "strictly increasing"),
    ],
)
def test_what_cannot_be_split_is_refused(given: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Split(*given)  # type: ignore[arg-type]
    assert PARTS[0] == Split(96, 2).parts

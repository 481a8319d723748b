"""How a sequence is split over ranks: its parts, their owners, and the documents in each of them.

All ranks compute the same Split from the same numbers, so that each knows what all others hold.

    part        neighbouring tokens of one rank; all parts of a sequence are of the same length
    contiguous  rank r has part r of P
    two_ended   rank r has parts r and 2 P - 1 - r of 2 P: one from either end. Late queries read
                more keys than early ones, and every rank has as many of both.
    piece       the tokens of one document in one part
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa.ops import BlockSpec

PARTS = ("two_ended", "contiguous")
"""Ways to split a sequence; the first is the default."""


def shard_sequence(batch: Any, mesh: DeviceMesh, *, parts: str = PARTS[0]) -> Any:
    """This rank's tokens of a batch, which all ranks of the mesh hold whole.

    A batch is a tensor [B, S, ...], or a dict, list or tuple of them. Tensors of one dimension, as
    cu_seqlens, stay whole: a model takes the bounds of the whole row beside its shard of the ids.
    Targets must be shifted before: the target of a part's last token is in the next part.
    """
    rank, size = mesh.get_local_rank(), mesh.size()
    if isinstance(batch, Mapping):
        return {k: shard_sequence(value, mesh, parts=parts) for k, value in batch.items()}
    if isinstance(batch, list | tuple):
        held = [shard_sequence(value, mesh, parts=parts) for value in batch]
        return held if isinstance(batch, list) else tuple(held)
    if not isinstance(batch, Tensor) or batch.dim() < 2:
        return batch
    return Split(batch.shape[1], size, parts).own_tokens(batch, rank)


class Piece(NamedTuple):
    """The tokens of one document in one part, by their places in the whole row."""

    start: int
    """First token of the document, maybe in an earlier part."""
    first: int
    """First token of the document in this part."""
    stop: int
    """End of the document in this part."""

    @property
    def offset(self) -> int:
        """Position of the piece's first token in its document."""
        return self.first - self.start

    @property
    def num_tokens(self) -> int:
        """Tokens in the part: the queries of its rank."""
        return self.stop - self.first

    @property
    def num_keys(self) -> int:
        """Tokens of the document that the last of them sees."""
        return self.stop - self.start


@dataclass(frozen=True)
class Split:
    """A row of tokens, split over ranks. Parts are numbered from the left of the row."""

    num_tokens: int
    num_ranks: int
    parts: str = PARTS[0]
    bounds: tuple[int, ...] = ()
    """Of the documents, from 0 to num_tokens; empty: the row is one document."""

    def __post_init__(self) -> None:
        if self.parts not in PARTS:
            raise ValueError(f"parts={self.parts!r} is not known; use one of {', '.join(PARTS)}")
        if not self.num_tokens or self.num_tokens % self.num_parts:
            lower = self.num_tokens // self.num_parts * self.num_parts
            near = f"{lower} or {lower + self.num_parts}" if lower else f"{self.num_parts}"
            raise ValueError(
                f"a sequence of {self.num_tokens} tokens cannot be split into {self.num_parts} "
                f"equal parts ({self.num_ranks} ranks, {self.parts}); use a multiple of "
                f"{self.num_parts}, such as {near}, or another number of ranks"
            )
        rises = all(a < b for a, b in pairwise(self.bounds))
        if self.bounds and (self.bounds[0], self.bounds[-1], rises) != (0, self.num_tokens, True):
            raise ValueError(
                f"cu_seqlens goes from {self.bounds[0]} to {self.bounds[-1]}; under context "
                f"parallelism give the bounds of the whole row, strictly increasing from 0 to "
                f"{self.num_tokens}: they are not sharded"
            )

    @property
    def num_parts(self) -> int:
        """Parts of all ranks."""
        return self.num_ranks * (2 if self.parts == "two_ended" else 1)

    @property
    def part_len(self) -> int:
        """Tokens of a part."""
        return self.num_tokens // self.num_parts

    def parts_of(self, rank: int) -> tuple[int, ...]:
        """The parts of a rank, in the order in which it holds their tokens."""
        if self.parts == "two_ended":
            return rank, self.num_parts - 1 - rank
        return (rank,)

    def owner(self, part: int) -> tuple[int, int]:
        """The rank of a part, and the part's place among those of the rank."""
        if part < self.num_ranks:
            return part, 0
        return self.num_parts - 1 - part, 1

    def tokens(self, part: int) -> slice:
        """Where a part is in the row."""
        return slice(part * self.part_len, (part + 1) * self.part_len)

    def own_tokens(self, x: Tensor, rank: int) -> Tensor:  # [B, S, ...] -> [B, T, ...]
        """The tokens of a rank, from those of the row."""
        return torch.cat([x[:, self.tokens(part)] for part in self.parts_of(rank)], dim=1)

    @property
    def pieces(self) -> list[list[Piece]]:
        """The documents in each part, from left to right; at least one in every part."""
        return _pieces(self)

    def positions(self, rank: int, device: torch.device) -> Tensor:  # [tokens of the rank]
        """Positions of a rank's tokens, counted from the start of their documents."""
        held = (piece for part in self.parts_of(rank) for piece in self.pieces[part])
        runs = [torch.arange(p.offset, p.num_keys, device=device) for p in held]
        return torch.cat(runs)


@lru_cache(maxsize=64)
def _pieces(split: Split) -> list[list[Piece]]:
    bounds, found, document = split.bounds or (0, split.num_tokens), [], 0
    for part in range(split.num_parts):
        first, stop = split.tokens(part).start, split.tokens(part).stop
        while bounds[document + 1] <= first:
            document += 1
        held, place = [], document
        while place < len(bounds) - 1 and bounds[place] < stop:
            start, end = bounds[place], bounds[place + 1]
            held.append(Piece(start, max(start, first), min(end, stop)))
            place += 1
        found.append(held)
    return found


# --- What a part needs from the parts on its left ---
# Only the first document of a part can have begun before it.


@lru_cache(maxsize=64)
def window_starts(split: Split, w: int) -> tuple[int, ...]:
    """By part: the first token whose key a window of w tokens reads there."""
    return tuple(max(p[0].start, p[0].first - (w - 1)) for p in split.pieces)


@lru_cache(maxsize=64)
def block_starts(split: Split, spec: BlockSpec) -> tuple[int, ...]:
    """By part: the first token of the first compression block that ends there.

    A block belongs to the part of its last token. So l - d to l - 1 tokens come from the left:
    l - d where the border is a multiple of d tokens from the document's start.
    """
    return tuple(p[0].start + spec.num_cmp(p[0].offset) * spec.d for p in split.pieces)


@lru_cache(maxsize=64)
def num_blocks(split: Split, spec: BlockSpec) -> tuple[int, ...]:
    """By part: the compression blocks that end there, of all its documents."""
    return tuple(
        sum(spec.num_cmp(p.num_keys) - spec.num_cmp(p.offset) for p in pieces)
        for pieces in split.pieces
    )


@lru_cache(maxsize=64)
def visible_blocks(split: Split, spec: BlockSpec) -> tuple[slice, ...]:
    """By part: where, among the compressed tokens of the row, those of its documents up to its last
    token are."""
    ends, spans = 0, []
    for pieces, count in zip(split.pieces, num_blocks(split, spec), strict=True):
        # Those of the first document that earlier parts hold.
        first = ends - spec.num_cmp(pieces[0].offset)
        ends += count
        spans.append(slice(first, ends))
    return tuple(spans)


class Halo(NamedTuple):
    """What one rank sends and receives, so that its parts continue to the left.

    Rows are tokens in the order in which a rank holds them.
    """

    sends: tuple[slice, ...]
    """Rows to send, ordered by receiver."""
    to_each: list[int]
    """Rows for each rank."""
    from_each: list[int]
    """Rows from each rank."""
    lengths: list[int]
    """Rows of each run of tokens that arrives, ordered by sender."""
    runs: tuple[tuple[int, ...], ...]
    """By own part: the runs that continue it, from left to right."""


@lru_cache(maxsize=64)
def plan_halo(split: Split, rank: int, starts: tuple[int, ...]) -> Halo:
    """The exchange after which each part has all tokens from `starts` of the part on.

    They may come from several parts, and from this rank itself.
    """
    sends, to_each = [], []
    for receiver in range(split.num_ranks):
        rows = [run.rows for run in _runs(split, rank, receiver, starts)]
        sends += rows
        to_each.append(sum(r.stop - r.start for r in rows))
    arriving = [
        run for sender in range(split.num_ranks) for run in _runs(split, sender, rank, starts)
    ]
    from_each = [0] * split.num_ranks
    for run in arriving:
        from_each[split.owner(run.source)[0]] += run.rows.stop - run.rows.start
    runs = [
        sorted((run.source, i) for i, run in enumerate(arriving) if run.part == part)
        for part in split.parts_of(rank)
    ]
    return Halo(
        tuple(sends),
        to_each,
        from_each,
        [run.rows.stop - run.rows.start for run in arriving],
        tuple(tuple(i for _, i in found) for found in runs),
    )


class _Run(NamedTuple):
    """Tokens of one part that continue another to the left."""

    part: int
    source: int
    rows: slice


def _runs(split: Split, sender: int, receiver: int, starts: tuple[int, ...]) -> list[_Run]:
    """What one rank sends to another, in the order of the receiver's parts."""
    found = []
    for part in split.parts_of(receiver):
        for place, source in enumerate(split.parts_of(sender)):
            own = split.tokens(source)
            first = max(starts[part], own.start)
            stop = min(split.tokens(part).start, own.stop)
            if first < stop:
                shift = place * split.part_len - own.start
                found.append(_Run(part, source, slice(first + shift, stop + shift)))
    return found

"""Training rows as prepared shards, which the trainer reads like those of `nsa data prepare`.

The trainer shuffles rows; every row is written where the trainer will read it when its turn comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nsa.data.array_rows import shuffled
from nsa.data.documents import TRAIN, VAL, Counts
from nsa.data.shards import FILE_NAME, Manifest, Shard, write_manifest
from nsa.data.tokenizers import HFTokenizer, id_type
from nsa.evaluate.needles import Ids
from nsa.files import DurableFile
from studies.long_context.text import TOKENIZER, Say, read_hay
from studies.long_context.training_rows import Mixture, make_row
from studies.long_context.vocabulary import Words, find_words

CHUNK_TOKENS = 65536
"""Tokens of the rows that a process makes at a time."""


@dataclass(frozen=True, kw_only=True)
class RowMaker:
    """All that decides the rows, but their number."""

    text: Path
    """The folder with the tokenizer and the text."""
    mixture: Mixture
    digits: int
    num_keys: int
    seed: int
    """Of the rows, and of the trainer that shuffles them."""
    plain_held_out: bool = False
    """Held-out rows are text alone, one after another: their loss is that of a language model."""


def write_shards(
    folder: Path, maker: RowMaker, num_rows: dict[str, int], say: Say, pool: Executor | None = None
) -> None:
    """One shard for each side and the manifest last; a folder that is complete stays.

    Each side gets a row more than it is asked for, for the last target of the row before it. The
    rows are made by the processes of `pool`, or here.
    """
    if (folder / FILE_NAME).is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = HFTokenizer(maker.text / TOKENIZER)
    shards = [_write_side(folder, side, maker, num_rows[side], pool) for side in num_rows]
    documents = {shard.side: shard.documents for shard in shards}
    manifest = Manifest(
        tokenizer=tokenizer.name,
        fingerprint=tokenizer.fingerprint(),
        vocab=tokenizer.vocab,
        eos=tokenizer.eos,
        counts=Counts(documents=sum(documents.values()), held_out=documents[VAL]),
        shards=shards,
    )
    write_manifest(folder, manifest)
    say(f"{folder}: {sum(shard.tokens for shard in shards):,} tokens for training and validation")


def place_of(turn: int, side: str, num_rows: int, seed: int) -> int:
    """Where the trainer looks for the row that it reads at this turn of its first epoch."""
    if side != TRAIN or turn == num_rows:  # held-out rows do not grow; the last is never read whole
        return turn
    return shuffled(turn, num_rows, seed, epoch=0)


def _write_side(
    folder: Path, side: str, maker: RowMaker, num_rows: int, pool: Executor | None
) -> Shard:
    tokenizer = HFTokenizer(maker.text / TOKENIZER)
    rows = np.empty((num_rows + 1, maker.mixture.seq_len), id_type(tokenizer.vocab))
    for places, made in _make(maker, side, num_rows, pool):
        rows[places] = made
    name = f"{side}-00000.bin"
    with DurableFile(folder / name) as file:
        file.write(rows.data)
    return Shard(
        file=name,
        side=side,
        tokens=rows.size,
        documents=max(1, int((rows == tokenizer.eos).sum())),  # text alone has no end mark
        sha256=hashlib.sha256(rows.data).hexdigest(),
    )


Made = tuple[list[int], Ids]
"""Places, and the row for each: [rows, S]."""


def _make(maker: RowMaker, side: str, num_rows: int, pool: Executor | None) -> Iterable[Made]:
    """All rows in chunks."""
    size = max(1, CHUNK_TOKENS // maker.mixture.seq_len)
    starts = range(0, num_rows + 1, size)
    chunks = [range(start, min(start + size, num_rows + 1)) for start in starts]
    make = partial(_make_chunk, maker, side, num_rows)
    return map(make, chunks) if pool is None else pool.map(make, chunks)


class _Maker:
    """Makes rows; the text is read once."""

    def __init__(self, maker: RowMaker, side: str, num_rows: int) -> None:
        self._tokenizer = HFTokenizer(maker.text / TOKENIZER)
        self._words: Words = find_words(self._tokenizer, maker.digits, maker.num_keys)
        self._hay: NDArray[np.int64] = read_hay(maker.text, side, self._words)
        self._maker, self._side, self._num_rows = maker, side, num_rows

    def rows(self, turns: range) -> Made:
        places = [place_of(t, self._side, self._num_rows, self._maker.seed) for t in turns]
        return places, np.stack([self._row(turn) for turn in turns])

    def _row(self, turn: int) -> Ids:
        if self._maker.plain_held_out and self._side == VAL:
            length = self._maker.mixture.seq_len
            return np.take(self._hay, range(turn * length, (turn + 1) * length), mode="wrap")
        return make_row(
            turn,
            self._side,
            self._maker.mixture,
            self._hay,
            self._words,
            self._tokenizer.eos,
            self._maker.seed,
            turn / self._num_rows if self._side == TRAIN else 1.0,
        ).ids


@lru_cache(maxsize=2)
def _open(maker: RowMaker, side: str, num_rows: int) -> _Maker:
    return _Maker(maker, side, num_rows)


def _make_chunk(maker: RowMaker, side: str, num_rows: int, turns: range) -> Made:
    return _open(maker, side, num_rows).rows(turns)

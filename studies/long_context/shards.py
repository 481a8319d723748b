"""Training rows as prepared shards, which the trainer reads like those of `nsa data prepare`.

The trainer shuffles rows; every row is written where the trainer will read it when its turn comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nsa.data.durable import DurableFile
from nsa.data.hf_tokenizer import HFTokenizer
from nsa.data.local import TRAIN, VAL, Counts
from nsa.data.manifest import FILE_NAME, Manifest, Shard, write_manifest
from nsa.data.order import shuffled
from nsa.data.tokenizer import id_type
from studies.long_context.task import Document, Ids
from studies.long_context.text import TOKENIZER, Say, read_hay
from studies.long_context.training_rows import Mixture, make_row
from studies.long_context.vocabulary import Words, find_words

CHUNK_ROWS = 64
"""Rows that a process makes at a time."""


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


def write_shards(folder: Path, maker: RowMaker, num_rows: dict[str, int], say: Say) -> None:
    """One shard for each side and the manifest last; a folder that is complete stays.

    Each side gets a row more than it is asked for, for the last target of the row before it.
    """
    if (folder / FILE_NAME).is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = HFTokenizer(maker.text / TOKENIZER)
    shards = [_write_side(folder, side, maker, num_rows[side], tokenizer) for side in num_rows]
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


def turns(num_rows: int, seed: int) -> NDArray[np.float64]:  # [rows]
    """The share of its first epoch after which the trainer reads each row."""
    order = [shuffled(place, num_rows, seed, epoch=0) for place in range(num_rows)]
    found = np.empty(num_rows)
    found[order] = np.arange(num_rows) / num_rows
    return found


def _write_side(
    folder: Path, side: str, maker: RowMaker, num_rows: int, tokenizer: HFTokenizer
) -> Shard:
    digest, tokens, documents = hashlib.sha256(), 0, 0
    name = f"{side}-00000.bin"
    with DurableFile(folder / name) as file:
        for rows in _make(maker, side, num_rows):
            content = rows.astype(id_type(tokenizer.vocab)).tobytes()
            file.write(content)
            digest.update(content)
            tokens += len(rows)
            documents += int((rows == tokenizer.eos).sum())
    return Shard(
        file=name, side=side, tokens=tokens, documents=documents, sha256=digest.hexdigest()
    )


def _make(maker: RowMaker, side: str, num_rows: int) -> Iterator[Ids]:
    """Chunks of rows in order, from many processes where there are many rows."""
    progress = np.ones(num_rows + 1)
    if side == TRAIN:
        progress[:-1] = turns(num_rows, maker.seed)
    indices = np.split(np.arange(num_rows + 1), range(CHUNK_ROWS, num_rows + 1, CHUNK_ROWS))
    chunks = [list(zip(part.tolist(), progress[part].tolist(), strict=True)) for part in indices]
    if len(chunks) < 4:
        made = _Maker(maker, side)
        yield from map(made.rows, chunks)
        return
    with ProcessPoolExecutor(
        mp_context=get_context("spawn"), initializer=_open, initargs=(maker, side)
    ) as pool:
        yield from pool.map(_make_chunk, chunks)


Chunk = list[tuple[int, float]]
"""Indices of rows, each with the share of training after which it is read."""


class _Maker:
    """Makes rows; the text is read once."""

    def __init__(self, maker: RowMaker, side: str) -> None:
        self._tokenizer = HFTokenizer(maker.text / TOKENIZER)
        self._words: Words = find_words(self._tokenizer, maker.digits, maker.num_keys)
        self._hay: NDArray[np.int64] = read_hay(maker.text, side, self._words)
        self._maker, self._side = maker, side

    def rows(self, chunk: Chunk) -> Ids:
        return np.concatenate([self._row(index, progress).ids for index, progress in chunk])

    def _row(self, index: int, progress: float) -> Document:
        return make_row(
            index,
            self._side,
            self._maker.mixture,
            self._hay,
            self._words,
            self._tokenizer.eos,
            self._maker.seed,
            progress,
        )


_maker: list[_Maker] = []
"""What a process makes rows with."""


def _open(maker: RowMaker, side: str) -> None:
    _maker.append(_Maker(maker, side))


def _make_chunk(chunk: Chunk) -> Ids:
    return _maker[0].rows(chunk)

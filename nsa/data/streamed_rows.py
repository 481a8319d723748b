"""Rows of an endless, forward-only document stream.

The training documents of all epochs form one token stream; row i starts at token i*S. Rows are
shuffled within blocks of neighbouring rows. A row therefore depends only on seed and position, and
a block can be read again from its start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa.data.array_rows import State, shuffled
from nsa.data.documents import TRAIN, Counts, Document, fingerprint_of
from nsa.data.encode import EndlessDocuments, Place, Report, encode_sides
from nsa.data.errors import DataError, SourceLost
from nsa.data.tokenizers import Ids, Tokenizer

MOST_ROWS, MOST_TOKENS = 256, 1 << 19
"""Most rows in a block, and most tokens unless a single row is longer: one or two megabytes of
text, which a resume has to read again."""


class Start(NamedTuple):
    """Start of a block: its number, the first document, and the tokens of it to skip."""

    block: int
    place: Place
    skip: int


class StreamedRows:
    """Rows by position from a forward-only stream; going back starts from the beginning."""

    num_rows = None

    def __init__(
        self,
        documents: EndlessDocuments,
        tokenizer: Tokenizer,
        seq_len: int,
        seed: int,
        *,
        doc_batch: int = 64,
        report: Report | None = None,
    ) -> None:
        """`doc_batch` documents are read, then tokenized, at a time."""
        self._documents, self._tokenizer = documents, tokenizer
        self._seq_len, self._seed, self._doc_batch = seq_len, seed, doc_batch
        self._report = report or Report(every=0)
        self.block_rows = max(1, min(MOST_ROWS, MOST_TOKENS // seq_len))
        self._kept: dict[int, tuple[Start, NDArray[np.int64]]] = {}
        self._seek(Start(0, Place(), 0))

    def batch(self, position: int, size: int) -> Tensor:  # [size, S+1] int64
        """The rows at these positions; reads everything before them."""
        rows = np.empty((size, self._seq_len + 1), dtype=np.int64)
        for row, place in zip(rows, range(position, position + size), strict=True):
            number, index = divmod(place, self.block_rows)
            _, tokens = self._block(number)
            start = shuffled(index, self.block_rows, self._seed, number) * self._seq_len
            row[:] = tokens[start : start + self._seq_len + 1]
        return torch.from_numpy(rows)

    def state_dict(self, position: int) -> State:
        """Start of the block of a position, or the nearest known block before it."""
        known = [self._origin, *(start for start, _ in self._kept.values())]
        start = max(start for start in known if start.block * self.block_rows <= position)
        return {"block": start.block, **start.place._asdict(), "skip": start.skip}

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; earlier blocks are then read from the very beginning."""
        names = {"block", *Place._fields, "skip"}
        if state.keys() != names or any(type(v) is not int or v < 0 for v in state.values()):
            raise DataError(
                f"{state!r} is not a position in {self._documents!r}; it needs whole numbers >= 0 "
                f"for {', '.join(sorted(names))}; resume from another checkpoint"
            )
        place = Place(*(state[name] for name in Place._fields))
        self._seek(Start(state["block"], place, state["skip"]))

    def fingerprint(self) -> str:
        """Hash everything that determines the rows."""
        return fingerprint_of(
            rows="blocks",
            documents=self._documents.fingerprint(),
            tokenizer=self._tokenizer.fingerprint(),
            seq_len=self._seq_len,
            seed=self._seed,
            block=self.block_rows,
        )

    def _block(self, number: int) -> tuple[Start, NDArray[np.int64]]:
        """The tokens of a block; two blocks are kept, because a batch may span both."""
        if number not in self._kept and number < self._next.block:
            self._seek(Start(0, Place(), 0))
        while number not in self._kept:
            start, tokens = self._read_block()
            self._kept[start.block] = start, tokens
            for old in sorted(self._kept)[:-2]:
                del self._kept[old]
        return self._kept[number]

    def _seek(self, start: Start) -> None:
        self._kept.clear()
        self._origin = self._next = start
        self._ahead = deque[tuple[Place, Ids]]()
        self._tokens_ahead = -start.skip
        self._encoded = self._encode(start.place)

    def _read_block(self) -> tuple[Start, NDArray[np.int64]]:
        """Take a block off the stream; its last token is also the first of the next block."""
        length = self.block_rows * self._seq_len
        while self._tokens_ahead <= length:
            try:
                place, ids = next(self._encoded)
            except StopIteration:  # an earlier error, already raised, ended the generator
                raise SourceLost("the stream has already failed; restart the run") from None
            self._ahead.append((place, ids))
            self._tokens_ahead += len(ids)
        start = self._next
        stream = np.concatenate([ids for _, ids in self._ahead])
        tokens = stream[start.skip : start.skip + length + 1].astype(np.int64)
        skip = start.skip + length
        # Drop documents that this block used up; the next block starts inside the first one left.
        while skip >= len(self._ahead[0][1]):
            skip -= len(self._ahead.popleft()[1])
        self._next = Start(start.block + 1, self._ahead[0][0], skip)
        self._tokens_ahead -= length
        return start, tokens

    def _encode(self, place: Place) -> Iterator[tuple[Place, Ids]]:
        """Yield (place, ids with EOS) for each training document."""
        counts, at, last_trained_epoch = Counts(), place, place.epoch
        for chunk in _chunks(self._documents.read(place), self._doc_batch):
            for at, document in chunk:  # one at a time, so that each keeps its own place
                for side, ids in encode_sides([document], self._tokenizer, counts):
                    self._report.add(at.epoch, len(ids))
                    if side == TRAIN:
                        last_trained_epoch = at.epoch
                        yield at, ids
            if at.epoch > last_trained_epoch + 1:
                raise DataError(
                    f"an epoch had no document to train on ({counts.documents} documents, "
                    f"{counts.empty} empty); use another source"
                )


def _chunks(
    documents: Iterator[tuple[Place, Document]], size: int
) -> Iterator[list[tuple[Place, Document]]]:
    """Yield `size` documents at a time; before an error, the documents read so far."""
    while True:
        chunk: list[tuple[Place, Document]] = []
        try:
            for _ in range(size):
                chunk.append(next(documents))
        except (DataError, SourceLost):
            yield chunk
            raise
        yield chunk

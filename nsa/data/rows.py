"""Rows of S+1 tokens, each addressed by its global position; nothing else decides what it holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nsa.data.errors import DataError
from nsa.data.fingerprint import fingerprint_of
from nsa.data.order import shuffled
from nsa.data.stream import Stream
from nsa.data.tokenizer import Ids, Tokenizer, id_type

State = dict[str, int]
"""What a source needs to go on in another process; empty where any row can be read at once."""


class Rows(Protocol):
    """Rows for a model that reads S tokens and has S targets."""

    @property
    def num_rows(self) -> int | None:
        """Different rows in an epoch; None when no row ever returns."""

    def batch(self, position: int, size: int) -> Tensor:  # [size, S+1] int64
        """Return the rows at global positions `position` to `position + size - 1`."""

    def fingerprint(self) -> str:
        """Return a sha256 of what decides every row; a resume on other data can be refused."""

    def state(self, position: int) -> State:
        """Return what lets another process read from `position` on, which was read lately."""

    def resume(self, state: State) -> None:
        """Be ready for the rows from the position on that this state was asked for."""


class AnyOrder:
    """Rows of which any can be read at once: there is nothing to remember."""

    def state(self, position: int) -> State:
        """Return nothing: the position says it all."""
        return {}

    def resume(self, state: State) -> None:
        """Do nothing."""
        assert not state, f"{state} is the state of another source"


class StreamRows(AnyOrder):
    """Rows of a token stream: row i starts at token i*S, so neighbours overlap by one token."""

    def __init__(
        self, stream: Stream | Ids, seq_len: int, seed: int, side: str, content: str = ""
    ) -> None:
        """`content` names what the stream holds; without it, its tokens are hashed for that."""
        self._stream = stream if isinstance(stream, Stream) else Stream([stream])
        self._seq_len, self._seed, self._content = seq_len, seed, content
        self.num_rows = (len(self._stream) - 1) // seq_len
        if self.num_rows < 1:
            raise _too_short(len(self._stream), seq_len, side)

    def batch(self, position: int, size: int) -> Tensor:  # [size, S+1] int64
        """Each epoch visits every row once, in an order of its own."""
        rows = np.empty((size, self._seq_len + 1), dtype=np.int64)
        for row, place in zip(rows, range(position, position + size), strict=True):
            epoch, index = divmod(place, self.num_rows)
            start = shuffled(index, self.num_rows, self._seed, epoch) * self._seq_len
            self._stream.copy_to(row, start)
        return torch.from_numpy(rows)

    def fingerprint(self) -> str:
        """Hash the content, how it is cut and in which order it comes."""
        self._content = self._content or self._stream.sha256()
        return fingerprint_of(
            rows="stream", content=self._content, seq_len=self._seq_len, seed=self._seed
        )


def to_stream(documents: Iterable[str], tokenizer: Tokenizer) -> Ids:
    """Join the ids of the documents; each ends with the end mark."""
    end: Ids = np.array([tokenizer.eos], dtype=id_type(tokenizer.vocab))
    parts = [part for text in documents for part in (tokenizer.encode(text), end)]
    return np.concatenate(parts) if parts else end[:0]


def _too_short(num_tokens: int, seq_len: int, side: str) -> DataError:
    given = f"seq_len={seq_len} needs {seq_len + 1} tokens, the {side} text has {num_tokens}"
    if num_tokens < 2:
        return DataError(f"{given}; the hash of a document decides its side; give more documents")
    return DataError(f"{given}; use a train.seq_len of at most {num_tokens - 1}")

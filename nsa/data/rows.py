"""Rows of S+1 tokens, each addressed by its global position; nothing else decides what it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa.data.errors import DataError
from nsa.data.order import shuffled
from nsa.data.tokenizer import ByteTokenizer


class Rows(Protocol):
    """Rows for a model that reads S tokens and has S targets."""

    @property
    def num_rows(self) -> int | None:
        """Different rows in an epoch; None when no row ever returns."""

    def batch(self, position: int, size: int) -> Tensor:  # [size, S+1] int64
        """Return the rows at global positions `position` to `position + size - 1`."""


class StreamRows:
    """Rows of a token stream: row i starts at token i*S, so neighbours overlap by one token."""

    def __init__(self, stream: NDArray[np.uint8], seq_len: int, seed: int, side: str) -> None:
        self.num_rows = (len(stream) - 1) // seq_len
        if self.num_rows < 1:
            raise DataError(
                f"seq_len={seq_len} needs {seq_len + 1} tokens, the {side} text has {len(stream)}; "
                f"use a train.seq_len of at most {len(stream) - 1}"
            )
        self._tokens = torch.from_numpy(stream)
        self._seq_len, self._seed = seq_len, seed

    def batch(self, position: int, size: int) -> Tensor:  # [size, S+1] int64
        """Each epoch visits every row once, in an order of its own."""
        return torch.stack([self._row(p) for p in range(position, position + size)])

    def _row(self, position: int) -> Tensor:  # [S+1] int64
        epoch, index = divmod(position, self.num_rows)
        start = shuffled(index, self.num_rows, self._seed, epoch) * self._seq_len
        return self._tokens[start : start + self._seq_len + 1].long()


class SyntheticRows:
    """Uniform random tokens, fresh at every position: nothing in them can be learned."""

    num_rows = None

    def __init__(self, vocab: int, seq_len: int, seed: int, side: str) -> None:
        self._vocab, self._seq_len, self._key = vocab, seq_len, f"{seed}/{side}"

    def batch(self, position: int, size: int) -> Tensor:  # [size, S+1] int64
        """The row at a position has a generator of its own."""
        return torch.stack([self._row(p) for p in range(position, position + size)])

    def _row(self, position: int) -> Tensor:  # [S+1] int64
        digest = hashlib.blake2b(f"{self._key}/{position}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.randint(self._vocab, (self._seq_len + 1,), generator=generator)


def to_stream(documents: Iterable[str], tokenizer: ByteTokenizer) -> NDArray[np.uint8]:
    """Join the ids of the documents; each ends with the end mark."""
    end = np.array([tokenizer.eos], dtype=np.uint8)
    parts = [part for text in documents for part in (tokenizer.encode(text), end)]
    return np.concatenate(parts) if parts else end[:0]

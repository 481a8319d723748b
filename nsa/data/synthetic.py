"""Rows that are made, not read: uniform random tokens, and random tokens with a copy in them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from nsa.data.errors import DataError
from nsa.data.fingerprint import fingerprint_of
from nsa.data.rows import AnyOrder

COPIED_PART = 4
"""A copy is a quarter of a row, so that half of the row is noise, wherever it lies."""


class SyntheticRows(AnyOrder):
    """Uniform random tokens, fresh at every position: nothing in them can be learned."""

    num_rows = None
    kind = "synthetic"

    def __init__(self, vocab: int, seq_len: int, seed: int, side: str) -> None:
        self._vocab, self._seq_len, self._key = vocab, seq_len, f"{seed}/{side}"

    def batch(self, position: int, size: int) -> Tensor:  # [size, S+1] int64
        """The row at a position has a generator of its own."""
        return torch.stack([self._row(p) for p in range(position, position + size)])

    def fingerprint(self) -> str:
        """Hash what every row is made from."""
        return fingerprint_of(
            rows=self.kind, vocab=self._vocab, seq_len=self._seq_len, key=self._key
        )

    def _row(self, position: int) -> Tensor:  # [S+1] int64
        return self._random(self._generator(position))

    def _generator(self, position: int) -> torch.Generator:
        digest = hashlib.blake2b(f"{self._key}/{position}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)

    def _random(self, generator: torch.Generator) -> Tensor:  # [S+1] int64
        return torch.randint(self._vocab, (self._seq_len + 1,), generator=generator)


class CopyRows(SyntheticRows):
    """Random tokens in which one segment comes again later, at a random distance.

    The copy can be predicted from its second token on by a model that finds the first occurrence;
    everything else stays at ln V nats per token. A copy never overlaps what it copies.
    """

    kind = "synthetic_copy"

    def __init__(self, vocab: int, seq_len: int, seed: int, side: str) -> None:
        super().__init__(vocab, seq_len, seed, side)
        if seq_len < COPIED_PART:
            raise DataError(
                f"seq_len={seq_len} has no room for a copy; synthetic_copy needs {COPIED_PART} or "
                "more; use a longer train.seq_len"
            )

    def segment(self, position: int) -> tuple[int, int, int]:
        """Return where the segment and its copy start in the row at a position, and the length."""
        return self._place(self._generator(position))

    def _row(self, position: int) -> Tensor:  # [S+1] int64
        generator = self._generator(position)
        source, target, length = self._place(generator)
        row = self._random(generator)
        row[target : target + length] = row[source : source + length]
        return row

    def _place(self, generator: torch.Generator) -> tuple[int, int, int]:
        """Draw the distance first: long ones are then as frequent as short ones."""
        row_len = self._seq_len + 1
        length = row_len // COPIED_PART
        distance = length + _below(row_len - 2 * length + 1, generator)
        source = _below(row_len - length - distance + 1, generator)
        return source, source + distance, length


def _below(bound: int, generator: torch.Generator) -> int:
    return int(torch.randint(bound, (1,), generator=generator))

"""Tokens of one or more arrays, in memory or mapped from files, read as one stream."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from nsa.data.tokenizer import Ids

CHUNK_TOKENS = 1 << 20
"""Tokens that are hashed at a time: a mapped stream may be larger than the memory."""


class Stream:
    """A stream of token ids; only what is asked for is touched."""

    def __init__(self, parts: Sequence[Ids]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def copy_to(self, out: NDArray[np.int64], start: int) -> None:
        """Fill `out` with the tokens from `start` on; they may lie in several parts."""
        assert 0 <= start <= len(self) - len(out), f"{len(out)} tokens at {start} of {len(self)}"
        part, filled = bisect_right(self._ends, start), 0
        while filled < len(out):
            begin = start + filled - (self._ends[part] - len(self._parts[part]))
            piece = self._parts[part][begin : begin + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            part, filled = part + 1, filled + len(piece)

    def sha256(self) -> str:
        """Hash every token; how the stream is cut into parts does not matter."""
        digest = hashlib.sha256("/".join(sorted({p.dtype.name for p in self._parts})).encode())
        for part in self._parts:
            for start in range(0, len(part), CHUNK_TOKENS):
                digest.update(part[start : start + CHUNK_TOKENS].tobytes())
        return digest.hexdigest()

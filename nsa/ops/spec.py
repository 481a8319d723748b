"""Block arithmetic of NSA: the five sizes, how many blocks exist, how many tokens a query reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

NUM_FORCED = 3
"""Blocks that every query reads: the first of the sequence, the previous one, its own."""


@dataclass(frozen=True)
class BlockSpec:
    """Sizes of the three branches in tokens (`n_sel`: in blocks), under the paper's letters."""

    l: int = 32
    """Compression block: raw tokens behind one compressed token."""
    d: int = 16
    """Compression stride: tokens from one block's start to the next; divides l and l_sel."""
    l_sel: int = 64
    """Selection block: raw tokens that are selected together."""
    n_sel: int = 16
    """Selection blocks each query reads, the forced ones included."""
    w: int = 512
    """Sliding window: the latest raw tokens each query reads, itself included."""

    def __post_init__(self) -> None:
        for field in fields(self):
            # bool is a subclass of int and would pass the check.
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"BlockSpec.{field.name}={value!r} is not a positive integer; "
                    f"give a count of {'blocks' if field.name == 'n_sel' else 'tokens'} >= 1"
                )
        if self.n_sel < NUM_FORCED:
            raise ValueError(
                f"n_sel={self.n_sel} leaves no room for the {NUM_FORCED} forced blocks (first, "
                f"previous, current); use n_sel >= {NUM_FORCED}"
            )
        self._check_stride("l", self.l)
        self._check_stride("l_sel", self.l_sel)

    def _check_stride(self, name: str, size: int) -> None:
        """Refuse sizes that d does not divide: blocks would not be a whole number of strides."""
        if size % self.d:
            lower = max(self.d, size - size % self.d)
            choices = f"{lower} or {lower + self.d}" if lower < size else f"{self.d}"
            raise ValueError(
                f"{name}={size} is not a multiple of d={self.d}; use {name}={choices}, "
                f"or a stride d that divides {size}"
            )

    def to_ints(self) -> list[int]:
        """The sizes in the order of the fields: torch.library operators take no objects."""
        return [self.l, self.d, self.l_sel, self.n_sel, self.w]

    @staticmethod
    def from_ints(sizes: Sequence[int]) -> BlockSpec:
        """The inverse of `to_ints`."""
        return _from_ints(*sizes)

    def num_cmp(self, num_tokens: int) -> int:
        """Compressed tokens that `num_tokens` raw tokens complete."""
        return 0 if num_tokens < self.l else (num_tokens - self.l) // self.d + 1

    def num_blocks(self, num_tokens: int) -> int:
        """Selection blocks that `num_tokens` raw tokens touch, the last one perhaps partly."""
        return -(-num_tokens // self.l_sel)

    def num_selected_tokens(self, num_tokens: int) -> int:
        """Raw tokens the last of `num_tokens` queries reads in the selected branch."""
        if num_tokens == 0:
            return 0
        # The own block is read up to the query, all others whole.
        current_block = (num_tokens - 1) // self.l_sel
        tokens_in_current = num_tokens - current_block * self.l_sel
        return min(self.n_sel - 1, current_block) * self.l_sel + tokens_in_current

    def num_reads(self, num_tokens: int) -> int:
        """Tokens per KV head that decoding the last of `num_tokens` tokens reads, all branches."""
        return (
            self.num_cmp(num_tokens)
            + self.num_selected_tokens(num_tokens)
            + min(self.w, num_tokens)
        )


@lru_cache
def _from_ints(*sizes: int) -> BlockSpec:
    """Cached, so that an operator does not check the same sizes in every call."""
    return BlockSpec(*sizes)

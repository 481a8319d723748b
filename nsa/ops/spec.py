"""Block arithmetic of NSA: the sizes, how many blocks exist, how many tokens a query reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache


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
    num_first: int = 1
    """Forced blocks at the start of the sequence."""
    num_local: int = 2
    """Forced blocks up to the query's own, which is one of them."""

    def __post_init__(self) -> None:
        for field in fields(self):
            # bool is a subclass of int and would pass the check.
            value, least = getattr(self, field.name), int(field.name != "num_first")
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                in_blocks = field.name in ("n_sel", "num_first", "num_local")
                raise ValueError(
                    f"BlockSpec.{field.name}={value!r} is not {'a positive' if least else 'an'} "
                    f"integer; give a count of {'blocks' if in_blocks else 'tokens'} >= {least}"
                )
        if self.n_sel < self.num_forced:
            raise ValueError(
                f"n_sel={self.n_sel} leaves no room for the {self.num_forced} forced blocks "
                f"(num_first={self.num_first}, num_local={self.num_local}); use n_sel >= "
                f"{self.num_forced}"
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

    @property
    def num_forced(self) -> int:
        """Blocks that every query reads, where there are as many."""
        return self.num_first + self.num_local

    def to_ints(self) -> list[int]:
        """The sizes in the order of the fields: torch.library operators take no objects."""
        forced = [self.num_first, self.num_local]
        return [self.l, self.d, self.l_sel, self.n_sel, self.w, *forced]

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

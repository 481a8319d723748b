"""The cache of `generate()`: rows of a batch have lengths of their own, and no padding.

transformers counts columns of a padded batch. Here every row is read without its padding. Rows of
equal length share one cache of TinyLM; a batch without padding is a single one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.model import ModelCache, TinyLM

FIRST_TOKENS = 1 << 16
"""Tokens for which a cache is made at once; for longer texts it grows."""
SPARE_TOKENS = 256
"""Room of a cache, where nobody says how long the text will be."""


class _Rows:
    """Rows of a batch with equally many tokens, and the cache that they share."""

    def __init__(self, rows: Tensor, ids: Tensor) -> None:
        self.rows, self.ids = rows, ids  # [n] int64, on the host; [n, T] integer
        self.cache: ModelCache | None = None

    def append(self, model: TinyLM, ids: Tensor, max_len: int) -> Tensor:  # [n, T] -> [n, T, dim]
        """Read T more tokens; return their hidden states."""
        self.ids = torch.cat([self.ids, ids], dim=1)
        length = self.ids.shape[1]
        if self.cache is None or length > self.cache.max_len:
            # A larger cache reads all tokens again: its layers do not know how to grow.
            room = min(max_len, FIRST_TOKENS) if max_len else length + SPARE_TOKENS
            self.cache = model.new_cache(len(self.rows), room if length <= room else 2 * length)
            return model.append(self.ids, self.cache)[:, -ids.shape[1] :]
        return model.append(ids, self.cache)

    def split(self, counts: Tensor) -> list[_Rows]:  # [n] int64, on the host
        """Rows with equal counts together; caches of rows that part are made again."""
        values = counts.unique()
        if len(values) == 1:
            return [self]
        parts = [torch.nonzero(counts == value)[:, 0] for value in values]
        return [_Rows(self.rows[part], self.ids[part.to(self.ids.device)]) for part in parts]


class GenerationCache:
    """`past_key_values` of NSAForCausalLM: all tokens that the rows of a batch have read."""

    is_compileable = False
    """transformers compiles the forward pass for caches of fixed addresses; this is none."""

    def __init__(self, max_len: int = 0) -> None:
        """`max_len`: columns to make room for; 0: unknown."""
        self.max_len, self.num_columns = max_len, 0
        self._parts: list[_Rows] = []

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included, as transformers counts them."""
        return self.num_columns

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, without padding."""
        found = [(int(row), part.ids.shape[1]) for part in self._parts for row in part.rows]
        return [length for _, length in sorted(found)]

    def nbytes(self) -> int:
        """Memory of all caches."""
        return sum(part.cache.nbytes() for part in self._parts if part.cache is not None)

    @torch.no_grad()
    def append(
        self,
        model: TinyLM,
        ids: Tensor,  # [B, T] integer
        real: Tensor | None,  # [B, T] bool: no padding; None: nowhere
    ) -> Tensor:  # [B, T, dim], 0 for padding
        """Read T more columns and return the hidden states of their tokens."""
        self._start(ids)
        self.num_columns += ids.shape[1]
        if real is None and len(self._parts) == 1:
            return self._parts[0].append(model, ids, self.max_len)
        real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
        counts = real.sum(dim=1).cpu()
        self._parts = [one for part in self._parts for one in part.split(counts[part.rows])]
        out = model.head_weight.new_zeros(*ids.shape, model.head_weight.shape[1])
        for part in self._parts:
            rows = part.rows.to(ids.device)
            held = real[rows]  # [n, T]
            if held.any():
                new = part.append(model, ids[rows][held].view(len(rows), -1), self.max_len)
                place = torch.zeros_like(real).index_put_((rows,), held)
                out = out.to(new.dtype)
                out[place] = new.flatten(0, 1)
        return out

    def _start(self, ids: Tensor) -> None:
        num_rows = sum(len(part.rows) for part in self._parts)
        if num_rows == 0:
            self._parts = [_Rows(torch.arange(len(ids)), ids[:, :0])]
        elif num_rows != len(ids):
            raise ValueError(
                f"{len(ids)} rows given with a cache of {num_rows}; a cache serves the batch that "
                "it began with: pass as many rows, or start without past_key_values"
            )

    def reorder_cache(self, beam_idx: Any) -> None:
        """Beams are not supported."""
        raise ValueError("the rows of this cache cannot change places; use num_beams=1")

    def crop(self, max_length: int) -> None:
        """A cache cannot forget tokens: the rings of its window have lost what came before."""
        raise ValueError(
            f"crop({max_length}): this cache cannot forget its last tokens, which assisted "
            "generation asks for; generate without an assistant"
        )

"""The cache of a padded batch: its rows have lengths of their own, and no padding.

transformers counts columns of a padded batch. Here every row is read without its padding. Rows of
equal length share one cache of TinyLM; a batch without padding is a single one. Where the decode
kernels run, rows of different lengths take their steps together, in a paged cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.model import ModelCache, NSACache, PagedModelCache, TinyLM

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
        num_before = self.ids.shape[1]
        self.ids = torch.cat([self.ids, ids], dim=1)
        length = self.ids.shape[1]
        cache = self.cache
        if cache is None or cache.length != num_before or length > cache.max_len:
            # A larger cache reads all tokens again: its layers do not know how to grow.
            self.cache = model.new_cache(len(self.rows), _room(length, max_len))
            return model.append(self.ids, self.cache)[:, -ids.shape[1] :]
        return model.append(ids, cache)

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
        self.pages: PagedModelCache | None = None
        """All rows, where their steps run on the decode kernels."""

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
        caches = [*(part.cache for part in self._parts), self.pages]
        return sum(cache.nbytes() for cache in caches if cache is not None)

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
        if real is None and ids.shape[1] == 1 and self._in_pages(model):
            return self._step(model, ids)
        self.pages = None
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

    def _in_pages(self, model: TinyLM) -> bool:
        """Whether all rows are in a paged cache with room; put there now, if they can be."""
        longest = max(part.ids.shape[1] for part in self._parts)
        if self.pages is not None:
            return longest < self.pages.pages.max_len
        if not all(
            part.cache is not None and _has_kernels(model, part.cache) for part in self._parts
        ):
            return False
        room = _room(longest + 1, self.max_len)
        num_rows = sum(len(part.rows) for part in self._parts)
        page = model.layers[0].attn.spec.l_sel
        pages = model.new_paged_cache(num_rows, room, num_rows * -(-room // page))
        for part in self._parts:
            assert part.cache is not None
            for row, place in enumerate(part.rows.tolist()):
                pages.open(place, part.cache.layers, row)
            part.cache = None  # its tokens are in the pages
        self.pages = pages
        return True

    def _step(self, model: TinyLM, ids: Tensor) -> Tensor:  # [B, 1] -> [B, 1, dim]
        """One token for every row at once."""
        assert self.pages is not None
        for part in self._parts:
            part.ids = torch.cat([part.ids, ids[part.rows.to(ids.device)]], dim=1)
        return model.append(ids, self.pages)

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


def _room(length: int, max_len: int) -> int:
    """Capacity of a new cache with `length` tokens, of a text of `max_len` (0: unknown)."""
    room = min(max_len, FIRST_TOKENS) if max_len else length + SPARE_TOKENS
    return room if length <= room else 2 * length


def _has_kernels(model: TinyLM, cache: ModelCache | None) -> bool:
    """Whether the decode kernels, which alone read pages, run on these caches."""
    if cache is None:
        return False
    pairs = zip(model.layers, cache.layers, strict=True)
    return all(
        isinstance(layer, NSACache) and block.attn.decodes_by_kernels(layer)
        for block, layer in pairs
    )

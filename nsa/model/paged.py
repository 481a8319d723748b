"""Paged cache: sequences of different lengths that share memory, for the decode kernels.

A page holds one selection block of every KV head, with the compressed tokens that start in it. All
layers of a model use the same page numbers, each in its own buffers. A sequence has a place in the
batch, and the rings of its window and its raw tokens are there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.model.cache import DecodedCache, NSACache, new_buffer, ring_slots
from nsa.ops.spec import BlockSpec


class OutOfPages(RuntimeError):
    """No free page for a sequence that grows; close another one, or make more pages."""


class Pages:
    """Page table and free list; the layers of a model share it."""

    def __init__(
        self, num_pages: int, num_places: int, max_len: int, page_tokens: int, device: torch.device
    ) -> None:
        if num_pages < 1 or num_places < 1:
            raise ValueError(
                f"{num_pages} pages for {num_places} places; give at least one of each"
            )
        self.num_pages, self.max_len, self.page_tokens = num_pages, max_len, page_tokens
        blocks = -(-max_len // page_tokens)
        self.table = torch.zeros(num_places, blocks, dtype=torch.int32, device=device)
        """[places, blocks] int32: the page of each block."""
        self._free = list(range(num_pages))[::-1]
        self._held: list[list[int]] = [[] for _ in range(num_places)]

    @property
    def num_free(self) -> int:
        """Number of pages that no sequence holds."""
        return len(self._free)

    def held(self, place: int) -> list[int]:
        """Pages of a place, by block."""
        return list(self._held[place])

    def make_room(self, place: int, length: int) -> None:
        """Allocate the pages that `length` tokens need; all of the missing ones, or none."""
        pages = self._held[place]
        first, missing = len(pages), -(-length // self.page_tokens) - len(pages)
        if missing <= 0:
            return
        if missing > len(self._free):
            raise OutOfPages(
                f"{length} tokens at place {place} need {missing} more pages of "
                f"{self.page_tokens}, and {len(self._free)} of {self.num_pages} are free; close a "
                f"sequence, or make the cache with more pages"
            )
        pages += [self._free.pop() for _ in range(missing)]
        self.table[place, first : len(pages)] = torch.tensor(pages[first:], dtype=torch.int32)

    def give_back(self, place: int) -> None:
        """Free all pages of a place."""
        self._free += reversed(self._held[place])
        self._held[place] = []


class PagedCache(DecodedCache):
    """Keys and values of one layer, in pages. A place without a sequence has the length max_len,
    which the kernels skip."""

    def __init__(
        self,
        spec: BlockSpec,
        pages: Pages,
        *,
        num_groups: int,
        d_k: int,
        d_v: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_places = len(pages.table)
        super().__init__(num_places, pages.max_len, dtype, device)
        self.spec, self.pages, self.table = spec, pages, pages.table
        sizes = (d_k, d_v, dtype, device)
        self.sel = new_buffer((pages.num_pages, num_groups, spec.l_sel), *sizes)
        self.cmp = new_buffer((pages.num_pages, num_groups, spec.l_sel // spec.d), *sizes)
        self.win = new_buffer((num_places, num_groups, min(spec.w, pages.max_len)), *sizes)
        self.raw = new_buffer((num_places, num_groups, spec.l), *sizes)
        self._count_reads(num_groups)
        self.lengths.fill_(pages.max_len)
        self.open_lengths: dict[int, int] = {}
        """Length of the sequence at each open place, on the host."""

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.open_lengths.values(), default=0)

    @length.setter
    def length(self, value: int) -> None:
        raise AttributeError(
            f"length={value}: the sequences of a paged cache have lengths of their own; use open "
            f"and close"
        )

    def clear(self) -> None:
        """Not supported: the pages belong to all layers."""
        raise AttributeError("the sequences of a paged cache end one by one; use close")

    def check(self, x: Tensor) -> None:
        """Refuse another batch or device, and allocate pages for a token of every sequence."""
        if x.shape[0] != self.batch:
            raise ValueError(
                f"{x.shape[0]} tokens given to a cache with {self.batch} places; give one for each "
                f"place, of which those without a sequence are skipped"
            )
        if x.device != self.device:
            raise ValueError(f"tokens on {x.device}, cache on {self.device}; use one device")
        for place, length in self.open_lengths.items():
            if length >= self.max_len:
                raise ValueError(
                    f"the sequence at place {place} has {length} tokens, which is all a cache for "
                    f"{self.max_len} takes; close it, or make the cache with a larger max_len"
                )
            self.pages.make_room(place, length + 1)

    def advanced(self) -> None:
        """Count on the host what the kernels have appended, and counted in `lengths`."""
        for place in self.open_lengths:
            self.open_lengths[place] += 1

    def open(self, place: int, cache: NSACache, row: int | None = None) -> None:
        """Copy a cache of one sequence, or a row of one with several, to a place."""
        length, spec = cache.length, self.spec
        if (row is None and cache.batch != 1) or place in self.open_lengths:
            raise ValueError(
                f"place {place} takes one sequence, and only while it has none; got a cache of "
                f"{cache.batch}; close the place first, or choose another"
            )
        if cache.dtype != self.dtype:
            raise ValueError(
                f"a cache of {cache.dtype} given to pages of {self.dtype}; make both with the same "
                f"model, under the same autocast"
            )
        # Pages for all tokens, then copy: selected and compressed by page, rings by slot.
        self.pages.make_room(place, length)
        pages = torch.tensor(self.pages.held(place), dtype=torch.int64, device=self.device)
        for mine, theirs, count in (
            (self.sel, cache.sel, length),
            (self.cmp, cache.cmp, spec.num_cmp(length)),
        ):
            for paged, flat in zip(mine[:2], theirs[:2], strict=True):
                _copy_to_pages(paged, pages, flat[row or 0, :, :count])
        # Ring sizes may differ: both hold the latest tokens, as many as the smaller one has.
        for ring, theirs in ((self.win, cache.win), (self.raw, cache.raw)):
            kept = min(length, ring.k.shape[2], theirs.k.shape[2])
            to, source = (ring_slots(kv, length - kept, length) for kv in (ring, theirs))
            for own, other in zip(ring[:2], theirs[:2], strict=True):
                own[place][:, to] = other[row or 0][:, source]
        self.open_lengths[place] = length
        self.lengths[place] = length

    def close(self, place: int) -> None:
        """Drop the sequence at a place; PagedModelCache frees its pages, which all layers share."""
        # max_len marks the place as empty for the kernels.
        del self.open_lengths[place]
        self.lengths[place] = self.max_len


class PagedModelCache:
    """One PagedCache per layer, over the same pages."""

    def __init__(self, pages: Pages, layers: list[PagedCache]) -> None:
        self.pages, self.layers = pages, layers
        # Layers run one after another: one set of buffers between launches is enough.
        for layer in layers[1:]:
            layer.workspace = layers[0].workspace

    def open(self, place: int, layers: list[NSACache], row: int | None = None) -> None:
        """Copy a prompt that was prefilled into its own cache (batch 1), or into a row of one, to a
        place."""
        for mine, theirs in zip(self.layers, layers, strict=True):
            mine.open(place, theirs, row)

    def close(self, place: int) -> None:
        """Drop the sequence at a place and free its pages."""
        for layer in self.layers:
            layer.close(place)
        self.pages.give_back(place)

    def nbytes(self) -> int:
        """Memory of all layers."""
        return sum(layer.nbytes() for layer in self.layers)


def _copy_to_pages(
    paged: Tensor,  # [pages, Hkv, tokens of a page, D]
    pages: Tensor,  # [n] int64
    flat: Tensor,  # [Hkv, tokens, D]
) -> None:
    """Fill pages in order; the last one perhaps partly."""
    # [Hkv, tokens, D] -> [pages, Hkv, tokens of a page, D], whole pages in one copy.
    size = paged.shape[2]
    whole = flat.shape[1] // size
    if whole:
        blocks = flat[:, : whole * size].unflatten(1, (whole, size)).transpose(0, 1)
        paged[pages[:whole]] = blocks
    if rest := flat.shape[1] - whole * size:
        paged[pages[whole], :, :rest] = flat[:, whole * size :]

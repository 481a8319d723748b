"""Decode cache of one layer: selected K/V of all tokens, compressed K/V, and two short rings.

All buffers are allocated once. Beside the K/V of all tokens for the selected branch, a sequence
costs 1/d of that for the compressed branch, a ring of the latest w tokens for the window, and a
ring of the latest l raw tokens, from which compressed tokens are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nsa.ops.eager.rows import Branches, KeyValues, clean
from nsa.ops.spec import BlockSpec
from nsa.ops.triton.decode.tiles import Workspace

if TYPE_CHECKING:  # Triton exists for Linux only
    from nsa.ops.triton.decode.launch import Decoder

Phi = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(raw k, raw v [B, S, Hkv, D], index of the first block) -> compressed k, v [B, N, Hkv, D]."""


class Cache:
    """Base of the caches: `batch` sequences of equal length, at most `max_len` tokens."""

    def __init__(self, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        for name, value in (("batch", batch), ("max_len", max_len)):
            if value < 1:
                raise ValueError(f"cache {name}={value}; give at least 1")
        self.batch, self.max_len, self.dtype = batch, max_len, dtype
        self.device = torch.empty(0, device=device).device  # with its index: cuda becomes cuda:0
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        """Tokens of each sequence, on the device: kernels read and advance them."""
        self.workspace = Workspace()
        """Buffers between the launches of a step; the layers of a model share them."""
        # The host's copy of `lengths`, so that no step needs a host sync.
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        """Set by the caller, who has filled the buffers up to here."""
        self._check_length(value)
        self._length = value
        self.lengths.fill_(value)

    def _check_length(self, value: int) -> None:
        if not 0 <= value <= self.max_len:
            raise ValueError(
                f"length={value} of a cache for {self.max_len} tokens; give 0 to {self.max_len}"
            )

    def clear(self) -> None:
        """Drop all tokens and keep the memory, for another prompt."""
        self._length = 0
        self.lengths.zero_()

    def advanced(self) -> None:
        """Count a token that the kernels have appended, and counted in `lengths`, on the host."""
        self._length += 1

    def check(self, x: Tensor) -> None:
        """Refuse tokens [B, T, ...] of another batch or device, or more than fit."""
        batch, num_tokens = x.shape[:2]
        if batch != self.batch:
            raise ValueError(
                f"{batch} sequences given to a cache for {self.batch}; make the cache with "
                f"batch={batch}"
            )
        if self.length + num_tokens > self.max_len:
            raise ValueError(
                f"{self.length} + {num_tokens} tokens do not fit a cache for {self.max_len}; make "
                f"it with max_len >= {self.length + num_tokens}"
            )
        if x.device != self.device:
            raise ValueError(f"tokens on {x.device}, cache on {self.device}; use one device")

    def in_dtype(self, weight: Tensor, *projected: Tensor) -> tuple[Tensor, ...]:
        """Products with `weight`, converted to the dtype of the cache.

        Under autocast a product is narrower than its weight. A cache of the weight's dtype, made
        outside of autocast, holds it without loss; any other mix is refused before anything is
        stored.
        """
        given = projected[0].dtype
        if given == self.dtype:
            return projected
        holds_all = torch.promote_types(given, self.dtype) == self.dtype
        if self.dtype != weight.dtype or not holds_all:
            raise ValueError(
                f"keys and values of {given} (weights: {weight.dtype}) given to a cache of "
                f"{self.dtype}; make the cache with new_cache() of this model, under the autocast "
                f"that it is used with"
            )
        return tuple(x.to(self.dtype) for x in projected)


def cache_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of products with a weight, and so of its cache: autocast's if it is on (it never
    casts float64), otherwise the weight's."""
    kind = weight.device.type
    if weight.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return weight.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def new_buffer(
    size: tuple[int, int, int], d_k: int, d_v: int, dtype: torch.dtype, device: torch.device
) -> KeyValues:
    """Memory for keys and values [*size, D]."""
    return KeyValues(
        torch.empty(*size, d_k, dtype=dtype, device=device),
        torch.empty(*size, d_v, dtype=dtype, device=device),
    )


def check_one_token(x: Tensor) -> None:
    """Refuse more than one new token per sequence: a step takes one."""
    if x.shape[1] != 1:
        raise ValueError(
            f"step got {x.shape[1]} tokens per sequence; it takes one: use prefill for more"
        )


class DecodedCache(Cache):
    """A cache that the decode kernels can read and write: the buffers of one layer."""

    spec: BlockSpec
    cmp: KeyValues
    sel: KeyValues
    win: KeyValues  # [B, Hkv, w, D], a ring: token t at t % its size
    raw: KeyValues  # [B, Hkv, l, D], a ring: token t at t % l
    table: Tensor | None = None
    """[B, blocks] int32: the page of each block, where `sel` and `cmp` are in pages."""
    _decoder: Decoder | None = None

    def _count_reads(self, num_groups: int) -> None:
        size = (self.batch, num_groups, 3)
        self.reads = torch.zeros(size, dtype=torch.int64, device=self.device)
        """Tokens each KV head has read in decode steps: compressed, selected, window."""
        self.last_reads = torch.zeros_like(self.reads)
        """The same for the latest decode step alone."""

    def nbytes(self) -> int:
        """Memory of all buffers."""
        buffers = (self.sel, self.cmp, self.win, self.raw)
        return sum(x.nbytes for kv in buffers for x in (kv.k, kv.v))

    def decoder(self, num_heads: int) -> Decoder:
        """The Triton decoder of these buffers; made by the first call."""
        if self._decoder is None:
            from nsa.ops.triton.decode.launch import Caches, Decoder  # Triton exists for Linux only

            counters = (self.reads, self.last_reads)
            rings = (self.win, self.raw)
            buffers = Caches(self.cmp, self.sel, *rings, self.lengths, self.table, *counters)
            scale = 1 / math.sqrt(self.sel.k.shape[3])
            self._decoder = Decoder(
                buffers, self.spec, self.max_len, num_heads, scale, self.workspace
            )
        return self._decoder

    def block_ending_here(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The latest l raw tokens of every sequence, a new one [B, 1, Hkv, D] included, in order.

        Sequences shorter than l have undefined tokens in front. No host sync.
        """
        # With t tokens stored, slot (t + i) % l holds token t + i - l; i = l is the new one's slot.
        size = self.spec.l
        order = torch.arange(1, size + 1, device=self.device)
        slots = (self.lengths[:, None] + order) % size  # [B, l]; the last is the new one's

        def ordered(ring: Tensor, new: Tensor) -> Tensor:  # [B, l, Hkv, D]
            index = slots[:, None, :, None].expand(ring.shape)
            old = ring.gather(2, index).transpose(1, 2)
            return torch.cat([old[:, :-1], new], dim=1)

        return ordered(self.raw.k, k), ordered(self.raw.v, v)


class NSACache(DecodedCache):
    """Keys and values of one layer for `batch` sequences of equal length, at most `max_len`."""

    def __init__(
        self,
        spec: BlockSpec,
        *,
        batch: int,
        max_len: int,
        num_groups: int,
        d_k: int,
        d_v: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(batch, max_len, dtype, device)
        self.spec = spec

        def buffer(length: int) -> KeyValues:
            return new_buffer((batch, num_groups, length), d_k, d_v, dtype, device)

        self.sel = buffer(max_len)  # token t at t
        self.cmp = buffer(spec.num_cmp(max_len))  # block i at i
        self.win = buffer(min(spec.w, max_len))  # token t at t % its size
        self.raw = buffer(spec.l)  # token t at t % l
        self._count_reads(num_groups)

    def _check_length(self, value: int) -> None:
        super()._check_length(value)
        if value < self.length:
            raise ValueError(
                f"length={value} of a cache that holds {self.length} tokens; the rings of the "
                f"window and of the raw tokens have lost what a shorter sequence needs: call "
                f"clear() and prefill the {value} tokens again"
            )

    @property
    def num_cmp(self) -> int:
        """Compressed tokens in the cache."""
        return self.spec.num_cmp(self.length)

    def fill(
        self,
        compressed: tuple[Tensor, ...],  # k, v [B, N, Hkv, D]
        selected: tuple[Tensor, ...],  # [B, T, Hkv, D]
        window: tuple[Tensor, ...],  # [B, some, Hkv, D]: the latest, at least as many as a ring has
        raw: tuple[Tensor, ...],
    ) -> None:
        """Take T tokens that were computed elsewhere, into an empty cache."""
        assert self.length == 0, "fill is for an empty cache"
        length = selected[0].shape[1]
        for buffer, given in ((self.sel, selected), (self.cmp, compressed)):
            buffer.k[:, :, : given[0].shape[1]] = given[0].transpose(1, 2)
            buffer.v[:, :, : given[1].shape[1]] = given[1].transpose(1, 2)
        for ring, (k, v) in ((self.win, window), (self.raw, raw)):
            num = min(k.shape[1], ring.k.shape[2])
            slots = ring_slots(ring, length - num, length)
            ring.k[:, :, slots] = k[:, -num:].transpose(1, 2)
            ring.v[:, :, slots] = v[:, -num:].transpose(1, 2)
        self.length = length

    def store_selected(self, k: Tensor, v: Tensor) -> None:
        """Append T new tokens [B, T, Hkv, D] of the selected branch."""
        span = slice(self.length, self.length + k.shape[1])
        self.sel.k[:, :, span], self.sel.v[:, :, span] = k.transpose(1, 2), v.transpose(1, 2)

    def store_window(self, k: Tensor, v: Tensor) -> None:
        """Keep the latest w of T new tokens [B, T, Hkv, D] in the ring."""
        self._store_ring(self.win, k, v)

    def store_raw(self, k: Tensor, v: Tensor, phi: Phi) -> None:
        """Append T new raw tokens [B, T, Hkv, D]; compress the blocks that they complete."""
        start, end = self.num_cmp, self.spec.num_cmp(self.length + k.shape[1])
        # The first incomplete block begins less than l tokens ago: the ring still has all of it.
        if end > start:
            old = ring_slots(self.raw, start * self.spec.d, self.length)
            k_whole, v_whole = (
                torch.cat([ring[:, :, old].transpose(1, 2), new], dim=1)
                for ring, new in ((self.raw.k, k), (self.raw.v, v))
            )
            k_cmp, v_cmp = phi(k_whole, v_whole, start)
            self.cmp.k[:, :, start:end] = k_cmp.transpose(1, 2)
            self.cmp.v[:, :, start:end] = v_cmp.transpose(1, 2)
        self._store_ring(self.raw, k, v)

    def _store_ring(self, ring: KeyValues, k: Tensor, v: Tensor) -> None:
        """Keep the latest of T new tokens [B, T, Hkv, D], as many as fit."""
        num_new, end = min(k.shape[1], ring.k.shape[2]), self.length + k.shape[1]
        slots = ring_slots(ring, end - num_new, end)
        ring.k[:, :, slots] = k[:, -num_new:].transpose(1, 2)
        ring.v[:, :, slots] = v[:, -num_new:].transpose(1, 2)

    def branches(self) -> Branches:
        """Keys and values of a decode step, after its token was stored. One query sees every key it
        is given, so the ring needs no order and no mask."""
        num_win = min(self.length + 1, self.win.k.shape[2])
        win = KeyValues(self.win.k[:, :, :num_win], self.win.v[:, :, :num_win])
        return Branches(self.cmp, self.sel, win, win_first=self.length + 1 - num_win)

    def branches_with_window(self, k_win: Tensor, v_win: Tensor, dtype: torch.dtype) -> Branches:
        """Keys and values of T new queries; the window's new tokens are not stored yet."""
        end = self.length + k_win.shape[1]
        k, v, win_first = self.window_with(k_win, v_win)
        num_cmp = self.spec.num_cmp(end)
        return Branches(
            cmp=_readable(self.cmp.k[:, :, :num_cmp], self.cmp.v[:, :, :num_cmp], dtype),
            sel=_readable(self.sel.k[:, :, :end], self.sel.v[:, :, :end], dtype),
            win=_readable(k.transpose(1, 2), v.transpose(1, 2), dtype),
            win_first=win_first,
        )

    def window_with(self, k_win: Tensor, v_win: Tensor) -> tuple[Tensor, Tensor, int]:
        """Keys and values [B, ., Hkv, D] of the windows of T new tokens, these included, in order,
        and the position of the first."""
        kept = min(self.length, self.spec.w - 1)
        old = ring_slots(self.win, self.length - kept, self.length)
        k = torch.cat([self.win.k[:, :, old].transpose(1, 2), k_win], dim=1)
        v = torch.cat([self.win.v[:, :, old].transpose(1, 2), v_win], dim=1)
        return k, v, self.length - kept


def ring_slots(ring: KeyValues, start: int, stop: int) -> Tensor:
    """Slots in a ring of the tokens start .. stop - 1: token t is at t % size."""
    return torch.arange(start, stop, device=ring.k.device) % ring.k.shape[2]


def _readable(k: Tensor, v: Tensor, dtype: torch.dtype) -> KeyValues:
    """The buffers without a copy of the whole past, unless v holds a non-finite value.

    Minimum and maximum show it, and need no temporary of the size of v.
    """
    low, high = torch.aminmax(v, dim=-1)
    if (low.isfinite() & high.isfinite()).all():
        return KeyValues(k, v)
    return clean(k.to(dtype), v.to(dtype))

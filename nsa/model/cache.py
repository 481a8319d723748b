"""What decoding remembers of one layer: full selected K/V, compressed K/V, and two short buffers.

All buffers are allocated once. Beside the selected branch's full keys and values, a sequence costs
1/d of them for the compressed branch, a ring of the latest w tokens for the window, and a ring of
the latest l raw tokens, of which compression blocks are made.
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
    """Room for the tokens of `batch` sequences of equal length, at most `max_len`."""

    def __init__(self, batch: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        for name, value in (("batch", batch), ("max_len", max_len)):
            if value < 1:
                raise ValueError(f"cache {name}={value}; give at least 1")
        self.batch, self.max_len, self.dtype = batch, max_len, dtype
        self.device = torch.empty(0, device=device).device  # with its number
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        """Tokens of each sequence, as kernels read and advance them."""
        self.workspace = Workspace()
        """Memory between the launches of a step, which the layers of a model share."""
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        """More tokens than before: whoever says so has filled the buffers."""
        self._check_length(value)
        self._length = value
        self.lengths.fill_(value)

    def _check_length(self, value: int) -> None:
        if not 0 <= value <= self.max_len:
            raise ValueError(
                f"length={value} of a cache for {self.max_len} tokens; give 0 to {self.max_len}"
            )

    def clear(self) -> None:
        """Forget all tokens; the memory can take another prompt."""
        self._length = 0
        self.lengths.zero_()

    def advanced(self) -> None:
        """Kernels have appended a token to every sequence, and counted it in `lengths`."""
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
        """What a product with `weight` gave, in the dtype of the cache.

        Under autocast a product is narrower than its weight. A cache of the weight's dtype, made
        outside, takes it without a loss; any other mix is refused, and nothing has changed yet.
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
    """The dtype of products with a weight, hence of a cache that is made here: autocast's, where it
    is on (it leaves float64 alone), or the weight's."""
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
    """The buffers of one layer that the decode kernels read and write."""

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
        """What runs decode steps over these buffers with Triton; made by the first call."""
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
        """The latest l raw tokens of every sequence with a new one [B, 1, Hkv, D], in order.

        Of sequences shorter than l, the first of them are anything. Nothing is read by the host.
        """
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

    def store_selected(self, k: Tensor, v: Tensor) -> None:
        """Append T new tokens [B, T, Hkv, D] of the selected branch."""
        span = slice(self.length, self.length + k.shape[1])
        self.sel.k[:, :, span], self.sel.v[:, :, span] = k.transpose(1, 2), v.transpose(1, 2)

    def store_window(self, k: Tensor, v: Tensor) -> None:
        """Keep the latest w of T new tokens [B, T, Hkv, D] in the ring."""
        self._store_ring(self.win, k, v)

    def store_raw(self, k: Tensor, v: Tensor, phi: Phi) -> None:
        """Add T new raw tokens [B, T, Hkv, D]; compress the blocks that they complete."""
        start, end = self.num_cmp, self.spec.num_cmp(self.length + k.shape[1])
        if end > start:  # the first incomplete block begins less than l tokens ago
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
        """What a decode step reads, its token stored: one query sees every key it is given, so the
        ring needs no order and nothing needs a mask."""
        num_win = min(self.length + 1, self.win.k.shape[2])
        win = KeyValues(self.win.k[:, :, :num_win], self.win.v[:, :, :num_win])
        return Branches(self.cmp, self.sel, win, win_first=self.length + 1 - num_win)

    def branches_with_window(self, k_win: Tensor, v_win: Tensor, dtype: torch.dtype) -> Branches:
        """What T new queries read; selected and raw tokens are stored, the window's not yet."""
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
        """Keys and values [B, ., Hkv, D] that windows of T new tokens reach, these included, in
        order, and the position of the first."""
        kept = min(self.length, self.spec.w - 1)
        old = ring_slots(self.win, self.length - kept, self.length)
        k = torch.cat([self.win.k[:, :, old].transpose(1, 2), k_win], dim=1)
        v = torch.cat([self.win.v[:, :, old].transpose(1, 2), v_win], dim=1)
        return k, v, self.length - kept


def ring_slots(ring: KeyValues, start: int, stop: int) -> Tensor:
    """Places in a ring of the tokens start .. stop - 1."""
    return torch.arange(start, stop, device=ring.k.device) % ring.k.shape[2]


def _readable(k: Tensor, v: Tensor, dtype: torch.dtype) -> KeyValues:
    """The buffers as they are, without a copy of the whole past; only a NaN in them needs one.

    Smallest and largest value tell of it, and take no memory of the size of v.
    """
    low, high = torch.aminmax(v, dim=-1)
    if (low.isfinite() & high.isfinite()).all():
        return KeyValues(k, v)
    return clean(k.to(dtype), v.to(dtype))

"""What decoding remembers of one layer: full selected K/V, compressed K/V, and two short buffers.

All buffers are allocated once. Beside the selected branch's full keys and values, a sequence costs
1/d of them for the compressed branch, the latest w tokens for the window, and at most l raw tokens
that wait for their compression block to be complete.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa.ops.eager.attend import KeyValues, clean
from nsa.ops.eager.rows import Branches
from nsa.ops.spec import BlockSpec

Phi = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(raw k, raw v [B, S, Hkv, D], index of the first block) -> compressed k, v [B, N, Hkv, D]."""


class Cache:
    """Room for the tokens of `batch` sequences of equal length, at most `max_len`."""

    def __init__(self, batch: int, max_len: int, device: torch.device) -> None:
        for name, value in (("batch", batch), ("max_len", max_len)):
            if value < 1:
                raise ValueError(f"cache {name}={value}; give at least 1")
        self.batch, self.max_len = batch, max_len
        self.device = torch.empty(0, device=device).device  # with its number
        self.length = 0
        """Tokens in the cache."""

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


def check_one_token(x: Tensor) -> None:
    """Refuse more than one new token per sequence: a step takes one."""
    if x.shape[1] != 1:
        raise ValueError(
            f"step got {x.shape[1]} tokens per sequence; it takes one: use prefill for more"
        )


class NSACache(Cache):
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
        super().__init__(batch, max_len, device)
        self.spec = spec

        def buffer(length: int) -> KeyValues:
            size = (batch, num_groups, length)
            return KeyValues(
                torch.empty(*size, d_k, dtype=dtype, device=device),
                torch.empty(*size, d_v, dtype=dtype, device=device),
            )

        self.sel = buffer(max_len)  # token t at t
        self.cmp = buffer(spec.num_cmp(max_len))  # block i at i
        self.win = buffer(min(spec.w, max_len))  # token t at t % its size
        self.raw = buffer(spec.l)  # tokens of the first incomplete block, from its start on
        self.reads = torch.zeros(batch, num_groups, 3, dtype=torch.int64, device=device)
        """Tokens each KV head has read in decode steps: compressed, selected, window."""
        self.last_reads = torch.zeros_like(self.reads)
        """The same for the latest decode step alone."""

    @property
    def num_cmp(self) -> int:
        """Compressed tokens in the cache."""
        return self.spec.num_cmp(self.length)

    @property
    def num_raw(self) -> int:
        """Raw tokens that wait in `raw`."""
        return self.length - self.num_cmp * self.spec.d

    def nbytes(self) -> int:
        """Memory of all buffers."""
        buffers = (self.sel, self.cmp, self.win, self.raw)
        return sum(x.nbytes for kv in buffers for x in (kv.k, kv.v))

    def store_selected(self, k: Tensor, v: Tensor) -> None:
        """Append T new tokens [B, T, Hkv, D] of the selected branch."""
        span = slice(self.length, self.length + k.shape[1])
        self.sel.k[:, :, span], self.sel.v[:, :, span] = k.transpose(1, 2), v.transpose(1, 2)

    def store_window(self, k: Tensor, v: Tensor) -> None:
        """Keep the latest w of T new tokens [B, T, Hkv, D] in the ring."""
        num_new = min(k.shape[1], self.win.k.shape[2])
        end = self.length + k.shape[1]
        slots = self._window_slots(end - num_new, end)
        self.win.k[:, :, slots] = k[:, -num_new:].transpose(1, 2)
        self.win.v[:, :, slots] = v[:, -num_new:].transpose(1, 2)

    def store_raw(self, k: Tensor, v: Tensor, phi: Phi) -> None:
        """Add T new raw tokens [B, T, Hkv, D]; compress the blocks that they complete."""
        num_new, start = k.shape[1], self.num_cmp
        end = self.spec.num_cmp(self.length + num_new)
        k, v = self._waiting(self.raw.k, k), self._waiting(self.raw.v, v)
        if end > start:
            k_cmp, v_cmp = phi(k, v, start)
            self.cmp.k[:, :, start:end] = k_cmp.transpose(1, 2)
            self.cmp.v[:, :, start:end] = v_cmp.transpose(1, 2)
        if end > start or num_new > 1:
            done = (end - start) * self.spec.d
            self._keep(self.raw.k, k[:, done:])
            self._keep(self.raw.v, v[:, done:])

    def _waiting(self, raw: Tensor, new: Tensor) -> Tensor:
        """The waiting tokens and the new ones, [B, ., Hkv, D]; a single one goes in in place."""
        if new.shape[1] == 1:
            raw[:, :, self.num_raw] = new[:, 0]
            return raw[:, :, : self.num_raw + 1].transpose(1, 2)
        return torch.cat([raw[:, :, : self.num_raw].transpose(1, 2), new], dim=1)

    def _keep(self, raw: Tensor, tokens: Tensor) -> None:
        """Move the tokens of the first incomplete block to the front; they may overlap it."""
        raw[:, :, : tokens.shape[1]] = tokens.transpose(1, 2).clone()

    def branches(self) -> Branches:
        """What a decode step reads, its token stored: one query sees every key it is given, so the
        ring needs no order and nothing needs a mask."""
        num_win = min(self.length + 1, self.win.k.shape[2])
        win = KeyValues(self.win.k[:, :, :num_win], self.win.v[:, :, :num_win])
        return Branches(self.cmp, self.sel, win, win_first=self.length + 1 - num_win)

    def branches_with_window(self, k_win: Tensor, v_win: Tensor, dtype: torch.dtype) -> Branches:
        """What T new queries read; selected and raw tokens are stored, the window's not yet."""
        end = self.length + k_win.shape[1]
        kept = min(self.length, self.spec.w - 1)
        old = self._window_slots(self.length - kept, self.length)
        k = torch.cat([self.win.k[:, :, old], k_win.transpose(1, 2)], dim=2)
        v = torch.cat([self.win.v[:, :, old], v_win.transpose(1, 2)], dim=2)
        num_cmp = self.spec.num_cmp(end)
        return Branches(
            cmp=_readable(self.cmp.k[:, :, :num_cmp], self.cmp.v[:, :, :num_cmp], dtype),
            sel=_readable(self.sel.k[:, :, :end], self.sel.v[:, :, :end], dtype),
            win=_readable(k, v, dtype),
            win_first=self.length - kept,
        )

    def _window_slots(self, start: int, stop: int) -> Tensor:
        """Places in the ring of the tokens start .. stop - 1."""
        return torch.arange(start, stop, device=self.sel.k.device) % self.win.k.shape[2]


def _readable(k: Tensor, v: Tensor, dtype: torch.dtype) -> KeyValues:
    """The buffers as they are, without a copy of the whole past; only a NaN in them needs one.

    Smallest and largest value tell of it, and take no memory of the size of v.
    """
    low, high = torch.aminmax(v, dim=-1)
    if (low.isfinite() & high.isfinite()).all():
        return KeyValues(k, v)
    return clean(k.to(dtype), v.to(dtype))

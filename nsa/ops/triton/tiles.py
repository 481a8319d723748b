"""Tile sizes by static shape: a fixed table, never tuned at run time and never by data."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Rows and keys of a tile, warps of a program, stages of its pipeline."""

    BM: int
    BN: int
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """Next power of two, at least 16: what a matrix product of the tensor cores needs."""
    return max(16, 1 << (size - 1).bit_length())


def forward_tiles(d_k: int, d_v: int, dtype: torch.dtype) -> Tiles:
    """Tiles of band_forward; measured on an H200, docs/kernels.md has the alternatives."""
    wide = max(padded(d_k), padded(d_v))
    if dtype == torch.float32:
        return Tiles(64, 32, 4, 2) if wide <= 128 else Tiles(32, 16, 4, 2)
    if wide <= 64:
        return Tiles(128, 64, 4, 3)
    return Tiles(64, 64, 4, 3) if wide <= 128 else Tiles(64, 32, 8, 2)


def backward_tiles(d_k: int, d_v: int, dtype: torch.dtype) -> Tiles:
    """Tiles of band_dq and band_dkv."""
    wide = max(padded(d_k), padded(d_v))
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2) if wide <= 128 else Tiles(16, 16, 4, 1)
    if wide <= 128:
        return Tiles(64, 64, 4, 3 if wide <= 64 else 2)
    return Tiles(32, 32, 8, 1)


def block_tiles(
    d_k: int, d_v: int, per_group: int, l_sel: int, dtype: torch.dtype, *, backward: bool = False
) -> Tiles:
    """Rows are (query, head) pairs, keys one selection block."""
    wide = max(padded(d_k), padded(d_v))
    if dtype == torch.float32 or wide > 128:
        rows, num_stages = 32, 1
    elif wide <= 64:
        rows, num_stages = (64, 3) if backward else (128, 2)
    else:
        rows, num_stages = (32, 2) if backward else (64, 2)
    return Tiles(max(rows, padded(per_group)), padded(l_sel), 4, num_stages)

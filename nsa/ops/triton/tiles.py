"""Tile sizes by static shape: a fixed table, never tuned at run time and never by data."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tiles(NamedTuple):
    """Rows and keys of a tile, warps of a program, stages of its pipeline, registers of a thread.

    Without a limit (0) the compiler takes what it likes, at the price of fewer programs at a time.
    """

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """As Triton calls them."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options | ({"maxnreg": self.max_registers} if self.max_registers else {})


def padded(size: int) -> int:
    """Next power of two, at least 16: what a matrix product of the tensor cores needs."""
    return max(16, 1 << (size - 1).bit_length())


def parts_of(d_k: int) -> tuple[int, int]:
    """A head dim as a power of two and a power of two for the rest: 192 is (128, 64)."""
    main = max(16, 1 << (d_k.bit_length() - 1))
    return main, padded(d_k - main) if d_k > main else 0


def _wide(d_k: int, d_v: int) -> int:
    return max(sum(parts_of(d_k)), padded(d_v))


def forward_tiles(d_k: int, d_v: int, dtype: torch.dtype, branch: int) -> Tiles:
    """Tiles of band_forward; measured on an H200, docs/kernels.md has the alternatives.

    Branch 0 is the compressed one, with the longest loops, 2 the window with the shortest.
    """
    wide = _wide(d_k, d_v)
    if dtype == torch.float32:
        return Tiles(64, 32, 4, 2) if wide <= 128 else Tiles(32, 16, 4, 2)
    if wide <= 64:
        return Tiles(64, 64, 4, 2, 96) if branch == 2 else Tiles(64, 128, 4, 2)
    if d_k == d_v == 128 and branch == 0:
        return Tiles(128, 64, 8, 2, 128)
    if wide <= 192:
        return Tiles(64, 64, 4, 3 if wide <= 128 else 2)
    return Tiles(64, 32, 8, 2)


def dkv_tiles(d_k: int, d_v: int, dtype: torch.dtype) -> Tiles:
    """Tiles of band_dkv."""
    wide = _wide(d_k, d_v)
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2) if wide <= 128 else Tiles(16, 16, 4, 1)
    if wide <= 64:
        return Tiles(64, 64, 4, 3, 168)
    if wide <= 128:
        return Tiles(64, 64, 4, 2)
    return Tiles(32, 64, 4, 3) if wide <= 192 else Tiles(32, 32, 8, 2)


def dq_tiles(d_k: int, d_v: int, dtype: torch.dtype) -> Tiles:
    """Tiles of band_dq."""
    wide = _wide(d_k, d_v)
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2) if wide <= 128 else Tiles(16, 16, 4, 1)
    if wide <= 128:
        return Tiles(64, 64, 4, 3 if wide <= 64 else 2)
    return Tiles(128, 64, 8, 2) if wide <= 192 else Tiles(32, 32, 8, 2)


def score_tiles(d_k: int, dtype: torch.dtype) -> Tiles:
    """Tiles of group_scores."""
    wide = sum(parts_of(d_k))
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2)
    if wide <= 64:
        return Tiles(64, 64, 4, 3)
    return Tiles(64, 128, 4, 2, 168) if wide <= 128 else Tiles(64, 64, 4, 2)


def fits_blocks(d_k: int, d_v: int, l_sel: int, dtype: torch.dtype) -> bool:
    """Whether the kernels that go to the selected blocks take them: larger tiles spill registers.

    A tile holds a whole block, so long blocks need narrow heads.
    """
    wide = _wide(d_k, d_v)
    if l_sel > 64:
        return wide <= 64 and padded(l_sel) <= 256
    return wide <= (128 if dtype == torch.float32 else 192)


def fits_dq(d_k: int, d_v: int) -> bool:
    """Whether block_backward has room for the gradient of q, too."""
    return _wide(d_k, d_v) <= 128


def block_tiles(
    d_k: int, d_v: int, per_group: int, l_sel: int, dtype: torch.dtype, purpose: str
) -> Tiles:
    """Tiles of block_forward and block_backward (purpose: forward, backward, dkv alone).

    Rows are (query, head) pairs, keys one selection block. Products of 16 bit need two stages or
    more: with one, two operands may share an address, and ptxas compiles that to wrong code
    (docs/kernels.md). Those of fp32 use no tensor cores.
    """
    wide, keys = _wide(d_k, d_v), padded(l_sel)
    if dtype == torch.float32:
        tiles = Tiles(32, keys, 4, 1)
    elif l_sel > 64:
        tiles = Tiles(64 if purpose == "forward" else 32, keys, 8, 2)
    elif wide <= 64:
        tiles = Tiles(64, keys, 4, 2)
    elif purpose == "forward":
        tiles = Tiles(64, keys, 4, 2, 168 if d_k == d_v == 128 else 0)
    elif purpose == "backward":
        tiles = Tiles(32, keys, 4, 3)
    else:
        tiles = Tiles(64 if wide <= 128 else 32, keys, 4, 2)
    return tiles._replace(BM=max(tiles.BM, padded(per_group)))


def query_tiles(
    d_k: int,
    d_v: int,
    per_group: int,
    l_sel: int,
    dtype: torch.dtype,
    *,
    backward: bool = False,
) -> Tiles:
    """Tiles of query_forward and query_dq: rows are the heads of a group."""
    wide = _wide(d_k, d_v)
    rows, short = padded(per_group), dtype == torch.float32 or wide > 192
    if rows == 16 and wide <= 128 and not short:
        keys, num_warps, num_stages = (64, 2, 3) if backward else (32, 1, 3)
    else:
        keys, num_warps, num_stages = 32 if short else 64, 2 if rows <= 32 else 4, 2
    return Tiles(rows, min(padded(l_sel), keys), num_warps, num_stages)

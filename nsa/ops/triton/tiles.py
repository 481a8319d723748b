"""Tile sizes by static shape: a fixed table, never tuned at run time and never by data."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa.ops.spec import BlockSpec


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
    return Tiles(32, 64, 4, 3) if wide <= 192 else Tiles(32, 32, 8, 1)


def dq_tiles(d_k: int, d_v: int, dtype: torch.dtype) -> Tiles:
    """Tiles of band_dq."""
    wide = _wide(d_k, d_v)
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2) if wide <= 128 else Tiles(16, 16, 4, 1)
    if wide <= 128:
        return Tiles(64, 64, 4, 3 if wide <= 64 else 2)
    return Tiles(128, 64, 8, 2) if wide <= 192 else Tiles(32, 32, 8, 1)


def score_tiles(d_k: int, dtype: torch.dtype) -> Tiles:
    """Tiles of group_scores."""
    wide = sum(parts_of(d_k))
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2)
    if wide <= 64:
        return Tiles(64, 64, 4, 3)
    return Tiles(64, 128, 4, 2, 168) if wide <= 128 else Tiles(64, 64, 4, 2)


def fits_blocks(d_k: int, d_v: int, l_sel: int, dtype: torch.dtype) -> bool:
    """Whether the kernels that go to the selected blocks take them: wider tiles spill registers.

    With 256 numbers in a head, block_backward compiled to wrong code (docs/kernels.md).
    """
    wide = _wide(d_k, d_v)
    return wide <= 64 or (l_sel <= 64 and wide <= (128 if dtype == torch.float32 else 192))


def fits_dq(d_k: int, d_v: int) -> bool:
    """Whether block_backward has room for the gradient of q, too."""
    return _wide(d_k, d_v) <= 128


def block_tiles(
    d_k: int, d_v: int, per_group: int, l_sel: int, dtype: torch.dtype, purpose: str
) -> Tiles:
    """Tiles of block_forward and block_backward (purpose: forward, backward, dkv alone).

    Rows are (query, head) pairs, keys one selection block.
    """
    wide, keys = _wide(d_k, d_v), padded(l_sel)
    if dtype == torch.float32 or l_sel > 64:
        tiles = Tiles(32, keys, 4, 1)
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


class DecodeTiles(NamedTuple):
    """How a decode step is cut: tiles as above, keys of a part by branch, blocks of a program."""

    BM: int
    BN: int
    """Compressed tokens at a time."""
    TOKENS: int
    """Tokens of the window, or of a block, at a time."""
    CMP_PART: int
    WIN_PART: int
    PER_PART: int
    """Selected blocks of a part."""
    BLOCKS: int
    """Blocks that are scored at a time."""
    CHOOSE_ONCE: bool
    """Who chooses: the last of a segment who has scored, or every part of the selected branch."""
    SUMS: bool
    """What is kept of the compressed branch: sums of blocks (tiles hold whole ones), or logits."""
    cmp_warps: int
    cmp_stages: int
    tok_warps: int
    tok_stages: int
    merge_warps: int


DECODE_PROGRAMS = 512
"""Programs that fill a GPU: splits over the keys stop there."""
SUMS_AT_A_TIME = 4096
"""Heads times blocks whose sums a program loads at a time."""
MERGED_BY_A_WARP = 512
"""Numbers of all parts of a head, about."""
MAX_CMP_PARTS = 128
"""Parts whose log-sum-exp a program can hold at a time."""


def decode_tiles(
    d_k: int,
    d_v: int,
    per_group: int,
    dtype: torch.dtype,
    *,
    segments: int,
    num_cmp: int,
    window: int,
    spec: BlockSpec,
) -> DecodeTiles:
    """Tiles of the decode kernels: parts as long as fill the GPU with programs."""
    narrow = dtype != torch.float32 and _wide(d_k, d_v) <= 128
    keys = 64 if narrow else 32

    def part(num_keys: int, longest: int) -> int:
        """The longest part that leaves enough programs."""
        size = keys
        while size < longest and segments * (num_keys // (2 * size)) >= DECODE_PROGRAMS:
            size *= 2
        return size

    least = 1 << (max(num_cmp - 1, 1) // MAX_CMP_PARTS).bit_length()
    many = max(DECODE_PROGRAMS // segments, 1)
    few = segments < 64
    rows = padded(per_group)
    strides = spec.l_sel // spec.d
    sums = not few and keys % strides == 0
    scored = min(max(SUMS_AT_A_TIME // rows, 64), max(padded(num_cmp // strides + 1), keys))
    cmp_part = max(part(num_cmp, 512), 128 if num_cmp > 1024 else keys, least)
    win_part = max(keys, 64 if few else 128)
    per_part = max(1, spec.n_sel // many)
    num_parts = -(-num_cmp // cmp_part) + -(-window // win_part) + -(-spec.n_sel // per_part)
    merged = padded(num_parts) * padded(d_v)
    return DecodeTiles(
        BM=rows,
        BN=keys,
        TOKENS=min(keys, padded(spec.l_sel)),
        CMP_PART=cmp_part,
        WIN_PART=win_part,
        PER_PART=per_part,
        BLOCKS=32 if few else scored if sums else 64,
        CHOOSE_ONCE=not few,
        SUMS=sums,
        cmp_warps=4,
        cmp_stages=3,
        tok_warps=4,
        tok_stages=2,
        merge_warps=min(8, max(1, merged // MERGED_BY_A_WARP)),
    )

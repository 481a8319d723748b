"""Memory that is needed between the launches of a step, and by every step again."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.spec import NUM_FORCED, BlockSpec
from nsa.ops.triton.tiles import (
    H200,
    SMALLEST,
    Capability,
    Tiles,
    fitting,
    group_obstacle,
    padded,
    parts_of,
)


class Workspace:
    """Buffers by name and size; layers that run one after another can share them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    def get(self, name: str, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same memory for the same name and size."""
        key = (name, size, dtype, device)
        if key not in self._kept:
            self._kept[key] = torch.empty(size, dtype=dtype, device=device)
        return self._kept[key]


# How a decode step is cut, by static shape: as tiles.py, a fixed table.


class DecodeTiles(NamedTuple):
    """Tiles, tokens of a part by branch, blocks of a program, warps and stages of each kernel."""

    BM: int
    BN: int
    """Compressed tokens at a time."""
    TOKENS: int
    """Tokens of the window, or of a block, at a time."""
    CMP_PART: int
    WIN_PART: int
    PER_PART: int
    """Selected blocks of a part, all forced or none."""
    BLOCKS: int
    """Blocks that a program scores."""
    SUMS: bool
    """What is kept of the compressed branch: sums of blocks (tiles hold whole ones), or logits."""
    BESIDE: bool
    """Whether window and forced blocks are read beside the end of the compressed branch, or after
    it, beside the scoring."""
    cmp_warps: int
    cmp_stages: int
    tok_warps: int
    tok_stages: int
    merge_warps: int


class Cut(NamedTuple):
    """How many programs each branch gets, at most, and how its tokens are read."""

    cmp_programs: int
    shortest: int
    """Compressed tokens of a part, at least."""
    sel_programs: int
    win_part: int
    keys: int
    warps: int
    stages: int
    token_warps: int = 4
    beside: bool = False


FEW = Cut(512, 64, 512, 64, 64, 4, 3)
FEW_LONG = FEW._replace(shortest=128)
NARROW = Cut(512, 64, 512, 128, 64, 2, 3, token_warps=2)
NARROW_LONG = Cut(396, 64, 256, 512, 64, 4, 3)
WIDE = Cut(264, 256, 512, 256, 64, 4, 3, beside=True)
WIDE_LONG = Cut(396, 256, 512, 512, 128, 4, 2, beside=True)
"""Best of those that were timed on an H200 (132 processors); docs/kernels.md has the others.

A GPU that is full at once, with programs that end together, beats several rounds: two or three
programs of the compressed branch on each processor.
"""
FEW_SEGMENTS = 64
LONG = 1024
"""Compressed tokens from which a sequence is long."""

SUMS_AT_A_TIME = 4096
"""Heads times blocks whose sums a program loads at a time."""
MERGED_BY_A_WARP = 2048
"""Numbers of all parts of a head."""
MAX_CMP_PARTS = 128
"""Parts whose log-sum-exp a program can hold at a time."""
MAX_WIN_PARTS = 128
"""Parts of the window that a program merges at a time, beside those of the other branches."""
MAX_SCORED = 1 << 17
"""Logits that a program scores at a time: heads times compressed tokens of its blocks."""
MAX_BLOCKS = 16384
"""Selection blocks of a sequence that fit the registers of the program that chooses among them."""


@lru_cache(maxsize=256)
def decode_obstacle(
    d_k: int,
    d_v: int,
    per_group: int,
    dtype: torch.dtype,
    spec: BlockSpec,
    max_len: int,
    capability: Capability,
) -> str:
    """Why the decode kernels cannot take such caches; empty when they can."""
    if spec.num_blocks(max_len) > MAX_BLOCKS:
        return (
            f"{max_len} tokens are {spec.num_blocks(max_len)} selection blocks, the decode kernels "
            f"take up to {MAX_BLOCKS}"
        )
    rows = padded(per_group)
    if _fitting(Tiles(rows, SMALLEST, 4, 1), d_k, d_v, dtype, capability, SMALLEST) is None:
        return group_obstacle(d_k, d_v, per_group, dtype, capability)
    if rows * _strides_pad(spec) > MAX_SCORED:
        return (
            f"{per_group} query heads to a KV head and {spec.l_sel // spec.d} compressed tokens to "
            f"a selection block (l_sel={spec.l_sel}, d={spec.d}) are more than a decode kernel "
            f"scores at a time"
        )
    return ""


COPIED_BYTES = 16
"""What a thread copies at a time past the L1 cache."""
THREADS_PER_WARP = 32


def decode_tiles(
    d_k: int,
    d_v: int,
    per_group: int,
    dtype: torch.dtype,
    capability: Capability = H200,
    *,
    segments: int,
    num_cmp: int,
    window: int,
    spec: BlockSpec,
) -> DecodeTiles:
    """Tiles of the decode kernels, for what `decode_obstacle` lets pass."""
    wide = max(sum(parts_of(d_k)), padded(d_v))
    fits = dtype != torch.float32 and wide <= 128
    cut = _cut(segments < FEW_SEGMENTS, num_cmp > LONG, wide > 64)
    keys = min(cut.keys, 64) if fits else 32
    strides = spec.l_sel // spec.d
    sums = segments >= FEW_SEGMENTS and keys % strides == 0
    rows = padded(per_group)
    tile = cut.keys if fits and (not sums or 64 * strides >= cut.keys) else keys
    cmp_part = max(num_cmp // max(cut.cmp_programs // segments, 1), cut.shortest)
    cmp_part = _up(max(cmp_part, _up(num_cmp, MAX_CMP_PARTS) // MAX_CMP_PARTS), tile)
    per_part = max(1, -(-(spec.n_sel - NUM_FORCED) // max(cut.sel_programs // segments - 1, 1)))
    win_part = max(keys, cut.win_part, _up(-(-window // MAX_WIN_PARTS), keys))
    num_parts = -(-num_cmp // cmp_part) + -(-window // win_part)
    num_parts += -(-NUM_FORCED // per_part) + -(-(spec.n_sel - NUM_FORCED) // per_part)
    scored = min(max(SUMS_AT_A_TIME // rows, 64), max(padded(num_cmp // strides + 1), 64))
    # Halved as often as they must be, the tiles still divide the parts.
    sizes = (d_k, d_v, dtype, capability)
    cmp = Tiles(rows, tile, cut.warps if fits else 4, cut.stages if fits else 3)
    whole = _fitting(cmp, *sizes, max(strides, SMALLEST)) if sums else None
    cmp = whole or _fitting(cmp, *sizes, SMALLEST) or cmp
    tokens = Tiles(rows, min(keys, padded(spec.l_sel)), cut.token_warps if fits else 4, 2)
    tokens = _fitting(tokens, *sizes, SMALLEST) or tokens
    logits = min(32 if segments < FEW_SEGMENTS else 64, MAX_SCORED // (rows * _strides_pad(spec)))
    return DecodeTiles(
        BM=rows,
        BN=cmp.BN,
        TOKENS=tokens.BN,
        CMP_PART=cmp_part,
        WIN_PART=win_part,
        PER_PART=per_part,
        BLOCKS=scored if whole else logits,
        SUMS=whole is not None,
        BESIDE=cut.beside,
        cmp_warps=cmp.num_warps,
        cmp_stages=cmp.num_stages,
        tok_warps=tokens.num_warps,
        tok_stages=tokens.num_stages,
        merge_warps=min(8, max(1, padded(num_parts) * padded(d_v) // MERGED_BY_A_WARP)),
    )


def reads_pass_l1(d_k: int, d_v: int, dtype: torch.dtype, tiles: DecodeTiles) -> bool:
    """Whether keys and values of the window and of blocks are read past the L1 cache.

    They are copied asynchronously; only copies of 16 bytes can be asked to come from L2, and the
    compiler makes them of that size where rows are multiples of it and every thread has as much to
    copy in each tile. Shorter copies come through L1, which may still hold an earlier step's bytes
    where nobody has waited.
    """
    rows = all(size * dtype.itemsize % COPIED_BYTES == 0 for size in (d_k, d_v))
    widths = (width for width in (*parts_of(d_k), padded(d_v)) if width)
    smallest = min(widths) * tiles.TOKENS * dtype.itemsize
    return rows and smallest >= COPIED_BYTES * THREADS_PER_WARP * tiles.tok_warps


def _fitting(
    tiles: Tiles, d_k: int, d_v: int, dtype: torch.dtype, capability: Capability, least_keys: int
) -> Tiles | None:
    """Tiles of the two kernels that attend, as small as this GPU wants them; None: never."""
    least = Tiles(tiles.BM, least_keys, tiles.num_warps, 1)
    return fitting("decode", tiles, d_k, d_v, dtype, capability, least)


def _strides_pad(spec: BlockSpec) -> int:
    """Compressed tokens that start in a selection block, as a power of two."""
    return 1 << (spec.l_sel // spec.d - 1).bit_length()


def _cut(is_few: bool, is_long: bool, is_wide: bool) -> Cut:
    if is_few:
        return FEW_LONG if is_long else FEW
    if is_wide:
        return WIDE_LONG if is_long else WIDE
    return NARROW_LONG if is_long else NARROW


def _up(size: int, step: int) -> int:
    return -(-size // step) * step

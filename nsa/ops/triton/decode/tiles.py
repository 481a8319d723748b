"""Tiles and parts of a decode step by static shape, and the workspace between its launches.

As in ops/triton/tiles.py, the table is fixed: measured on an H200, never tuned at run time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.spec import BlockSpec
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
    """Buffers by name and size; layers that run one after another share them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    def get(self, name: str, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of this name, size, dtype and device; allocated once."""
        key = (name, size, dtype, device)
        if key not in self._kept:
            self._kept[key] = torch.empty(size, dtype=dtype, device=device)
        return self._kept[key]

    def zeros(self, name: str, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same, filled with zeros when it is allocated."""
        key = (name, size, dtype, device)
        if key not in self._kept:
            self.get(name, *size, dtype=dtype, device=device).zero_()
        return self._kept[key]


# --- How a decode step is split ---


class DecodeTiles(NamedTuple):
    """Tiles, tokens per part of each branch, blocks per program, warps and stages per kernel."""

    BM: int
    BN: int
    """Compressed tokens of a tile."""
    TOKENS: int
    """Tokens of a tile of the window or of a block."""
    CMP_PART: int
    WIN_PART: int
    PER_PART: int
    """Selected blocks of a part, all forced or none."""
    BLOCKS: int
    """Blocks that a program scores."""
    SUMS: bool
    """The compressed branch stores sums by block (tiles hold whole blocks) instead of logits."""
    BESIDE: bool
    """Window and forced blocks are read beside the end of the compressed branch, not only beside
    the scoring."""
    cmp_warps: int
    cmp_stages: int
    tok_warps: int
    tok_stages: int
    merge_warps: int
    programs: int = 0
    """Programs of a segment where one launch does it all (resident.py); 0: a launch per phase."""


class Cut(NamedTuple):
    """Upper bounds of the programs of each branch, and how its tokens are read."""

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
FEW_WHOLE = Cut(512, 64, 32, 128, 64, 4, 3)
NARROW_WHOLE = Cut(264, 64, 512, 128, 64, 2, 3, token_warps=2)
WIDE_WHOLE = Cut(264, 64, 512, 512, 64, 4, 3)
"""The fastest of those timed on an H200 (132 multiprocessors); docs/log/decode.md has the others.

Programs that fill the GPU once and end together are faster than several waves: two or three
programs of the compressed branch per multiprocessor.
"""
FEW_SEGMENTS = 64
"""Below this, a step has too few segments to fill the GPU and is split more finely."""
LONG = 1024
"""Compressed tokens from which a sequence is long."""

SUMS_AT_A_TIME = 4096
"""Heads * blocks whose sums a program of score_blocks loads."""
MERGED_BY_A_WARP = 2048
"""Numbers (parts * Dv) that a warp of merge_parts takes."""
MAX_CMP_PARTS = 128
"""Parts of the compressed branch whose log-sum-exps a program holds."""
MAX_WIN_PARTS = 128
"""Parts of the window that a program merges, beside those of the other branches."""
MAX_SCORED = 1 << 17
"""Logits (heads * compressed tokens of its blocks) that a program scores."""
SEGMENT_DIMS, SEGMENT_HEADS, SEGMENT_ROWS = (64, 128), 16, 64
"""Of hopper/decode.py: head dims, heads of a group at most, rows of a tile."""
SEGMENT_BLOCKS = 1024
"""Blocks whose sums fit its shared memory."""
SEGMENT_RING = 64
"""Raw tokens behind a compressed one, at most: they lie in registers."""
HALF_BUSY, MAINLY_BUSY, MOST_BUSY = 0.45, 0.7, 0.9
"""Shares of the multiprocessors that it must keep busy: the least one of one round of programs, for
long caches of narrow heads, and of several rounds."""
RESIDENT_PARTS, RESIDENT_ROWS = (64, 128), 32
"""Of resident.py: compressed tokens of a part, which are one tile, and rows of a tile at most. With
64 rows products are wgmma, and two operands may share an address, which ptxas miscompiles."""
MAX_BLOCKS = 16384
"""Selection blocks of a sequence: one program holds all their scores in registers."""


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
"""Size of the asynchronous copies that can bypass the L1 cache."""
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
    whole: bool,
    processors: int = 0,
) -> DecodeTiles:
    """Tiles of the decode kernels, for shapes that `decode_obstacle` accepts.

    `whole`: every block of a sequence is read, and none counts as forced. `processors`:
    multiprocessors of a GPU on which the programs of one launch can wait for each other.
    """
    # Small tiles for fp32 and heads wider than 128.
    wide = max(sum(parts_of(d_k)), padded(d_v))
    fits = dtype != torch.float32 and wide <= 128
    cut = _cut_of(segments < FEW_SEGMENTS, num_cmp > LONG, wide > 64, whole)
    keys = min(cut.keys, 64) if fits else 32
    strides = spec.l_sel // spec.d
    # Sums by block need tiles that hold whole blocks.
    sums = segments >= FEW_SEGMENTS and keys % strides == 0
    rows = padded(per_group)
    tile = cut.keys if fits and (not sums or 64 * strides >= cut.keys) else keys
    # Tokens per part: enough parts for cmp_programs, not shorter than `shortest`, not more than
    # MAX_CMP_PARTS of them, and whole tiles.
    cmp_part = max(num_cmp // max(cut.cmp_programs // segments, 1), cut.shortest)
    cmp_part = _round_up(max(cmp_part, _round_up(num_cmp, MAX_CMP_PARTS) // MAX_CMP_PARTS), tile)
    num_forced = 0 if whole else spec.num_forced
    parts = max(cut.sel_programs // segments - (0 if whole else 1), 1)
    per_part = max(1, -(-(spec.n_sel - num_forced) // parts))
    win_part = max(keys, cut.win_part, _round_up(-(-window // MAX_WIN_PARTS), keys))
    # Parts of a head, which decide the warps of the merge.
    cmp_parts, token_parts = -(-num_cmp // cmp_part), -(-window // win_part)
    free_parts = -(-(spec.n_sel - num_forced) // per_part)
    token_parts += -(-num_forced // per_part) + free_parts
    num_parts = cmp_parts + token_parts
    scored = min(max(SUMS_AT_A_TIME // rows, 64), max(padded(num_cmp // strides + 1), 64))
    # Tiles are only ever halved to fit, so they still divide the parts.
    sizes = (d_k, d_v, dtype, capability)
    cmp = Tiles(rows, tile, cut.warps if fits else 4, cut.stages if fits else 3)
    summed = _fitting(cmp, *sizes, max(strides, SMALLEST)) if sums else None
    cmp = summed or _fitting(cmp, *sizes, SMALLEST) or cmp
    tokens = Tiles(rows, min(keys, padded(spec.l_sel)), cut.token_warps if fits else 4, 2)
    tokens = _fitting(tokens, *sizes, SMALLEST) or tokens
    logits = min(32 if segments < FEW_SEGMENTS else 64, MAX_SCORED // (rows * _strides_pad(spec)))
    # One program to a multiprocessor always fits. Caches that are read whole are faster in several
    # launches. A part is one tile of whole blocks.
    together = fits and not (sums or whole) and rows <= RESIDENT_ROWS
    together = together and cmp_part in RESIDENT_PARTS and cmp_part % strides == 0
    # A program merges a head beside its parts: where there is room, others read the chosen blocks.
    room = processors // segments if together else 0
    wanted = max(cmp_parts + token_parts, per_group + free_parts)
    programs = min(room, wanted) if room >= max(cmp_parts, token_parts) else 0
    return DecodeTiles(
        BM=rows,
        BN=cmp.BN,
        TOKENS=tokens.BN,
        CMP_PART=cmp_part,
        WIN_PART=win_part,
        PER_PART=per_part,
        BLOCKS=scored if summed else logits,
        SUMS=summed is not None,
        BESIDE=cut.beside,
        cmp_warps=cmp.num_warps,
        cmp_stages=cmp.num_stages,
        tok_warps=tokens.num_warps,
        tok_stages=tokens.num_stages,
        merge_warps=min(8, max(1, padded(num_parts) * padded(d_v) // MERGED_BY_A_WARP)),
        programs=programs,
    )


def takes_segments(
    caches: tuple[int, int, torch.dtype],
    per_group: int,
    spec: BlockSpec,
    max_len: int,
    segments: int,
    processors: int,
) -> bool:
    """Whether hopper/decode.py takes such caches (d_k, d_v, dtype), and is faster than several
    launches (docs/log/decode.md).

    Each program has a multiprocessor of its own, so segments must come in about as many; 0
    multiprocessors: on such a machine it does not run.
    """
    if not processors:
        return False
    d_k, d_v, dtype = caches
    strides, num_blocks = spec.l_sel // spec.d, spec.num_blocks(max_len)
    if not (
        d_k == d_v and d_k in SEGMENT_DIMS and dtype.itemsize == 2
        and per_group <= SEGMENT_HEADS and num_blocks <= SEGMENT_BLOCKS
        and spec.num_cmp(max_len) > 0 and spec.l_sel % SEGMENT_ROWS == 0
        and strides & (strides - 1) == 0 and strides <= SEGMENT_ROWS
        and spec.l <= SEGMENT_RING and spec.l - spec.d <= spec.l_sel
    ):  # fmt: skip
        return False
    rounds = -(-segments // processors)
    narrow, whole = d_k == 64, num_blocks <= spec.n_sel
    least = MOST_BUSY if rounds > 1 or (narrow and whole) else HALF_BUSY
    if narrow and spec.num_cmp(max_len) > LONG:
        least = max(least, MAINLY_BUSY)
    return segments >= least * rounds * processors


def reads_pass_l1(d_k: int, d_v: int, dtype: torch.dtype, tiles: DecodeTiles) -> bool:
    """Whether reads of the window and of blocks bypass the L1 cache, so that they need no wait.

    They are asynchronous copies. Only 16-byte copies can bypass L1; the compiler makes them that
    wide where rows are multiples of 16 bytes and every thread has as much to copy in each tile.
    Shorter copies go through L1, which may hold stale bytes of an earlier step before the wait.
    """
    rows = all(size * dtype.itemsize % COPIED_BYTES == 0 for size in (d_k, d_v))
    widths = (width for width in (*parts_of(d_k), padded(d_v)) if width)
    smallest = min(widths) * tiles.TOKENS * dtype.itemsize
    return rows and smallest >= COPIED_BYTES * THREADS_PER_WARP * tiles.tok_warps


def _fitting(
    tiles: Tiles, d_k: int, d_v: int, dtype: torch.dtype, capability: Capability, least_keys: int
) -> Tiles | None:
    """Tiles of the two attention kernels, reduced to fit this GPU; None: they never fit."""
    least = Tiles(tiles.BM, least_keys, tiles.num_warps, 1)
    return fitting("decode", tiles, d_k, d_v, dtype, capability, least)


def _strides_pad(spec: BlockSpec) -> int:
    """Compressed tokens that start in a selection block, rounded up to a power of two."""
    return 1 << (spec.l_sel // spec.d - 1).bit_length()


def _cut_of(is_few: bool, is_long: bool, is_wide: bool, whole: bool) -> Cut:
    if is_few:
        return FEW_WHOLE if whole else FEW_LONG if is_long else FEW
    if whole:
        return WIDE_WHOLE if is_wide else NARROW_WHOLE
    if is_wide:
        return WIDE_LONG if is_long else WIDE
    return NARROW_LONG if is_long else NARROW


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step

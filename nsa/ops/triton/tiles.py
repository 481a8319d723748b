"""Tile sizes by static shape and GPU: a fixed table, never tuned at run time and never by data.

The table was measured on an H200. Where its tiles need more shared memory than a GPU has, they are
made smaller, by an upper bound of what a kernel needs (`shared_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from nsa.ops.machine import machine_of
from nsa.ops.spec import BlockSpec

Capability = tuple[int, int]
H200: Capability = (9, 0)
SHARED_KIB = {
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (10, 3): 227,
    (11, 0): 227,
    (12, 0): 99,
    (12, 1): 99,
}
"""Shared memory per program, by compute capability; unknown GPUs count as the smallest."""
SPARE_BYTES = 3072
"""Barriers, and what reductions over a tile exchange between warps."""
TENSOR_MEMORY = (10, 11)
"""Major capabilities whose tensor cores keep results in a memory of their own."""
DIM_STEP = 8
"""Head dims are padded to a multiple of this: rows of 16-bit numbers are then 16-byte aligned."""
SMALLEST = 16
"""Lower bound of both sides of a tile: the smallest product of the tensor cores."""


class Tiles(NamedTuple):
    """Rows and keys of a tile, warps of a program, pipeline stages, register limit of a thread.

    A limit lets more programs run at a time, at the price of spilled registers; it is set where
    that was measured to be faster. 0: no limit.
    """

    BM: int
    BN: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    @property
    def options(self) -> dict[str, int]:
        """Launch options under Triton's names."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options | ({"maxnreg": self.max_registers} if self.max_registers else {})


def padded(size: int) -> int:
    """Next power of two, at least 16, as products of the tensor cores need."""
    return max(16, 1 << (size - 1).bit_length())


def parts_of(d_k: int) -> tuple[int, int]:
    """A head dim as a power of two and a power of two for the rest: 192 is (128, 64)."""
    main = max(16, 1 << (d_k.bit_length() - 1))
    return main, padded(d_k - main) if d_k > main else 0


def _wide(d_k: int, d_v: int) -> int:
    """The wider of both heads as it is read; rows of the tables below depend on it."""
    return max(sum(parts_of(d_k)), padded(d_v))


def capability_of(device: torch.device) -> Capability:
    """Compute capability of the GPU; the interpreter has none and uses that of the tile table."""
    return machine_of(device).capability or H200


def room_of(capability: Capability) -> int:
    """Bytes of shared memory that a program can use."""
    return SHARED_KIB.get(capability, min(SHARED_KIB.values())) << 10


# --- Shared memory: an upper bound by formula, and tiles reduced until they fit ---


def shared_bytes(
    kernel: str,
    tiles: Tiles,
    d_k: int,
    d_v: int,
    dtype: torch.dtype,
    capability: Capability,
    *,
    words: bool = False,
) -> int:
    """Upper bound of a kernel's shared memory; tests compile for these GPUs and compare.

    Some tiles stay for the whole program, others are loaded by its loop and exist once per stage.
    The tensor cores of sm_90 and sm_100 read operands from shared memory, which takes one stage
    more than older ones, whose operands are in registers while the next tile arrives. A product
    that is an operand of the next one passes through shared memory, too.
    `words`: the mask of the selected branch loads a word for every (query, key) pair.
    """
    # Bytes of one tile of k, v (BN rows), q and out (BM rows).
    keys, rows = tiles.BN * dtype.itemsize, tiles.BM * dtype.itemsize
    k, v = keys * sum(parts_of(d_k)), keys * padded(d_v)
    q, o = rows * sum(parts_of(d_k)), rows * padded(d_v)
    stays, comes = {
        "band_forward": (q, k + v),
        "band_dkv": (k + v, q + o),
        "band_dq": (q + o, k + v),
        "group_scores": (k, q),
        "block_forward": (k + v, q),
        "block_backward": (k + v, q + o),
        "block_dkv": (k + v, q + o),
        "query_forward": (q, k + v),
        "query_dq": (q + o, k + v),
        "decode": (q, k + v),
    }[kernel]
    in_place = capability[0] in (9, *TENSOR_MEMORY) or dtype == torch.float32
    if kernel == "decode":  # through pointers, and in place only with 64 rows or more
        in_place = in_place and dtype != torch.float32 and tiles.BM >= 64
    copies = tiles.num_stages if in_place else max(tiles.num_stages - 1, 1)
    products = tiles.BM * keys
    if kernel == "decode" and in_place:  # the logits are kept, as fp32
        products = 4 * tiles.BM * tiles.BN
    if capability[0] in TENSOR_MEMORY:
        # What stays exists in a second layout; results come back from tensor memory as fp32.
        sums = tiles.BN * max(parts_of(d_k)[0], padded(d_v)) if stays == k + v else 0
        products = stays + 4 * max(tiles.BM * tiles.BN, sums)
        copies *= 2 if kernel == "group_scores" else 1  # its two loops do not share buffers
    if kernel == "block_backward":
        # dq is transposed, and so are the keys unless wgmma reads them in place.
        turned = 0 if (in_place and parts_of(d_k)[0] >= 64) or dtype == torch.float32 else k
        products += max(4 * tiles.BM * sum(parts_of(d_k)), turned)
    if words:
        products += 4 * tiles.BM * tiles.BN * (tiles.num_stages - 1)
    return stays + copies * comes + products + SPARE_BYTES


def fitting(
    kernel: str,
    tiles: Tiles,
    d_k: int,
    d_v: int,
    dtype: torch.dtype,
    capability: Capability,
    least: Tiles,
    *,
    words: bool = False,
) -> Tiles | None:
    """The tiles, reduced until they fit, but not below `least`; None: they never fit.

    In this order: drop the third stage, halve the longer side down to 32, drop the second stage,
    halve further.
    """
    room = room_of(capability)
    # Each step is repeated until it changes nothing more, then the next one begins.
    steps: tuple[Callable[[Tiles], Tiles], ...] = (
        lambda t: t._replace(num_stages=max(min(t.num_stages, 2), least.num_stages)),
        lambda t: _halved(t, max(least.BM, 32), max(least.BN, 32)),
        lambda t: t._replace(num_stages=least.num_stages),
        lambda t: _halved(t, least.BM, least.BN),
    )
    for step in steps:
        while shared_bytes(kernel, tiles, d_k, d_v, dtype, capability, words=words) > room:
            less = step(tiles)
            if less == tiles:
                break
            tiles = less
        else:
            return tiles
    return None


def _halved(tiles: Tiles, least_rows: int, least_keys: int) -> Tiles:
    """The tiles with the longer side halved; unchanged if that would be too short."""
    rows, keys = tiles.BM // 2, tiles.BN // 2
    if rows >= least_rows and (rows >= keys or keys < least_keys):
        return tiles._replace(BM=rows)
    return tiles._replace(BN=keys) if keys >= least_keys else tiles


def needs_words(spec: BlockSpec, *, packed: bool) -> bool:
    """Whether the keys of a tile may need several words of a query's bits, or other words than its
    neighbours: a word has 32 blocks, a tile up to 128 keys (tile._is_selected)."""
    return packed or spec.l_sel % 4 != 0


def _fitted_band_tiles(
    kernel: str,
    tiles: Tiles,
    d_k: int,
    d_v: int,
    dtype: torch.dtype,
    capability: Capability,
    words: bool = False,
) -> Tiles:
    """Tiles of a band kernel; small enough ones fit every GPU."""
    least = Tiles(SMALLEST, SMALLEST, tiles.num_warps, 1)
    fitted = fitting(kernel, tiles, d_k, d_v, dtype, capability, least, words=words)
    assert fitted is not None, (kernel, tiles, d_k, d_v, capability)
    return fitted


# --- The table: band kernels ---
# Registers limit most kernels at D 128, so tiles shrink as heads grow. fp32 products use no tensor
# cores and have small tiles. docs/log/portable.md lists the alternatives that were timed.


def forward_tiles(
    d_k: int,
    d_v: int,
    dtype: torch.dtype,
    branch: int,
    capability: Capability = H200,
    *,
    words: bool = False,
) -> Tiles:
    """Tiles of band_forward. The compressed branch (0) has the longest loops, the window (2) the
    shortest.
    """
    tiles = _forward_tiles(d_k, d_v, dtype, branch)
    return _fitted_band_tiles("band_forward", tiles, d_k, d_v, dtype, capability, words)


def _forward_tiles(d_k: int, d_v: int, dtype: torch.dtype, branch: int) -> Tiles:
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


def dkv_tiles(
    d_k: int,
    d_v: int,
    dtype: torch.dtype,
    capability: Capability = H200,
    *,
    words: bool = False,
) -> Tiles:
    """Tiles of band_dkv."""
    tiles = _dkv_tiles(d_k, d_v, dtype)
    return _fitted_band_tiles("band_dkv", tiles, d_k, d_v, dtype, capability, words)


def _dkv_tiles(d_k: int, d_v: int, dtype: torch.dtype) -> Tiles:
    wide = _wide(d_k, d_v)
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2) if wide <= 128 else Tiles(16, 16, 4, 1)
    if wide <= 64:
        return Tiles(64, 64, 4, 3, 168)
    if wide <= 128:
        return Tiles(64, 64, 4, 2)
    return Tiles(32, 64, 4, 3) if wide <= 192 else Tiles(32, 32, 8, 2)


def dq_tiles(
    d_k: int,
    d_v: int,
    dtype: torch.dtype,
    capability: Capability = H200,
    *,
    words: bool = False,
) -> Tiles:
    """Tiles of band_dq."""
    tiles = _dq_tiles(d_k, d_v, dtype)
    return _fitted_band_tiles("band_dq", tiles, d_k, d_v, dtype, capability, words)


def _dq_tiles(d_k: int, d_v: int, dtype: torch.dtype) -> Tiles:
    wide = _wide(d_k, d_v)
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2) if wide <= 128 else Tiles(16, 16, 4, 1)
    if wide <= 128:
        return Tiles(64, 64, 4, 3 if wide <= 64 else 2)
    return Tiles(128, 64, 8, 2) if wide <= 192 else Tiles(32, 32, 8, 2)


def score_tiles(
    d_k: int, dtype: torch.dtype, capability: Capability = H200, per_group: int = 1
) -> Tiles:
    """Tiles of group_scores. Programs of large groups are long: they have one stage more, and fewer
    of them run at a time."""
    tiles = _score_tiles(d_k, dtype)
    if per_group >= BY_QUERY_FROM and tiles.max_registers:
        tiles = tiles._replace(num_stages=3, max_registers=0)
    return _fitted_band_tiles("group_scores", tiles, d_k, d_k, dtype, capability)


def token_tiles(
    d_k: int, block: int, dtype: torch.dtype, capability: Capability = H200
) -> Tiles | None:
    """Tiles of token_scores, which hold a whole block; None: they do not fit this GPU."""
    tiles = _score_tiles(d_k, dtype)._replace(BN=padded(block), num_stages=2)
    fits = shared_bytes("group_scores", tiles, d_k, d_k, dtype, capability) <= room_of(capability)
    return tiles if fits else None


def _score_tiles(d_k: int, dtype: torch.dtype) -> Tiles:
    wide = sum(parts_of(d_k))
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 2)
    if wide <= 64:
        return Tiles(64, 64, 4, 3)
    return Tiles(64, 128, 4, 2, 168) if wide <= 128 else Tiles(64, 64, 4, 2)


# --- The table: kernels that read selected blocks ---


def fits_blocks(d_k: int, d_v: int, spec: BlockSpec, dtype: torch.dtype) -> bool:
    """Whether the block and query kernels take such blocks; larger tiles would spill registers.

    A tile holds a whole block, so long blocks need narrow heads.
    """
    wide, is_fp32 = _wide(d_k, d_v), dtype == torch.float32
    if spec.l_sel > 64:
        return spec.l_sel <= LONGEST_TILE and wide <= (64 if is_fp32 else 128)
    return wide <= (128 if is_fp32 else 192)


BY_QUERY_FROM = 9
"""Heads per group from which its forward is in query order: they fill a tile of 16 rows."""


def in_query_order(d_k: int, d_v: int, per_group: int) -> bool:
    """Whether the selected branch reads its blocks query by query."""
    return per_group >= BY_QUERY_FROM or not fits_dq(d_k, d_v)


def fits_dq(d_k: int, d_v: int) -> bool:
    """Whether block_backward has registers for the gradient of q, too."""
    return _wide(d_k, d_v) <= 128


def block_tiles(
    d_k: int, d_v: int, per_group: int, spec: BlockSpec, dtype: torch.dtype, purpose: str
) -> Tiles:
    """Tiles of block_forward and block_backward (purpose: forward, backward, dkv alone).

    Rows are (query, head) pairs, keys one selection block. 16-bit products need two stages or more:
    with one, two operands may share an address, which ptxas miscompiles (docs/log/faults.md). fp32
    products use no tensor cores and are not affected.
    """
    wide, keys = _wide(d_k, d_v), padded(spec.l_sel)
    if dtype == torch.float32:
        tiles = Tiles(32, keys, 4, 1)
    elif spec.l_sel > 64:
        tiles = Tiles(64, keys, 4, 3) if purpose == "forward" else Tiles(64, keys, 8, 2)
    elif wide <= 64:
        rows = 128 if purpose == "backward" and per_group >= 4 else 64
        tiles = Tiles(rows, keys, 4, 2, 96 if purpose == "forward" else 0)
    elif purpose == "forward":
        tiles = Tiles(64, keys, 4, 2, 168 if d_k == d_v == 128 else 0)
    elif purpose == "backward":
        tiles = Tiles(32, keys, 4, 3)
    else:
        tiles = Tiles(64 if wide <= 128 else 32, keys, 4, 2)
    return tiles._replace(BM=max(tiles.BM, padded(per_group)))


def fitted_block_tiles(
    d_k: int,
    d_v: int,
    per_group: int,
    spec: BlockSpec,
    dtype: torch.dtype,
    purpose: str,
    capability: Capability = H200,
) -> Tiles | None:
    """The block tiles on this GPU, with fewer rows where necessary; None: they do not fit.

    Only rows and the third stage are reduced: other forms were not checked for the ptxas bug
    (docs/log/faults.md, wrong code).
    """
    tiles = block_tiles(d_k, d_v, per_group, spec, dtype, purpose)
    if capability[0] in TENSOR_MEMORY:  # four results of more rows may exceed it
        if padded(per_group) > 64:
            return None
        tiles = tiles._replace(BM=min(tiles.BM, 64))
    kernel = f"block_{purpose}"
    least = tiles
    if tiles.num_stages > 1:
        rows = min(tiles.BM, max(padded(per_group), 32))
        least = tiles._replace(BM=rows, num_stages=2)
    return fitting(kernel, tiles, d_k, d_v, dtype, capability, least)


def fits_selected(
    d_k: int,
    d_v: int,
    per_group: int,
    spec: BlockSpec,
    dtype: torch.dtype,
    capability: Capability = H200,
    *,
    by_query: bool,
) -> bool:
    """Whether the selected branch can read its blocks on this GPU, forward and backward."""
    sizes = (d_k, d_v, per_group, spec, dtype)
    purposes = ("dkv",) if by_query else ("forward", "backward")
    blocks = (fitted_block_tiles(*sizes, purpose, capability) for purpose in purposes)
    fits = fits_blocks(d_k, d_v, spec, dtype) and None not in blocks
    queries = (_fitted_query_tiles(*sizes, capability, backward=back) for back in (False, True))
    return fits and (not by_query or None not in queries)


# --- Long blocks, which are read in parts ---

LONGEST_TILE, SHORT_TILE = 128, 64
"""Tokens of a block that a tile holds at most: where registers and shared memory allow it, and
elsewhere."""


def read_spec(
    d_k: int,
    d_v: int,
    per_group: int,
    spec: BlockSpec,
    dtype: torch.dtype,
    capability: Capability = H200,
) -> BlockSpec:
    """Sizes with which the selected blocks are read: a block that a tile cannot hold as several
    shorter ones of equal length."""
    by_query = in_query_order(d_k, d_v, per_group)
    parted = spec
    for longest in (spec.l_sel, LONGEST_TILE, SHORT_TILE):
        parted = _parted(spec, longest)
        sizes = (d_k, d_v, per_group, parted, dtype, capability)
        if fits_selected(*sizes, by_query=by_query):
            return parted
    return parted


def _parted(spec: BlockSpec, longest: int) -> BlockSpec:
    """The same tokens in blocks of at most `longest`: the longest that divide a block."""
    block = spec.l_sel
    parts = next(n for n in range(-(-block // longest), block + 1) if block % n == 0)
    return spec if parts == 1 else sparse_spec(block // parts, parts * spec.n_sel)


def sparse_spec(block: int, num_ids: int) -> BlockSpec:
    """Sizes where blocks are only read: the compressed and the window branch have none."""
    return BlockSpec(block, block, block, num_ids, 1, num_first=0, num_local=1)


def sparse_obstacle(
    head_dims: tuple[int, ...],
    per_group: int,
    spec: BlockSpec,
    dtype: torch.dtype,
    capability: Capability,
) -> str:
    """Why the kernels cannot read such blocks; empty when they can."""
    d_k, d_v = (-(-size // DIM_STEP) * DIM_STEP for size in head_dims)
    spec = read_spec(d_k, d_v, per_group, spec, dtype, capability)
    by_query = in_query_order(d_k, d_v, per_group)
    if fits_selected(d_k, d_v, per_group, spec, dtype, capability, by_query=by_query):
        return ""
    return group_obstacle(d_k, d_v, per_group, dtype, capability)


# --- Query order ---


def query_obstacle(
    d_k: int,
    d_v: int,
    per_group: int,
    spec: BlockSpec,
    dtype: torch.dtype,
    capability: Capability = H200,
) -> str:
    """Why query_forward cannot take such heads; empty when it can."""
    fits = (
        _fitted_query_tiles(d_k, d_v, per_group, spec, dtype, capability, backward=False)
        is not None
    )
    return "" if fits else group_obstacle(d_k, d_v, per_group, dtype, capability)


def group_obstacle(
    d_k: int, d_v: int, per_group: int, dtype: torch.dtype, capability: Capability
) -> str:
    """Why kernels that take a whole group at a time cannot run, as a sentence for the caller."""
    major, minor = capability
    return (
        f"{per_group} query heads to a KV head, with Dk={d_k} and Dv={d_v} in {dtype}, do not fit "
        f"the {room_of(capability) >> 10} KiB of shared memory of this GPU (sm_{major}{minor})"
    )


def query_tiles(
    d_k: int,
    d_v: int,
    per_group: int,
    spec: BlockSpec,
    dtype: torch.dtype,
    capability: Capability = H200,
    *,
    backward: bool = False,
) -> Tiles:
    """Tiles of query_forward and query_dq: rows are the heads of a group."""
    tiles = _fitted_query_tiles(d_k, d_v, per_group, spec, dtype, capability, backward=backward)
    assert tiles is not None, group_obstacle(d_k, d_v, per_group, dtype, capability)
    return tiles


def _fitted_query_tiles(
    d_k: int,
    d_v: int,
    per_group: int,
    spec: BlockSpec,
    dtype: torch.dtype,
    capability: Capability,
    *,
    backward: bool,
) -> Tiles | None:
    """Tiles of query_forward or query_dq on this GPU; None where none fit."""
    tiles = _query_tiles(d_k, d_v, per_group, spec, dtype, backward)
    kernel = "query_dq" if backward else "query_forward"
    least = Tiles(tiles.BM, SMALLEST, tiles.num_warps, 1)
    return fitting(kernel, tiles, d_k, d_v, dtype, capability, least)


def _query_tiles(
    d_k: int, d_v: int, per_group: int, spec: BlockSpec, dtype: torch.dtype, backward: bool
) -> Tiles:
    wide = _wide(d_k, d_v)
    rows, short = padded(per_group), dtype == torch.float32 or wide > 192
    if rows == 16 and wide <= 128 and not short:
        keys, num_warps, num_stages = (64, 2, 3) if backward else (32, 1, 3)
    else:
        keys, num_warps, num_stages = 32 if short else 64, 2 if rows <= 32 else 4, 2
    return Tiles(rows, min(padded(spec.l_sel), keys), num_warps, num_stages)

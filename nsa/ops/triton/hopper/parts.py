"""What the kernels of this folder share: copies by TMA, rounding, the order of work, descriptors.

Gluon is Triton's lower level: tiles in shared memory, their layouts and the waiting between warps
are written out. A program has several warpgroups. One warp, the producer, copies tiles from memory
(TMA) and the consumers multiply them (wgmma). They meet at mbarriers in shared memory: `full` is
completed by a copy, `empty` by the consumers, once they have read the tile. A barrier changes its
phase with every completion. A waiter names the parity of the phase it waits for; a new barrier
counts as if phase 1 had just ended, so that the first wait for `empty` passes.

Names as in tile.py. C is the number of a consumer, NC how many there are, `it` counts the tiles of
a program, `n` its items. Import this only where Gluon is needed: see problem.hopper.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from nsa.ops.triton.launcher import Launch, Rows, ceil_div
from nsa.ops.triton.problem import Problem

TILE = 64
"""Rows of every tile, of queries and of keys: what one wgmma takes."""
TILE_ROWS = gl.constexpr(TILE)
PRODUCER_REGISTERS = gl.constexpr(24)
COUNTS = ("S", "NUM_ITEMS", "NUM_TILES", "Hkv", "SHARES", "PER_TILE", "W", "OFF", "STEP")
"""Numbers of forward.py and queries.py that change no code."""

# Triton 3.7 has renamed it.
sync_warps = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Barrier of one consumer's warps."""


@gluon.jit
def num_rounds(num_items):
    """Items of this program: one of each round, in which every program takes one."""
    whole = num_items // gl.num_programs(0)
    return whole + (item_of(whole) < num_items).to(gl.int32)


@gluon.jit
def item_of(n):
    """Item of round n. Items get shorter: the order of the programs turns with every round, so that
    all have about the same to do."""
    i = gl.program_id(0)
    last = gl.num_programs(0) - 1
    return n * (last + 1) + gl.where(n % 2 == 0, i, last - i)


@gluon.jit
def place_of(item, sizes, NC: gl.constexpr):
    """Batch element, first query, group, and first head of one item of work.

    The consumers hold NC heads of one group, on the same queries, and share its keys. Those of a
    group follow each other, then the groups: programs that run at a time read the same keys. Late
    queries, which see the most keys, come first. Divisions take hundreds of cycles: few of them,
    beside products.
    """
    num_tiles, Hkv, SHARES, PER_TILE = sizes[1], sizes[2], sizes[3], sizes[4]
    tile = item // PER_TILE
    rest = item - tile * PER_TILE
    i_b = rest // (Hkv * SHARES)
    rest -= i_b * (Hkv * SHARES)
    return i_b, (num_tiles - 1 - tile) * TILE_ROWS, rest // SHARES, rest * NC


@gluon.jit
def place_after(n, rounds, sizes, NC: gl.constexpr):
    """Place of the item after that of round n; after the last one, of the first."""
    return place_of(gl.where(n + 1 < rounds, item_of(n + 1), gl.program_id(0)), sizes, NC)


@gluon.jit
def num_key_tiles(t0, W):
    """Tiles of keys that the queries of a tile see. Tile 0 is on the diagonal, the others before.

    Also the first one, of those before, that the window does not cover whole: it needs a mask.
    """
    n = (t0 - gl.maximum(t0 - W + 1, 0) // TILE_ROWS * TILE_ROWS) // TILE_ROWS + 1
    return n, gl.maximum(gl.minimum(W // TILE_ROWS, n), 1)


@gluon.jit
def num_compressed(t, OFF, STEP):
    """Compressed keys that query t sees: those up to floor((t - OFF) / STEP)."""
    return gl.maximum(t - OFF + STEP, 0) // STEP


@gluon.jit
def compressed_tiles(t0, S, OFF, STEP):
    """Tiles of compressed keys that the queries of a tile see; and how many all of them see
    whole, so that only those after them need a mask."""
    seen = num_compressed(gl.minimum(t0 + TILE_ROWS, S) - 1, OFF, STEP)
    return (seen + TILE_ROWS - 1) // TILE_ROWS, num_compressed(t0, OFF, STEP) // TILE_ROWS


@gluon.jit
def query_tile(start, i, COMPRESSED: gl.constexpr):
    """The tile of queries that is walked as number i for a head: backwards where keys have no last
    query."""
    if COMPRESSED:
        tile = start - i
    else:
        tile = start + i
    return tile


@gluon.jit
def stage_of(it, STAGES: gl.constexpr):
    """Buffer of tile `it`; bits, because a remainder would think of negative numbers."""
    gl.static_assert(STAGES & (STAGES - 1) == 0)
    return it & (STAGES - 1)


@gluon.jit
def phase_of(it, STAGES: gl.constexpr):
    """Phase of the barriers of that buffer."""
    return (it & STAGES) // STAGES


@gluon.jit
def copy_in(t, i_b, row, i_h, full, buf):
    """Start copying rows of one head of [B, S, H, D]; outside of the tensor they are 0."""
    tma.async_copy_global_to_shared(t, [i_b, row, i_h, 0], full, buf)


@gluon.jit
def copy_out(t, i_b, row, i_h, buf):
    """Start copying a tile to [B, S, H, D]; what lies outside is not written."""
    tma.async_copy_shared_to_global(t, [i_b, row, i_h, 0], buf)


@gluon.jit
def matrix(bufs, i):
    """Buffer i, as the matrix of its rows."""
    buf = bufs.index(i)
    return buf.reshape([buf.shape[1], buf.shape[3]])


@gluon.jit
def stat_column(b_stats, COLUMN: gl.constexpr, LAYOUT: gl.constexpr):
    """One of the four numbers of each row [64, 4], as columns of a tile [keys, rows] have it."""
    WIDE: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        [[0, 0], [0, 0]],
        [],
        [TILE_ROWS, 1],
    )
    b = gl.reshape(b_stats.slice(COLUMN, 1, dim=1).load(WIDE), [TILE_ROWS])
    return gl.convert_layout(b, gl.SliceLayout(0, LAYOUT))


@gluon.jit
def with_sign(p, lse):
    """p [keys, rows] times the sign of the gates, which is the last bit of lse [rows]."""
    bits = p.to(gl.int32, bitcast=True) ^ (lse.to(gl.int32, bitcast=True) << 31)[None, :]
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """x in 16 bits, two numbers at a time: Triton converts one by one, and joins them then."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:  # without it, the function would have two types
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def exchanged(b, D: gl.constexpr):
    """Columns of b [64, D] in another order, or back: column 8 a + 2 b + c of every 32 lies in
    column 8 b + 2 a + c (a, b < 4, c < 2).

    A thread holds 2 columns of every 8 of a wgmma operand or result, which would be 4 bytes of
    memory at a time. Where keys or values have their columns exchanged in shared memory, what it
    holds of 32 columns are 8 neighbours, 16 bytes: those of row_layout.
    """
    b = gl.reshape(b, [TILE_ROWS, D // 32, 4, 4, 2])
    return gl.reshape(gl.permute(b, (0, 1, 3, 2, 4)), [TILE_ROWS, D])


@gluon.constexpr_function
def row_layout(D: Any) -> Any:
    """Of [64, D], with columns exchanged back: 16 bytes of two rows for a thread, in every 32
    columns."""
    more = [[0, 1 << power] for power in range(5, D.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *more]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, D])


# --- Launching ---


def tile_rows(x: Tensor, num_rows: int = TILE) -> Rows:
    """Tiles of rows of one head of x [B, S, H, D]."""
    return Rows(x, num_rows, x.shape[3], layout_of(num_rows, x.shape[3], x.dtype))


def stat_rows(stats: Tensor) -> Rows:
    """Tiles of the stats of one head, of [B, Hq, S, 4]."""
    batch, num_heads, seq_len, _ = stats.shape
    rows = Rows(stats, TILE, 4, stats_layout())
    rows.shape, rows.strides = (batch * num_heads, seq_len, 4), (4 * seq_len, 4, 1)
    rows.block_shape = (1, TILE, 4)
    return rows


@cache
def stats_layout() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)


@cache
def layout_of(num_rows: int, width: int, dtype: torch.dtype) -> Any:
    """Layout of such a tile in shared memory, as wgmma reads it."""
    kinds = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
    return gl.NVMMASharedLayout.get_default_for([1, num_rows, 1, width], kinds[dtype])


def item_counts(problem: Problem, consumers: int) -> tuple[int, ...]:
    """S, NUM_ITEMS, NUM_TILES, Hkv, SHARES and PER_TILE of forward.py and queries.py."""
    num_tiles, shares = ceil_div(problem.seq_len, TILE), problem.per_group // consumers
    per_tile = problem.num_segments * shares
    return problem.seq_len, num_tiles * per_tile, num_tiles, problem.num_groups, shares, per_tile


def num_programs(problem: Problem, consumers: int) -> int:
    """Programs that stay for the whole launch."""
    return min(problem.processors, item_counts(problem, consumers)[1])


class Registers(NamedTuple):
    """Registers of a thread that multiplies, and of every thread before roles are given out."""

    consumer: int
    each: int


REGISTERS = {2: Registers(240, 168), 3: Registers(160, 128)}
"""By consumers, where the only other role is the producer."""


def launch(
    programs: int,
    numbers: tuple[Any, ...],
    constants: dict[str, Any],
    consumers: int,
    registers: Registers | None = None,
) -> Launch:
    """A launch with that many consumers.

    The registers of a multiprocessor are divided by `maxnreg` first; warp_specialize then takes
    them from the producer for the consumers.
    """
    consumer, each = registers or REGISTERS[consumers]
    sized = {**constants, "NC": consumers, "REGISTERS": consumer}
    return Launch((programs,), numbers, sized, {"num_warps": 4, "maxnreg": each})

"""Gradient of queries beside that of the keys, in one pass: for keys.py, at D 64.

The consumers of keys.py leave dS^T of each tile in shared memory, [keys, queries]. A warpgroup of
its own multiplies it with their keys and adds the product to dq in memory: scores and exponentials
are computed once for all three gradients. Many programs add to the same queries, so that the order
of a sum changes from run to run; deterministic mode takes two passes. Names as in tile.py, barriers
as in parts.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.ops.triton.hopper.parts import (
    TILE_ROWS,
    matrix,
    phase_of,
    query_tile,
    stage_of,
    sync_warps,
)

SLOTS = gl.constexpr(4)
"""Tiles of dS^T of a consumer that are multiplied or wait for it."""
REGISTERS = gl.constexpr(64)
"""Of a thread of this warpgroup."""


class Sums(NamedTuple):
    """Keys with exchanged columns, by consumer; dS^T, and its barriers, by consumer and slot."""

    k: Any
    ds: Any
    full: Any
    empty: Any


@gluon.jit
def allocate(dtype: gl.constexpr, D: gl.constexpr, NC: gl.constexpr):
    """Shared memory of NC consumers, and the barriers, initialised."""
    gl.static_assert(D == 64)
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    sums = Sums(
        gl.allocate_shared_memory(dtype, [NC, TILE_ROWS, D], TILE),
        gl.allocate_shared_memory(dtype, [NC * SLOTS, TILE_ROWS, TILE_ROWS], TILE),
        gl.allocate_shared_memory(gl.int64, [NC * SLOTS, 1], BAR),
        gl.allocate_shared_memory(gl.int64, [NC * SLOTS, 1], BAR),
    )
    for i in gl.static_range(NC * SLOTS):
        mbarrier.init(sums.full.index(i), count=1)
        mbarrier.init(sums.empty.index(i), count=1)
    return sums


@gluon.jit
def keep_keys(sums, k_bufs, C: gl.constexpr, D: gl.constexpr):
    """Copy the keys of a consumer, before their buffer takes their gradient.

    Of every 16 columns, 4 a + 2 b + c lies in column 8 b + 2 a + c (a < 4; b, c < 2): a thread
    holds columns 2 a + c of every 8 of a product, which are then 4 neighbours.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    b_k = gl.reshape(matrix(k_bufs, C).load(ROW), [TILE_ROWS, D // 16, 4, 2, 2])
    sums.k.index(C).store(gl.reshape(gl.permute(b_k, (0, 1, 3, 2, 4)), [TILE_ROWS, D]))


@gluon.jit
def give(sums, ds, C: gl.constexpr, n):
    """Store dS^T of a consumer's tile n."""
    slot = C * SLOTS + stage_of(n, SLOTS)
    mbarrier.wait(sums.empty.index(slot), phase_of(n, SLOTS) ^ 1)
    sums.ds.index(slot).store(ds)


@gluon.jit
def announce(sums, C: gl.constexpr, n):
    """It is there: after the next products have begun, which need not wait for that."""
    fence_async_shared()
    sync_warps()
    mbarrier.arrive(sums.full.index(C * SLOTS + stage_of(n, SLOTS)))


@gluon.jit
def add_queries(p_dq, scale, sums, place, sizes, spans, D: gl.constexpr, COMPRESSED: gl.constexpr):
    """Add scale * dS k of all tiles to dq [B, S, Hq, D] fp32, and zeros to the rows after it.

    `spans`: of the tiles that are walked for a head, the first of each consumer's and their number.
    Consumer 0 begins with the first tile.
    """
    i_b, i_g, _, _, h0, start, total = place
    S, _, Hkv, G, HEADS, _ = sizes
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    IO: gl.constexpr = _added_layout(D)
    o_t = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, IO))
    o_d = gl.arange(0, D, gl.SliceLayout(0, IO))
    at = (o_t * (Hkv * G * D))[:, None] + o_d[None, :]
    none = gl.zeros([TILE_ROWS, D], gl.float32, OL)
    own, first, second = spans[0][1], spans[1][0], spans[1][1]
    for i_h in range(HEADS):
        p_head = p_dq + (i_b.to(gl.int64) * S * (Hkv * G) + i_g * G + h0 + i_h) * D
        for i in range(total):
            n = i_h * second + i - first
            if i < own:
                b_dq = _product(sums, none, 0, i_h * own + i, False)
                if (i >= first) & (i < first + second):
                    b_dq = _product(sums, b_dq, 1, n, True)
            else:
                b_dq = _product(sums, none, 1, n, False)
            b_dq = gl.reshape(b_dq * scale, [TILE_ROWS, D // 16, 2, 4, 2])
            b_dq = gl.reshape(gl.permute(b_dq, (0, 1, 3, 2, 4)), [TILE_ROWS, D])
            t0 = query_tile(start, i, COMPRESSED) * TILE_ROWS
            b_dq = gl.convert_layout(b_dq, IO)  # nothing moves
            if t0 + TILE_ROWS > S:  # a NaN there would reach the next batch element
                b_dq = gl.where((t0 + o_t < S)[:, None], b_dq, 0.0)
            gl.atomic_add(p_head + t0.to(gl.int64) * (Hkv * G * D) + at, b_dq, sem="relaxed")


@gluon.jit
def _product(sums, b_dq, C: gl.constexpr, n, ADDS: gl.constexpr):
    """dS k of a consumer's tile n, [queries, D]; ADDS: and b_dq."""
    slot = C * SLOTS + stage_of(n, SLOTS)
    mbarrier.wait(sums.full.index(slot), phase_of(n, SLOTS))
    b_ds = sums.ds.index(slot).permute((1, 0))
    b_dq = warpgroup_mma(b_ds, sums.k.index(C), b_dq, use_acc=ADDS, is_async=True)
    b_dq = warpgroup_mma_wait(0, deps=(b_dq,))
    sync_warps()
    mbarrier.arrive(sums.empty.index(slot))
    return b_dq


@gluon.constexpr_function
def _added_layout(D: Any) -> Any:
    """Of [64, D]: a thread has 4 neighbours of two rows in every 16 columns."""
    more = [[0, 1 << power] for power in range(4, D.bit_length() - 1)]
    registers = [[0, 1], [0, 2], [8, 0], *more]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, D])

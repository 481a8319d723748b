"""Gradients of keys and values on Hopper, of all branches that are bands: what
banded_backward.backward_kv computes.

A program takes 128 keys of a group, 64 for each of two consumers, and walks the queries that see
them, one head after the other: so programs with neighbouring keys read the same tiles of queries at
about the same time, while the L2 cache has them. Both consumers read the same tiles. Compressed
keys are few, and many queries see each: there the heads of a group and slices of the queries are
divided between programs, and sum_parts adds up what they found. The masked selected branch is the
same band with one key for each token, and queries that did not choose a block have a probability of
0 there: their words are the fourth numbers of the stats. Scores are [keys, queries]: P and
dS are left operands as they are. Sums of keys and values have one fixed order; dq_sums.py adds up
the gradient of queries, where it is wanted here. banded_backward.py has the equations, parts.py the
names.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.ops.triton.bands.banded_backward import sum_all
from nsa.ops.triton.hopper import dq_sums
from nsa.ops.triton.hopper.division import divided
from nsa.ops.triton.hopper.parts import (
    PRODUCER_REGISTERS,
    TILE,
    TILE_ROWS,
    Registers,
    copy_in,
    copy_out,
    launch,
    matrix,
    phase_of,
    query_tile,
    rounded,
    stage_of,
    stat_column,
    stat_rows,
    sync_warps,
    tile_rows,
    with_sign,
)
from nsa.ops.triton.launcher import ceil_div, start
from nsa.ops.triton.problem import Problem

STAGES = 4
"""Tiles of queries, and as many of dout, that are in flight or being read."""
WITH_QUERIES = Registers(208, 128)
"""Where a third warpgroup adds up the gradient of queries."""
NEITHER, BOTH, VALUES = 0, 1, 2
"""What of keys and values is in registers, at D 64."""
HELD_ALONE, HELD_WITH_QUERIES = BOTH, VALUES
"""As much as there are registers for, without and with that warpgroup."""


@gluon.jit(do_not_specialize=("S", "K", "Hkv", "G", "W", "OFF", "STEP", "BATCH", "HEADS", "SLICES"))
def gluon_dkv(
    t_q, t_dout, t_k, t_v, t_dk, t_dv, t_stats, p_dk, p_dv, p_dq,
    S, K, Hkv, G, W, OFF, STEP, BATCH, HEADS, SLICES, scale, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, COMPRESSED: gl.constexpr,
    L_SEL: gl.constexpr, HELD: gl.constexpr, NC: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv [B, K, Hkv, D], or, in their place, partial sums p_dk, p_dv.

    Those are [B, parts, K, Hkv, D] fp32, with parts = G / HEADS * SLICES. stats are [B * Hq, S, 4],
    as in tile.py. L_SEL > 0: the selected branch, also COMPRESSED. p_dq: what the keys give dq
    [B, S, Hq, D] fp32 is added there (dq_sums.py).
    """
    dtype: gl.constexpr = t_q.dtype
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    k_bufs = gl.allocate_shared_memory(dtype, [NC, 1, TILE_ROWS, 1, D], t_k.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [NC, 1, TILE_ROWS, 1, D], t_v.layout)
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, TILE_ROWS, 1, D], t_q.layout)
    d_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, TILE_ROWS, 1, D], t_dout.layout)
    stat_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE_ROWS, 4], t_stats.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [NC, 1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for i in gl.static_range(NC):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NC)
    if p_dq is not None:
        sums = dq_sums.allocate(dtype, D, NC)
    # The copies are asynchronous, and must see the barriers as they were just written.
    fence_async_shared()
    bufs = (k_bufs, v_bufs, q_bufs, d_bufs, stat_bufs)
    bars = (k_full, full, empty)
    band = (W, OFF, STEP)
    if COMPRESSED:
        place = _compressed_place(S, Hkv, G, OFF, STEP, BATCH, HEADS, SLICES)
    else:
        place = _window_place(S, Hkv, W)
    sizes = (S, K, Hkv, G, HEADS, G // HEADS * SLICES)
    copied = (t_q, t_dout, t_k, t_v, t_stats)
    given = (t_dk, t_dv, p_dk, p_dv)
    if p_dq is None:
        shared = (given, bufs, bars, None, place, sizes, band, scale, scale_log2)
        gl.warp_specialize(
            [
                (_consume, (0, shared, D, STAGES, COMPRESSED, L_SEL, HELD)),
                (_consume, (1, shared, D, STAGES, COMPRESSED, L_SEL, HELD)),
                (_produce, (copied, bufs, bars, place, sizes, D, STAGES, COMPRESSED, NC)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        shared = (given, bufs, bars, sums, place, sizes, band, scale, scale_log2)
        k0 = place[2] * TILE_ROWS
        spans = (
            _span(k0, place, sizes, band, COMPRESSED),
            _span(k0 + TILE_ROWS, place, sizes, band, COMPRESSED),
        )
        gl.warp_specialize(
            [
                (_consume, (0, shared, D, STAGES, COMPRESSED, L_SEL, HELD)),
                (_consume, (1, shared, D, STAGES, COMPRESSED, L_SEL, HELD)),
                (dq_sums.add_queries, (p_dq, scale, sums, place, sizes, spans, D, COMPRESSED)),
                (_produce, (copied, bufs, bars, place, sizes, D, STAGES, COMPRESSED, NC)),
            ],
            [4, 4, 1],
            [REGISTERS, dq_sums.REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def _window_place(S, Hkv, W):
    """Batch element, group, first tile of keys, part, first head of it; first of the tiles of
    queries that the program walks for each head, and their number.

    Of a tile of keys the window covers so many; the second consumer's begin one later.
    """
    num_tiles = (S + TILE_ROWS - 1) // TILE_ROWS
    pairs = (num_tiles + 1) // 2
    rest = gl.program_id(0) // Hkv
    i_b, i_g, tile = rest // pairs, gl.program_id(0) % Hkv, rest % pairs * 2
    seen = (W + TILE_ROWS - 2) // TILE_ROWS + 1
    return i_b, i_g, tile, 0, 0, tile, gl.minimum(seen + 1, num_tiles - tile)


@gluon.jit
def _compressed_place(S, Hkv, G, OFF, STEP, BATCH, HEADS, SLICES):
    """The same; early keys, which the most queries see, come first. Queries are walked from the
    last to the first: programs with other keys then read the same ones at the same time."""
    parts = G // HEADS * SLICES
    each = BATCH * Hkv * parts
    tile = gl.program_id(0) // each * 2
    rest = gl.program_id(0) % each
    i_part = rest % parts
    i_slice = i_part % SLICES
    num_tiles = (S + TILE_ROWS - 1) // TILE_ROWS
    per_slice = (num_tiles + SLICES - 1) // SLICES
    stop = gl.minimum((i_slice + 1) * per_slice, num_tiles)
    first = gl.maximum((tile * TILE_ROWS * STEP + OFF) // TILE_ROWS, i_slice * per_slice)
    rest = rest // parts
    total = gl.maximum(stop - first, 0)
    return rest // Hkv, rest % Hkv, tile, i_part, i_part // SLICES * HEADS, stop - 1, total


@gluon.jit
def _produce(
    copied, bufs, bars, place, sizes,
    D: gl.constexpr, STAGES: gl.constexpr, COMPRESSED: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    """Copy the keys and values of the consumers, then all tiles of queries, dout and stats."""
    t_q, t_dout, t_k, t_v, t_stats = copied
    k_bufs, v_bufs, q_bufs, d_bufs, stat_bufs = bufs
    k_full, full, empty = bars
    i_b, i_g, tile, i_part, h0, start, total = place
    S, K, Hkv, G, HEADS, parts = sizes
    SIZE: gl.constexpr = TILE_ROWS * D * 2
    for c in gl.static_range(NC):
        k0 = (tile + c) * TILE_ROWS
        mbarrier.expect(k_full.index(c), 2 * SIZE)
        copy_in(t_k, i_b, k0, i_g, k_full.index(c), k_bufs.index(c))
        copy_in(t_v, i_b, k0, i_g, k_full.index(c), v_bufs.index(c))
    for it in range(total * HEADS):
        stage = stage_of(it, STAGES)
        i_h = i_g * G + h0 + it // total
        t0 = query_tile(start, it % total, COMPRESSED) * TILE_ROWS
        mbarrier.wait(empty.index(stage), phase_of(it, STAGES) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, 2 * SIZE + TILE_ROWS * 16)
        copy_in(t_q, i_b, t0, i_h, bar, q_bufs.index(stage))
        row = i_b * Hkv * G + i_h
        tma.async_copy_global_to_shared(t_stats, [row, t0, 0], bar, stat_bufs.index(stage))
        copy_in(t_dout, i_b, t0, i_h, bar, d_bufs.index(stage))


@gluon.jit
def _consume(
    C: gl.constexpr, shared, D: gl.constexpr, STAGES: gl.constexpr,
    COMPRESSED: gl.constexpr, L_SEL: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """Gradients of 64 keys and values."""
    given, bufs, bars, sums, place, sizes, band, scale, scale_log2 = shared
    k_bufs, v_bufs, q_bufs, d_bufs, stat_bufs = bufs
    i_b, i_g, tile, i_part, h0, start, total = place
    S, K, Hkv, G, HEADS, parts = sizes
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dk = gl.zeros([TILE_ROWS, D], gl.float32, OL)
    dv = gl.zeros([TILE_ROWS, D], gl.float32, OL)
    mbarrier.wait(bars[0].index(C), 0)
    b_k = _held(k_bufs, C, HELD == 1)
    b_v = _held(v_bufs, C, HELD > 0)
    if sums is not None:
        dq_sums.keep_keys(sums, k_bufs, C, D)
    k0 = (tile + C) * TILE_ROWS
    first, own = _span(k0, place, sizes, band, COMPRESSED)
    walked = (bufs, bars, sums, b_k, b_v, start, k0, band, scale_log2)
    for i in range(HEADS):
        begin = i * total
        _skip(bars, begin, first, STAGES)
        if D == 64:
            if own > 0:
                dk, dv = _walk(
                    dk, dv, walked, begin, first, own, i * own, C, D, STAGES, COMPRESSED, L_SEL
                )
        else:
            dk, dv = _walk_plainly(dk, dv, walked, begin, first, own, D, STAGES, COMPRESSED, L_SEL)
        _skip(bars, begin + first + own, total - first - own, STAGES)
    t_dk, t_dv, p_dk, p_dv = given
    if p_dk is not None:
        row = (i_b * parts + i_part).to(gl.int64) * K
        _store_part(p_dk, dk * scale, row, k0, K, Hkv, i_g, D, OL)
        _store_part(p_dv, dv, row, k0, K, Hkv, i_g, D, OL)
    else:
        # The keys and values were read for the last time: their buffers take the gradients.
        matrix(k_bufs, C).store(rounded(dk * scale, k_bufs.dtype))
        matrix(v_bufs, C).store(rounded(dv, v_bufs.dtype))
        fence_async_shared()
        copy_out(t_dk, i_b, k0, i_g, k_bufs.index(C))
        copy_out(t_dv, i_b, k0, i_g, v_bufs.index(C))
        tma.store_wait(0)


@gluon.jit
def _held(bufs, C: gl.constexpr, HELD: gl.constexpr):
    """Keys or values as a left operand: in registers, or where they are."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_ROWS, 16])
    if HELD:
        b = matrix(bufs, C).load(gl.DotOperandLayout(0, SL, 2))
    else:
        b = matrix(bufs, C)
    return b


@gluon.jit
def _span(k0, place, sizes, band, COMPRESSED: gl.constexpr):
    """The first of a consumer's tiles of queries, of those walked for a head, and their number."""
    tile, start, total = place[2], place[5], place[6]
    W, OFF, STEP = band
    if COMPRESSED:
        # Backwards, to the first tile that sees any of the keys.
        first = 0
        own = start - (k0 * STEP + OFF) // TILE_ROWS + 1
    else:
        # The other consumer's begin one before, or end one later.
        first = k0 // TILE_ROWS - tile
        own = (W + TILE_ROWS - 2) // TILE_ROWS + 1
    return first, gl.maximum(gl.minimum(own, total - first), 0)


@gluon.jit
def _store_part(p, b, row, k0, K, Hkv, i_g, D: gl.constexpr, OL: gl.constexpr):
    """Rows of a partial sum of [.., K, Hkv, D]."""
    o_k = k0 + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, OL))
    o_d = gl.arange(0, D, gl.SliceLayout(0, OL))
    at = ((row + o_k) * Hkv + i_g)[:, None] * D + o_d[None, :]
    gl.store(p + at, b, mask=(o_k < K)[:, None])


@gluon.jit
def _skip(bars, it, num, STAGES: gl.constexpr):
    """Pass over tiles that only the other consumer reads."""
    k_full, full, empty = bars
    for i in range(num):
        stage = stage_of(it + i, STAGES)
        mbarrier.wait(full.index(stage), phase_of(it + i, STAGES))
        # Without it, one warp could let the barrier go on by two phases while another still waits.
        sync_warps()
        mbarrier.arrive(empty.index(stage))


@gluon.jit
def _walk(
    dk, dv, walked, begin, first, own, before_head, C: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, COMPRESSED: gl.constexpr, L_SEL: gl.constexpr,
):  # fmt: skip
    """What a consumer's tiles of queries of a head add, of which there is one at least.

    The products with P and dS of a tile are started together with the scores of the next: while
    one consumer multiplies, the other has time for its exponentials.
    """
    bufs, bars, sums, b_k, b_v, start, k0, band, scale_log2 = walked
    k_full, full, empty = bars
    stage = stage_of(begin + first, STAGES)
    mbarrier.wait(full.index(stage), phase_of(begin + first, STAGES))
    s, dp = _start_scores(b_k, b_v, bufs, stage)
    lse = _log_sums(walked, stage, L_SEL)
    s = warpgroup_mma_wait(1, deps=(s,))
    p, b_p = _probabilities(s, lse, walked, first, D, COMPRESSED)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    ds = _give_left(p, dp, bufs, stage, sums, before_head, C, D)
    for i in range(first + 1, first + own):
        stage = stage_of(begin + i, STAGES)
        before = stage_of(begin + i - 1, STAGES)
        mbarrier.wait(full.index(stage), phase_of(begin + i, STAGES))
        dk, dv = _start_sums(dk, dv, ds, b_p, bufs, before)
        s, dp = _start_scores(b_k, b_v, bufs, stage)
        if sums is not None:
            dq_sums.announce(sums, C, before_head + i - first - 1)
        lse = _log_sums(walked, stage, L_SEL)
        s, dk, dv, b_p, ds = warpgroup_mma_wait(1, deps=(s, dk, dv, b_p, ds))
        p, b_p = _probabilities(s, lse, walked, i, D, COMPRESSED)
        dp = warpgroup_mma_wait(0, deps=(dp,))
        ds = _give_left(p, dp, bufs, stage, sums, before_head + i - first, C, D)
        # As late as this: between it and the stats, Triton would put one barrier more.
        mbarrier.arrive(empty.index(before))
    last = stage_of(begin + first + own - 1, STAGES)
    dk, dv = _start_sums(dk, dv, ds, b_p, bufs, last)
    if sums is not None:
        dq_sums.announce(sums, C, before_head + own - 1)
    dk, dv, b_p, ds = warpgroup_mma_wait(0, deps=(dk, dv, b_p, ds))
    mbarrier.arrive(empty.index(last))
    return dk, dv


@gluon.jit
def _walk_plainly(
    dk, dv, walked, begin, first, own,
    D: gl.constexpr, STAGES: gl.constexpr, COMPRESSED: gl.constexpr, L_SEL: gl.constexpr,
):  # fmt: skip
    """The same, one tile after the other: at D 128, registers do not suffice for two."""
    bufs, bars, sums, b_k, b_v, start, k0, band, scale_log2 = walked
    k_bufs, v_bufs, q_bufs, d_bufs, stat_bufs = bufs
    k_full, full, empty = bars
    for i in range(first, first + own):
        stage = stage_of(begin + i, STAGES)
        mbarrier.wait(full.index(stage), phase_of(begin + i, STAGES))
        s, dp = _start_scores(b_k, b_v, bufs, stage)
        lse = _log_sums(walked, stage, L_SEL)
        s = warpgroup_mma_wait(1, deps=(s,))
        p, b_p = _probabilities(s, lse, walked, i, D, COMPRESSED)
        dv = warpgroup_mma(b_p, matrix(d_bufs, stage), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = _as_left(_gradient(p, dp, bufs, stage), D)
        dk = warpgroup_mma(ds, matrix(q_bufs, stage), dk, is_async=True)
        dk, dv, b_p, ds = warpgroup_mma_wait(0, deps=(dk, dv, b_p, ds))
        mbarrier.arrive(empty.index(stage))
    return dk, dv


@gluon.jit
def _start_scores(b_k, b_v, bufs, stage):
    """Start s^T = k q^T and dP^T = v dout^T: [keys, queries]."""
    k_bufs, v_bufs, q_bufs, d_bufs, stat_bufs = bufs
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_ROWS, 16])
    none = gl.zeros([TILE_ROWS, TILE_ROWS], gl.float32, SL)
    b_q, b_dout = matrix(q_bufs, stage), matrix(d_bufs, stage)
    s = warpgroup_mma(b_k, b_q.permute((1, 0)), none, use_acc=False, is_async=True)
    dp = warpgroup_mma(b_v, b_dout.permute((1, 0)), none, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _start_sums(dk, dv, ds, b_p, bufs, stage):
    """Start what a tile adds: dV += P^T dout and dK += dS^T q."""
    k_bufs, v_bufs, q_bufs, d_bufs, stat_bufs = bufs
    dv = warpgroup_mma(b_p, matrix(d_bufs, stage), dv, is_async=True)
    dk = warpgroup_mma(ds, matrix(q_bufs, stage), dk, is_async=True)
    return dk, dv


@gluon.jit
def _log_sums(walked, stage, L_SEL: gl.constexpr):
    """Log-sum-exps of the queries of a tile, with their gates, and the same as they are for these
    keys: +inf, and so exp2(s - inf) = 0, for queries that did not choose the block."""
    bufs, bars, sums, b_k, b_v, start, k0, band, scale_log2 = walked
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_ROWS, 16])
    b_stats = bufs[4].index(stage).reshape([TILE_ROWS, 4])
    gated = stat_column(b_stats, 0, SL)
    lse = gated
    if L_SEL > 0:
        word = stat_column(b_stats, 3, SL).to(gl.int32, bitcast=True)
        lse = gl.where((word >> (k0 // L_SEL) & 1) != 0, gated, float("inf"))
    return gated, lse


@gluon.jit
def _probabilities(s, log_sums, walked, i, D: gl.constexpr, COMPRESSED: gl.constexpr):
    """P^T * gate of a tile, and the same as a left operand."""
    bufs, bars, sums, b_k, b_v, start, k0, band, scale_log2 = walked
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_ROWS, 16])
    gated, lse = log_sums
    p = with_sign(gl.exp2(s * scale_log2 - lse[None, :]), gated)
    p = _mask(p, query_tile(start, i, COMPRESSED) * TILE_ROWS, k0, band, COMPRESSED, SL)
    return p, _as_left(rounded(p, bufs[2].dtype), D)


@gluon.jit
def _give_left(p, dp, bufs, stage, sums, n, C: gl.constexpr, D: gl.constexpr):
    """dS^T of a consumer's tile n as a left operand; where dq is wanted, too, also for that."""
    ds = _gradient(p, dp, bufs, stage)
    if sums is not None:
        dq_sums.give(sums, ds, C, n)
    return _as_left(ds, D)


@gluon.jit
def _gradient(p, dp, bufs, stage):
    """dS^T = P^T * (dP^T - delta), in 16 bits."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_ROWS, 16])
    delta = stat_column(bufs[4].index(stage).reshape([TILE_ROWS, 4]), 1, SL)
    return rounded(p * (dp - delta[None, :]), bufs[2].dtype)


@gluon.jit
def _as_left(b, D: gl.constexpr):
    """A tile [keys, queries] as the left operand of a product with rows of queries."""
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    return gl.convert_layout(b, gl.DotOperandLayout(0, OL, 2))


@gluon.jit
def _mask(p, t0, k0, band, COMPRESSED: gl.constexpr, SL: gl.constexpr):
    """P^T of a tile with 0 where a query does not see a key: it is before the key's first query,
    or, of a window, after its last one."""
    W, OFF, STEP = band
    o_k = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))
    o_t = gl.arange(0, TILE_ROWS, gl.SliceLayout(0, SL))[None, :]
    if t0 < (k0 + TILE_ROWS - 1) * STEP + OFF:
        p = gl.where(o_t >= ((k0 + o_k) * STEP + (OFF - t0))[:, None], p, 0.0)
    if not COMPRESSED:  # noqa: SIM102  known here; whether a tile is at the far end is not
        if t0 + TILE_ROWS > k0 + W:
            p = gl.where(o_t < (o_k + (k0 + W - t0))[:, None], p, 0.0)
    return p


# --- Launcher ---

PLACES = {0: "compressed dkv", 1: "selected dkv", 2: "window dkv"}
IN_ONE_PASS = {0: "compressed dkv and dq", 2: "window dkv and dq"}


def backward_kv(
    problem: Problem,
    branch: int,
    q: Tensor,  # [B, S, Hq, D]
    k: Tensor,  # [B, K, Hkv, D], K > 0
    v: Tensor,  # [B, K, Hkv, D]
    dout: Tensor,  # [B, S, Hq, D]
    stats: Tensor,  # [3, B, Hq, S, 4] fp32
    dq_sum: Tensor | None = None,  # [B, S, Hq, D] fp32
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v of a branch; of the selected one, whose words are in the stats, where it
    masks the past. What they give the queries is added to dq_sum."""
    num_keys, window = k.shape[1], problem.spec.w
    shares, slices = (1, 1) if branch == 2 else divided(problem, branch)
    parts, band = shares * slices, problem.bands[branch]
    size = k.shape if parts == 1 else (problem.batch, parts, *k.shape[1:])
    dtype = problem.dtype if parts == 1 else torch.float32
    dk, dv = problem.empty(*size, dtype=dtype), problem.empty(*size, dtype=dtype)
    start(
        problem.memo,
        PLACES[branch] if dq_sum is None else IN_ONE_PASS[branch],
        gluon_dkv,
        (
            *(tile_rows(x) for x in (q, dout, k, v)),
            *((tile_rows(dk), tile_rows(dv)) if parts == 1 else (None, None)),
            stat_rows(stats[branch]),
            *((None, None) if parts == 1 else (dk, dv)),
            dq_sum,
        ),
        lambda: launch(
            problem.num_segments * ceil_div(num_keys, 2 * TILE) * parts,
            (
                problem.seq_len, num_keys, problem.num_groups, problem.per_group, window,
                band.OFF, band.STEP, problem.batch, problem.per_group // shares, slices,
                problem.scale, problem.scale_log2,
            ),
            {"D": problem.d_k, "STAGES": STAGES}
            | {"COMPRESSED": branch != 2, "L_SEL": problem.spec.l_sel if band.SELECT else 0}
            | {"HELD": _held_of(problem, dq_sum)},
            2,
            None if dq_sum is None else WITH_QUERIES,
        ),
    )  # fmt: skip
    if parts == 1:
        return dk, dv
    return sum_all(problem, branch, (dk, dv), parts, k, v)


def _held_of(problem: Problem, dq_sum: Tensor | None) -> int:
    if problem.d_k != 64:
        return NEITHER
    return HELD_ALONE if dq_sum is None else HELD_WITH_QUERIES

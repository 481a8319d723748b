"""Attention to a window, gradients of keys and values, on Hopper: banded_backward.backward_kv.

A program takes 128 keys of a group, 64 for each of two consumers, and walks the queries that see
them, one head after the other: so programs with neighbouring keys read the same tiles of queries at
about the same time, while the L2 cache has them. Both consumers read the same tiles. Scores are
[keys, queries]: P and dS are left operands as they are. Every sum has one fixed order.
banded_backward.py has the equations, parts.py the names.
"""

from __future__ import annotations

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

from nsa.ops.triton.hopper.parts import (
    PRODUCER_REGISTERS,
    TILE,
    TILE_ROWS,
    copy_in,
    copy_out,
    launch,
    matrix,
    rounded,
    stat_rows,
    sync_warps,
    tile_rows,
)
from nsa.ops.triton.launcher import ceil_div, start
from nsa.ops.triton.problem import Problem

STAGES = 4
"""Tiles of queries, and as many of dout, that are in flight or being read."""
CLEAR, DIAGONAL, FAR = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
"""Tiles that the window covers whole, those on the diagonal, and those at its far end."""


@gluon.jit(do_not_specialize=("NUM_TILES", "Hkv", "G", "W"))
def window_dkv(
    t_q, t_dout, t_k, t_v, t_dk, t_dv, t_stats,
    NUM_TILES, Hkv, G, W, scale, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, NARROW: gl.constexpr,
    NC: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv [B, S, Hkv, D]; stats are [B * Hq, S, 4], as in tile.py. NARROW: W < 64."""
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
    # The copies are asynchronous, and must see the barriers as they were just written.
    fence_async_shared()
    bufs = (k_bufs, v_bufs, q_bufs, d_bufs, stat_bufs)
    bars = (k_full, full, empty)
    # First tile of keys of the program, and the tiles of queries that it walks: of a tile of keys
    # the window covers this many, and the second consumer's begin one later.
    pairs = (NUM_TILES + 1) // 2
    rest = gl.program_id(0) // Hkv
    i_b, i_g, tile = rest // pairs, gl.program_id(0) % Hkv, rest % pairs * 2
    seen = (W + TILE_ROWS - 2) // TILE_ROWS + 1
    place = (i_b, i_g, tile, gl.minimum(seen + 1, NUM_TILES - tile))
    sizes = (NUM_TILES, Hkv, G, W, seen)
    copied = (t_q, t_dout, t_k, t_v, t_stats)
    shared = (t_dk, t_dv, bufs, bars, place, sizes, scale, scale_log2)
    gl.warp_specialize(
        [
            (_consume, (0, shared, D, STAGES, NARROW)),
            (_consume, (1, shared, D, STAGES, NARROW)),
            (_produce, (copied, bufs, bars, place, sizes, D, STAGES, NC)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(
    copied, bufs, bars, place, sizes, D: gl.constexpr, STAGES: gl.constexpr, NC: gl.constexpr
):
    """Copy the keys and values of the consumers, then all tiles of queries, dout and stats."""
    t_q, t_dout, t_k, t_v, t_stats = copied
    k_bufs, v_bufs, q_bufs, d_bufs, stat_bufs = bufs
    k_full, full, empty = bars
    i_b, i_g, tile, total = place
    num_tiles, Hkv, G, W, seen = sizes
    SIZE: gl.constexpr = TILE_ROWS * D * 2
    for c in gl.static_range(NC):
        k0 = (tile + c) * TILE_ROWS
        mbarrier.expect(k_full.index(c), 2 * SIZE)
        copy_in(t_k, i_b, k0, i_g, k_full.index(c), k_bufs.index(c))
        copy_in(t_v, i_b, k0, i_g, k_full.index(c), v_bufs.index(c))
    for it in range(total * G):
        stage = it % STAGES
        i_h = i_g * G + it // total
        t0 = (tile + it % total) * TILE_ROWS
        mbarrier.wait(empty.index(stage), (it // STAGES & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, 2 * SIZE + TILE_ROWS * 16)
        copy_in(t_q, i_b, t0, i_h, bar, q_bufs.index(stage))
        row = i_b * Hkv * G + i_h
        tma.async_copy_global_to_shared(t_stats, [row, t0, 0], bar, stat_bufs.index(stage))
        copy_in(t_dout, i_b, t0, i_h, bar, d_bufs.index(stage))


@gluon.jit
def _consume(C: gl.constexpr, shared, D: gl.constexpr, STAGES: gl.constexpr, NARROW: gl.constexpr):
    """Gradients of 64 keys and values."""
    t_dk, t_dv, bufs, bars, place, sizes, scale, scale_log2 = shared
    k_bufs, v_bufs, q_bufs, d_bufs, stat_bufs = bufs
    i_b, i_g, tile, total = place
    num_tiles, Hkv, G, W, seen = sizes
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dk = gl.zeros([TILE_ROWS, D], gl.float32, OL)
    dv = gl.zeros([TILE_ROWS, D], gl.float32, OL)
    mbarrier.wait(bars[0].index(C), 0)
    own = gl.maximum(gl.minimum(seen, num_tiles - tile - C), 0)
    covered = gl.maximum(W // TILE_ROWS, 1)
    for i in range(G):
        # Tiles of queries of a head: one before the keys of the second consumer, one on the
        # diagonal, those that see all keys, those at the far end of the window, and one that only
        # the other consumer reads.
        begin = i * total
        first = begin + C
        clear, far, end = first + gl.minimum(1, own), first + gl.minimum(covered, own), first + own
        walked = (bufs, bars, first, W, scale_log2)
        _skip(bars, begin, first, STAGES)
        dk, dv = _walk(dk, dv, walked, first, clear, C, DIAGONAL, D, STAGES, NARROW)
        dk, dv = _walk(dk, dv, walked, clear, far, C, CLEAR, D, STAGES, NARROW)
        dk, dv = _walk(dk, dv, walked, far, end, C, FAR, D, STAGES, NARROW)
        _skip(bars, end, begin + total, STAGES)
    # The keys and values were read for the last time: their buffers take the gradients.
    matrix(k_bufs, C).store(rounded(dk * scale, k_bufs.dtype))
    matrix(v_bufs, C).store(rounded(dv, v_bufs.dtype))
    fence_async_shared()
    copy_out(t_dk, i_b, (tile + C) * TILE_ROWS, i_g, k_bufs.index(C))
    copy_out(t_dv, i_b, (tile + C) * TILE_ROWS, i_g, v_bufs.index(C))
    tma.store_wait(0)


@gluon.jit
def _skip(bars, lo, hi, STAGES: gl.constexpr):
    """Pass over tiles that only the other consumer reads."""
    k_full, full, empty = bars
    for it in range(lo, hi):
        stage = it % STAGES
        mbarrier.wait(full.index(stage), it // STAGES & 1)
        # Without it, one warp could let the barrier go on by two phases while another still waits.
        sync_warps()
        mbarrier.arrive(empty.index(stage))


@gluon.jit
def _walk(
    dk, dv, walked, lo, hi,
    C: gl.constexpr, EDGE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    NARROW: gl.constexpr,
):  # fmt: skip
    """What the tiles lo .. hi of queries add."""
    bufs, bars, first, W, scale_log2 = walked
    k_bufs, v_bufs, q_bufs, d_bufs, stat_bufs = bufs
    k_full, full, empty = bars
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_ROWS, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    none = gl.zeros([TILE_ROWS, TILE_ROWS], gl.float32, SL)
    for it in range(lo, hi):
        stage = it % STAGES
        mbarrier.wait(full.index(stage), it // STAGES & 1)
        # s^T = k q^T and dP^T = v dout^T: [keys, queries].
        b_q, b_dout = matrix(q_bufs, stage), matrix(d_bufs, stage)
        s = warpgroup_mma(
            matrix(k_bufs, C), b_q.permute((1, 0)), none, use_acc=False, is_async=True
        )
        dp = warpgroup_mma(
            matrix(v_bufs, C), b_dout.permute((1, 0)), none, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(1, deps=(s,))
        # P^T * gate, and its product with dout; queries beyond S have a gate of 0. The stats are
        # read when they are needed, twice: all of them together would not fit the registers.
        lse, _, gate = _stats(stat_bufs, stage, SL)
        p = gl.exp2(s * scale_log2 - lse[None, :]) * gate[None, :]
        if EDGE != CLEAR:
            o_k = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))[:, None]
            o_t = gl.arange(0, TILE_ROWS, gl.SliceLayout(0, SL))[None, :]
            if EDGE == DIAGONAL:
                p = gl.where(o_k <= o_t, p, 0.0)
            if EDGE == FAR or NARROW:
                p = gl.where(o_k > o_t + ((it - first) * TILE_ROWS - W), p, 0.0)
        b_p = gl.convert_layout(rounded(p, q_bufs.dtype), PL)
        dv = warpgroup_mma(b_p, b_dout, dv, is_async=True)
        # dS^T = P^T * (dP^T - delta), and its product with q.
        dp = warpgroup_mma_wait(1, deps=(dp,))
        _, delta, _ = _stats(stat_bufs, stage, SL)
        ds = gl.convert_layout(rounded(p * (dp - delta[None, :]), q_bufs.dtype), PL)
        dk = warpgroup_mma(ds, b_q, dk, is_async=True)
        dk, dv, b_p, ds = warpgroup_mma_wait(0, deps=(dk, dv, b_p, ds))
        mbarrier.arrive(empty.index(stage))
    return dk, dv


@gluon.jit
def _stats(stat_bufs, stage, SL: gl.constexpr):
    """Log-sum-exp, delta and gate of the queries, as columns of a tile of scores."""
    # A thread reads the four numbers of a query at once, of those queries whose columns it holds.
    LL: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]],
        lane_bases=[[2, 0], [4, 0], [0, 0], [0, 0], [0, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[TILE_ROWS, 4],
    )
    b_4 = stat_bufs.index(stage).reshape([TILE_ROWS, 4]).load(LL)
    even, odd = gl.split(gl.reshape(b_4, [TILE_ROWS, 2, 2]))
    lse, gate = gl.split(even)
    delta, _ = gl.split(odd)
    CL: gl.constexpr = gl.SliceLayout(0, SL)
    return gl.convert_layout(lse, CL), gl.convert_layout(delta, CL), gl.convert_layout(gate, CL)


# --- Launcher ---


def backward_kv(
    problem: Problem,
    q: Tensor,  # [B, S, Hq, D]
    k: Tensor,  # [B, S, Hkv, D]
    v: Tensor,  # [B, S, Hkv, D]
    dout: Tensor,  # [B, S, Hq, D]
    stats: Tensor,  # [B, Hq, S, 4] fp32, of the window branch
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v of the window branch."""
    dk, dv = problem.empty(*k.shape), problem.empty(*v.shape)
    num_tiles, window = ceil_div(problem.seq_len, TILE), problem.spec.w
    start(
        problem.memo,
        "window dkv",
        window_dkv,
        (*(tile_rows(x) for x in (q, dout, k, v, dk, dv)), stat_rows(stats)),
        lambda: launch(
            problem.num_segments * ceil_div(num_tiles, 2),
            (
                num_tiles, problem.num_groups, problem.per_group, window,
                problem.scale, problem.scale_log2,
            ),
            {"D": problem.d_k, "STAGES": STAGES, "NARROW": window < TILE},
            2,
        ),
    )  # fmt: skip
    return dk, dv

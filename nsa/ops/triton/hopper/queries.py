"""Gradient of queries on Hopper, of all branches that are bands.

The order of work is that of forward.py: an item is 64 queries of NC heads of a group. They walk the
tiles of their window, then, where compressed keys are given, those, and then, where the selected
branch masks the past, all of it. The kernel also adds what another library computed.
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
    COUNTS,
    PRODUCER_REGISTERS,
    TILE,
    TILE_ROWS,
    compressed_tiles,
    copy_in,
    copy_out,
    item_counts,
    item_of,
    launch,
    matrix,
    num_compressed,
    num_key_tiles,
    num_programs,
    num_rounds,
    phase_of,
    place_after,
    place_of,
    rounded,
    stage_of,
    sync_warps,
    tile_rows,
)
from nsa.ops.triton.launcher import start
from nsa.ops.triton.problem import Problem

STAGES = 4
"""Tiles of keys, and as many of values, that are in flight or being read."""
CONSUMERS = 2
"""More would not find registers for q, dout and dq."""
CLEAR, DIAGONAL, FAR, NEAR = (gl.constexpr(i) for i in range(4))
"""Tiles of which all queries see all keys; of the window, those on the diagonal, and those at its
far end; of the compressed keys and of the masked past, the last ones."""


@gluon.jit(do_not_specialize=COUNTS)
def gluon_dq(
    t_q, t_dout, t_k, t_v, t_k_cmp, t_v_cmp, t_k_sel, t_v_sel, t_dq,
    p_stats, p_stats_cmp, p_stats_sel, p_dq_more,
    S, NUM_ITEMS, NUM_TILES, Hkv, SHARES, PER_TILE, W, OFF, STEP, scale, scale_log2,
    D: gl.constexpr, STAGES: gl.constexpr, NARROW: gl.constexpr, L_SEL: gl.constexpr,
    NC: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dq [B, S, Hq, D] = window + compressed + selected + dq_more, where given.

    dq and dq_more are contiguous. stats are [B, Hq, S, 4], as in tile.py. NARROW: W < 64.
    """
    dtype: gl.constexpr = t_q.dtype
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = gl.allocate_shared_memory(dtype, [NC, 1, TILE_ROWS, 1, D], t_q.layout)
    d_bufs = gl.allocate_shared_memory(dtype, [NC, 1, TILE_ROWS, 1, D], t_dout.layout)
    o_bufs = gl.allocate_shared_memory(dtype, [NC, 1, TILE_ROWS, 1, D], t_dq.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, TILE_ROWS, 1, D], t_k.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, TILE_ROWS, 1, D], t_v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [NC, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [NC, 1], bar)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for i in gl.static_range(NC):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NC)
    # The copies are asynchronous, and must see the barriers as they were just written.
    fence_async_shared()
    bufs = (q_bufs, d_bufs, k_bufs, v_bufs, o_bufs)
    bars = (q_full, q_empty, full, empty)
    sizes = (NUM_ITEMS, NUM_TILES, Hkv, SHARES, PER_TILE, W, OFF, STEP, S)
    copied = (t_q, t_dout, t_k, t_v, t_k_cmp, t_v_cmp, t_k_sel, t_v_sel)
    pointers = (p_stats, p_stats_cmp, p_stats_sel, p_dq_more)
    shared = (t_dq, pointers, bufs, bars, sizes, scale, scale_log2)
    gl.warp_specialize(
        [
            (_consume, (0, shared, D, STAGES, NARROW, L_SEL, NC)),
            (_consume, (1, shared, D, STAGES, NARROW, L_SEL, NC)),
            (_produce, (copied, bufs, bars, sizes, D, STAGES, NC)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _produce(copied, bufs, bars, sizes, D: gl.constexpr, STAGES: gl.constexpr, NC: gl.constexpr):
    """Copy the tiles of all items, in the order in which the consumers read them."""
    it = 0
    rounds = num_rounds(sizes[0])
    for n in range(rounds):
        it = _copy_item(copied, bufs, bars, sizes, item_of(n), it, n, False, D, STAGES, NC)
    # The consumers begin one item more than there are, and do not end it.
    item = gl.program_id(0)
    _copy_item(copied, bufs, bars, sizes, item, it, rounds, True, D, STAGES, NC)


@gluon.jit
def _copy_item(
    copied, bufs, bars, sizes, item, it, n,
    BEGIN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    NC: gl.constexpr,
):  # fmt: skip
    """Queries and dout of all consumers, then tiles of keys and values; BEGIN: only the first."""
    t_q, t_dout, t_k, t_v, t_k_cmp, t_v_cmp, t_k_sel, t_v_sel = copied
    q_bufs, d_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, full, empty = bars
    SIZE: gl.constexpr = TILE_ROWS * D * 2
    i_b, t0, i_g, h0 = place_of(item, sizes, NC)
    for c in gl.static_range(NC):
        mbarrier.wait(q_empty.index(c), (n & 1) ^ 1)
        mbarrier.expect(q_full.index(c), 2 * SIZE)
        copy_in(t_q, i_b, t0, h0 + c, q_full.index(c), q_bufs.index(c))
        copy_in(t_dout, i_b, t0, h0 + c, q_full.index(c), d_bufs.index(c))
    num_seen = 1
    if not BEGIN:
        num_seen, _ = num_key_tiles(t0, sizes[5])
    for j in range(num_seen):
        _copy_keys(t_k, t_v, bufs, bars, i_b, t0 - j * TILE_ROWS, i_g, it, SIZE, STAGES)
        it += 1
    if not BEGIN and t_k_cmp is not None:
        num_seen, _ = compressed_tiles(t0, sizes[8], sizes[6], sizes[7])
        for j in range(num_seen):
            _copy_keys(t_k_cmp, t_v_cmp, bufs, bars, i_b, j * TILE_ROWS, i_g, it, SIZE, STAGES)
            it += 1
    if not BEGIN and t_k_sel is not None:
        for j in range(t0 // TILE_ROWS + 1):
            _copy_keys(t_k_sel, t_v_sel, bufs, bars, i_b, j * TILE_ROWS, i_g, it, SIZE, STAGES)
            it += 1
    return it


@gluon.jit
def _copy_keys(t_k, t_v, bufs, bars, i_b, k0, i_g, it, SIZE: gl.constexpr, STAGES: gl.constexpr):
    """Tile `it` of keys and values, once its buffers are free."""
    q_bufs, d_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, full, empty = bars
    stage = stage_of(it, STAGES)
    mbarrier.wait(empty.index(stage), phase_of(it, STAGES) ^ 1)
    mbarrier.expect(full.index(stage), 2 * SIZE)
    copy_in(t_k, i_b, k0, i_g, full.index(stage), k_bufs.index(stage))
    copy_in(t_v, i_b, k0, i_g, full.index(stage), v_bufs.index(stage))


@gluon.jit
def _consume(
    C: gl.constexpr, shared, D: gl.constexpr, STAGES: gl.constexpr,
    NARROW: gl.constexpr, L_SEL: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    """One head of every item. The next item's first dS is made beside the end of this one."""
    t_dq, pointers, bufs, bars, sizes, scale, scale_log2 = shared
    q_bufs, d_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, full, empty = bars
    num_items, num_tiles, Hkv, SHARES, PER_TILE, W, OFF, STEP, S = sizes
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_ROWS, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q = _take_queries(q_bufs, q_full, 0, C, SL)
    mbarrier.wait(full.index(0), 0)
    s = _start_scores(q, k_bufs, 0, SL)
    i_b, t0, i_g, h0 = place_of(gl.program_id(0), sizes, NC)
    row = (i_b * Hkv * SHARES * NC + h0 + C).to(gl.int64) * S
    stats = _load_stats(pointers[0], row, t0, S, SL)
    dout = _take_dout(bufs, bars, C, SL)
    ds = _begin(s, dout, stats, bufs, bars, 0, W, scale_log2, STAGES, NARROW, SL, OL)
    it = 0
    rounds = num_rounds(num_items)
    for n in range(rounds):
        num_seen, masked = num_key_tiles(t0, W)
        dq = gl.zeros([TILE_ROWS, D], gl.float32, OL)
        o_t = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))
        it += 1
        for _ in range(1, masked):
            dq, ds = _step(
                dq, ds, q, dout, stats, bufs, bars, it, False, 0, scale_log2,
                CLEAR, STAGES, NARROW, SL, OL,
            )  # fmt: skip
            it += 1
        if pointers[1] is not None:  # they come meanwhile
            cmp_stats = _load_stats(pointers[1], row, t0, S, SL)
        if pointers[2] is not None:
            sel_stats = _load_stats(pointers[2], row, t0, S, SL)
            word = _load_words(pointers[2], row, t0, S, SL)
        for j in range(masked, num_seen):
            edge = o_t + (j * TILE_ROWS - W)
            dq, ds = _step(
                dq, ds, q, dout, stats, bufs, bars, it, True, edge, scale_log2,
                FAR, STAGES, NARROW, SL, OL,
            )  # fmt: skip
            it += 1
        if pointers[1] is not None:
            seen = num_compressed(t0 + o_t, OFF, STEP)
            num_seen, masked = compressed_tiles(t0, S, OFF, STEP)
            for j in range(num_seen):
                dq, ds = _step(
                    dq, ds, q, dout, cmp_stats, bufs, bars, it, j >= masked, seen - j * TILE_ROWS,
                    scale_log2, NEAR, STAGES, NARROW, SL, OL,
                )  # fmt: skip
                it += 1
        if pointers[2] is not None:
            whole = t0 // TILE_ROWS
            for j in range(whole + 1):
                chosen = _if_chosen(sel_stats, word, j * TILE_ROWS // L_SEL)
                dq, ds = _step(
                    dq, ds, q, dout, chosen, bufs, bars, it, j == whole, o_t + 1,
                    scale_log2, NEAR, STAGES, NARROW, SL, OL,
                )  # fmt: skip
                it += 1
        # The last tile's product with keys, beside the first scores of the next item.
        last = stage_of(it - 1, STAGES)
        dq = warpgroup_mma(ds, matrix(k_bufs, last), dq, is_async=True)
        q = _take_queries(q_bufs, q_full, n + 1, C, SL)
        mbarrier.wait(full.index(stage_of(it, STAGES)), phase_of(it, STAGES))
        s = _start_scores(q, k_bufs, stage_of(it, STAGES), SL)
        # Meanwhile, where this item is written, and where the next one is.
        at_b, at_t, at_h = i_b, t0, h0 + C
        i_b, t0, i_g, h0 = place_after(n, rounds, sizes, NC)
        row = (i_b * Hkv * SHARES * NC + h0 + C).to(gl.int64) * S
        stats = _load_stats(pointers[0], row, t0, S, SL)
        dq, ds = warpgroup_mma_wait(1, deps=(dq, ds))
        mbarrier.arrive(empty.index(last))
        dq = _add_more(dq * scale, pointers, at_b, at_t, at_h, S, Hkv * SHARES * NC, D, OL)
        tma.store_wait(0)  # the item before has left the buffer
        matrix(o_bufs, C).store(rounded(dq, o_bufs.dtype))
        fence_async_shared()
        copy_out(t_dq, at_b, at_t, at_h, o_bufs.index(C))
        dout = _take_dout(bufs, bars, C, SL)
        ds = _begin(s, dout, stats, bufs, bars, it, W, scale_log2, STAGES, NARROW, SL, OL)
    tma.store_wait(0)


@gluon.jit
def _start_scores(left, right_bufs, stage, SL: gl.constexpr):
    """Start the product of rows with a tile: s = q k^T, or dP = dout v^T."""
    none = gl.zeros([TILE_ROWS, TILE_ROWS], gl.float32, SL)
    right = matrix(right_bufs, stage).permute((1, 0))
    return warpgroup_mma(left, right, none, use_acc=False, is_async=True)


@gluon.jit
def _take_queries(q_bufs, q_full, n, C: gl.constexpr, SL: gl.constexpr):
    """Item n's queries, as a left operand."""
    mbarrier.wait(q_full.index(C), n & 1)
    return matrix(q_bufs, C).load(gl.DotOperandLayout(0, SL, 2))


@gluon.jit
def _take_dout(bufs, bars, C: gl.constexpr, SL: gl.constexpr):
    """dout of the queries that were taken, as a left operand; the buffers of both are free."""
    q_bufs, d_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, full, empty = bars
    dout = matrix(d_bufs, C).load(gl.DotOperandLayout(0, SL, 2))
    fence_async_shared()
    sync_warps()
    mbarrier.arrive(q_empty.index(C))
    return dout


@gluon.jit
def _load_stats(p_stats, row, t0, S, SL: gl.constexpr):
    """Log-sum-exp, sign, and sign * delta of a branch, of the queries of a tile."""
    o_t = t0 + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))
    p = p_stats + (row + o_t) * 4
    lse = gl.load(p, mask=o_t < S, other=0.0)
    sign = gl.load(p + 2, mask=o_t < S, other=0.0)
    return lse, sign, gl.load(p + 1, mask=o_t < S, other=0.0) * sign


@gluon.jit
def _load_words(p_stats, row, t0, S, SL: gl.constexpr):
    """The bits of the selection of the queries, which the stats of the masked branch have."""
    o_t = t0 + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))
    word = gl.load(p_stats + (row + o_t) * 4 + 3, mask=o_t < S, other=0.0)
    return word.to(gl.int32, bitcast=True)


@gluon.jit
def _if_chosen(stats, word, block):
    """The stats of the queries for the keys of a block: P = exp2(s - inf) = 0 if not chosen."""
    lse, sign, signed_delta = stats
    return gl.where((word >> block & 1) != 0, lse, float("inf")), sign, signed_delta


@gluon.jit
def _begin(
    s, dout, stats, bufs, bars, it, W, scale_log2,
    STAGES: gl.constexpr, NARROW: gl.constexpr, SL: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """dS of an item's first tile, which is on the diagonal; its scores were started before."""
    q_bufs, d_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, full, empty = bars
    dp = _start_scores(dout, v_bufs, stage_of(it, STAGES), SL)
    s = warpgroup_mma_wait(1, deps=(s,))
    edge = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL)) - W
    p = _probabilities(s, stats[0], True, edge, scale_log2, DIAGONAL, NARROW, SL)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    return _left(p, dp, stats, k_bufs.dtype, OL)


@gluon.jit
def _step(
    dq, ds, q, dout, stats, bufs, bars, it, masked, edge, scale_log2,
    EDGE: gl.constexpr, STAGES: gl.constexpr, NARROW: gl.constexpr,
    SL: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """dS of tile `it`, beside the product of the dS before with its keys, which dq gets."""
    q_bufs, d_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, full, empty = bars
    before = stage_of(it - 1, STAGES)
    mbarrier.wait(full.index(stage_of(it, STAGES)), phase_of(it, STAGES))
    s = _start_scores(q, k_bufs, stage_of(it, STAGES), SL)
    dp = _start_scores(dout, v_bufs, stage_of(it, STAGES), SL)
    dq = warpgroup_mma(ds, matrix(k_bufs, before), dq, is_async=True)
    s = warpgroup_mma_wait(2, deps=(s,))
    p = _probabilities(s, stats[0], masked, edge, scale_log2, EDGE, NARROW, SL)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    new_ds = _left(p, dp, stats, k_bufs.dtype, OL)
    dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
    mbarrier.arrive(empty.index(before))
    return dq, new_ds


@gluon.jit
def _probabilities(
    s, lse, masked, edge, scale_log2,
    EDGE: gl.constexpr, NARROW: gl.constexpr, SL: gl.constexpr,
):  # fmt: skip
    """P of a tile. A query sees the keys up to its own on the diagonal, those after `edge` at the
    far end of the window, and those before `edge` of the last compressed ones."""
    p = gl.exp2(s * scale_log2 - lse[:, None])
    o_k = gl.arange(0, TILE_ROWS, gl.SliceLayout(0, SL))[None, :]
    if EDGE == DIAGONAL:
        o_t = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))
        p = gl.where(o_k <= o_t[:, None], p, 0.0)
    if EDGE == DIAGONAL and NARROW:
        p = gl.where(o_k > edge[:, None], p, 0.0)
    if EDGE == FAR:
        p = gl.where(o_k > edge[:, None], p, 0.0)
    if EDGE == NEAR:  # noqa: SIM102  known here; whether a tile needs the mask is not
        if masked:
            p = gl.where(o_k < edge[:, None], p, 0.0)
    return p


@gluon.jit
def _left(p, dp, stats, dtype: gl.constexpr, OL: gl.constexpr):
    """dS = P * sign * (dP - delta), as the left operand of the product with keys."""
    lse, sign, signed_delta = stats
    ds = p * (dp * sign[:, None] - signed_delta[:, None])
    return gl.convert_layout(rounded(ds, dtype), gl.DotOperandLayout(0, OL, 2))


@gluon.jit
def _add_more(dq, pointers, i_b, t0, i_h, S, Hq, D: gl.constexpr, OL: gl.constexpr):
    """dq and what another library gave, of [B, S, Hq, D]."""
    p_stats, p_stats_cmp, p_stats_sel, p_dq_more = pointers
    o_t = t0 + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, OL))
    o_d = gl.arange(0, D, gl.SliceLayout(0, OL))
    at = ((i_b.to(gl.int64) * S + o_t) * Hq + i_h)[:, None] * D + o_d[None, :]
    mask = (o_t < S)[:, None]
    if p_dq_more is not None:
        dq += gl.load(p_dq_more + at, mask=mask, other=0.0).to(gl.float32)
    return dq


# --- Launcher ---


def backward_q(
    problem: Problem,
    q: Tensor,  # [B, S, Hq, D]
    cmp: tuple[Tensor, Tensor] | None,  # [B, N, Hkv, D], N > 0
    sel: tuple[Tensor, Tensor] | None,  # [B, S, Hkv, D]
    win: tuple[Tensor, Tensor],  # [B, S, Hkv, D]
    dout: Tensor,  # [B, S, Hq, D]
    stats: Tensor,  # [3, B, Hq, S, 4] fp32
    dq_more: Tensor | None,  # [B, S, Hq, D]
) -> Tensor:
    """Gradient of q: of the window and, if given, the compressed branch and the selected one, which
    masks the past, and what another library gave."""
    dq, spec = problem.empty(*q.shape), problem.spec
    start(
        problem.memo,
        (_place(cmp, sel), dq_more is None),
        gluon_dq,
        (
            *(tile_rows(x) for x in (q, dout, *win)),
            *((None, None) if cmp is None else (tile_rows(x) for x in cmp)),
            *((None, None) if sel is None else (tile_rows(x) for x in sel)),
            tile_rows(dq), stats[2], None if cmp is None else stats[0],
            None if sel is None else stats[1], dq_more,
        ),
        lambda: launch(
            num_programs(problem, CONSUMERS),
            (
                *item_counts(problem, CONSUMERS), spec.w, spec.l - 1, spec.d,
                problem.scale, problem.scale_log2,
            ),
            {"D": problem.d_k, "STAGES": STAGES, "NARROW": spec.w < TILE}
            | {"L_SEL": TILE if sel is None else spec.l_sel},
            CONSUMERS,
        ),
    )  # fmt: skip
    return dq


def _place(cmp: object | None, sel: object | None) -> str:
    if sel is not None:
        return "all dq" if cmp is not None else "selected dq"
    return "both dq" if cmp is not None else "window dq"

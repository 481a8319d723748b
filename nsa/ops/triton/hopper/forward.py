"""Attention to a window, to compressed keys or to a masked past, on Hopper: what
banded_forward.forward gives.

Programs are persistent: each takes items of work in turn, which are 64 queries of NC heads of one
group. The window's tiles of keys go from the diagonal backwards, all others from the first key on:
so every row that sees a key of the window or a compressed one has seen one after the first tile.
Of the masked past a row sees the blocks whose bit is set in its word: a tile lies within a block,
and a row sees all of it or nothing. parts.py has the names.
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

from nsa.ops.triton.bands.banded_forward import NOT_GATED, Gated, gate_strides
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
WINDOW, NARROW, COMPRESSED, SELECTED = (gl.constexpr(i) for i in range(4))
"""Kinds of bands: a window, one of less than 64 tokens, compressed keys, and the past as far as it
was selected, which is a band of compressed keys with holes. The last two begin with key 0."""


@gluon.jit(do_not_specialize=COUNTS)
def gluon_forward(
    t_q, t_k, t_v, t_o, p_lse, p_bits, p_gates, p_o_cmp, p_o_win, p_out,
    S, NUM_ITEMS, NUM_TILES, Hkv, SHARES, PER_TILE, W, OFF, STEP, scale_log2,
    s_gb, s_gs, s_gh,
    D: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr, L_SEL: gl.constexpr,
    NC: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Output [B, S, Hq, D] and log-sum-exp [B, Hq, S], base 2.

    SELECTED reads bits [B, Hkv, 1, S], and also writes the gated sum of the branches, p_out.
    """
    dtype: gl.constexpr = t_q.dtype
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = gl.allocate_shared_memory(dtype, [NC, 1, TILE_ROWS, 1, D], t_q.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, TILE_ROWS, 1, D], t_k.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, TILE_ROWS, 1, D], t_v.layout)
    o_bufs = gl.allocate_shared_memory(dtype, [NC, 1, TILE_ROWS, 1, D], t_o.layout)
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
    bufs = (q_bufs, k_bufs, v_bufs, o_bufs)
    bars = (q_full, q_empty, full, empty)
    sizes = (NUM_ITEMS, NUM_TILES, Hkv, SHARES, PER_TILE, W, OFF, STEP, S)
    gated = (p_gates, p_o_cmp, p_o_win, p_out, s_gb, s_gs, s_gh)
    shared = (t_o, p_lse, p_bits, gated, bufs, bars, sizes, scale_log2)
    copied = (t_q, t_k, t_v)
    if NC == 2:
        gl.warp_specialize(
            [
                (_consume, (0, shared, D, STAGES, KIND, L_SEL, NC)),
                (_consume, (1, shared, D, STAGES, KIND, L_SEL, NC)),
                (_produce, (copied, bufs, bars, sizes, D, STAGES, KIND, NC)),
            ],
            [4, 1],
            [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, shared, D, STAGES, KIND, L_SEL, NC)),
                (_consume, (1, shared, D, STAGES, KIND, L_SEL, NC)),
                (_consume, (2, shared, D, STAGES, KIND, L_SEL, NC)),
                (_produce, (copied, bufs, bars, sizes, D, STAGES, KIND, NC)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )


@gluon.jit
def _produce(
    copied, bufs, bars, sizes,
    D: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    NC: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of all items, in the order in which the consumers read them."""
    it = 0
    rounds = num_rounds(sizes[0])
    for n in range(rounds):
        item = item_of(n)
        it = _copy_item(copied, bufs, bars, sizes, item, it, n, False, D, STAGES, KIND, NC)
    # The consumers begin one item more than there are, and do not end it.
    item = gl.program_id(0)
    _copy_item(copied, bufs, bars, sizes, item, it, rounds, True, D, STAGES, KIND, NC)


@gluon.jit
def _copy_item(
    copied, bufs, bars, sizes, item, it, n,
    FIRST: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    NC: gl.constexpr,
):  # fmt: skip
    """Queries of all consumers, then tiles of keys and values; FIRST: only one."""
    t_q, t_k, t_v = copied
    q_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, full, empty = bars
    SIZE: gl.constexpr = TILE_ROWS * D * 2
    i_b, t0, i_g, h0 = place_of(item, sizes, NC)
    for c in gl.static_range(NC):
        mbarrier.wait(q_empty.index(c), (n & 1) ^ 1)
        mbarrier.expect(q_full.index(c), SIZE)
        copy_in(t_q, i_b, t0, h0 + c, q_full.index(c), q_bufs.index(c))
    num_tiles = 1
    if not FIRST:
        num_tiles, _ = _key_tiles(t0, sizes, KIND)
    for j in range(num_tiles):
        stage = stage_of(it, STAGES)
        if KIND >= COMPRESSED:
            k0 = j * TILE_ROWS
        else:
            k0 = t0 - j * TILE_ROWS
        mbarrier.wait(empty.index(stage), phase_of(it, STAGES) ^ 1)
        mbarrier.expect(full.index(stage), 2 * SIZE)
        copy_in(t_k, i_b, k0, i_g, full.index(stage), k_bufs.index(stage))
        copy_in(t_v, i_b, k0, i_g, full.index(stage), v_bufs.index(stage))
        it += 1
    return it


@gluon.jit
def _key_tiles(t0, sizes, KIND: gl.constexpr):
    """Tiles of keys of an item, and the first of those after the first that needs a mask."""
    if KIND == COMPRESSED:
        n, masked = compressed_tiles(t0, sizes[8], sizes[6], sizes[7])
        # Queries that see no key at all walk a tile, too.
        n, masked = gl.maximum(n, 1), gl.maximum(masked, 1)
    elif KIND == SELECTED:
        n = t0 // TILE_ROWS + 1
        masked = gl.maximum(n - 1, 1)
    else:
        n, masked = num_key_tiles(t0, sizes[5])
    return n, masked


@gluon.jit
def _consume(
    C: gl.constexpr, shared, D: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    L_SEL: gl.constexpr, NC: gl.constexpr,
):  # fmt: skip
    """One head of every item. The next item's first scores are made beside the end of this one."""
    t_o, p_lse, p_bits, gated, bufs, bars, sizes, scale_log2 = shared
    q_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, full, empty = bars
    num_items, num_tiles, Hkv, SHARES, PER_TILE, W, OFF, STEP, S = sizes
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_ROWS, 16])
    OL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    o_t = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))
    none = gl.zeros([TILE_ROWS, TILE_ROWS], gl.float32, SL)
    # q is in registers: from shared memory, wgmma would wait for it.
    q = _take_queries(q_bufs, q_full, q_empty, 0, C, SL)
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma(q, matrix(k_bufs, 0).permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    i_b, t0, i_g, h0 = place_of(gl.program_id(0), sizes, NC)
    word = _words(p_bits, i_b, t0, i_g, sizes, KIND, SL)
    seen = _seen(t0, word, sizes, KIND, SL)
    p, top, total = _begin(s, seen, W, scale_log2, KIND, SL, OL, k_bufs.dtype)
    it = 1
    rounds = num_rounds(num_items)
    for n in range(rounds):
        num_seen, masked = _key_tiles(t0, sizes, KIND)
        o = gl.zeros([TILE_ROWS, D], gl.float32, OL)
        for j in range(1, masked):
            bit = word >> (j * TILE_ROWS // L_SEL)
            p, o, top, total = _step(
                q, p, o, top, total, bufs, bars, it, 0, bit, scale_log2, False, STAGES, KIND, SL, OL
            )
            it += 1
        for j in range(masked, num_seen):
            bit = word >> (j * TILE_ROWS // L_SEL)
            edge = _edge(t0, j, W, seen, KIND, SL)
            p, o, top, total = _step(
                q, p, o, top, total, bufs, bars, it, edge, bit, scale_log2, True,
                STAGES, KIND, SL, OL,
            )  # fmt: skip
            it += 1
        # The last tile's product with values, beside the scores of the next item's first one.
        last = stage_of(it - 1, STAGES)
        coming = stage_of(it, STAGES)
        q = _take_queries(q_bufs, q_full, q_empty, n + 1, C, SL)
        mbarrier.wait(full.index(coming), phase_of(it, STAGES))
        o = warpgroup_mma(p, matrix(v_bufs, last), o, is_async=True)
        keys = matrix(k_bufs, coming).permute((1, 0))
        s = warpgroup_mma(q, keys, none, use_acc=False, is_async=True)
        at_b, at_t, at_h = i_b, t0, h0 + C
        i_b, t0, i_g, h0 = place_after(n, rounds, sizes, NC)
        word = _words(p_bits, i_b, t0, i_g, sizes, KIND, SL)
        seen = _seen(t0, word, sizes, KIND, SL)
        row = (at_b * Hkv * SHARES * NC + at_h).to(gl.int64) * S
        lse, share = _finish(top, total, KIND)
        gl.store(p_lse + row + (at_t + o_t), lse, mask=at_t + o_t < S)
        share = gl.convert_layout(share, gl.SliceLayout(1, OL))
        o, p = warpgroup_mma_wait(1, deps=(o, p))
        mbarrier.arrive(empty.index(last))
        tma.store_wait(0)  # the item before has left the buffer
        matrix(o_bufs, C).store(rounded(o * share[:, None], o_bufs.dtype))
        fence_async_shared()
        copy_out(t_o, at_b, at_t, at_h, o_bufs.index(C))
        if KIND == SELECTED:
            _store_gated(gated, matrix(o_bufs, C), at_b, at_t, at_h, S, Hkv * SHARES * NC, D)
        s = warpgroup_mma_wait(0, deps=(s,))
        p, top, total = _begin(s, seen, W, scale_log2, KIND, SL, OL, k_bufs.dtype)
        it += 1
    tma.store_wait(0)


@gluon.jit
def _take_queries(q_bufs, q_full, q_empty, n, C: gl.constexpr, SL: gl.constexpr):
    """Item n's queries, as the left operand of a product; their buffer is free again."""
    mbarrier.wait(q_full.index(C), n & 1)
    q = matrix(q_bufs, C).load(gl.DotOperandLayout(0, SL, 2))
    fence_async_shared()
    sync_warps()
    mbarrier.arrive(q_empty.index(C))
    return q


@gluon.jit
def _words(p_bits, i_b, t0, i_g, sizes, KIND: gl.constexpr, SL: gl.constexpr):
    """The bits of the rows; beyond S none is set."""
    o_t = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))
    if KIND == SELECTED:
        p_words = p_bits + (i_b * sizes[2] + i_g).to(gl.int64) * sizes[8]
        word = gl.load(p_words + (t0 + o_t), mask=t0 + o_t < sizes[8], other=0)
    else:  # unread
        word = o_t
    return word


@gluon.jit
def _seen(t0, word, sizes, KIND: gl.constexpr, SL: gl.constexpr):
    """Keys that the rows see, of those from the first tile's first key on; of the selected ones, of
    those in that tile."""
    o_t = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))
    if KIND == COMPRESSED:
        seen = num_compressed(t0 + o_t, sizes[6], sizes[7])
    elif KIND == SELECTED:
        seen = gl.where((word & 1) != 0, t0 + o_t + 1, 0)
    else:
        seen = o_t + 1
    return seen


@gluon.jit
def _edge(t0, j, W, seen, KIND: gl.constexpr, SL: gl.constexpr):
    """Where the rows' keys begin in tile j, or, of all but windows, where they end."""
    o_t = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))
    if KIND == COMPRESSED:
        edge = seen - j * TILE_ROWS
    elif KIND == SELECTED:
        edge = o_t + 1
    else:
        edge = o_t + (j * TILE_ROWS - W)
    return edge


@gluon.jit
def _begin(
    s, seen, W, scale_log2, KIND: gl.constexpr,
    SL: gl.constexpr, OL: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Probabilities and running numbers of an item's first tile: the window's diagonal, or the
    first compressed keys."""
    o_t = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))
    o_k = gl.arange(0, TILE_ROWS, gl.SliceLayout(0, SL))[None, :]
    s = gl.where(o_k < seen[:, None], s, float("-inf"))
    if KIND == NARROW:
        s = gl.where(o_k > (o_t - W)[:, None], s, float("-inf"))
    top = gl.max(s, 1) * scale_log2
    used = top
    if KIND >= COMPRESSED:
        # A row that sees nothing has a total of 0. Of compressed keys it has no other tile: where
        # one row sees no key, the 63 after it see less than 64.
        used = gl.where(seen > 0, top, 0.0)
    p = gl.exp2(s * scale_log2 - used[:, None])
    total = gl.sum(p, 1)
    p = gl.convert_layout(rounded(p, dtype), gl.DotOperandLayout(0, OL, 2))
    return p, top, total


@gluon.jit
def _finish(top, total, KIND: gl.constexpr):
    """Log-sum-exp of the rows, and what their sums are multiplied by; of no key: +inf and 0."""
    lse = top + gl.log2(total)
    share = 1.0 / total
    if KIND >= COMPRESSED:
        lse = gl.where(total == 0.0, float("inf"), lse)
        share = gl.where(total == 0.0, 0.0, share)
    return lse, share


@gluon.jit
def _softmax(
    s, top, total, bit, scale_log2, KIND: gl.constexpr, OL: gl.constexpr, dtype: gl.constexpr
):
    """Probabilities as the left operand of the next product, and the running numbers."""
    new_top = gl.maximum(top, gl.max(s, 1) * scale_log2)
    if KIND == SELECTED:
        # Rows that did not choose the block stay as they are: exp2(s - inf) = 0. Their top may
        # still be -inf, which is nowhere subtracted from itself.
        chosen = (bit & 1) != 0
        p = gl.exp2(s * scale_log2 - gl.where(chosen, new_top, float("inf"))[:, None])
        shrink = gl.where(chosen, gl.exp2(top - new_top), 1.0)
        new_top = gl.where(chosen, new_top, top)
    else:
        p = gl.exp2(s * scale_log2 - new_top[:, None])
        shrink = gl.exp2(top - new_top)
    total = total * shrink + gl.sum(p, 1)
    p = gl.convert_layout(rounded(p, dtype), gl.DotOperandLayout(0, OL, 2))
    return p, new_top, total, shrink


@gluon.jit
def _step(
    q, p, o, top, total, bufs, bars, it, edge, bit, scale_log2,
    MASKED: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
    SL: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """Scores of tile `it`, beside the product with the values of the tile before.

    MASKED: a row of the tile sees the keys after its edge or, of all but windows, before it.
    SELECTED: it sees none of them unless its lowest bit is set.
    """
    q_bufs, k_bufs, v_bufs, o_bufs = bufs
    q_full, q_empty, full, empty = bars
    stage = stage_of(it, STAGES)
    before = stage_of(it - 1, STAGES)
    none = gl.zeros([TILE_ROWS, TILE_ROWS], gl.float32, SL)
    mbarrier.wait(full.index(stage), phase_of(it, STAGES))
    s = warpgroup_mma(q, matrix(k_bufs, stage).permute((1, 0)), none, use_acc=False, is_async=True)
    o = warpgroup_mma(p, matrix(v_bufs, before), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    if MASKED:
        o_k = gl.arange(0, TILE_ROWS, gl.SliceLayout(0, SL))[None, :]
        if KIND >= COMPRESSED:
            s = gl.where(o_k < edge[:, None], s, float("-inf"))
        else:
            s = gl.where(o_k > edge[:, None], s, float("-inf"))
    new_p, top, total, shrink = _softmax(s, top, total, bit, scale_log2, KIND, OL, k_bufs.dtype)
    o, p = warpgroup_mma_wait(0, deps=(o, p))
    mbarrier.arrive(empty.index(before))
    o = o * gl.convert_layout(shrink, gl.SliceLayout(1, OL))[:, None]
    return new_p, o, top, total


@gluon.jit
def _store_gated(gated, o_buf, i_b, t0, i_h, S, Hq, D: gl.constexpr):
    """The gated sum of the branches; o_buf holds the selected one, rounded as it is stored."""
    p_gates, p_o_cmp, p_o_win, p_out, s_gb, s_gs, s_gh = gated
    LL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_t = t0 + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, LL))
    o_d = gl.arange(0, D, gl.SliceLayout(0, LL))
    at = ((i_b.to(gl.int64) * S + o_t) * Hq + i_h)[:, None] * D + o_d[None, :]
    m_t = o_t < S
    mask = m_t[:, None] & (o_d < D)[None, :]
    b_cmp = gl.load(p_o_cmp + at, mask=mask, other=0.0)
    b_win = gl.load(p_o_win + at, mask=mask, other=0.0)
    p_gate = p_gates + i_b.to(gl.int64) * s_gb + i_h.to(gl.int64) * s_gh
    p_gate = p_gate + o_t.to(gl.int64) * s_gs
    g_cmp = gl.load(p_gate, mask=m_t, other=0.0).to(gl.float32)
    g_sel = gl.load(p_gate + 1, mask=m_t, other=0.0).to(gl.float32)
    g_win = gl.load(p_gate + 2, mask=m_t, other=0.0).to(gl.float32)
    b_sum = o_buf.load(LL).to(gl.float32) * g_sel[:, None]
    b_sum += b_cmp.to(gl.float32) * g_cmp[:, None]
    b_sum += b_win.to(gl.float32) * g_win[:, None]
    gl.store(p_out + at, b_sum.to(p_out.dtype.element_ty), mask=mask)


# --- Launcher ---

PLACES = {0: "compressed forward", 1: "selected forward", 2: "window forward"}


def forward(
    problem: Problem,
    branch: int,
    q: Tensor,  # [B, S, Hq, D]
    k: Tensor,  # [B, K, Hkv, D], K > 0
    v: Tensor,  # [B, K, Hkv, D]
    lse: Tensor,  # [B, Hq, S] fp32, written
    bits: Tensor | None = None,  # [B, Hkv, 1, S] int32
    gated: Gated | None = None,
) -> Tensor:  # [B, S, Hq, D]
    """Output of a branch. The selected one masks the past by its bits, and writes the gated sum."""
    out = problem.empty(*q.shape)
    consumers, band = problem.consumers, problem.bands[branch]
    kind = NARROW if band.W < TILE else WINDOW
    if branch != 2:
        kind = SELECTED if band.SELECT else COMPRESSED
    start(
        problem.memo,
        PLACES[branch],
        gluon_forward,
        (*(tile_rows(x) for x in (q, k, v, out)), lse, bits, *(gated or NOT_GATED)),
        lambda: launch(
            num_programs(problem, consumers),
            (
                *item_counts(problem, consumers), band.W, band.OFF, band.STEP, problem.scale_log2,
                *gate_strides(gated),
            ),
            {"D": problem.d_k, "STAGES": STAGES, "KIND": kind.value}
            | {"L_SEL": problem.spec.l_sel if band.SELECT else TILE},
            consumers,
        ),
    )  # fmt: skip
    return out

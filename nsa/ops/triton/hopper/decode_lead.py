"""The lead of a decode step (decode.py): the new token, the scores of the blocks and the choice."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from nsa.ops.triton.hopper.decode_attend import HEADS, ROWS
from nsa.ops.triton.hopper.parts import sync_warps

SCORED = gl.constexpr(8)
"""Tiles whose blocks are scored at a time."""
FIRST_GUESS = gl.constexpr(2 << 23)
"""As in choice/best.py."""


class News(NamedTuple):
    """The new token: k and v of compressed branch (raw), window and blocks, and what the caller
    made of the block that it completes."""

    p_k_cmp: Any
    p_v_cmp: Any
    p_k_win: Any
    p_v_win: Any
    p_k_sel: Any
    p_v_sel: Any
    p_k_made: Any
    p_v_made: Any


class New(NamedTuple):
    """What was loaded of it, [D] each; `old` is the ring of raw tokens [ROWS_PAD, D], or what the
    caller made."""

    raw_k: Any
    raw_v: Any
    win_k: Any
    win_v: Any
    sel_k: Any
    sel_v: Any
    old_k: Any
    old_v: Any


class OwnRows(NamedTuple):
    """Caches of the segment."""

    p_k_cmp: Any
    p_v_cmp: Any
    p_k_win: Any
    p_v_win: Any
    p_k_sel: Any
    p_v_sel: Any
    p_k_raw: Any
    p_v_raw: Any


class Own(NamedTuple):
    """Memory of the segment: maxima of the tiles, and what each carries into the next; scores of
    the blocks, and what is carried into the first block after each tile; ids, reads."""

    p_tops: Any
    p_carried: Any
    p_scores: Any
    p_selection: Any
    p_reads: Any
    p_last_reads: Any
    NUM_BLOCKS: Any


@gluon.jit
def lead(
    new, rows, own, shared, counts, G: gl.constexpr, D: gl.constexpr, L: gl.constexpr,
    STRIDES: gl.constexpr, L_SEL: gl.constexpr, N_SEL: gl.constexpr, N_SEL_PAD: gl.constexpr,
    NUM_FIRST: gl.constexpr, NUM_LOCAL: gl.constexpr, LEVELS: gl.constexpr, NB: gl.constexpr,
    TILES: gl.constexpr, MADE: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    _append(new, rows, shared, counts, D, L, MADE)
    _count_reads(own, counts, L_SEL)
    mbarrier.wait(shared.has_sums, 0)
    if WHOLE:
        _store_all_ids(own.p_selection, counts, N_SEL, N_SEL_PAD)
    else:
        BLOCKS: gl.constexpr = ROWS // STRIDES
        _factors(own, counts, shared.lse, shared.factors, G, TILES, LEVELS)
        sync_warps()
        _score(own, counts, shared.sums, shared.factors, TILES, BLOCKS)
        sync_warps()
        _choose(own, counts, N_SEL, N_SEL_PAD, NUM_FIRST, NUM_LOCAL, LEVELS, BLOCKS, NB)
    sync_warps()
    mbarrier.arrive(shared.has_ids)


@gluon.jit
def load_new(news, p_k_raw, p_v_raw, D: gl.constexpr, L: gl.constexpr, MADE: gl.constexpr):
    """The new token, and the ring of raw tokens, unless the caller made their mean."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_d = gl.arange(0, D, ONE)
    if MADE:
        old_k, old_v = gl.load(news.p_k_made + o_d), gl.load(news.p_v_made + o_d)
    else:
        old_k, old_v = _load_ring(p_k_raw, D, L), _load_ring(p_v_raw, D, L)
    return New(
        gl.load(news.p_k_cmp + o_d), gl.load(news.p_v_cmp + o_d), gl.load(news.p_k_win + o_d),
        gl.load(news.p_v_win + o_d), gl.load(news.p_k_sel + o_d), gl.load(news.p_v_sel + o_d),
        old_k, old_v,
    )  # fmt: skip


@gluon.jit
def _load_ring(p_raw, D: gl.constexpr, L: gl.constexpr):
    ROWS_PAD: gl.constexpr = 32 if L <= 32 else 64
    gl.static_assert(L <= ROWS_PAD)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_l = gl.arange(0, ROWS_PAD, gl.SliceLayout(1, LOADED))
    o_d = gl.arange(0, D, gl.SliceLayout(0, LOADED))
    mask = (o_l < L)[:, None] & (o_d < D)[None, :]
    return gl.load(p_raw + (o_l * D)[:, None] + o_d[None, :], mask=mask, other=0.0)


@gluon.jit
def _mean(b_ring, b_new, t, D: gl.constexpr, L: gl.constexpr):
    """Mean of the ring with the new token in the place of the oldest, as it is stored."""
    ROWS_PAD: gl.constexpr = b_ring.shape[0]
    o_l = gl.arange(0, ROWS_PAD, gl.SliceLayout(1, b_ring.type.layout))
    b_old = gl.where((o_l != t % L)[:, None], b_ring.to(gl.float32), 0.0)
    b_sum = gl.convert_layout(gl.sum(b_old, axis=0), b_new.type.layout)
    return ((b_new.to(gl.float32) + b_sum) / L).to(b_new.dtype)


@gluon.jit
def _append(
    new, rows, shared, counts, D: gl.constexpr, L: gl.constexpr, MADE: gl.constexpr
):  # fmt: skip
    """Give those who attend the rows of the new token, and store it."""
    t = counts.t
    cmp_k, cmp_v = new.old_k, new.old_v
    if not MADE:
        cmp_k, cmp_v = _mean(cmp_k, new.raw_k, t, D, L), _mean(cmp_v, new.raw_v, t, D, L)
    shared.new_rows.index(0).store(cmp_k)
    shared.new_rows.index(1).store(cmp_v)
    shared.new_rows.index(2).store(new.win_k)
    shared.new_rows.index(3).store(new.win_v)
    shared.new_rows.index(4).store(new.sel_k)
    shared.new_rows.index(5).store(new.sel_v)
    sync_warps()
    mbarrier.arrive(shared.has_new)
    o_d = gl.arange(0, D, gl.BlockedLayout([1], [32], [4], [0]))
    is_new = (o_d < D) & (counts.newest >= 0)
    at_cmp, at_sel = counts.newest.to(gl.int64) * D, t.to(gl.int64) * D
    gl.store(rows.p_k_cmp + at_cmp + o_d, cmp_k, mask=is_new)
    gl.store(rows.p_v_cmp + at_cmp + o_d, cmp_v, mask=is_new)
    gl.store(rows.p_k_win + counts.new_in_win * D + o_d, new.win_k)
    gl.store(rows.p_v_win + counts.new_in_win * D + o_d, new.win_v)
    gl.store(rows.p_k_sel + at_sel + o_d, new.sel_k)
    gl.store(rows.p_v_sel + at_sel + o_d, new.sel_v)
    gl.store(rows.p_k_raw + t % L * D + o_d, new.raw_k)
    gl.store(rows.p_v_raw + t % L * D + o_d, new.raw_v)


@gluon.jit
def _factors(
    own, counts, lse_buf, factors, G: gl.constexpr, TILES: gl.constexpr, LEVELS: gl.constexpr
):  # fmt: skip
    """exp2(top - lse), which turns the sums of a tile into probabilities, 0 for heads that are
    padding; and what the tile carries into the next one."""
    OWN: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    o_i = gl.arange(0, TILES, gl.SliceLayout(1, OWN))
    o_h = gl.arange(0, HEADS, gl.SliceLayout(0, OWN))
    mask = (o_i * ROWS < counts.num_cmp)[:, None] & (o_h < G)[None, :]
    at = (o_i * HEADS)[:, None] + o_h[None, :]
    b_top = gl.load(own.p_tops + at, mask=mask, other=float("-inf"))
    factor = gl.exp2(b_top - lse_buf.load(gl.SliceLayout(0, OWN))[None, :])
    factors.store(factor)
    if LEVELS > 1:
        carried = gl.sum(gl.load(own.p_carried + at, mask=mask, other=0.0) * factor, axis=1)
        gl.store(own.p_scores + own.NUM_BLOCKS + o_i, carried, mask=o_i < own.NUM_BLOCKS)


@gluon.jit
def _score(own, counts, sums, factors, TILES: gl.constexpr, BLOCKS: gl.constexpr):
    """Scores of all blocks up to the new token's, without what is carried into them."""
    OWN: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [4, 1, 1], [2, 1, 0])
    SL: gl.constexpr = gl.SliceLayout(2, OWN)  # tiles, blocks
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    cubes = sums._reinterpret(gl.float32, [TILES // SCORED, SCORED, BLOCKS, HEADS], CUBE)
    planes = factors._reinterpret(gl.float32, [TILES // SCORED, SCORED, HEADS], PLAIN)
    o_c = gl.arange(0, BLOCKS, gl.SliceLayout(0, SL))
    for i in range(counts.current // (SCORED * BLOCKS) + 1):
        o_i = i * SCORED + gl.arange(0, SCORED, gl.SliceLayout(1, SL))
        factor = planes.index(i).load(gl.SliceLayout(1, OWN))
        b_score = gl.sum(cubes.index(i).load(OWN) * factor[:, None, :], axis=2)
        # What no tile has written may be anything.
        b_score = gl.where((o_i * ROWS < counts.num_cmp)[:, None], b_score, 0.0)
        o_j = (o_i * BLOCKS)[:, None] + o_c[None, :]
        gl.store(own.p_scores + o_j, b_score, mask=o_j < own.NUM_BLOCKS)


@gluon.jit
def _choose(
    own, counts, N_SEL: gl.constexpr, N_SEL_PAD: gl.constexpr, NUM_FIRST: gl.constexpr,
    NUM_LOCAL: gl.constexpr, LEVELS: gl.constexpr, BLOCKS: gl.constexpr, NB: gl.constexpr,
):  # fmt: skip
    """Ids of the blocks that are read: ascending, then -1; as _choose in decode/score.py."""
    OWN: gl.constexpr = gl.BlockedLayout([NB // 128 if NB >= 128 else 1], [32], [4], [0])
    o_j = gl.arange(0, NB, OWN)
    current = counts.current
    legal = o_j <= current
    scores = gl.load(own.p_scores + o_j, mask=legal, other=0.0)
    if LEVELS > 1:
        p_carried = own.p_scores + own.NUM_BLOCKS + o_j // BLOCKS - 1
        scores += gl.load(p_carried, mask=legal & (o_j > 0) & (o_j % BLOCKS == 0), other=0.0)
    forced = (o_j < NUM_FIRST) | (o_j > current - NUM_LOCAL)
    scores = gl.where(scores == scores, scores, 0.0)  # a NaN ranks last
    key = gl.where(legal & (forced == 0), scores.to(gl.int32, bitcast=True), -1)
    need = counts.num_blocks - counts.num_known
    # Bisection for the largest `low` that at least `need` keys reach.
    low = 0
    high = 0
    if current + 1 > N_SEL:
        high = gl.max(key, axis=0)
    middle = gl.maximum(high - FIRST_GUESS, (high + 1) // 2)
    while low < high:
        reached = gl.sum((key >= middle).to(gl.int32), axis=0)
        low = gl.where(reached >= need, middle, low)
        high = gl.where(reached == need, middle, gl.where(reached > need, high, middle - 1))
        middle = low + (high - low + 1) // 2
    # Keys above `low` are taken; of those equal to it, the lower blocks.
    above = key > low
    equal = (key == low).to(gl.int32)
    spare = need - gl.sum(above.to(gl.int32), axis=0)
    if gl.sum(equal, axis=0) > spare:
        equal = gl.where(gl.associative_scan(equal, 0, _add) <= spare, equal, 0)
    chosen = ((forced & legal) | above | (equal != 0)).to(gl.int32)
    place = gl.associative_scan(chosen, 0, _add)
    gl.store(own.p_selection + place - 1, o_j, mask=chosen != 0)
    o_s = gl.arange(0, N_SEL_PAD, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(own.p_selection + o_s, o_s * 0 - 1, mask=(o_s > current) & (o_s < N_SEL))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _store_all_ids(p_ids, counts, N_SEL: gl.constexpr, N_SEL_PAD: gl.constexpr):
    o_s = gl.arange(0, N_SEL_PAD, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(p_ids + o_s, gl.where(o_s <= counts.current, o_s, -1), mask=o_s < N_SEL)


@gluon.jit
def _count_reads(own, counts, L_SEL: gl.constexpr):
    """Tokens that this step reads: compressed, selected, window."""
    o_c = gl.arange(0, 4, gl.BlockedLayout([1], [32], [4], [0]))
    # All blocks are read whole but the new token's, which is always among them.
    num_sel = (counts.num_blocks - 1) * L_SEL + counts.t % L_SEL + 1
    num = gl.where(o_c == 0, counts.num_cmp, gl.where(o_c == 1, num_sel, counts.num_win))
    b_sums = gl.load(own.p_reads + o_c, mask=o_c < 3, other=0)
    gl.store(own.p_last_reads + o_c, num.to(gl.int64), mask=o_c < 3)
    gl.store(own.p_reads + o_c, b_sums + num, mask=o_c < 3)

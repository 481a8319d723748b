"""Block scores of a decode step from its compressed branch, and the choice of blocks.

The scores come from logits [segments, G, tokens] or, where tiles of BN tokens hold whole blocks,
from sums: of exp2(logit - top) over the tokens of a block by level, fp32 [segments, tiles, LEVELS,
G, blocks of a tile], with the top of each tile, [segments, tiles, G]. Sums are half the bytes and
need no exponential per token afterwards.

Parts of the scores are fp32 [segments, LEVELS, s_scores]: at [k, j] lies what the tokens that start
in block j - k give to block j, so that a program that chooses reads aligned rows. Names as in
attend.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.choice.best import FIRST_GUESS
from nsa.ops.triton.tile import _let_next_come, _wait


@triton.jit
def _lse_of_parts(p_lse, num_parts, G, BM: tl.constexpr, PARTS: tl.constexpr):
    """Log-sum-exp of each head over the parts of a branch; 0 where nothing was seen."""
    o_h, o_p = tl.arange(0, BM), tl.arange(0, PARTS)
    mask = (o_h < G)[:, None] & (o_p < num_parts)[None, :]
    p = p_lse + o_p[None, :] * G + o_h[:, None]
    b_lse = tl.load(p, mask=mask, other=float("-inf"), cache_modifier=".cg")
    # lse = log2(sum over parts of exp2(lse_part)): [BM], without overflow.
    top = tl.max(b_lse, axis=1)
    safe_top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.math.exp2(b_lse - safe_top[:, None]), axis=1)
    return safe_top + tl.math.log2(tl.where(total == 0.0, 1.0, total))


@triton.jit
def _weights_of(o_s, level, STRIDES: tl.constexpr, OVERLAP: tl.constexpr):
    """Weight of token s of a block at a level: strides that it shares with the later block.

    It covers the strides s .. s + OVERLAP - 1 after the start of its own block.
    """
    stop = tl.minimum(o_s + OVERLAP, level * STRIDES + STRIDES)
    return tl.maximum(stop - tl.maximum(o_s, level * STRIDES), 0).to(tl.float32)


@triton.jit
def _store_sums(
    p_sums, p_tops, b_p, top, tile, m_h, G,
    L: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr, LEVELS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Sums by block of a tile of exp2(logit - top) [BM, BN], for heads m_h; 0: unseen tokens."""
    STRIDES: tl.constexpr = L_SEL // STEP
    BLOCKS: tl.constexpr = BN // STRIDES
    o_h, o_c, o_s = tl.arange(0, BM), tl.arange(0, BLOCKS), tl.arange(0, STRIDES)
    # sum[level, block] = sum over the block's tokens s of weight(s, level) * exp2(logit - top).
    b_tokens = tl.reshape(b_p, [BM, BLOCKS, STRIDES])
    for level in tl.static_range(LEVELS):
        weight = _weights_of(o_s, level, STRIDES, L // STEP)
        b_sum = tl.sum(b_tokens * weight[None, None, :], axis=2)
        rows = (tile * LEVELS + level) * G + o_h
        tl.store(p_sums + rows[:, None] * BLOCKS + o_c[None, :], b_sum, mask=m_h[:, None])
    tl.store(p_tops + tile * G + o_h, top, mask=m_h)


@triton.jit
def _score_sums(
    p_sums, p_tops, p_scores, lse, i_seg, first, num_cmp, G, NUM_CMP, s_scores,
    L_SEL: tl.constexpr, STEP: tl.constexpr, LEVELS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Parts of the scores of NB blocks from `first` on, from the sums of whole tiles."""
    BLOCKS: tl.constexpr = BN // (L_SEL // STEP)
    TILES: tl.constexpr = NB // BLOCKS
    o_h, o_c = tl.arange(0, BM), tl.arange(0, BLOCKS)
    # [TILES, BM]: exp2(top - lse) turns a tile's sums into probabilities.
    o_tile = first // BLOCKS + tl.arange(0, TILES)
    tile = i_seg * tl.cdiv(NUM_CMP, BN) + o_tile
    mask = (o_tile * BN < num_cmp)[:, None] & (o_h < G)[None, :]
    p = p_tops + tile[:, None] * G + o_h[None, :]
    b_top = tl.load(p, mask=mask, other=float("-inf"), cache_modifier=".cg")
    factor = tl.math.exp2(b_top - lse[None, :])  # [TILES, BM]
    o_j = o_tile[:, None] * BLOCKS + o_c[None, :]
    # part[level, j] = sum over heads of sum * factor: [TILES, BLOCKS].
    for level in tl.static_range(LEVELS):
        rows = ((tile * LEVELS + level) * G)[:, None] + o_h[None, :]
        p = p_sums + rows[:, :, None] * BLOCKS + o_c[None, None, :]
        b_sum = tl.load(p, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
        b_part = tl.sum(b_sum * factor[:, :, None], axis=1)
        _store_level(p_scores, b_part, o_j, level, s_scores)


@triton.jit
def _store_level(p_scores, b_part, o_j, level: tl.constexpr, s_scores):
    """What blocks o_j give to the blocks `level` further on."""
    tl.store(p_scores + level * s_scores + o_j + level, b_part, mask=o_j + level < s_scores)


@triton.jit
def _load_logits(
    p_logits, first, G, s_logits, STRIDES: tl.constexpr, STRIDES_PAD: tl.constexpr,
    BM: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Logits [BM, NB, STRIDES_PAD] of NB blocks from `first` on, unseen tokens included."""
    o_h, o_s = tl.arange(0, BM), tl.arange(0, STRIDES_PAD)
    # Compressed tokens that start in each block: [NB, STRIDES_PAD].
    o_i = (first + tl.arange(0, NB))[:, None] * STRIDES + o_s[None, :]
    p = p_logits + (o_h * s_logits)[:, None, None] + o_i[None, :, :]
    # Rows are long enough for whole tiles. Without a mask by token, loads are 16 bytes wide; unseen
    # tokens are masked afterwards.
    mask = ((o_h < G)[:, None] & (o_s < STRIDES)[None, :])[:, None, :]
    return tl.load(p, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _score_logits(
    b_s, p_scores, lse, first, num_cmp, G, s_scores,
    L: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr, STRIDES_PAD: tl.constexpr,
    LEVELS: tl.constexpr, BM: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Parts of the scores of NB blocks from `first` on, from their logits b_s."""
    STRIDES: tl.constexpr = L_SEL // STEP
    o_h, o_s = tl.arange(0, BM), tl.arange(0, STRIDES_PAD)
    o_j = first + tl.arange(0, NB)
    o_i = o_j[:, None] * STRIDES + o_s[None, :]
    seen = (o_i < num_cmp) & (o_s < STRIDES)[None, :]
    b_s = tl.where(seen[None, :, :] & (o_h < G)[:, None, None], b_s, float("-inf"))
    # p_cmp = exp2(logit - lse), summed over the heads: [NB, STRIDES_PAD].
    b_tokens = tl.sum(tl.math.exp2(b_s - lse[:, None, None]), axis=0)
    for level in tl.static_range(LEVELS):
        weight = _weights_of(o_s, level, STRIDES, L // STEP)
        b_part = tl.sum(b_tokens * weight[None, :], axis=1)
        _store_level(p_scores, b_part, o_j, level, s_scores)


@triton.jit
def _score_tile(
    p_logits, p_tops, p_scores, lse, i_seg, first, num_cmp, G, NUM_CMP, s_logits, s_scores,
    L: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr, STRIDES_PAD: tl.constexpr,
    LEVELS: tl.constexpr, SUMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    NB: tl.constexpr,
):  # fmt: skip
    """Parts of the scores of NB blocks of a segment, from logits or, SUMS, from sums."""
    p_own = p_scores + i_seg * LEVELS * s_scores
    if SUMS:
        _score_sums(
            p_logits, p_tops, p_own, lse, i_seg, first, num_cmp, G, NUM_CMP, s_scores,
            L_SEL, STEP, LEVELS, BM, BN, NB,
        )  # fmt: skip
    else:
        p_rows = p_logits + i_seg * G * s_logits
        b_s = _load_logits(p_rows, first, G, s_logits, L_SEL // STEP, STRIDES_PAD, BM, NB)
        _score_logits(
            b_s, p_own, lse, first, num_cmp, G, s_scores,
            L, STEP, L_SEL, STRIDES_PAD, LEVELS, BM, NB,
        )  # fmt: skip


@triton.jit
def _choose(
    p_scores, p_ids, current, num_cmp, s_scores, stores, STRIDES: tl.constexpr,
    N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, NUM_FIRST: tl.constexpr,
    NUM_LOCAL: tl.constexpr, LEVELS: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Place of each block among those that a query in block `current` reads, from 1 on; or 0.

    `stores`: this program stores their ids, ascending, then -1.
    """
    o_j, o_s = tl.arange(0, NB), tl.arange(0, N_SEL_PAD)
    b_scores = tl.zeros([NB], tl.float32)
    # score[j] = sum over levels of part[level, j], where it is stored: [NB]. The loads have no mask
    # by block, which would make them 4 bytes wide and, with 1024 blocks, wait for each other.
    num_giving = tl.cdiv(num_cmp, STRIDES)
    for level in tl.static_range(LEVELS):
        b_part = tl.load(p_scores + level * s_scores + o_j, cache_modifier=".cg")
        b_scores += tl.where((o_j >= level) & (o_j - level < num_giving), b_part, 0.0)
    chosen = _chosen(b_scores, o_j, current, N_SEL, NUM_FIRST, NUM_LOCAL)
    places = tl.cumsum(chosen, axis=0)
    tl.store(p_ids + places - 1, o_j, mask=(chosen != 0) & stores)
    unused = (o_s > current) & (o_s < N_SEL) & stores
    tl.store(p_ids + o_s, tl.full([N_SEL_PAD], -1, tl.int32), mask=unused)
    return places * chosen


@triton.jit
def _chosen(
    scores, o_j, current,
    N_SEL: tl.constexpr, NUM_FIRST: tl.constexpr, NUM_LOCAL: tl.constexpr,
):  # fmt: skip
    """Which of the blocks o_j the query in block `current` reads: 1 or 0 each.

    The n-th best score is found by bisection of its bits: scores are not negative, so their bits
    as integers have the same order. Of equal scores the lower block wins. choice/best.py does
    the same for many queries.
    """
    # The first and the local blocks are always read (Eq. 11 ranks the others).
    forced = (o_j < NUM_FIRST) | (o_j > current - NUM_LOCAL)
    legal = o_j <= current
    ranked = legal & (forced == 0)
    scores = tl.where(scores == scores, scores, 0.0)  # a NaN ranks last
    key = tl.where(ranked, scores.to(tl.int32, bitcast=True), -1)
    # How many blocks are left to rank: n_sel minus the forced ones, or all there are.
    num_forced = tl.minimum(current + 1, NUM_FIRST + NUM_LOCAL)
    need = tl.minimum(N_SEL - num_forced, current + 1 - num_forced)
    # Search for the largest `low` that at least `need` keys reach, by three bounds at a time, whose
    # counts are fields of one sum. Where every candidate is taken, 0 is enough and the loop does
    # not run. The n-th score is likely to lie above a quarter of the largest one, so the first
    # bounds are there. An exact hit ends the loop early.
    FITS: tl.constexpr = scores.shape[0] - NUM_FIRST - NUM_LOCAL < 1 << 10
    BITS: tl.constexpr = 10 if FITS else 20
    low = 0
    high = 0
    is_exact = current + 1 <= N_SEL
    if not is_exact:
        high = tl.max(key, axis=0)
    step = tl.full([], FIRST_GUESS // 3, tl.int32)
    bound = tl.maximum(high - FIRST_GUESS, 1)
    while low < high:
        second = tl.minimum(bound + step, high)
        third = tl.minimum(second + step, high)
        counts = (key >= third).to(tl.int32 if FITS else tl.int64)
        counts = (counts << BITS) + (key >= second).to(tl.int32)
        counts = tl.sum((counts << BITS) + (key >= bound).to(tl.int32), axis=0)
        at_first = (counts & ((1 << BITS) - 1)).to(tl.int32)
        at_second = ((counts >> BITS) & ((1 << BITS) - 1)).to(tl.int32)
        at_third = (counts >> (2 * BITS)).to(tl.int32)
        is_exact = (at_first == need) | (at_second == need) | (at_third == need)
        if at_first < need:
            high = bound - 1
        elif at_second < need:
            low, high = bound, second - 1
        elif at_third < need:
            low, high = second, third - 1
        else:
            low = third
        high = tl.where(is_exact, low, high)
        step = (high - low + 3) // 4
        bound = low + step
    taken = key >= low
    if not is_exact:
        # More keys than needed are equal to `low`: the lower blocks win.
        equal = key == low
        spare = need - tl.sum((key > low).to(tl.int32), axis=0)
        taken = taken & ((equal == 0) | (tl.cumsum(equal.to(tl.int32), axis=0) <= spare))
    return ((forced & legal) | taken).to(tl.int32)


@triton.jit
def score_blocks(
    p_logits, p_tops, p_part_lse, p_scores, p_lengths,
    Hkv, G, NUM_CMP, NUM_PARTS, MAX_LEN, s_logits, s_scores,
    L: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr, CMP_PART: tl.constexpr,
    PARTS: tl.constexpr, STRIDES_PAD: tl.constexpr, LEVELS: tl.constexpr, SUMS: tl.constexpr,
    EARLY: tl.constexpr, BESIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    NB: tl.constexpr,
):  # fmt: skip
    """Parts of the scores of NB blocks of a segment: fp32 [segments, LEVELS, s_scores]."""
    i_seg = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * NB
    length = tl.load(p_lengths + i_seg // Hkv, cache_modifier=".cg") + 1
    # BESIDE: attend_tokens may start before this kernel has waited. What it reads before its own
    # wait is older than this step.
    _let_next_come(EARLY and BESIDE)
    _wait(EARLY)
    _let_next_come(EARLY and not BESIDE)
    if (first * L_SEL >= length) | (length > MAX_LEN):
        return
    num_cmp = tl.minimum(tl.maximum((length - L + STEP) // STEP, 0), NUM_CMP)
    num_parts = tl.cdiv(num_cmp, CMP_PART)
    lse = _lse_of_parts(p_part_lse + i_seg * NUM_PARTS * G, num_parts, G, BM, PARTS)
    _score_tile(
        p_logits, p_tops, p_scores, lse, i_seg, first, num_cmp, G, NUM_CMP, s_logits, s_scores,
        L, STEP, L_SEL, STRIDES_PAD, LEVELS, SUMS, BM, BN, NB,
    )  # fmt: skip

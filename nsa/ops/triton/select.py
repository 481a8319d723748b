"""Block scores from the compressed branch and the choice of blocks (Eq. 9 to 12).

group_scores recomputes the probabilities from the log-sum-exp, a tile at a time, sums them over the
heads of a group and folds them into selection blocks in registers. choose_blocks takes the best.
pack_selection does the same for ids that the caller gives. Launchers are below the kernels.

A compressed token counts for every block that it overlaps: its own, in which it starts, and later
ones. So a block adds LEVELS parts: level k of block j is what the tokens that start in block j give
to block j + k. All sums are fp32, in the same order for every block: equal scores tie exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.checks import assert_selection
from nsa.ops.plan import nvtx
from nsa.ops.triton.launcher import Launch, ceil_div, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.tile import COUNTS, _band, _dot, _dot_add, _rows
from nsa.ops.triton.tiles import Tiles, padded, parts_of, score_tiles, token_tiles

FEW_IDS = tl.constexpr(16)
"""Ids of a query that pack_selection compares in pairs: faster than by the bits of all blocks."""
FIRST_GUESS = tl.constexpr(2 << 23)
"""2 in the exponent field of fp32: subtracted from the bits of a number, it divides by 4."""
FEW_COLUMNS = tl.constexpr(4)
"""Columns of the blocks where they are few: a row is then what one lane holds."""
FEW_TOO_MANY = tl.constexpr(8)
"""Keys above the bound and not needed, up to which it is raised key by key."""


@triton.jit
def _head_rows(t, i_b, i_h, row, column: tl.constexpr, BM: tl.constexpr, D: tl.constexpr):
    """BM rows of one head, as tile._rows reads them, from a descriptor whose rows are one after
    the other: such a tile is an operand without passing through registers."""
    b = t.load([tl.cast(i_b, tl.int32), tl.cast(i_h, tl.int32), tl.cast(row, tl.int32), column])
    return tl.reshape(b, [BM, D])


@triton.jit(do_not_specialize=COUNTS)
def group_scores(
    t_q_heads, t_q2_heads, t_k, t_k2, p_lse, p_scores, p_row_start, p_row_key,
    first_row, stop_row, S, Hkv, G, WIDTH, scale_log2,
    OFF, STEP,
    DK1: tl.constexpr, DK2: tl.constexpr,
    STRIDES: tl.constexpr, OVERLAP: tl.constexpr, LEVELS: tl.constexpr, LARGEST: tl.constexpr,
    HAS_DOCS: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scores of BM queries and BN compressed tokens, for the rows first_row .. stop_row - 1.

    LEVELS > 0: parts of the block scores, fp32 [B * Hkv, LEVELS, rows, WIDTH]; the part of level k
    that block j gets is number j of its row. LEVELS = 0: the probabilities, [B * Hkv, rows, WIDTH].
    Tiles that no query sees are neither read nor written.
    """
    i_bg = tl.program_id(2).to(tl.int64)
    i_b, i_g = i_bg // Hkv, i_bg % Hkv
    r0 = tl.program_id(1) * BM
    o_m = tl.arange(0, BM)
    t0 = first_row + r0
    o_t = t0 + o_m
    m_t = o_t < stop_row
    k0 = tl.program_id(0) * BN
    # Last visible token of the first and of the last row, as scalars.
    begin, reach = _band(t0, t0 < S, p_row_start, p_row_key, OFF, STEP, 0, HAS_DOCS)
    t = tl.minimum(t0 + BM, stop_row) - 1
    _, last_reach = _band(t, t < S, p_row_start, p_row_key, OFF, STEP, 0, HAS_DOCS)
    if (k0 > last_reach) | (k0 + BN <= begin):
        return  # no row sees these tokens, and choose_blocks does not read this part
    # k: [BN, DK1] and [BN, DK2], read once for all heads of the group.
    b_k = _rows(t_k, i_b, k0, i_g, 0, BN, DK1)
    if DK2 > 0:
        b_k2 = _rows(t_k2, i_b, k0, i_g, DK1, BN, DK2)
    p_lse += i_bg * G * S + o_t
    b_sum = tl.zeros([BM, BN], tl.float32)
    for g in range(0, G):
        # p_cmp = exp2(q k^T * scale_log2 - lse): [BM, BN]. The keys stay, the heads change.
        b_q = _head_rows(t_q_heads, i_b, i_g * G + g, t0, 0, BM, DK1)
        lse = tl.load(p_lse, mask=m_t, other=float("inf"))
        b_s = _dot(b_q, tl.trans(b_k), UPCAST)
        if DK2 > 0:
            b_q2 = _head_rows(t_q2_heads, i_b, i_g * G + g, t0, DK1, BM, DK2)
            b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
        b_sum += tl.math.exp2(b_s * scale_log2 - lse[:, None])
        p_lse += S
    # What a query sees is the same for all heads, so that their sum is masked, and only where a
    # query does not see all BN tokens. Block scores are folded for one document alone; queries with
    # an offset are packed, too.
    if k0 + BN - 1 > reach or (HAS_DOCS and LEVELS == 0):
        first, last = _band(o_t, m_t, p_row_start, p_row_key, OFF, STEP, 0, HAS_DOCS)
        o_k = k0 + tl.arange(0, BN)
        visible = (o_k[None, :] >= first[:, None]) & (o_k[None, :] <= last[:, None])
        b_sum = tl.where(visible, b_sum, 0.0)
    # Store [BM, BN] probabilities, or fold them into [BM, BLOCKS] for each level. Rows of a tile
    # are near each other: int32 offsets.
    num_rows = stop_row - first_row
    if LEVELS == 0:
        o_k = k0 + tl.arange(0, BN)
        p_scores += (i_bg * num_rows + r0) * WIDTH
        at = o_m[:, None] * WIDTH + o_k[None, :]
        tl.store(p_scores + at, b_sum, mask=m_t[:, None] & (o_k < WIDTH)[None, :])
    else:
        BLOCKS: tl.constexpr = BN // STRIDES
        o_s = tl.arange(0, STRIDES)
        # Eq. 9: the score of block j is the sum of p_cmp * overlap / d. In strides of d tokens, a
        # block is STRIDES long and a compressed token OVERLAP.
        b_tokens = tl.reshape(b_sum, [BM, BLOCKS, STRIDES])
        for level in tl.static_range(LEVELS):
            # Token s of a block covers the strides s .. s + OVERLAP - 1 after the block's start;
            # its weight is how many of them lie in the block `level` further on.
            stop = tl.minimum(o_s + OVERLAP, level * STRIDES + STRIDES)
            weight = tl.maximum(stop - tl.maximum(o_s, level * STRIDES), 0).to(tl.float32)
            if LARGEST:
                b_part = tl.max(tl.where((weight > 0.0)[None, None, :], b_tokens, 0.0), axis=2)
            else:
                b_part = tl.sum(b_tokens * weight[None, None, :], axis=2)
            p_rows = p_scores + ((i_bg * LEVELS + level) * num_rows + r0) * WIDTH
            o_j = k0 // STRIDES + tl.arange(0, BLOCKS) + level
            at = o_m[:, None] * WIDTH + o_j[None, :]
            tl.store(p_rows + at, b_part, mask=m_t[:, None] & (o_j < WIDTH)[None, :])


@triton.jit
def _count(is_one):
    """How many of [BQ, ROUNDS, COLUMNS] are true, for each query; first those of a lane."""
    OWN: tl.constexpr = 2 if is_one.shape[2] == FEW_COLUMNS else 1
    return tl.sum(tl.sum(is_one.to(tl.int32), axis=OWN), axis=1)


@triton.jit
def _least(x):
    """The least of [BQ, ROUNDS, COLUMNS], for each query."""
    OWN: tl.constexpr = 2 if x.shape[2] == FEW_COLUMNS else 1
    return tl.min(tl.min(x, OWN), 1)


@triton.jit
def _largest(x):
    """The largest of [BQ, ROUNDS, COLUMNS], for each query."""
    OWN: tl.constexpr = 2 if x.shape[2] == FEW_COLUMNS else 1
    return tl.max(tl.max(x, OWN), 1)


@triton.jit
def _each(x):
    """A number for each query, as [BQ, 1, 1]."""
    return x[:, None, None]


@triton.jit
def _bound(columns, need, low, high):
    """The largest number found by bisection that at least `need` of the columns reach.

    The n-th score is likely to lie above a quarter of the largest one, so that is the first guess.
    An exact hit ends the loop early.
    """
    middle = tl.maximum(high - FIRST_GUESS, low + (high - low + 1) // 2)
    while tl.max((low < high).to(tl.int32), axis=0) != 0:
        reached = _count(columns >= _each(middle))
        low = tl.where(reached >= need, middle, low)
        high = tl.where(reached == need, middle, tl.where(reached > need, high, middle - 1))
        middle = low + (high - low + 1) // 2
    return low


@triton.jit
def _raised(key, need, low, high):
    """`low`, which more than `need` keys may reach, raised until `need` do or all else are equal;
    and how many do.

    Few keys too many: the bound passes the least of them; else bisection.
    """
    reached = _count(key >= _each(low))
    tied = need < 0
    while tl.max(((reached > need) & (tied == 0)).to(tl.int32), axis=0) != 0:
        is_open = (reached > need) & (tied == 0)
        # Unsigned, keys below the bound are far above it.
        above = (key - _each(low)).to(tl.uint32, bitcast=True)
        least = low + _least(above).to(tl.int32, bitcast=True)
        half = tl.maximum(low + (high - low + 1) // 2, least + 1)
        middle = tl.where(reached - need > FEW_TOO_MANY, half, least + 1)
        now = _count(key >= _each(middle))
        is_enough = now >= need
        tied = tied | (is_open & (is_enough == 0) & (middle == least + 1))
        high = tl.where(is_enough, high, middle - 1)
        low = tl.where(is_open & is_enough, middle, tl.where(tied & is_open, least, low))
        reached = tl.where(is_open & is_enough, now, reached)
    return low, reached


@triton.jit
def _taken(
    key, o_j, need, is_all,
    N_SEL: tl.constexpr, ROUNDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Which of the keys [BQ, ROUNDS, COLUMNS] are among the `need` largest; keys < 0 never are.

    Bisection for the largest bound that at least `need` keys reach; of equal keys the lower block
    wins. With several rounds, the bound of their largest keys comes first: it is nearly the same,
    and has fewer numbers to count. `is_all`: every candidate is taken.
    """
    columns = key
    if COLUMNS > FEW_COLUMNS and N_SEL <= COLUMNS:
        columns = tl.max(key, axis=1, keep_dims=True)
    top = _largest(columns)
    least = tl.where(columns < 0, 0x7FFFFFFF, columns)
    least = tl.minimum(_least(least), tl.maximum(top, 0))
    high = tl.where(is_all, 0, top)
    low = _bound(columns, need, tl.where(is_all, 0, least), high)
    if COLUMNS > FEW_COLUMNS and N_SEL <= COLUMNS:
        low, reached = _raised(key, need, low, high)
    else:
        reached = _count(key >= _each(low))
    taken = key >= _each(low)
    if tl.max((reached > need).to(tl.int32), axis=0) != 0:
        # A tie: bisection for the last block that is still taken.
        equal = key == _each(low)
        spare = need - _count(key > _each(low))
        before, last = need * 0 - 1, need * 0 + ROUNDS * COLUMNS - 1
        while tl.max((before < last).to(tl.int32), axis=0) != 0:
            middle = (before + last) >> 1
            is_enough = _count(equal & (o_j <= _each(middle))) >= spare
            before = tl.where(is_enough, before, middle + 1)
            last = tl.where(is_enough, middle, last)
        last = tl.where(reached > need, last, ROUNDS * COLUMNS)
        taken = taken & ((equal == 0) | (o_j <= _each(last)))
    return taken


@triton.jit
def _joined(scores, b_part, LARGEST: tl.constexpr):
    """Scores with one more part: the larger one, or the sum."""
    if LARGEST:
        return tl.maximum(scores, b_part)
    return scores + b_part


@triton.jit
def _store_ids(p_rows, chosen, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store the chosen of the blocks [BQ, ROWS, COLUMNS] in ascending order."""
    ROUNDS: tl.constexpr = ROWS if COLUMNS > FEW_COLUMNS else 1
    if ROUNDS <= 8:
        LANES: tl.constexpr = ROWS * COLUMNS // ROUNDS // 4
        chosen = tl.reshape(chosen, [chosen.shape[0], ROUNDS, LANES, 4])
        # The choices of a lane as bits of a word, four for each round, and their number in each
        # round as a byte: first of two bits, then of four, which are then moved apart.
        o_r, o_4 = tl.arange(0, ROUNDS), tl.arange(0, 4)
        bit = (o_r[:, None] * 4 + o_4[None, :])[None, :, None, :]
        words = tl.sum(tl.sum(chosen << bit, axis=3), axis=1)
        pairs = words.to(tl.uint32, bitcast=True)
        pairs -= (pairs >> 1) & 0x55555555
        counts = ((pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)).to(tl.int64)
        counts = (counts | (counts << 16)) & 0x0000FFFF0000FFFF
        counts = (counts | (counts << 8)) & 0x00FF00FF00FF00FF
        counts = (counts | (counts << 4)) & 0x0F0F0F0F0F0F0F0F
        # Chosen blocks before: those of lower lanes and, by the product, those of earlier rounds.
        rounds = tl.sum(counts, axis=1) * 0x0101010101010100
        place = tl.cumsum(counts, axis=1) - counts + rounds[:, None]
        o_lane = tl.arange(0, LANES)[None, :] * 4
        # Every lane stores its lowest block that is left; few have more than two.
        while tl.max(tl.max((words != 0).to(tl.int32), axis=1), axis=0) != 0:
            lowest = (words & -words).to(tl.uint32, bitcast=True).to(tl.float32)
            at = tl.maximum((lowest.to(tl.int32, bitcast=True) >> 23) - 127, 0)
            shift = (at >> 2) * 8
            id = (at >> 2) * (LANES * 4) + o_lane + (at & 3)
            here = ((place >> shift.to(tl.int64)) & 0xFF).to(tl.int32)
            tl.store(p_rows[:, None] + here, id, mask=words != 0)
            place += tl.full([1, 1], 1, tl.int64) << shift.to(tl.int64)
            words = words & (words - 1)
    else:
        flat: tl.constexpr = ROUNDS * COLUMNS
        chosen = tl.reshape(chosen, [chosen.shape[0], flat])
        place = tl.cumsum(chosen, axis=1) - 1
        o_b = tl.arange(0, flat)[None, :] + place * 0
        tl.store(p_rows[:, None] + place, o_b, mask=chosen != 0)


@triton.jit(do_not_specialize=COUNTS)
def choose_blocks(
    p_scores, p_selection, p_num_chosen, p_bits, p_row_start, p_row_key,
    first_row, num_rows, S, Hkv, WIDTH,
    OFF, STEP, NUM_WORDS,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr,
    NUM_FIRST: tl.constexpr, NUM_LOCAL: tl.constexpr,
    STRIDES: tl.constexpr, OVERLAP: tl.constexpr, LEVELS: tl.constexpr, LARGEST: tl.constexpr,
    NB: tl.constexpr, NW: tl.constexpr, HAS_DOCS: tl.constexpr, HAS_BITS: tl.constexpr,
    BQ: tl.constexpr,
):  # fmt: skip
    """The choice of BQ queries, as ids (ascending, then -1), their number, and, HAS_BITS, as bits.

    STRIDES = l_sel / d and OVERLAP = l / d. LARGEST: a block's score is its largest part, not the
    sum. Ids and bits count from the first block of the row's document.
    A lane reads four blocks at a time. Many blocks are [ROUNDS, 128], the columns over the lanes of
    a warp, so that a round is a register and a count ends with one reduction. As [ROUNDS, lanes, 4]
    Triton 3.6 spreads the rounds over the lanes: 26 shuffles for a count. Up to 128 blocks are
    [lanes, 4], and the lanes go to different queries first.
    """
    COLUMNS: tl.constexpr = 128 if NB > 128 else FEW_COLUMNS
    ROUNDS: tl.constexpr = NB // COLUMNS
    i_bg = tl.program_id(1).to(tl.int64)
    i_b, i_g = i_bg // Hkv, i_bg % Hkv
    o_q = tl.program_id(0) * BQ + tl.arange(0, BQ)
    m_q = o_q < num_rows
    o_t = first_row + o_q
    # Position in the document, and first compressed token of the document: [BQ].
    position, base = o_t, o_t * 0
    if HAS_DOCS:
        position = o_t - tl.load(p_row_start + o_t, mask=m_q, other=0)
        base = tl.load(p_row_key + o_t, mask=m_q, other=0)
    # Compressed tokens that the query sees, the band of tile.py.
    num_visible = tl.maximum((position - OFF + STEP) // STEP, 0)
    current = tl.where(m_q, position // L_SEL, -1)
    o_j = tl.arange(0, ROUNDS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    o_j = o_j[None, :, :]
    if LEVELS > 0:
        # score[j] = sum over levels of part[level, j]. Visible tokens lie in the first num_written
        # blocks, and group_scores did not write the others. Loads are of four blocks. The ranked
        # blocks are all among the written ones where few tokens are not visible (SAFE).
        SAFE: tl.constexpr = OVERLAP < STRIDES
        num_written = tl.cdiv(num_visible, STRIDES)
        scores = tl.zeros([BQ, ROUNDS, COLUMNS], tl.float32)
        for level in tl.static_range(LEVELS):
            p_rows = p_scores + (i_bg * LEVELS + level) * num_rows * WIDTH
            p_rows += _each(o_q.to(tl.int64) * WIDTH)
            stop = (current + 1 if SAFE else num_written + level) + 3
            near = o_j < _each(tl.where(m_q, stop, 0) // 4 * 4)
            b_part = tl.load(p_rows + o_j, mask=near, other=0.0)
            if not SAFE:
                written = (o_j >= level) & (o_j - level < _each(num_written))
                b_part = tl.where(written, b_part, 0.0)
            scores = _joined(scores, b_part, LARGEST) if level > 0 else b_part
    else:
        # Eq. 9 token by token: i runs over the tokens that overlap each stride of the block.
        scores = tl.zeros([BQ, ROUNDS, COLUMNS], tl.float32)
        p_rows = p_scores + _each((i_bg * num_rows + o_q) * WIDTH + base)
        for stride in range(0, STRIDES):
            for back in range(0, OVERLAP):
                i = o_j * STRIDES + stride - back
                seen = (i >= 0) & (i < _each(tl.where(m_q, num_visible, 0)))
                scores = _joined(scores, tl.load(p_rows + i, mask=seen, other=0.0), LARGEST)
    # The first and the local blocks are always read (Eq. 11 ranks the others). The bits of scores,
    # which are not negative, have their order as integers; a NaN ranks last, as 0.
    ranked = (o_j >= NUM_FIRST) & (o_j <= _each(current - NUM_LOCAL))
    scores = tl.where(scores == scores, scores, 0.0)
    key = tl.where(ranked, scores.to(tl.int32, bitcast=True), -1)
    # How many blocks are left to rank: n_sel minus the forced ones, or all there are.
    num_forced = tl.minimum(current + 1, NUM_FIRST + NUM_LOCAL)
    need = tl.minimum(N_SEL - num_forced, current + 1 - num_forced)
    taken = _taken(key, o_j, need, current < N_SEL, N_SEL, ROUNDS, COLUMNS)
    forced = (o_j <= _each(current)) & ((o_j < NUM_FIRST) | (o_j > _each(current - NUM_LOCAL)))
    chosen = (forced | taken).to(tl.int32)

    # ids [N_SEL]: the running count of chosen blocks is the place of each one; then -1.
    p_ids = p_selection + ((i_b * S + o_t) * Hkv + i_g) * N_SEL
    _store_ids(p_ids, chosen, ROUNDS, COLUMNS)
    o_n = tl.arange(0, N_SEL_PAD)
    num_chosen = num_forced + need
    tl.store(p_num_chosen + i_bg * S + o_t, num_chosen, mask=m_q)
    unused = m_q[:, None] & (o_n[None, :] >= num_chosen[:, None]) & (o_n < N_SEL)[None, :]
    fill = tl.full([BQ, N_SEL_PAD], -1, tl.int32)
    tl.store(p_ids[:, None] + o_n[None, :], fill, mask=unused)
    if HAS_BITS:
        # [BQ, NW] words; layout [words, S], so that a tile of queries loads rows.
        o_w = tl.arange(0, NW)
        words = tl.sum(tl.reshape(chosen << (o_j % 32), [BQ, NW, 32]), axis=2)
        p_words = p_bits + (i_bg * NUM_WORDS + o_w)[None, :] * S + o_t[:, None]
        tl.store(p_words, words, mask=m_q[:, None] & (o_w < NUM_WORDS)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def token_scores(
    t_q, t_q2, t_k, t_k2, p_scores, first_row, stop_row, Hkv, WIDTH,
    DK1: tl.constexpr, DK2: tl.constexpr, L_SEL: tl.constexpr, TILES: tl.constexpr,
    UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Scores of one block for TILES tiles of queries: the largest product with a token of it.

    There is one head of keys for all. Stored as numbers >= 0 in the same order, which is what
    choose_blocks ranks: fp32 [B * Hkv, rows, WIDTH], for blocks that end before the query.
    """
    i_bg = tl.program_id(2).to(tl.int64)
    i_b, i_g = i_bg // Hkv, i_bg % Hkv
    block = tl.program_id(0)
    o_m = tl.arange(0, BM)
    # Tiles of this program whose queries see the whole block.
    r0 = tl.program_id(1) * BM * TILES
    first = tl.maximum(r0, (block * L_SEL + L_SEL - 1 - first_row) // BM * BM)
    stop = tl.minimum(r0 + BM * TILES, stop_row - first_row)
    b_k = _rows(t_k, i_b, block * L_SEL, 0, 0, BN, DK1)
    b_k2 = b_k
    if DK2 > 0:
        b_k2 = _rows(t_k2, i_b, block * L_SEL, 0, DK1, BN, DK2)
    num_rows = stop_row - first_row
    for row in range(first, stop, BM):
        # s = q k^T: [BM, BN].
        b_q = _rows(t_q, i_b, first_row + row, i_g, 0, BM, DK1)
        b_s = _dot(b_q, tl.trans(b_k), UPCAST)
        if DK2 > 0:
            b_q2 = _rows(t_q2, i_b, first_row + row, i_g, DK1, BM, DK2)
            b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
        if L_SEL < BN:
            b_s = tl.where((tl.arange(0, BN) < L_SEL)[None, :], b_s, float("-inf"))
        # The bits of a negative number, all but the sign inverted, have its order as an integer.
        # Two bits less, and moved above 0, they are those of a number below 2.
        bits = tl.max(b_s, axis=1).to(tl.int32, bitcast=True)
        ordered = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> 2) + (1 << 29)
        p = p_scores + (i_bg * num_rows + row + o_m) * WIDTH + block
        tl.store(p, ordered.to(tl.float32, bitcast=True), mask=row + o_m < num_rows)


@triton.jit
def _or(a, b):
    """For tl.reduce."""
    return a | b


@triton.jit(do_not_specialize=COUNTS)
def pack_selection(
    p_selection, p_legal, p_num_chosen, p_bits, p_row_start, S, Hkv, NUM_WORDS,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, NW: tl.constexpr,
    HAS_DOCS: tl.constexpr, HAS_BITS: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """The given ids of BQ queries, in any order, as a selection: no repeated or future blocks."""
    i_bg = tl.program_id(1).to(tl.int64)
    i_b, i_g = i_bg // Hkv, i_bg % Hkv
    o_t = tl.program_id(0) * BQ + tl.arange(0, BQ)
    m_t = o_t < S
    position = o_t
    if HAS_DOCS:
        position = o_t - tl.load(p_row_start + o_t, mask=m_t, other=0)
    # ids [BQ, N_SEL_PAD]; ids of the future and -1 are dropped.
    o_n, o_w, o_bit = tl.arange(0, N_SEL_PAD), tl.arange(0, NW), tl.arange(0, 32)
    rows = ((i_b * S + o_t) * Hkv + i_g) * N_SEL
    m_ids = m_t[:, None] & (o_n < N_SEL)[None, :]
    ids = tl.load(p_selection + rows[:, None] + o_n[None, :], mask=m_ids, other=-1)
    legal = (ids >= 0) & (ids <= (position // L_SEL)[:, None])
    p_rows = p_legal + rows[:, None]
    # Store the distinct ids in ascending order; count them: [BQ].
    if N_SEL_PAD <= FEW_IDS:
        # By pairs: an id is kept where no equal one is before it; its place is how many are less.
        earlier = (o_n[None, :] < o_n[:, None])[None, :, :]
        same = (ids[:, :, None] == ids[:, None, :]) & earlier
        kept = legal & (tl.sum(same.to(tl.int32), axis=2) == 0)
        less = (ids[:, None, :] < ids[:, :, None]) & kept[:, None, :]
        tl.store(p_rows + tl.sum(less.to(tl.int32), axis=2), ids, mask=kept)
        num_chosen = tl.sum(kept.to(tl.int32), axis=1)
        if HAS_BITS:
            words = _words(ids, kept, o_w)
    else:
        # By the bits of all blocks [BQ, NW, 32]; NW words hold every block.
        words = _words(ids, legal, o_w)
        chosen = (words[:, :, None] >> o_bit[None, None, :]) & 1
        counts = tl.sum(chosen, axis=2)
        before = tl.cumsum(counts, axis=1) - counts
        place = before[:, :, None] + tl.cumsum(chosen, axis=2) - 1
        id = (o_w[:, None] * 32 + o_bit[None, :])[None, :, :]
        tl.store(p_rows[:, :, None] + place, id + chosen * 0, mask=chosen != 0)
        num_chosen = tl.sum(counts, axis=1)
    tl.store(p_num_chosen + i_bg * S + o_t, num_chosen, mask=m_t)
    unused = m_ids & (o_n[None, :] >= num_chosen[:, None])
    tl.store(p_rows + o_n[None, :], tl.full([BQ, N_SEL_PAD], -1, tl.int32), mask=unused)
    if HAS_BITS:
        at = (i_bg * NUM_WORDS + o_w)[None, :] * S + o_t[:, None]
        tl.store(p_bits + at, words, mask=m_t[:, None] & (o_w < NUM_WORDS)[None, :])


@triton.jit
def _words(ids, kept, o_w):
    """Ids [queries, ids] as words of 32 bits, [queries, words]; or-ed: an id may be repeated."""
    block = tl.where(kept, ids, 0)
    here = kept[:, None, :] & ((block // 32)[:, None, :] == o_w[None, :, None])
    return tl.reduce(tl.where(here, (1 << (block % 32))[:, None, :], 0), 2, _or)


# --- Launchers: a chunk of queries at a time, so that the scores have a bounded workspace ---

SCORE_BYTES = 256 << 20
"""Limit of the workspace for scores; longer sequences are split into chunks of queries."""
CHOICES = (32, 64, 128, 256, 512, 1024)
"""Blocks of choose_blocks; beyond, powers of two, too."""
BLOCKS_PER_WARP = 1024
"""Of choose_blocks: more do not fit the registers of a warp, and take half a minute to compile."""
BLOCKS_TOGETHER, MOST_TOGETHER = 512, 4
"""Of choose_blocks: queries with fewer blocks share a program, up to so many."""
MANY_BLOCKS, REGISTERS = 1024, 96
"""Of choose_blocks: blocks whose programs are held to so many registers, at the price of a few that
are spilled: more of them run at a time."""
TOKEN_TILES = 16
"""Tiles of queries that a program of token_scores takes with one block."""
PACKED = 8192
"""Pairs of an id and a word, or of two ids, that a program of pack_selection compares."""
MIN_WORDS = 32
"""Words that pack_selection takes at least, so that shorter sequences share its code."""
ROWS = 128
"""Chunk lengths are multiples of this, so that no chunk ends within a tile."""


class Selection(NamedTuple):
    """The chosen blocks in the forms that the kernels read."""

    ids: Tensor  # [B, S, Hkv, n_sel] int32, ascending, then -1
    num_chosen: Tensor  # [B, Hkv, S] int32
    bits: Tensor  # [B, Hkv, words, S] int32: a bit per block of a document; no words unless asked


class Chunk(NamedTuple):
    """Rows whose scores are in the workspace at a time."""

    first: int
    stop: int
    width: int  # numbers per row and level: blocks up to `stop`, or tokens of all documents, padded
    num_cmp: int  # compressed tokens that the rows can see


def choose(
    problem: Problem, q: Tensor, k_cmp: Tensor, lse: Tensor, *, has_bits: bool = False
) -> Selection:
    """Score the blocks by the compressed branch, whose log-sum-exp is given, and choose.

    `has_bits`: also as bits. They grow with the square of a document's length: only the mask of
    short ones has them.
    """
    levels = _num_levels(problem)
    chunks = _chunks(problem, levels)
    chosen = _empty(problem, has_bits=has_bits, zero=len(chunks) > 1)
    size = max((chunk.stop - chunk.first) * chunk.width for chunk in chunks)
    scores = problem.empty(problem.num_segments * size * max(levels, 1), dtype=torch.float32)
    for chunk in chunks:
        if chunk.num_cmp:
            with nvtx("map_pcmp_to_pslc", problem.flags.nvtx):
                _score(problem, q, k_cmp, lse, scores, chunk, levels)
        with nvtx("topk+ranges", problem.flags.nvtx):
            _choose(problem, q, scores, chosen, chunk, levels)
    if problem.flags.strict:
        position = torch.arange(problem.seq_len, device=problem.device)
        if problem.packed:
            position = position - problem.row_index(0, q)[0]
        assert_selection(chosen.ids.transpose(1, 2), position, problem.spec)
    return chosen


def choose_by_tokens(problem: Problem, q: Tensor, k: Tensor) -> Selection:
    """Score each block by the largest product of the query with one of its tokens, and choose.

    q [B, S, Hkv, D] has a head for each choice, k [B, S, 1, D] one for all. The spec of the problem
    has l = d = l_sel: its compressed tokens are the blocks. The own block must be forced.
    """
    chunks = _chunks(problem, 1)
    chosen = _empty(problem)
    size = max((chunk.stop - chunk.first) * chunk.width for chunk in chunks)
    scores = problem.empty(problem.num_segments * size, dtype=torch.float32)
    tiles = token_tiles(problem.d_k, problem.spec.l_sel, problem.dtype, problem.capability)
    assert tiles is not None, "the caller asks token_tiles first"
    for chunk in chunks:
        if chunk.num_cmp:
            _score_tokens(problem, q, k, scores, chunk, tiles)
        _choose(problem, q, scores, chosen, chunk, 1)
    return chosen


def _score_tokens(
    problem: Problem, q: Tensor, k: Tensor, scores: Tensor, chunk: Chunk, tiles: Tiles
) -> None:
    start(
        problem.memo,
        ("tokens", chunk),
        token_scores,
        (*problem.rows_k(q, tiles.BM), *problem.rows_k(k, tiles.BN), scores),
        lambda: Launch.tiled(
            (
                chunk.num_cmp,
                ceil_div(chunk.stop - chunk.first, tiles.BM * TOKEN_TILES),
                problem.num_segments,
            ),
            (chunk.first, chunk.stop, problem.num_groups, chunk.width),
            dict(zip(("DK1", "DK2"), parts_of(problem.d_k), strict=True))
            | {"L_SEL": problem.spec.l_sel, "TILES": TOKEN_TILES, "UPCAST": problem.upcast},
            tiles,
        ),
    )


def _score(
    problem: Problem,
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor,
    scores: Tensor,
    chunk: Chunk,
    levels: int,
) -> None:
    tiles = _tiles(problem)
    start(
        problem.memo,
        ("score", chunk),
        group_scores,
        (
            *problem.rows_k(q, tiles.BM, by_head=True), *problem.rows_k(k_cmp, tiles.BN), lse,
            scores, *problem.row_index(0, q),
        ),
        lambda: Launch.tiled(
            (
                ceil_div(chunk.num_cmp, tiles.BN),
                ceil_div(chunk.stop - chunk.first, tiles.BM),
                problem.num_segments,
            ),
            (
                chunk.first, chunk.stop, problem.seq_len, problem.num_groups, problem.per_group,
                chunk.width, problem.scale_log2, *problem.bands[0][:2],
            ),
            dict(zip(("DK1", "DK2"), parts_of(problem.d_k), strict=True))
            | _strides(problem, levels)
            | {"HAS_DOCS": problem.packed, "UPCAST": problem.upcast},
            tiles,
        ),
    )  # fmt: skip


def _choose(
    problem: Problem, q: Tensor, scores: Tensor, chosen: Selection, chunk: Chunk, levels: int
) -> None:
    spec, has_bits = problem.spec, chosen.bits.numel() > 0
    num_blocks = spec.num_blocks(max(problem.doc_lens) if problem.packed else chunk.stop)
    num_blocks = _padded_blocks(num_blocks)
    together = min(max(BLOCKS_TOGETHER // num_blocks, 1), MOST_TOGETHER)
    start(
        problem.memo,
        ("choose", chunk, has_bits),
        choose_blocks,
        (scores, *chosen, *problem.row_index(0, q)),
        lambda: Launch(
            (ceil_div(chunk.stop - chunk.first, together), problem.num_segments),
            (
                chunk.first, chunk.stop - chunk.first, problem.seq_len, problem.num_groups,
                chunk.width, *problem.bands[0][:2], problem.num_words,
            ),
            {"L_SEL": spec.l_sel, "N_SEL": spec.n_sel, "N_SEL_PAD": padded(spec.n_sel)}
            | {"NUM_FIRST": spec.num_first, "NUM_LOCAL": spec.num_local}
            | _strides(problem, levels)
            | {"NB": num_blocks, "NW": num_blocks // 32, "HAS_DOCS": problem.packed}
            | {"HAS_BITS": has_bits, "BQ": together},
            _options(num_blocks),
        ),
    )  # fmt: skip


def _padded_blocks(num_blocks: int) -> int:
    """Blocks that choose_blocks is compiled for: few sizes, so that few lengths need their own."""
    return next((size for size in CHOICES if num_blocks <= size), padded(num_blocks))


def split_ids(index: Tensor, parts: int) -> Tensor:
    """The same tokens, where each block is `parts` shorter ones: [..., n * parts]."""
    if parts == 1:
        return index
    ids = index[..., None] * parts + torch.arange(parts, dtype=torch.int32, device=index.device)
    return ids.masked_fill(index[..., None] < 0, -1).flatten(-2)


def given(problem: Problem, selection: Tensor, *, has_bits: bool = False) -> Selection:
    """A selection that the caller gave, without repeated blocks and blocks of the future."""
    selection = selection.contiguous()
    chosen = _empty(problem, has_bits=has_bits)
    row_start, _ = problem.row_index(1, selection)
    spec = problem.spec
    num_ids, num_words = padded(spec.n_sel), max(padded(problem.num_words), MIN_WORDS)
    # Few ids: neighbours are packed together, for wide stores. Many: a query alone.
    is_few = num_ids <= FEW_IDS.value
    wide = num_words if has_bits else num_ids
    together = max(PACKED // (wide * num_ids), 1) if is_few else 1
    start(
        problem.memo,
        ("given", has_bits),
        pack_selection,
        (selection, *chosen, row_start),
        lambda: Launch.plain(
            (ceil_div(problem.seq_len, together), problem.num_segments),
            (problem.seq_len, problem.num_groups, problem.num_words),
            {"L_SEL": spec.l_sel, "N_SEL": spec.n_sel, "N_SEL_PAD": num_ids}
            # Few ids without bits use no words: one form of the kernel for all lengths.
            | {"NW": num_words if has_bits or not is_few else MIN_WORDS}
            | {"HAS_DOCS": problem.packed, "HAS_BITS": has_bits, "BQ": together},
            num_warps=4 if together > 1 else 1,
        ),
    )
    return chosen


def _tiles(problem: Problem) -> Tiles:
    return score_tiles(problem.d_k, problem.dtype, problem.capability, problem.per_group)


def _strides(problem: Problem, levels: int) -> dict[str, int]:
    spec = problem.spec
    sizes = {"STRIDES": spec.l_sel // spec.d, "OVERLAP": spec.l // spec.d, "LEVELS": levels}
    return sizes | {"LARGEST": problem.largest}


def _num_levels(problem: Problem) -> int:
    """Levels of the block scores (module docstring); 0: the probabilities are stored unfolded.

    Folding needs blocks that are aligned with the tiles, which those of packed documents are not.
    """
    spec = problem.spec
    strides, overlap = spec.l_sel // spec.d, spec.l // spec.d
    in_step = strides & (strides - 1) == 0 and strides <= _tiles(problem).BN
    return 1 + ceil_div(overlap - 1, strides) if in_step and problem.aligned else 0


def _chunks(problem: Problem, levels: int) -> list[Chunk]:
    """Chunks of rows whose scores fit the workspace."""
    spec, seq_len = problem.spec, problem.seq_len
    num_cmp = sum(spec.num_cmp(length) for length in problem.doc_lens)
    # Parts of later levels are stored for the block that gets them, up to levels - 1 further on.
    widest = (spec.num_blocks(problem.doc_lens[0]) + levels - 1) * levels if levels else num_cmp
    rows = SCORE_BYTES // (4 * problem.num_segments * max(widest, 1)) // ROWS * ROWS
    rows = max(rows, ROWS)
    stops = [*range(rows, seq_len, rows), seq_len]
    return [
        Chunk(
            max(stop - rows, 0) if stop < seq_len else (seq_len - 1) // rows * rows,
            stop,
            # Rows of a multiple of 16 numbers: aligned loads, and one form of the kernels.
            ceil_div(_width(problem, stop) + levels - 1 if levels else num_cmp, 16) * 16,
            num_cmp if problem.packed else spec.num_cmp(stop),
        )
        for stop in stops
    ]


def _options(num_blocks: int) -> dict[str, int]:
    """Warps of choose_blocks, and their registers."""
    warps = {"num_warps": min(max(num_blocks // BLOCKS_PER_WARP, 1), 16)}
    return warps | ({"maxnreg": REGISTERS} if num_blocks == MANY_BLOCKS else {})


def _width(problem: Problem, stop: int) -> int:
    """Blocks of a document up to its query `stop`; all of them, where queries have an offset."""
    return problem.spec.num_blocks(problem.doc_lens[0] if problem.packed else stop)


def no_choice(problem: Problem, ids: Tensor) -> Selection:
    """For calls whose selected branch does not run: nobody reads more than the given ids."""
    return _empty(problem, has_bits=problem.masked)._replace(ids=ids.contiguous())


def _empty(problem: Problem, *, has_bits: bool = False, zero: bool = False) -> Selection:
    """Memory for a choice; `zero` where the kernels do not write every word of the bits."""
    batch, groups, seq_len = problem.batch, problem.num_groups, problem.seq_len
    make = torch.zeros if zero and has_bits else torch.empty
    words = (batch, groups, problem.num_words if has_bits else 0, seq_len)
    return Selection(
        problem.empty(batch, seq_len, groups, problem.spec.n_sel, dtype=torch.int32),
        problem.empty(batch, groups, seq_len, dtype=torch.int32),
        make(words, dtype=torch.int32, device=problem.memory),
    )

"""The choice of blocks: the forced ones, then the best scores (Eq. 11 and 12).

choose_blocks ranks the scores of scores.py: a bisection on their bits. Below it are the launchers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.checks import assert_selection
from nsa.ops.plan import nvtx
from nsa.ops.triton.choice.scores import (
    Chunk,
    chunks_of,
    num_levels,
    score,
    score_tokens,
    stride_constants,
)
from nsa.ops.triton.choice.selection import Selection, empty_selection
from nsa.ops.triton.launcher import Launch, ceil_div, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.tile import COUNTS
from nsa.ops.triton.tiles import padded, token_tiles

FIRST_GUESS = tl.constexpr(2 << 23)
"""2 in the exponent field of fp32: subtracted from the bits of a number, it divides by 4."""
FEW_COLUMNS = tl.constexpr(4)
"""Columns of the blocks where they are few: a row is then what one lane holds."""
FEW_TOO_MANY = tl.constexpr(8)
"""Keys above the bound and not needed, up to which it is raised key by key."""


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


# --- Launchers ---

CHOICES = (32, 64, 128, 256, 512, 1024)
"""Blocks of choose_blocks; beyond, powers of two, too."""
BLOCKS_PER_WARP = 1024
"""Of choose_blocks: more do not fit the registers of a warp, and take half a minute to compile."""
BLOCKS_TOGETHER, MOST_TOGETHER = 512, 4
"""Of choose_blocks: queries with fewer blocks share a program, up to so many."""
MANY_BLOCKS, REGISTERS = 1024, 96
"""Of choose_blocks: blocks whose programs are held to so many registers, at the price of a few that
are spilled: more of them run at a time."""


def choose(
    problem: Problem, q: Tensor, k_cmp: Tensor, lse: Tensor, *, has_bits: bool = False
) -> Selection:
    """Score the blocks by the compressed branch, whose log-sum-exp is given, and choose.

    `has_bits`: also as bits. They grow with the square of a document's length: only the mask of
    short ones has them.
    """
    levels = num_levels(problem)
    chunks = chunks_of(problem, levels)
    chosen = empty_selection(problem, has_bits=has_bits, zero=len(chunks) > 1)
    size = max((chunk.stop - chunk.first) * chunk.width for chunk in chunks)
    scores = problem.empty(problem.num_segments * size * max(levels, 1), dtype=torch.float32)
    for chunk in chunks:
        if chunk.num_cmp:
            with nvtx("map_pcmp_to_pslc", problem.flags.nvtx):
                score(problem, q, k_cmp, lse, scores, chunk, levels)
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
    chunks = chunks_of(problem, 1)
    chosen = empty_selection(problem)
    size = max((chunk.stop - chunk.first) * chunk.width for chunk in chunks)
    scores = problem.empty(problem.num_segments * size, dtype=torch.float32)
    tiles = token_tiles(problem.d_k, problem.spec.l_sel, problem.dtype, problem.capability)
    assert tiles is not None, "the caller asks token_tiles first"
    for chunk in chunks:
        if chunk.num_cmp:
            score_tokens(problem, q, k, scores, chunk, tiles)
        _choose(problem, q, scores, chosen, chunk, 1)
    return chosen


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
            | stride_constants(problem, levels)
            | {"NB": num_blocks, "NW": num_blocks // 32, "HAS_DOCS": problem.packed}
            | {"HAS_BITS": has_bits, "BQ": together},
            _options(num_blocks),
        ),
    )  # fmt: skip


def _padded_blocks(num_blocks: int) -> int:
    """Blocks that choose_blocks is compiled for: few sizes, so that few lengths need their own."""
    return next((size for size in CHOICES if num_blocks <= size), padded(num_blocks))


def _options(num_blocks: int) -> dict[str, int]:
    """Warps of choose_blocks, and their registers."""
    warps = {"num_warps": min(max(num_blocks // BLOCKS_PER_WARP, 1), 16)}
    return warps | ({"maxnreg": REGISTERS} if num_blocks == MANY_BLOCKS else {})

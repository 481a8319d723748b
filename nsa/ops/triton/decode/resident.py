"""A decode step in one launch whose programs are all on the GPU at once and wait for each other.

A launch costs about 3 us even if it starts early; a barrier in memory costs about one. `NUM`
programs of a segment do what the kernels of attend.py, score.py and merge.py do, in four phases:

1. a part of the compressed branch
2. scores of the blocks of that part, from its logits; parts of the window and of forced blocks
3. choice, and parts of the chosen blocks
4. the gated sum of all parts, some heads for each program

A segment has a counter for the end of each phase but the last, and one for the output of the last
compressed part, which comes late: it holds the token that completes in this step. Counters only
grow: a program that has arrived at none yet reads the first one, and knows from it how many steps
there were. So nothing is reset between steps, and a captured graph can be replayed. The launch is
cooperative, which makes sure that no program waits for one that never starts.

PHASE 0 is all of it. In the interpreter, which runs one program after another, each phase from 1 to
4 is a launch. Names as in attend.py.

At batch 1 such a step is a chain of waits, so loads are started as early as they can be: a part of
the compressed branch is one tile, loaded before the length is known, and what others do not need at
once is stored after a program has said that it has arrived.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.decode.merge import _gates, _num_parts, _sum_compressed, _sum_tokens
from nsa.ops.triton.decode.parts import (
    AVERAGED,
    _append,
    _base,
    _completed,
    _counts,
    _new_heads,
    _put,
    _query,
    _store_lse,
    _store_out,
    _store_part,
    _stream,
    _token_part,
)
from nsa.ops.triton.decode.score import _choose, _lse_of_parts, _store_level, _weights_of
from nsa.ops.triton.tile import _dot, _dot_add, _let_next_come, _wait

NUM_COUNTERS = 4
"""Counters of a segment, int64: the ends of the phases 1 to 3, and the output of the last part."""
COUNTERS = tl.constexpr(NUM_COUNTERS)


@triton.jit
def _arrive(p_counter):
    """This program's stores are done: whoever sees the counter sees them."""
    tl.debug_barrier()
    tl.atomic_add(p_counter, 1, sem="release", scope="gpu")


@triton.jit
def _await(p_counter, target):
    """Wait until `target` programs have arrived, in all steps together."""
    # Every thread reads for itself, so that its later reads come after what the others wrote.
    address = p_counter.to(tl.int64)
    seen = _count_at(address)
    while seen < target:
        seen = _count_at(address)


@triton.jit
def _count_at(address):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [address], tl.int64, False, 1
    )


@triton.jit
def step_resident(
    p_q, p_k_cmp_new, p_v_cmp_new, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new,
    p_k_made, p_v_made, p_k_cmp, p_v_cmp, p_k_sel, p_v_sel, p_k_win, p_v_win, p_k_raw, p_v_raw,
    p_part, p_part_lse, p_lengths, p_current, p_table,
    p_scores, p_selection, p_reads, p_last_reads, p_gates, p_out, p_counters,
    Hkv, G, NUM_CMP, NUM_PARTS, CMP_PARTS, WIN_PARTS, AHEAD_PARTS, FREE_PARTS,
    MAX_LEN, WIN, scale_log2,
    s_table, s_scores, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh,
    s_cmp, s_sel, s_head_cmp, s_head_sel, s_gb, s_gh, s_ob, s_oh,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr,
    PAGED: tl.constexpr, MADE: tl.constexpr, CMP_PART: tl.constexpr,
    LEVELS: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr,
    N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, NUM_FIRST: tl.constexpr,
    NUM_LOCAL: tl.constexpr, PER_PART: tl.constexpr, WIN_PART: tl.constexpr,
    NB: tl.constexpr, TOKENS: tl.constexpr, CMP_PADDED: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, NUM: tl.constexpr, FIRST_AHEAD: tl.constexpr,
    FIRST_FREE: tl.constexpr, ADVANCE: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """A decode step, by NUM programs for each segment; grid (NUM, segments).

    Program p has the part p of the compressed branch, if there is one, and scores its blocks;
    FIRST_AHEAD has the first part that needs no score, FIRST_FREE the first one that needs them.
    """
    i_seg = tl.program_id(1).to(tl.int64)
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    i_p = tl.program_id(0)
    _wait(EARLY)
    _let_next_come(EARLY)
    # Phase 4 alone: another program may have counted the token.
    t = tl.load((p_current if PHASE == 4 else p_lengths) + i_b, cache_modifier=".cg")
    p_ends = p_counters + i_seg * COUNTERS
    # Steps before this one: no program has yet arrived NUM times more.
    target = (tl.load(p_ends, cache_modifier=".cg") // NUM + 1) * NUM
    b_q = _query(p_q, i_b, i_g, G, s_qb, s_qh, DK, DK1, 0, BM)
    b_q2 = b_q
    if DK2 > 0:
        b_q2 = _query(p_q, i_b, i_g, G, s_qb, s_qh, DK, DK2, DK1, BM)
    num_cmp = tl.minimum(tl.maximum((t + 1 - L + STEP) // STEP, 0), NUM_CMP)
    p_ids = p_selection + i_seg * N_SEL
    new_k, new_v = i_b * s_kb + i_g * s_kh, i_b * s_vb + i_g * s_vh
    first, o_k = i_p * CMP_PART, tl.arange(0, CMP_PART)
    HELD: tl.constexpr = not MADE and L <= AVERAGED
    PER_PAGE: tl.constexpr = L_SEL // STEP if PAGED else 0
    if PHASE <= 2:
        b_k, b_k2, b_v, raw, raw2, raw_v = _early_loads(
            p_k_cmp_new + new_k, p_v_cmp_new + new_v, p_k_raw, p_v_raw, p_k_cmp, p_v_cmp, p_table,
            i_seg, i_b, i_g, first, num_cmp, NUM_CMP, s_table, s_cmp, s_head_cmp,
            DK, DV, DK1, DK2, DV_PAD, L, CMP_PART, PER_PAGE, HELD,
        )  # fmt: skip
    if PHASE <= 1:
        tl.store(p_current + i_b, t, mask=i_p == 0)
    # The first use of the length.
    if t >= MAX_LEN:
        return
    if PHASE <= 2:
        # The token that completes here, -1: none. It is not in the cache yet: its logit is a sum.
        completes = (t + 1 >= L) & ((t + 1 - L) % STEP == 0)
        newest = tl.where(completes, num_cmp - 1 - first, -1)
        is_mine = (newest >= 0) & (newest < CMP_PART)
        last = tl.maximum(tl.cdiv(num_cmp, CMP_PART) - 1, 0)
        logit = tl.zeros([BM], tl.float32)
        if is_mine:
            at = _base(p_table, i_b, first + newest, s_cmp, s_table, DK, PER_PAGE)
            p_row = p_k_cmp + at + i_g * s_head_cmp * DK
            logit += _newest_logit(
                b_q, raw, p_row, p_k_cmp_new + new_k, p_k_made, p_k_raw, i_seg, t,
                0, DK, DK1, L, HELD, MADE, PHASE,
            )  # fmt: skip
            if DK2 > 0:
                logit += _newest_logit(
                    b_q2, raw2, p_row, p_k_cmp_new + new_k, p_k_made, p_k_raw, i_seg, t,
                    DK1, DK, DK2, L, HELD, MADE, PHASE,
                )  # fmt: skip
        # s' = q k^T * scale_log2: [BM, CMP_PART].
        b_s = _dot(b_q, tl.trans(b_k), UPCAST)
        if DK2 > 0:
            b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
        b_s = tl.where((o_k == newest)[None, :], logit[:, None], b_s) * scale_log2
        b_s = tl.where((first + o_k < num_cmp)[None, :], b_s, float("-inf"))
    if PHASE <= 1:
        part = i_seg * NUM_PARTS + i_p
        top = tl.max(b_s, axis=1)
        safe_top = tl.where(top == float("-inf"), 0.0, top)
        b_p = tl.math.exp2(b_s - safe_top[:, None])
        total = tl.sum(b_p, axis=1)
        if first < num_cmp:
            _store_lse(p_part_lse, top, total, part, G, BM)
        if PHASE == 0:
            _arrive(p_ends)
        # Outputs are not read before phase 4. That of the last part comes after the scores.
        if i_p < last:
            b_out = _dot(b_p.to(b_v.dtype), b_v, UPCAST)
            _store_out(p_part, b_out, total, part, G, DV, DV_PAD, BM)
    if PHASE == 0 or PHASE == 2:
        if first < num_cmp:
            _score_phase(
                b_s, p_part_lse, p_scores, p_ends, target, i_seg, i_p, num_cmp,
                G, NUM_PARTS, s_scores, L, STEP, L_SEL, CMP_PART, LEVELS, BM, CMP_PADDED, PHASE,
            )  # fmt: skip
        if PHASE == 0:
            _arrive(p_ends + 1)
    if PHASE <= 1 and i_p == last:
        # Rows that are not filled may hold anything.
        m_v = (first + o_k < num_cmp) & (o_k != newest)
        b_v = tl.where(m_v[:, None], b_v, 0.0)
        b_out = _dot(b_p.to(b_v.dtype), b_v, UPCAST)
        if is_mine:
            if HELD:
                b_made = _mean_of(raw_v, t, L)
            else:
                b_made = _completed(
                    p_v_cmp_new + new_v, p_v_made, p_v_raw, i_seg, t, 0, DV, DV_PAD, L, MADE
                )
            at = _base(p_table, i_b, first + newest, s_cmp, s_table, DV, PER_PAGE)
            _put(p_v_cmp + at + i_g * s_head_cmp * DV, 0, b_made, True, DV, DV_PAD)
            weight = tl.math.exp2(logit * scale_log2 - safe_top)
            b_out += weight[:, None] * b_made.to(tl.float32)[None, :]
        if num_cmp > 0:
            _store_out(p_part, b_out, total, part, G, DV, DV_PAD, BM)
        if PHASE == 0:
            _arrive(p_ends + 3)
    SEL_PAGE: tl.constexpr = L_SEL if PAGED else 0
    if PHASE <= 1:
        if i_p == 0:
            DK_PAD: tl.constexpr = DK1 if DK2 == 0 else 2 * DK1
            news = _new_heads(
                p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new, p_k_cmp_new, p_v_cmp_new,
                new_k, new_v, True, DK, DV, DK_PAD, DV_PAD,
            )  # fmt: skip
            _append(
                news, p_k_sel, p_v_sel, p_k_win, p_v_win, p_k_raw, p_v_raw, p_table,
                i_seg, i_b, i_g, t, True, WIN, s_table, s_sel, s_head_sel,
                DK, DV, DK_PAD, DV_PAD, L, L_SEL, PAGED,
            )  # fmt: skip
        _ahead_phase(
            b_q, b_q2, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new, p_k_sel, p_v_sel,
            p_k_win, p_v_win, p_ids, p_table, p_part, p_part_lse, i_seg, i_b, i_g, i_p, t,
            G, NUM_PARTS, CMP_PARTS, WIN_PARTS, AHEAD_PARTS, WIN, scale_log2,
            s_table, s_kb, s_kh, s_vb, s_vh, s_sel, s_head_sel,
            DK, DV, DK1, DK2, DV_PAD, L_SEL, N_SEL, NUM_FIRST, NUM_LOCAL, SEL_PAGE, PER_PART,
            WIN_PART, STAGES, UPCAST, BM, TOKENS, FIRST_AHEAD, NUM,
        )  # fmt: skip
    if PHASE == 0 or PHASE == 3:
        _free_phase(
            b_q, b_q2, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new, p_k_sel, p_v_sel,
            p_k_win, p_v_win, p_ids, p_table, p_part, p_part_lse, p_scores,
            p_ends, target, i_seg, i_b, i_g, i_p, t, num_cmp,
            G, NUM_PARTS, CMP_PARTS, AHEAD_PARTS, FREE_PARTS, WIN, scale_log2,
            s_table, s_scores, s_kb, s_kh, s_vb, s_vh, s_sel, s_head_sel,
            DK, DV, DK1, DK2, DV_PAD, STEP, L_SEL, N_SEL, N_SEL_PAD, NUM_FIRST, NUM_LOCAL, LEVELS,
            SEL_PAGE, PER_PART, WIN_PART, NB, STAGES, UPCAST, BM, TOKENS, FIRST_FREE, NUM, PHASE,
        )  # fmt: skip
    if PHASE == 0:
        _arrive(p_ends + 2)
    if (PHASE == 0 or PHASE == 3) and i_p == FIRST_FREE:
        _count_reads(p_reads, p_last_reads, i_seg, t, num_cmp, WIN, L_SEL, N_SEL)
    if PHASE == 0 or PHASE == 4:
        _merge_phase(
            p_part, p_part_lse, p_gates, p_out, p_ends, target, i_seg, i_b, i_g, i_p, t,
            G, NUM_PARTS, CMP_PARTS, WIN_PARTS, AHEAD_PARTS, NUM_CMP, WIN, s_gb, s_gh, s_ob, s_oh,
            DV, DV_PAD, L, STEP, L_SEL, N_SEL, NUM_FIRST + NUM_LOCAL, PER_PART,
            CMP_PART, WIN_PART, CMP_PADDED, PARTS, NUM, PHASE,
        )  # fmt: skip
        # The token counts once every program of the sequence has read its length.
        if ADVANCE and (i_p == 0) & (i_g == 0):
            if PHASE == 0:
                for g in range(Hkv):
                    _await(p_ends + g * COUNTERS + 2, target)
            tl.store(p_lengths + i_b, t + 1)


@triton.jit
def _early_loads(
    p_new_k, p_new_v, p_k_raw, p_v_raw, p_k_cmp, p_v_cmp, p_table, i_seg, i_b, i_g, first,
    num_cmp, NUM_CMP, s_table, s_cmp, s_head_cmp,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L: tl.constexpr, CMP_PART: tl.constexpr, PER_PAGE: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """Keys and values of a part from `first` on, and the raw tokens: all that needs no length.

    b_k and raw have the columns of DK1, b_k2 and raw2 those of DK2, if there are any.
    """
    raw, raw2, raw_v = (0, 0), (0, 0), (0, 0)
    if HELD:
        raw = _hold_raw(p_new_k, p_k_raw, i_seg, 0, DK, DK1, L)
        if DK2 > 0:
            raw2 = _hold_raw(p_new_k, p_k_raw, i_seg, DK1, DK, DK2, L)
        raw_v = _hold_raw(p_new_v, p_v_raw, i_seg, 0, DV, DV_PAD, L)
    o_k = tl.arange(0, CMP_PART)
    # Rows up to the cache's end: how many of them are filled is not known yet. Pages are known
    # for filled ones alone.
    m_k = first + o_k < (num_cmp if PER_PAGE > 0 else NUM_CMP)
    if PER_PAGE > 0:
        p_pages = p_table + i_b * s_table + (first + o_k) // PER_PAGE
        page = tl.load(p_pages, mask=m_k, other=0).to(tl.int64)
        origin, row = i_g * s_head_cmp, page * s_cmp + (first + o_k) % PER_PAGE
    else:
        origin, row = i_b * s_cmp + i_g * s_head_cmp + first, o_k
    b_k = _columns(p_k_cmp + origin * DK, row, m_k, 0, DK, DK1)
    b_k2 = b_k
    if DK2 > 0:
        b_k2 = _columns(p_k_cmp + origin * DK, row, m_k, DK1, DK, DK2)
    b_v = _columns(p_v_cmp + origin * DV, row, m_k, 0, DV, DV_PAD)
    return b_k, b_k2, b_v, raw, raw2, raw_v


@triton.jit
def _columns(
    p, row, m_rows, column: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):  # fmt: skip
    """Columns of rows of a cache from `column` on: [rows, D_PAD]."""
    o_d = column + tl.arange(0, D_PAD)
    return _stream(p + row[:, None] * D + o_d[None, :], m_rows, o_d, D, column + D_PAD)


@triton.jit
def _hold_raw(
    p_new, p_raw, i_seg, column: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """The ring of raw tokens [AVERAGED, D_PAD] and the new token [D_PAD], before t is known."""
    o_l, o_d = tl.arange(0, AVERAGED), column + tl.arange(0, D_PAD)
    p_rows = p_raw + (i_seg * L + o_l)[:, None] * D + o_d[None, :]
    mask = (o_l < L)[:, None] & (o_d < D)[None, :]
    b_raw = tl.load(p_rows, mask=mask, other=0.0, cache_modifier=".cg")
    return b_raw, tl.load(p_new + o_d, mask=o_d < D, other=0.0, cache_modifier=".cg")


@triton.jit
def _newest_logit(
    b_q, raw, p_row, p_new, p_made, p_raw, i_seg, t, column: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, L: tl.constexpr, HELD: tl.constexpr,
    MADE: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Products of the queries with the compressed token that completes, which is stored at p_row.

    Over the columns of b_q. HELD: `raw` is of _hold_raw.
    """
    if HELD:
        b_made = _mean_of(raw, t, L)
    else:
        b_made = _completed(p_new, p_made, p_raw, i_seg, t, column, D, D_PAD, L, MADE)
    if PHASE <= 1:
        _put(p_row, column, b_made, True, D - column, D_PAD)
    return tl.sum(b_q.to(tl.float32) * b_made.to(tl.float32)[None, :], axis=1)


@triton.jit
def _mean_of(raw, t, L: tl.constexpr):
    """Mean of a held ring with the new token in the place of the oldest, as it is stored."""
    b_raw, b_new = raw
    # Another program may be writing that slot: what was read from it does not count.
    b_old = tl.where((tl.arange(0, AVERAGED) != t % L)[:, None], b_raw.to(tl.float32), 0.0)
    return ((b_new.to(tl.float32) + tl.sum(b_old, axis=0)) / L).to(b_new.dtype)


@triton.jit
def _score_phase(
    b_s, p_part_lse, p_scores, p_ends, target, i_seg, i_p, num_cmp,
    G, NUM_PARTS, s_scores,
    L: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr, CMP_PART: tl.constexpr,
    LEVELS: tl.constexpr, BM: tl.constexpr, CMP_PADDED: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Parts of the scores of the blocks of part i_p, from its logits [BM, CMP_PART]."""
    if PHASE == 0:
        _await(p_ends, target)
    num_parts = tl.cdiv(num_cmp, CMP_PART)
    lse = _lse_of_parts(p_part_lse + i_seg * NUM_PARTS * G, num_parts, G, BM, CMP_PADDED)
    STRIDES: tl.constexpr = L_SEL // STEP
    BLOCKS: tl.constexpr = CMP_PART // STRIDES
    o_h, o_s = tl.arange(0, BM), tl.arange(0, STRIDES)
    o_j = i_p * BLOCKS + tl.arange(0, BLOCKS)
    # p_cmp = exp2(logit - lse), summed over the heads: [BLOCKS, STRIDES].
    b_p = tl.where((o_h < G)[:, None], tl.math.exp2(b_s - lse[:, None]), 0.0)
    b_tokens = tl.reshape(tl.sum(b_p, axis=0), [BLOCKS, STRIDES])
    for level in tl.static_range(LEVELS):
        weight = _weights_of(o_s, level, STRIDES, L // STEP)
        b_part = tl.sum(b_tokens * weight[None, :], axis=1)
        _store_level(p_scores + i_seg * LEVELS * s_scores, b_part, o_j, level, s_scores)


@triton.jit
def _ahead_phase(
    b_q, b_q2, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new, p_k_sel, p_v_sel,
    p_k_win, p_v_win, p_ids, p_table, p_part, p_part_lse, i_seg, i_b, i_g, i_p, t,
    G, NUM_PARTS, CMP_PARTS, WIN_PARTS, AHEAD_PARTS, WIN, scale_log2,
    s_table, s_kb, s_kh, s_vb, s_vh, s_sel, s_head_sel,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, NUM_FIRST: tl.constexpr,
    NUM_LOCAL: tl.constexpr, PER_PAGE: tl.constexpr, PER_PART: tl.constexpr,
    WIN_PART: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, TOKENS: tl.constexpr, FIRST_AHEAD: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    """Parts that need no score, of window and forced blocks, by the segment's programs in turn."""
    num_of = _counts(t, False, WIN, L_SEL, N_SEL, NUM_FIRST + NUM_LOCAL)
    first_ahead = (i_p + NUM - FIRST_AHEAD) % NUM
    for a in tl.range(first_ahead, AHEAD_PARTS, NUM, num_stages=1):
        in_win = a < WIN_PARTS
        part = a - tl.where(in_win, 0, WIN_PARTS)
        b_out, top, total = _token_part(
            b_q, b_q2, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new,
            p_k_sel, p_v_sel, p_k_win, p_v_win, p_ids, p_table, i_seg, i_b, i_g, t, part,
            in_win, False, part == 0, 0, num_of, WIN, scale_log2, s_table, s_kb, s_kh, s_vb, s_vh,
            s_sel, s_head_sel, DK, DV, DK1, DK2, DV_PAD, L_SEL, N_SEL, NUM_FIRST, NUM_LOCAL,
            PER_PAGE, PER_PART, WIN_PART, STAGES, False, True, False, UPCAST, BM, TOKENS,
        )  # fmt: skip
        at = i_seg * NUM_PARTS + CMP_PARTS + a
        _store_part(p_part, p_part_lse, b_out, top, total, at, G, DV, DV_PAD, BM)


@triton.jit
def _free_phase(
    b_q, b_q2, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new, p_k_sel, p_v_sel,
    p_k_win, p_v_win, p_ids, p_table, p_part, p_part_lse, p_scores,
    p_ends, target, i_seg, i_b, i_g, i_p, t, num_cmp,
    G, NUM_PARTS, CMP_PARTS, AHEAD_PARTS, FREE_PARTS, WIN, scale_log2,
    s_table, s_scores, s_kb, s_kh, s_vb, s_vh, s_sel, s_head_sel,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr,
    N_SEL_PAD: tl.constexpr, NUM_FIRST: tl.constexpr, NUM_LOCAL: tl.constexpr,
    LEVELS: tl.constexpr, PER_PAGE: tl.constexpr, PER_PART: tl.constexpr, WIN_PART: tl.constexpr,
    NB: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, TOKENS: tl.constexpr, FIRST_FREE: tl.constexpr, NUM: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """Choice, and parts of the chosen blocks; program FIRST_FREE has the first part."""
    first = (i_p + NUM - FIRST_FREE) % NUM
    if first < FREE_PARTS:
        # One block to a part: its id needs no way through memory.
        ONE: tl.constexpr = PER_PART == 1
        block = 0
        if PHASE == 0:
            _await(p_ends + 1, target)
        places = _choose(
            p_scores + i_seg * LEVELS * s_scores, p_ids, t // L_SEL, num_cmp, s_scores,
            (first == 0) | (not ONE), L_SEL // STEP, N_SEL, N_SEL_PAD, NUM_FIRST, NUM_LOCAL,
            LEVELS, NB,
        )  # fmt: skip
        if not ONE:
            tl.debug_barrier()  # the ids are read by other threads than those that wrote them
        num_of = _counts(t, True, WIN, L_SEL, N_SEL, NUM_FIRST + NUM_LOCAL)
        for part in tl.range(first, FREE_PARTS, NUM, num_stages=1):
            if ONE:
                mine = places == NUM_FIRST + part + 1
                block = tl.sum(tl.where(mine, tl.arange(0, NB), 0), axis=0)
            b_out, top, total = _token_part(
                b_q, b_q2, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new,
                p_k_sel, p_v_sel, p_k_win, p_v_win, p_ids, p_table, i_seg, i_b, i_g, t, part,
                False, True, False, block, num_of, WIN, scale_log2,
                s_table, s_kb, s_kh, s_vb, s_vh, s_sel, s_head_sel,
                DK, DV, DK1, DK2, DV_PAD, L_SEL, N_SEL, NUM_FIRST, NUM_LOCAL,
                PER_PAGE, PER_PART, WIN_PART, STAGES, False, False, ONE, UPCAST, BM, TOKENS,
            )  # fmt: skip
            at = i_seg * NUM_PARTS + CMP_PARTS + AHEAD_PARTS + part
            _store_part(p_part, p_part_lse, b_out, top, total, at, G, DV, DV_PAD, BM)


@triton.jit
def _count_reads(
    p_reads, p_last_reads, i_seg, t, num_cmp, WIN, L_SEL: tl.constexpr, N_SEL: tl.constexpr
):  # fmt: skip
    """Tokens that this step reads: compressed, selected, window."""
    o_c = tl.arange(0, 4)
    # All blocks are read whole but the current one, which is always among them.
    num_sel = (tl.minimum(t // L_SEL + 1, N_SEL) - 1) * L_SEL + t % L_SEL + 1
    num = tl.where(o_c == 0, num_cmp, tl.where(o_c == 1, num_sel, tl.minimum(t + 1, WIN)))
    mask, p_sums = o_c < 3, p_reads + i_seg * 3 + o_c
    b_sums = tl.load(p_sums, mask=mask, other=0, cache_modifier=".cg")
    tl.store(p_last_reads + i_seg * 3 + o_c, num.to(tl.int64), mask=mask)
    tl.store(p_sums, b_sums + num, mask=mask)


@triton.jit
def _merge_phase(
    p_part, p_part_lse, p_gates, p_out, p_ends, target, i_seg, i_b, i_g, i_p, t,
    G, NUM_PARTS, CMP_PARTS, WIN_PARTS, AHEAD_PARTS, NUM_CMP, WIN, s_gb, s_gh, s_ob, s_oh,
    DV: tl.constexpr, DV_PAD: tl.constexpr, L: tl.constexpr, STEP: tl.constexpr,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, FORCED: tl.constexpr, PER_PART: tl.constexpr,
    CMP_PART: tl.constexpr, WIN_PART: tl.constexpr, CMP_PADDED: tl.constexpr,
    PARTS: tl.constexpr, NUM: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """The gated sum over the branches, one head at a time, by the segment's programs in turn.

    The compressed branch is summed first, while others still read the chosen blocks.
    """
    num_cmp, num_win, num_forced, num_free = _num_parts(
        t, NUM_CMP, WIN, L, STEP, L_SEL, N_SEL, FORCED, PER_PART, CMP_PART, WIN_PART
    )
    o_dv, first = tl.arange(0, DV_PAD), i_seg * NUM_PARTS
    for i_h in tl.range(i_p, G, NUM, num_stages=1):
        o_h = i_h + tl.arange(0, 1)
        m_h = o_h < G
        p_gate = p_gates + i_b * s_gb + (i_g * G + o_h) * s_gh
        gate_cmp, gate_sel, gate_win = _gates(p_gate, m_h)
        if PHASE == 0:
            _await(p_ends + 1, target)
            _await(p_ends + 3, target // NUM)
        b_sum = _sum_compressed(
            p_part, p_part_lse, gate_cmp, first, o_h, m_h, num_cmp, G, DV, DV_PAD, CMP_PADDED
        )
        if PHASE == 0:
            _await(p_ends + 2, target)
        b_sum += _sum_tokens(
            p_part, p_part_lse, gate_sel, gate_win, first + CMP_PARTS, o_h, m_h,
            num_win, num_forced, num_free, G, WIN_PARTS, AHEAD_PARTS, DV, DV_PAD, PARTS,
        )  # fmt: skip
        # out = sum over the branches: [1, DV], rounded once.
        p_rows = p_out + i_b * s_ob + (i_g * G + o_h)[:, None] * s_oh + o_dv[None, :]
        m_out = m_h[:, None] & (o_dv < DV)[None, :]
        tl.store(p_rows, b_sum.to(p_out.dtype.element_ty), mask=m_out)

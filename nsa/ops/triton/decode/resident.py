"""A decode step in one launch whose programs are all on the GPU at once and wait for each other.

A launch costs about 3 us even if it starts early; a barrier in memory costs about one. `NUM`
programs of a segment do what the kernels of attend.py, score.py and merge.py do, in four phases:

1. parts of the compressed branch, window and forced blocks
2. scores of the blocks
3. choice, and parts of the chosen blocks
4. the gated sum of all parts, some heads for each program

A segment has a counter for the end of each phase but the last. They only grow: a program that has
arrived at none yet reads the first one, and knows from it how many steps there were. So nothing is
reset between steps, and a captured graph can be replayed. The launch is cooperative, which makes
sure that no program waits for one that never starts.

PHASE 0 is all of it. In the interpreter, which runs one program after another, each phase from 1 to
4 is a launch. Names as in attend.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.decode.merge import _gates, _num_parts, _sum_compressed, _sum_tokens
from nsa.ops.triton.decode.parts import (
    AVERAGED,
    _compressed_part,
    _counts,
    _hold_raw,
    _query,
    _store_part,
    _token_part,
)
from nsa.ops.triton.decode.score import (
    _choose,
    _load_logits,
    _lse_of_parts,
    _score_logits,
)
from nsa.ops.triton.tile import _let_next_come, _wait

NUM_COUNTERS = 3
"""Counters of a segment, int64: the ends of the phases 1 to 3."""
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
    p_logits, p_part, p_part_lse, p_lengths, p_current, p_table,
    p_scores, p_selection, p_reads, p_last_reads, p_gates, p_out, p_counters,
    Hkv, G, NUM_CMP, NUM_PARTS, CMP_PARTS, WIN_PARTS, AHEAD_PARTS, FREE_PARTS, NUM_BLOCKS,
    MAX_LEN, WIN, scale_log2,
    s_table, s_logits, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh,
    s_cmp, s_sel, s_head_cmp, s_head_sel, s_gb, s_gh, s_ob, s_oh,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr,
    PAGED: tl.constexpr, MADE: tl.constexpr, CMP_PART: tl.constexpr,
    LEVELS: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, NUM_FIRST: tl.constexpr,
    NUM_LOCAL: tl.constexpr, PER_PART: tl.constexpr, WIN_PART: tl.constexpr,
    NB: tl.constexpr, TOKENS: tl.constexpr, STRIDES_PAD: tl.constexpr,
    SCORED: tl.constexpr, CMP_PADDED: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, NUM: tl.constexpr, FIRST_AHEAD: tl.constexpr,
    ADVANCE: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """A decode step, by NUM programs for each segment; grid (NUM, segments).

    Program p has the part p of the compressed branch, and scores blocks; FIRST_AHEAD has the first
    part that needs no score, the last program the first part that needs one.
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
    # Few programs, each with few tokens: the one that needs the raw tokens would be the last.
    HELD: tl.constexpr = not MADE and L <= AVERAGED and DK2 == 0 and PHASE <= 1
    b_raw_k, b_new_k, b_raw_v, b_new_v = 0, 0, 0, 0
    if HELD:
        new_k, new_v = i_b * s_kb + i_g * s_kh, i_b * s_vb + i_g * s_vh
        b_raw_k, b_new_k = _hold_raw(p_k_cmp_new + new_k, p_k_raw, i_seg, DK, DK1, L)
        b_raw_v, b_new_v = _hold_raw(p_v_cmp_new + new_v, p_v_raw, i_seg, DV, DV_PAD, L)
    if PHASE <= 1:
        tl.store(p_current + i_b, t, mask=i_p == 0)
    if t >= MAX_LEN:
        return
    num_cmp = tl.minimum(tl.maximum((t + 1 - L + STEP) // STEP, 0), NUM_CMP)
    PER_PAGE: tl.constexpr = L_SEL if PAGED else 0
    p_ids = p_selection + i_seg * N_SEL
    if PHASE <= 1:
        # Program p has the compressed part p. Part 0 always runs: it stores the new token.
        if (i_p * CMP_PART < num_cmp) | (i_p == 0):
            _compressed_part(
                b_q, b_q2, b_raw_k, b_new_k, b_raw_v, b_new_v,
                p_k_cmp_new, p_v_cmp_new, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new,
                p_k_made, p_v_made, p_k_cmp, p_v_cmp, p_k_sel, p_v_sel,
                p_k_win, p_v_win, p_k_raw, p_v_raw, p_logits, p_logits, p_part, p_part_lse,
                p_table, i_seg, i_b, i_g, i_p, t, num_cmp, G, NUM_CMP, NUM_PARTS, WIN, scale_log2,
                s_table, s_logits, s_kb, s_kh, s_vb, s_vh, s_cmp, s_sel, s_head_cmp, s_head_sel,
                DK, DV, DK1, DK2, DV_PAD, L, STEP, L_SEL, PAGED, MADE, CMP_PART, LEVELS, False,
                UPCAST, HELD, BM, BN,
            )  # fmt: skip
        if PHASE == 0:
            _arrive(p_ends)
    if PHASE == 0 or PHASE == 2:
        _score_phase(
            p_logits, p_part_lse, p_scores, p_ends, target, i_seg, i_p, t, num_cmp,
            G, NUM_PARTS, NUM_BLOCKS, s_logits,
            L, STEP, L_SEL, CMP_PART, STRIDES_PAD, LEVELS, BM, SCORED, CMP_PADDED, NUM, PHASE,
        )  # fmt: skip
    if PHASE <= 1:
        _ahead_phase(
            b_q, b_q2, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new, p_k_sel, p_v_sel,
            p_k_win, p_v_win, p_ids, p_table, p_part, p_part_lse, i_seg, i_b, i_g, i_p, t,
            G, NUM_PARTS, CMP_PARTS, WIN_PARTS, AHEAD_PARTS, WIN, scale_log2,
            s_table, s_kb, s_kh, s_vb, s_vh, s_sel, s_head_sel,
            DK, DV, DK1, DK2, DV_PAD, L_SEL, N_SEL, NUM_FIRST, NUM_LOCAL, PER_PAGE, PER_PART,
            WIN_PART, STAGES, UPCAST, BM, TOKENS, FIRST_AHEAD, NUM,
        )  # fmt: skip
    if PHASE == 0 or PHASE == 3:
        _free_phase(
            b_q, b_q2, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new, p_k_sel, p_v_sel,
            p_k_win, p_v_win, p_ids, p_table, p_part, p_part_lse, p_scores, p_reads, p_last_reads,
            p_ends, target, i_seg, i_b, i_g, i_p, t, num_cmp,
            G, NUM_PARTS, CMP_PARTS, AHEAD_PARTS, FREE_PARTS, NUM_BLOCKS, WIN, scale_log2,
            s_table, s_kb, s_kh, s_vb, s_vh, s_sel, s_head_sel,
            DK, DV, DK1, DK2, DV_PAD, L_SEL, N_SEL, N_SEL_PAD, NUM_FIRST, NUM_LOCAL, LEVELS,
            PER_PAGE, PER_PART, WIN_PART, NB, STAGES, UPCAST, BM, TOKENS, NUM, PHASE,
        )  # fmt: skip
    if PHASE == 0:
        _arrive(p_ends + 2)
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
def _free_phase(
    b_q, b_q2, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new, p_k_sel, p_v_sel,
    p_k_win, p_v_win, p_ids, p_table, p_part, p_part_lse, p_scores, p_reads, p_last_reads,
    p_ends, target, i_seg, i_b, i_g, i_p, t, num_cmp,
    G, NUM_PARTS, CMP_PARTS, AHEAD_PARTS, FREE_PARTS, NUM_BLOCKS, WIN, scale_log2,
    s_table, s_kb, s_kh, s_vb, s_vh, s_sel, s_head_sel,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr,
    NUM_FIRST: tl.constexpr, NUM_LOCAL: tl.constexpr, LEVELS: tl.constexpr,
    PER_PAGE: tl.constexpr, PER_PART: tl.constexpr, WIN_PART: tl.constexpr,
    NB: tl.constexpr, STAGES: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, TOKENS: tl.constexpr, NUM: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Choice, and parts of the chosen blocks; the segment's last program has the first part."""
    first = NUM - 1 - i_p
    if first < FREE_PARTS:
        # One block to a part: its id needs no way through memory.
        ONE: tl.constexpr = PER_PART == 1
        block = 0
        if PHASE == 0:
            _await(p_ends + 1, target)
        places = _choose(
            p_scores + i_seg * LEVELS * NUM_BLOCKS, p_ids, t // L_SEL, NUM_BLOCKS,
            N_SEL, N_SEL_PAD, NUM_FIRST, NUM_LOCAL, LEVELS, NB,
        )  # fmt: skip
        if not ONE:
            tl.debug_barrier()  # the ids are read by other threads than those that wrote them
        num_of = _counts(t, True, WIN, L_SEL, N_SEL, NUM_FIRST + NUM_LOCAL)
        _count_reads(p_reads, p_last_reads, i_seg, t, num_cmp, first, WIN, L_SEL, N_SEL)
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
    p_reads, p_last_reads, i_seg, t, num_cmp, part, WIN, L_SEL: tl.constexpr, N_SEL: tl.constexpr
):  # fmt: skip
    """Tokens that this step reads, counted by part 0: compressed, selected, window."""
    o_c = tl.arange(0, 4)
    # All blocks are read whole but the current one, which is always among them.
    num_sel = (tl.minimum(t // L_SEL + 1, N_SEL) - 1) * L_SEL + t % L_SEL + 1
    num = tl.where(o_c == 0, num_cmp, tl.where(o_c == 1, num_sel, tl.minimum(t + 1, WIN)))
    mask, p_sums = (o_c < 3) & (part == 0), p_reads + i_seg * 3 + o_c
    b_sums = tl.load(p_sums, mask=mask, other=0, cache_modifier=".cg")
    tl.store(p_last_reads + i_seg * 3 + o_c, num.to(tl.int64), mask=mask)
    tl.store(p_sums, b_sums + num, mask=mask)


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
def _score_phase(
    p_logits, p_part_lse, p_scores, p_ends, target, i_seg, i_p, t, num_cmp,
    G, NUM_PARTS, NUM_BLOCKS, s_logits,
    L: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr, CMP_PART: tl.constexpr,
    STRIDES_PAD: tl.constexpr, LEVELS: tl.constexpr, BM: tl.constexpr, SCORED: tl.constexpr,
    CMP_PADDED: tl.constexpr, NUM: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Scores of the segment's blocks, SCORED at a time, by all its programs in turn."""
    num_tiles = tl.cdiv(t // L_SEL + 1, SCORED)
    STRIDES: tl.constexpr = L_SEL // STEP
    # Where a program scores its own part, it loads the logits before the wait.
    OWN: tl.constexpr = SCORED * STRIDES == CMP_PART
    p_rows, p_own = p_logits + i_seg * G * s_logits, p_scores + i_seg * LEVELS * NUM_BLOCKS
    if i_p < num_tiles:
        if OWN:
            b_s = _load_logits(p_rows, i_p * SCORED, G, s_logits, STRIDES, STRIDES_PAD, BM, SCORED)
        if PHASE == 0:
            _await(p_ends, target)
        num_parts = tl.cdiv(num_cmp, CMP_PART)
        lse = _lse_of_parts(p_part_lse + i_seg * NUM_PARTS * G, num_parts, G, BM, CMP_PADDED)
        if OWN:
            _score_logits(
                b_s, p_own, lse, i_p * SCORED, num_cmp, G, NUM_BLOCKS,
                L, STEP, L_SEL, STRIDES_PAD, LEVELS, BM, SCORED,
            )  # fmt: skip
        for i in tl.range(i_p + (NUM if OWN else 0), num_tiles, NUM, num_stages=1):
            b_s = _load_logits(p_rows, i * SCORED, G, s_logits, STRIDES, STRIDES_PAD, BM, SCORED)
            _score_logits(
                b_s, p_own, lse, i * SCORED, num_cmp, G, NUM_BLOCKS,
                L, STEP, L_SEL, STRIDES_PAD, LEVELS, BM, SCORED,
            )  # fmt: skip
    if PHASE == 0:
        _arrive(p_ends + 1)


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
            _await(p_ends, target)
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

"""Decode attention of one new token per sequence: the compressed branch, then window and blocks.

Names as in tile.py; a segment is a sequence and a KV head. The length of a sequence is read on the
device, so that a captured CUDA graph can be replayed as it grows. Work is split over the keys into
parts of fixed size, merged in the order of their index: results repeat bit for bit. A part holds
its output [G, DV] and its log-sum-exp (base 2). The parts of a segment are contiguous: compressed
branch, window, forced blocks, other blocks.

The caches are [B, Hkv, tokens, D]; the window's is a ring. With a page table, the selected and the
compressed cache are [pages, Hkv, tokens of a page, D], and the table [B, pages of a sequence] holds
the page of each block.

EARLY (from sm_90 on): programmatic dependent launch. A kernel may start while the previous one
ends, and waits where it begins to read that one's results. What is older is read before the wait,
through the L2 cache (.cg), since it is the wait that invalidates the L1 cache. The window and the
forced blocks need no score: they are read while the others are being scored or, BESIDE, already
beside the end of the compressed branch. That branch stores the new token, so here it is taken from
its source and never from the cache.

WHOLE: a sequence has at most n_sel blocks, so every block is read. There is nothing to score, no
block counts as forced, and attend_tokens follows the compressed branch at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.decode.parts import _compressed_part, _counts, _query, _store_part, _token_part
from nsa.ops.triton.decode.score import _choose
from nsa.ops.triton.tile import _let_next_come, _wait


@triton.jit
def attend_compressed(
    p_q, p_k_cmp_new, p_v_cmp_new, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new,
    p_k_made, p_v_made, p_k_cmp, p_v_cmp, p_k_sel, p_v_sel, p_k_win, p_v_win, p_k_raw, p_v_raw,
    p_logits, p_tops, p_part, p_part_lse, p_lengths, p_current, p_table,
    Hkv, G, NUM_CMP, NUM_PARTS, MAX_LEN, WIN, scale_log2,
    s_table, s_logits, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh,
    s_cmp, s_sel, s_head_cmp, s_head_sel,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr,
    PAGED: tl.constexpr, MADE: tl.constexpr, CMP_PART: tl.constexpr,
    LEVELS: tl.constexpr, SUMS: tl.constexpr, EARLY: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A part of the compressed branch; keeps its logits [segments, G, tokens] for the scores.

    SUMS: keeps sums by block instead of the logits (_store_sums).

    The query sees every compressed token, so only their count is needed. The one that the new token
    completes is not in the cache yet: the part that needs it computes and stores it. The first part
    stores the new token. s_cmp and s_sel are the tokens of all heads of a page, or of a sequence,
    and s_head_* those of a head: times D, they keep the alignment of a row.
    """
    i_seg = tl.program_id(1).to(tl.int64)
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    part = tl.program_id(0)
    _wait(EARLY)
    _let_next_come(EARLY)
    # t: position of the new token. p_current keeps it for merge_parts, which advances p_lengths.
    t = tl.load(p_lengths + i_b)
    stores = part == 0
    tl.store(p_current + i_b, t, mask=stores)
    # A full sequence, or a place without one (paged.py), is skipped.
    if t >= MAX_LEN:
        return
    # Compressed tokens with the new one, and the range of this part. Part 0 always runs: it
    # stores the new token.
    num_cmp = tl.minimum(tl.maximum((t + 1 - L + STEP) // STEP, 0), NUM_CMP)
    first = part * CMP_PART
    if (first >= num_cmp) & (part > 0):
        return
    b_q = _query(p_q, i_b, i_g, G, s_qb, s_qh, DK, DK1, 0, BM)
    b_q2 = b_q
    if DK2 > 0:
        b_q2 = _query(p_q, i_b, i_g, G, s_qb, s_qh, DK, DK2, DK1, BM)
    _compressed_part(
        b_q, b_q2,
        p_k_cmp_new, p_v_cmp_new, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new,
        p_k_made, p_v_made, p_k_cmp, p_v_cmp, p_k_sel, p_v_sel, p_k_win, p_v_win, p_k_raw, p_v_raw,
        p_logits, p_tops, p_part, p_part_lse, p_table, i_seg, i_b, i_g, part, t, num_cmp,
        G, NUM_CMP, NUM_PARTS, WIN, scale_log2,
        s_table, s_logits, s_kb, s_kh, s_vb, s_vh, s_cmp, s_sel, s_head_cmp, s_head_sel,
        DK, DV, DK1, DK2, DV_PAD, L, STEP, L_SEL, PAGED, MADE, CMP_PART, LEVELS, SUMS, UPCAST,
        BM, BN,
    )  # fmt: skip


@triton.jit
def attend_tokens(
    p_q, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new, p_k_sel, p_v_sel, p_k_win, p_v_win,
    p_scores, p_part, p_part_lse, p_selection, p_reads, p_last_reads, p_lengths, p_table,
    Hkv, G, NUM_PARTS, CMP_PARTS, WIN_PARTS, AHEAD_PARTS, MAX_LEN, WIN, scale_log2,
    s_table, s_scores, s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_sel, s_head_sel,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr,
    N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, NUM_FIRST: tl.constexpr,
    NUM_LOCAL: tl.constexpr, PER_PAGE: tl.constexpr, PER_PART: tl.constexpr,
    WIN_PART: tl.constexpr, STAGES: tl.constexpr, LEVELS: tl.constexpr,
    NB: tl.constexpr, WHOLE: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
    UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A part of the window, or PER_PART of the forced or of the other blocks of a segment.

    Every part with other blocks makes the choice by itself; all of a segment choose the same. The
    first WIN_PARTS of the grid are the window's; the first AHEAD_PARTS need no score and, AHEAD, do
    not wait. The first part of the window and of the forced blocks takes the new token from its
    source; no part reads it from the cache. Reads are counted here and nowhere else: tokens of the
    compressed, selected and window branch.
    """
    i_seg = tl.program_id(0).to(tl.int64)
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    # Which kind of part this is, and its index among its kind. Segments are the fast grid index.
    in_win = tl.program_id(1) < WIN_PARTS
    in_free = tl.program_id(1) >= AHEAD_PARTS
    part = tl.program_id(1) - tl.where(in_win, 0, tl.where(in_free, AHEAD_PARTS, WIN_PARTS))
    t = tl.load(p_lengths + i_b, cache_modifier=".cg")
    length = t + 1
    b_q = _query(p_q, i_b, i_g, G, s_qb, s_qh, DK, DK1, 0, BM)
    b_q2 = b_q
    if DK2 > 0:
        b_q2 = _query(p_q, i_b, i_g, G, s_qb, s_qh, DK, DK2, DK1, BM)
    # Parts that need no score read older data only and do not wait (module docstring). WHOLE: the
    # other blocks wait once they are read. merge_parts reads what the compressed branch wrote
    # before its own wait, so it may start only after such a part has waited.
    if not AHEAD:
        _wait(EARLY)
    elif WHOLE:
        if in_free & (length > MAX_LEN):
            _wait(EARLY)
    elif in_free:
        _wait(EARLY)
    if not WHOLE and in_free:
        _let_next_come(EARLY)
    if length > MAX_LEN:
        return
    num_of = _counts(t, in_free, WIN, L_SEL, N_SEL, NUM_FIRST + NUM_LOCAL)
    num_win, current = num_of[0], num_of[1]
    p_ids = p_selection + i_seg * N_SEL
    counts = (part == 0) & in_free
    num_cmp = tl.maximum((length - L + STEP) // STEP, 0)
    # Every free part repeats the choice and stores the same ids: cheaper than a ticket, for which
    # one program would read in sequence what all read at once (docs/log/decode.md).
    if not WHOLE and in_free:
        _choose(
            p_scores + i_seg * LEVELS * s_scores, p_ids, current, num_cmp, s_scores, True,
            L_SEL // STEP, N_SEL, N_SEL_PAD, NUM_FIRST, NUM_LOCAL, LEVELS, NB,
        )  # fmt: skip
        tl.debug_barrier()  # the ids are read by other threads than the ones that wrote them
    o_s, o_c = tl.arange(0, N_SEL_PAD), tl.arange(0, 4)
    p_sums, m_c = p_reads + i_seg * 3 + o_c, (o_c < 3) & counts
    if WHOLE:
        ids = tl.where(o_s <= current, o_s, -1)
        tl.store(p_ids + o_s, ids, mask=(o_s < N_SEL) & counts)
    else:
        ids = tl.load(p_ids + o_s, mask=(o_s < N_SEL) & counts, other=-1)
    b_sums = tl.load(p_sums, mask=m_c, other=0, cache_modifier=".cg")
    # The first part of the window and of the forced blocks has the new token.
    has_new = part == 0
    if not WHOLE:
        has_new = has_new & (tl.program_id(1) < AHEAD_PARTS)
    b_out, top, total = _token_part(
        b_q, b_q2, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new,
        p_k_sel, p_v_sel, p_k_win, p_v_win, p_ids, p_table, i_seg, i_b, i_g, t, part,
        in_win, in_free, has_new, 0, num_of, WIN, scale_log2, s_table, s_kb, s_kh, s_vb, s_vh,
        s_sel, s_head_sel, DK, DV, DK1, DK2, DV_PAD, L_SEL, N_SEL, NUM_FIRST, NUM_LOCAL,
        PER_PAGE, PER_PART, WIN_PART, STAGES, WHOLE, True, False, UPCAST, BM, BN,
    )  # fmt: skip
    if WHOLE and in_free:
        _wait(EARLY and AHEAD)
        _let_next_come(EARLY)
    part_at = i_seg * NUM_PARTS + CMP_PARTS + tl.program_id(1)
    _store_part(p_part, p_part_lse, b_out, top, total, part_at, G, DV, DV_PAD, BM)
    # Count what this step read: one part per segment adds to the running counters.
    num_sel = tl.sum(tl.where(ids >= 0, tl.minimum(length - ids * L_SEL, L_SEL), 0), axis=0)
    num = tl.where(o_c == 0, num_cmp, tl.where(o_c == 1, num_sel, num_win))
    tl.store(p_last_reads + i_seg * 3 + o_c, num.to(tl.int64), mask=m_c)
    tl.store(p_sums, b_sums + num, mask=m_c)

"""Parts of the branches of a decode step: what one program reads and attends to.

attend.py has a launch for the compressed branch and one for window and blocks, resident.py one for
all of it. Names as in attend.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.ops.triton.decode.score import _store_sums
from nsa.ops.triton.tile import _dot, _dot_add

AVERAGED = tl.constexpr(32)
"""Raw tokens that are averaged at a time."""


@triton.jit
def _compressed_part(
    b_q, b_q2,
    p_k_cmp_new, p_v_cmp_new, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new,
    p_k_made, p_v_made, p_k_cmp, p_v_cmp, p_k_sel, p_v_sel, p_k_win, p_v_win, p_k_raw, p_v_raw,
    p_logits, p_tops, p_part, p_part_lse, p_table, i_seg, i_b, i_g, part, t, num_cmp,
    G, NUM_CMP, NUM_PARTS, WIN, scale_log2,
    s_table, s_logits, s_kb, s_kh, s_vb, s_vh, s_cmp, s_sel, s_head_cmp, s_head_sel,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L: tl.constexpr, STEP: tl.constexpr, L_SEL: tl.constexpr,
    PAGED: tl.constexpr, MADE: tl.constexpr, CMP_PART: tl.constexpr,
    LEVELS: tl.constexpr, SUMS: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attend to part `part` of num_cmp compressed tokens; the first part stores the new token."""
    stores = part == 0
    first = part * CMP_PART
    stop = tl.minimum(first + CMP_PART, num_cmp)
    # Index of the compressed token that ends at t; -1: none does.
    completes = (t + 1 >= L) & ((t + 1 - L) % STEP == 0)
    newest = tl.where(completes, num_cmp - 1, -1)
    new_k, new_v = i_b * s_kb + i_g * s_kh, i_b * s_vb + i_g * s_vh
    per_page: tl.constexpr = L_SEL // STEP if PAGED else 0
    o_h, o_n = tl.arange(0, BM), tl.arange(0, BN)
    m_h = o_h < G
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    b_out = tl.zeros([BM, DV_PAD], tl.float32)
    # The new token is loaded here and stored at the end: no instruction waits for it in between.
    DK_PAD: tl.constexpr = DK1 if DK2 == 0 else 2 * DK1
    news = _new_heads(
        p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new, p_k_cmp_new, p_v_cmp_new,
        new_k, new_v, stores, DK, DV, DK_PAD, DV_PAD,
    )  # fmt: skip
    p_k_cmp += i_g * s_head_cmp * DK
    p_v_cmp += i_g * s_head_cmp * DV
    # The completed token opens the online softmax: top = its logit, total = 1, out = its value.
    if (newest >= first) & (newest < stop):
        p_k = p_k_cmp + _base(p_table, i_b, newest, s_cmp, s_table, DK, per_page)
        p_v = p_v_cmp + _base(p_table, i_b, newest, s_cmp, s_table, DV, per_page)
        b_k = _completed(p_k_cmp_new + new_k, p_k_made, p_k_raw, i_seg, t, 0, DK, DK1, L, MADE)
        b_v = _completed(p_v_cmp_new + new_v, p_v_made, p_v_raw, i_seg, t, 0, DV, DV_PAD, L, MADE)
        # Its logit [BM]: a sum over the head, since a product needs 16 keys or more.
        top = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32)[None, :], axis=1)
        _put(p_k, 0, b_k, True, DK, DK1)
        _put(p_v, 0, b_v, True, DV, DV_PAD)
        if DK2 > 0:
            b_k2 = _completed(
                p_k_cmp_new + new_k, p_k_made, p_k_raw, i_seg, t, DK1, DK, DK2, L, MADE
            )
            top += tl.sum(b_q2.to(tl.float32) * b_k2.to(tl.float32)[None, :], axis=1)
            _put(p_k, DK1, b_k2, True, DK - DK1, DK2)
        top = top * scale_log2
        total += 1.0
        b_out += b_v.to(tl.float32)[None, :]
    # Kept, because the loop masks this token out: -inf where it is not in this part.
    logit = top
    if not PAGED:
        p_k_cmp += i_b * s_cmp * DK
        p_v_cmp += i_b * s_cmp * DV
    # Online softmax over the cached tokens of the part, BN at a time.
    for k0 in range(first, stop, BN):
        o_k = k0 + o_n
        m_k = (o_k < stop) & (o_k != newest)
        if PAGED:
            p_pages = p_table + i_b * s_table + o_k // per_page
            page = tl.load(p_pages, mask=m_k, other=0).to(tl.int64)
            row = page * s_cmp + o_k % per_page
            base_k, base_v = row * DK, row * DV
        else:
            base_k, base_v = o_k * DK, o_k * DV
        b_out, top, total, b_s, b_p = _tile(
            b_q, b_q2, b_out, top, total, p_k_cmp, p_v_cmp, base_k, base_v, m_k, scale_log2,
            DK, DV, DK1, DK2, DV_PAD, UPCAST,
        )  # fmt: skip
        if SUMS:
            b_p = tl.where((o_k == newest)[None, :], tl.math.exp2(logit - top)[:, None], b_p)
            tile = i_seg * tl.cdiv(NUM_CMP, BN) + k0 // BN
            _store_sums(p_logits, p_tops, b_p, top, tile, m_h, G, L, STEP, L_SEL, LEVELS, BM, BN)
        else:
            # Whole tiles, without a mask by token: stores are then 16 bytes wide. What lies beyond
            # the part's end is never read.
            b_s = tl.where((o_k == newest)[None, :], logit[:, None], b_s)
            p_rows = p_logits + (i_seg * G + o_h)[:, None] * s_logits + o_k[None, :]
            tl.store(p_rows, b_s, mask=m_h[:, None])
    _store_part(p_part, p_part_lse, b_out, top, total, i_seg * NUM_PARTS + part, G, DV, DV_PAD, BM)
    _append(
        news, p_k_sel, p_v_sel, p_k_win, p_v_win, p_k_raw, p_v_raw, p_table, i_seg, i_b, i_g, t,
        stores, WIN, s_table, s_sel, s_head_sel, DK, DV, DK_PAD, DV_PAD, L, L_SEL, PAGED,
    )  # fmt: skip


@triton.jit
def _new_heads(
    p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new, p_k_cmp_new, p_v_cmp_new,
    new_k, new_v, is_mine,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
):  # fmt: skip
    """k and v of the new token for selected cache, window and raw ring: a head each."""
    return (
        _new(p_k_sel_new + new_k, is_mine, DK, DK_PAD),
        _new(p_v_sel_new + new_v, is_mine, DV, DV_PAD),
        _new(p_k_win_new + new_k, is_mine, DK, DK_PAD),
        _new(p_v_win_new + new_v, is_mine, DV, DV_PAD),
        _new(p_k_cmp_new + new_k, is_mine, DK, DK_PAD),
        _new(p_v_cmp_new + new_v, is_mine, DV, DV_PAD),
    )


@triton.jit
def _append(
    news, p_k_sel, p_v_sel, p_k_win, p_v_win, p_k_raw, p_v_raw, p_table, i_seg, i_b, i_g, t,
    is_mine, WIN, s_table, s_sel, s_head_sel,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    L: tl.constexpr, L_SEL: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Store the new token (_new_heads): selected cache at t, the rings at t % their size."""
    b_k_sel, b_v_sel, b_k_win, b_v_win, b_k_raw, b_v_raw = news
    at = _base(p_table, i_b, t, s_sel, s_table, DK, L_SEL if PAGED else 0)
    _put(p_k_sel, at + i_g * s_head_sel * DK, b_k_sel, is_mine, DK, DK_PAD)
    at = _base(p_table, i_b, t, s_sel, s_table, DV, L_SEL if PAGED else 0)
    _put(p_v_sel, at + i_g * s_head_sel * DV, b_v_sel, is_mine, DV, DV_PAD)
    _put(p_k_win, (i_seg * WIN + t % WIN) * DK, b_k_win, is_mine, DK, DK_PAD)
    _put(p_v_win, (i_seg * WIN + t % WIN) * DV, b_v_win, is_mine, DV, DV_PAD)
    _put(p_k_raw, (i_seg * L + t % L) * DK, b_k_raw, is_mine, DK, DK_PAD)
    _put(p_v_raw, (i_seg * L + t % L) * DV, b_v_raw, is_mine, DV, DV_PAD)


@triton.jit
def _token_part(
    b_q, b_q2, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new,
    p_k_sel, p_v_sel, p_k_win, p_v_win, p_ids, p_table, i_seg, i_b, i_g, t, part,
    in_win, in_free, has_new, block_id, counts, WIN, scale_log2, s_table, s_kb, s_kh, s_vb, s_vh,
    s_sel, s_head_sel,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L_SEL: tl.constexpr, N_SEL: tl.constexpr, NUM_FIRST: tl.constexpr,
    NUM_LOCAL: tl.constexpr, PER_PAGE: tl.constexpr, PER_PART: tl.constexpr,
    WIN_PART: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, NEW: tl.constexpr,
    KNOWN: tl.constexpr, UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Part `part` of the window, of the forced blocks or, in_free, of the blocks in p_ids.

    Returns its output before the division [BM, DV_PAD], its maxima and its sums [BM]. NEW: some
    part of the call may have the new token. KNOWN: the part is the block block_id. `counts`: of
    _counts.
    """
    num_win, current, num_forced, num_blocks = counts
    o_n = tl.arange(0, BN)
    # The new token opens the online softmax of its part: top = logit, total = 1, out = v.
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    b_out = tl.zeros([BM, DV_PAD], tl.float32)
    if NEW:
        p_k_new = tl.where(in_win, p_k_win_new, p_k_sel_new) + i_b * s_kb + i_g * s_kh
        p_v_new = tl.where(in_win, p_v_win_new, p_v_sel_new) + i_b * s_vb + i_g * s_vh
        top = tl.sum(b_q.to(tl.float32) * _new_row(p_k_new, has_new, 0, DK, DK1), axis=1)
        if DK2 > 0:
            top += tl.sum(b_q2.to(tl.float32) * _new_row(p_k_new, has_new, DK1, DK, DK2), axis=1)
        top = tl.where(has_new, top * scale_log2, float("-inf"))
        total = tl.where(has_new, tl.full([BM], 1.0, tl.float32), 0.0)
        b_out = tl.zeros([BM, DV_PAD], tl.float32) + _new_row(p_v_new, has_new, 0, DV, DV_PAD)
    # Its slot in the cache is masked below: it may be written at the same time.
    newest = tl.where(in_win, t % WIN, t)
    # Base pointers of the segment in the selected cache, or in the window's ring.
    own = 0 if PER_PAGE > 0 else i_b
    p_k = p_k_sel + (own * s_sel + i_g * s_head_sel) * DK
    p_v = p_v_sel + (own * s_sel + i_g * s_head_sel) * DV
    p_k = tl.where(in_win, p_k_win + i_seg * WIN * DK, p_k)
    p_v = tl.where(in_win, p_v_win + i_seg * WIN * DV, p_v)
    num_keys = tl.where(in_win, num_win, t + 1)
    # One loop for window and blocks: two would each get shared memory of their own. Step i is tile
    # i of the ring, or tile i % STEPS of block i // STEPS.
    STEPS: tl.constexpr = (L_SEL + BN - 1) // BN
    size = tl.where(in_win, WIN_PART // BN, PER_PART * STEPS)
    end = tl.where(in_win, tl.cdiv(num_win, BN), num_blocks * STEPS)
    stop = tl.minimum(part * size + size, end)
    for i in tl.range(part * size, stop, num_stages=STAGES):
        # The ids are ascending: the forced blocks are the first ids and the last ones, the others
        # lie between, from id NUM_FIRST on.
        place = i // STEPS
        block = place
        if KNOWN:
            block = block_id
        elif not WHOLE:
            block = tl.where(place < NUM_FIRST, place, current + 1 - num_forced + place)
            block = tl.load(p_ids + NUM_FIRST + place, mask=in_free, other=block)
        # KNOWN: not a remainder, which may be a constant. Loads that do not depend on i would leave
        # the loop, and then v waits for k.
        in_block = (i - part * size if KNOWN else i % STEPS) * BN + o_n
        # [BN] tokens of the tile; the mask: within sequence and block, and not the new token.
        o_k = tl.where(in_win, i * BN + o_n, block * L_SEL + in_block)
        m_k = (o_k < num_keys) & (o_k != newest) & (in_win | (in_block < L_SEL))
        if PER_PAGE > 0:
            p_pages = p_table + i_b * s_table + o_k // PER_PAGE
            page = tl.load(p_pages, mask=m_k & (in_win == 0), other=0, cache_modifier=".cg")
            page = page.to(tl.int64)
            row = page * s_sel + tl.where(in_win, o_k, o_k % PER_PAGE)
            base_k, base_v = row * DK, row * DV
        else:
            base_k, base_v = o_k * DK, o_k * DV
        b_out, top, total, _, _ = _tile(
            b_q, b_q2, b_out, top, total, p_k, p_v, base_k, base_v, m_k, scale_log2,
            DK, DV, DK1, DK2, DV_PAD, UPCAST,
        )  # fmt: skip
    return b_out, top, total


@triton.jit
def _counts(
    t, in_free, WIN, L_SEL: tl.constexpr, N_SEL: tl.constexpr, FORCED: tl.constexpr
):  # fmt: skip
    """Of the token at t: keys of the window, its block, forced blocks, blocks of a kind of part."""
    current = t // L_SEL
    num_forced = tl.minimum(current + 1, FORCED)
    num_blocks = tl.where(in_free, tl.minimum(current + 1, N_SEL) - num_forced, num_forced)
    return tl.minimum(t + 1, WIN), current, num_forced, num_blocks


@triton.jit
def _base(p_table, i_b, o_token, s_page, s_table, D: tl.constexpr, PER_PAGE: tl.constexpr):
    """Offsets of a sequence's tokens in a cache; PER_PAGE = 0: it is not paged."""
    # int64 through i_b or the page: caches may pass 2^31 numbers.
    if PER_PAGE == 0:
        return (i_b * s_page + o_token) * D
    page = tl.load(p_table + i_b * s_table + o_token // PER_PAGE).to(tl.int64)
    return (page * s_page + o_token % PER_PAGE) * D


@triton.jit
def _new(p, is_mine, D: tl.constexpr, D_PAD: tl.constexpr):
    """A head of the new token [D_PAD]; 0 in programs that do not store it."""
    o_d = tl.arange(0, D_PAD)
    return tl.load(p + o_d, mask=(o_d < D) & is_mine, other=0.0)


@triton.jit
def _new_row(p, is_mine, column: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """Columns of a head of the new token from `column` on, fp32 [1, D_PAD]; 0 if not `is_mine`."""
    o_d = column + tl.arange(0, D_PAD)
    b = tl.load(p + o_d, mask=(o_d < D) & is_mine, other=0.0, cache_modifier=".cg")
    return b.to(tl.float32)[None, :]


@triton.jit
def _put(p, at, b, is_mine, D: tl.constexpr, D_PAD: tl.constexpr):
    """Store a head [D] at offset `at`, in the program that `is_mine` names."""
    o_d = tl.arange(0, D_PAD)
    tl.store(p + at + o_d, b, mask=(o_d < D) & is_mine)


@triton.jit
def _completed(
    p_new, p_made, p_raw, i_seg, t, column: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, L: tl.constexpr, MADE: tl.constexpr,
):  # fmt: skip
    """Compressed token of the block that ends at t, columns from `column` on, as it is stored.

    It is the mean of the ring of raw tokens with the new one, or, MADE, what the caller computed.
    """
    o_d = column + tl.arange(0, D_PAD)
    m_d = o_d < D
    if MADE:
        return tl.load(p_made + i_seg * D + o_d, mask=m_d, other=0.0)
    # mean = (new + sum of the other L - 1 raw tokens) / L, fp32 sums: [D_PAD].
    b_new = tl.load(p_new + o_d, mask=m_d, other=0.0)
    b_sum = b_new.to(tl.float32)
    for first in tl.static_range(0, L, AVERAGED):
        o_l = first + tl.arange(0, AVERAGED)
        # Another program may be writing the new token's slot right now: it is not read.
        m_l = (o_l < L) & (o_l != t % L)
        p_rows = p_raw + (i_seg * L + o_l)[:, None] * D + o_d[None, :]
        b_old = tl.load(p_rows, mask=m_l[:, None] & m_d[None, :], other=0.0)
        b_sum += tl.sum(b_old.to(tl.float32), axis=0)
    return (b_sum / L).to(b_new.dtype)


@triton.jit
def _query(p_q, i_b, i_g, G, s_qb, s_qh, DK: tl.constexpr, D1: tl.constexpr, D0: tl.constexpr,
           BM: tl.constexpr):  # fmt: skip
    """Columns D0 .. D0 + D1 - 1 of the query heads of a group: [BM, D1]."""
    o_h, o_d = tl.arange(0, BM), D0 + tl.arange(0, D1)
    p_rows = p_q + i_b * s_qb + (i_g * G + o_h)[:, None] * s_qh + o_d[None, :]
    mask = (o_h < G)[:, None]
    if DK < D0 + D1:
        mask = mask & (o_d < DK)[None, :]
    return tl.load(p_rows, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _stream(p, m_rows, o_d, D: tl.constexpr, D_PAD: tl.constexpr):
    """A [rows, D_PAD] tile that is read once: evicted from the L2 cache before what is reused."""
    mask = m_rows[:, None]
    if D < D_PAD:
        mask = mask & (o_d < D)[None, :]
    return tl.load(p, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _tile(
    b_q, b_q2, b_out, top, total, p_k, p_v, base_k, base_v, m_k, scale_log2,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of keys in the online softmax.

    Returns the updated b_out, top and total, the tile's scaled logits [BM, BN], and
    exp2(logits - top) over the returned maximum.
    """
    o_dk, o_dv = tl.arange(0, DK1), tl.arange(0, DV_PAD)
    # s' = q k^T * scale_log2: [BM, BN]. Rows are the heads of the group.
    b_k = _stream(p_k + base_k[:, None] + o_dk[None, :], m_k, o_dk, DK, DK1)
    b_s = _dot(b_q, tl.trans(b_k), UPCAST)
    if DK2 > 0:
        o_dk2 = DK1 + tl.arange(0, DK2)
        b_k2 = _stream(p_k + base_k[:, None] + o_dk2[None, :], m_k, o_dk2, DK, DK1 + DK2)
        b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
    b_v = _stream(p_v + base_v[:, None] + o_dv[None, :], m_k, o_dv, DV, DV_PAD)
    b_s = tl.where(m_k[None, :], b_s * scale_log2, float("-inf"))
    # While no key was visible, top is -inf; 0 in its place avoids NaN.
    new_top = tl.maximum(top, tl.max(b_s, axis=1))
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    b_p = tl.math.exp2(b_s - safe_top[:, None])
    shrink = tl.math.exp2(top - safe_top)
    total = total * shrink + tl.sum(b_p, axis=1)
    b_out = _dot_add(b_out * shrink[:, None], b_p.to(b_v.dtype), b_v, UPCAST)
    return b_out, new_top, total, b_s, b_p


@triton.jit
def _store_part(
    p_part, p_part_lse, b_out, top, total, part, G,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The output of a part and its log-sum-exp; zeros, and -inf, where it saw nothing."""
    _store_lse(p_part_lse, top, total, part, G, BM)
    _store_out(p_part, b_out, total, part, G, DV, DV_PAD, BM)


@triton.jit
def _store_lse(p_part_lse, top, total, part, G, BM: tl.constexpr):
    """Log-sum-exps of a part [G], base 2, fp32 until merge_parts."""
    o_h = tl.arange(0, BM)
    sees_none = total == 0.0
    lse = tl.where(sees_none, float("-inf"), top + tl.math.log2(tl.where(sees_none, 1.0, total)))
    tl.store(p_part_lse + part * G + o_h, lse, mask=o_h < G)


@triton.jit
def _store_out(
    p_part, b_out, total, part, G, DV: tl.constexpr, DV_PAD: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """The output of a part, out / total [G, DV], fp32 until merge_parts."""
    o_h, o_dv = tl.arange(0, BM), tl.arange(0, DV_PAD)
    b_out = b_out * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    at = (part * G + o_h)[:, None] * DV + o_dv[None, :]
    tl.store(p_part + at, b_out, mask=(o_h < G)[:, None] & (o_dv < DV)[None, :])

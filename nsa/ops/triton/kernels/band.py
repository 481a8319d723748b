"""Flash attention over a band of keys: the kernels of the compressed, selected and window branch.

Query t of a document sees the keys lo(t) .. hi(t) of that document, with

    hi(t) = floor((t - OFF) / STEP)      window, selected: OFF 0, STEP 1; compressed: l-1 and d
    lo(t) = t - W + 1, or 0 if W is 0    the window has a W

and, in the selected branch, only the keys in blocks whose bit is set in the query's row of `bits`.
Positions count from the start of the document: with packed documents, `row_start` holds it for
every query and `row_key` the index of the document's first key. Probabilities are formed in base
2; so is the log-sum-exp, +inf for a query that sees nothing.

Names: i_ index of a program, o_ offsets, m_ masks, b_ blocks of values, p_ pointers, s_ strides.
Tensors are [B, S, H, D] with any strides but 1 in D; lse and delta are [B, Hq, S] fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    """Product with fp32 sums; fp32 inputs are not rounded. The interpreter cannot multiply bf16."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _band(o_t, m_t, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS: tl.constexpr):
    """First key of the document, first and last visible key of each query (last < first: none)."""
    if HAS_DOCS:
        position = o_t - tl.load(p_row_start + o_t, mask=m_t, other=0)
        base = tl.load(p_row_key + o_t, mask=m_t, other=0)
    else:
        position = o_t
        base = o_t * 0
    # Division may round towards zero: a negative result means "none" all the same.
    last = base + (position - OFF + STEP) // STEP - 1
    first = base
    if W > 0:
        first = base + tl.maximum(position - W + 1, 0)
    return base, first, last


@triton.jit
def _tile_range(
    i_m, S, K, p_row_start, p_row_key, OFF, STEP, W,
    HAS_DOCS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Keys that a tile of queries visits: start, full, masked, stop, all but stop multiples of BN.

    From `full` to `masked` every query of the tile sees every key. Both ends of the band only grow
    with the query, so the first and the last query decide. They are scalars: a bound that is a
    reduction would keep the loop from being pipelined.
    """
    t = i_m * BM
    _, start, first_last = _band(t, t < S, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS)
    t = tl.minimum(t + BM, S) - 1
    _, last_start, last = _band(t, t < S, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS)
    start = start // BN * BN
    stop = tl.minimum(last + 1, K)
    full = tl.minimum((last_start + BN - 1) // BN * BN, tl.maximum(stop, start))
    masked = tl.maximum((first_last + 1) // BN * BN, full)
    return start, full, masked, stop


@triton.jit
def _selected(
    o_t,
    m_t,
    o_k,
    base,
    p_bits,
    NUM_WORDS,
    L_SEL: tl.constexpr,
    BN: tl.constexpr,
    HAS_DOCS: tl.constexpr,
):
    """[queries, keys]: whether the key's block is selected; `p_bits` is at the group's rows."""
    p_rows = p_bits + o_t.to(tl.int64)[:, None] * NUM_WORDS
    if L_SEL % BN == 0 and not HAS_DOCS:  # the keys share a block: one word per query
        block = tl.min(o_k, axis=0) // L_SEL
        word = tl.load(p_rows + block // 32, mask=m_t[:, None], other=0)
    else:
        block = tl.maximum(o_k[None, :] - base[:, None], 0) // L_SEL
        inside = m_t[:, None] & (block // 32 < NUM_WORDS)
        word = tl.load(p_rows + block // 32, mask=inside, other=0)
    return ((word >> (block % 32)) & 1) != 0


@triton.jit
def band_forward(
    p_q, p_k, p_v, p_out, p_lse, p_bits, p_row_start, p_row_key,
    S, K, Hq, G, scale_log2,
    s_qb, s_qs, s_qh, s_kb, s_ks, s_kh, s_vb, s_vs, s_vh, s_ob, s_os, s_oh,
    OFF, STEP, W, NUM_WORDS,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    L_SEL: tl.constexpr, SELECT: tl.constexpr, HAS_DOCS: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of BM queries of one head."""
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows start first
    i_b, i_h = (tl.program_id(1) // Hq).to(tl.int64), (tl.program_id(1) % Hq).to(tl.int64)
    i_g = i_h // G
    o_t = i_m * BM + tl.arange(0, BM)
    m_t = o_t < S
    o_dk, o_dv = tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
    rows = o_t.to(tl.int64)[:, None]
    b_q = tl.load(
        p_q + i_b * s_qb + i_h * s_qh + rows * s_qs + o_dk[None, :],
        mask=m_t[:, None] & (o_dk < DK)[None, :],
        other=0.0,
    )  # fmt: skip  [BM, DK]
    base, first, last = _band(o_t, m_t, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS)
    start, full, masked, stop = _tile_range(
        i_m, S, K, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS, BM, BN
    )
    p_kh = p_k + i_b * s_kb + i_g * s_kh
    p_vh = p_v + i_b * s_vb + i_g * s_vh
    p_bits += (i_b * (Hq // G) + i_g) * S * NUM_WORDS

    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    b_out = tl.zeros([BM, DV_PAD], tl.float32)
    for part in tl.static_range(1 if SELECT else 3):
        # Only the edges of the band need a mask; the selected branch needs it everywhere.
        if SELECT:
            lo, hi = start, stop
        elif part == 0:
            lo, hi = start, full
        elif part == 1:
            lo, hi = full, masked
        else:
            lo, hi = masked, stop
        for k0 in range(lo, hi, BN):
            o_k = k0 + tl.arange(0, BN)
            m_k = o_k < K
            keys = o_k.to(tl.int64)
            b_k = tl.load(
                p_kh + keys[None, :] * s_ks + o_dk[:, None],
                mask=m_k[None, :] & (o_dk < DK)[:, None],
                other=0.0,
            )  # fmt: skip  [DK, BN]
            b_s = _dot(b_q, b_k, UPCAST) * scale_log2
            if SELECT or part != 1:
                visible = (o_k[None, :] >= first[:, None]) & (o_k[None, :] <= last[:, None])
                if SELECT:
                    visible = visible & _selected(
                        o_t, m_t, o_k, base, p_bits, NUM_WORDS, L_SEL, BN, HAS_DOCS
                    )
                b_s = tl.where(visible, b_s, float("-inf"))
            new_top = tl.maximum(top, tl.max(b_s, axis=1))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            b_p = tl.math.exp2(b_s - safe_top[:, None])
            shrink = tl.math.exp2(top - safe_top)
            total = total * shrink + tl.sum(b_p, axis=1)
            b_v = tl.load(
                p_vh + keys[:, None] * s_vs + o_dv[None, :],
                mask=m_k[:, None] & (o_dv < DV)[None, :],
                other=0.0,
            )  # fmt: skip  [BN, DV]
            b_out = b_out * shrink[:, None] + _dot(b_p.to(b_v.dtype), b_v, UPCAST)
            top = new_top

    sees_none = total == 0.0
    b_out = b_out / tl.where(sees_none, 1.0, total)[:, None]
    lse = tl.where(sees_none, float("inf"), top + tl.math.log2(total))
    tl.store(p_lse + tl.program_id(1).to(tl.int64) * S + o_t, lse, mask=m_t)
    tl.store(
        p_out + i_b * s_ob + i_h * s_oh + rows * s_os + o_dv[None, :],
        b_out.to(p_out.dtype.element_ty), mask=m_t[:, None] & (o_dv < DV)[None, :],
    )  # fmt: skip


@triton.jit
def band_dq(
    p_q, p_k, p_v, p_dout, p_lse, p_delta, p_gates, p_dq, p_bits, p_row_start, p_row_key,
    S, K, Hq, G, scale, scale_log2,
    s_qb, s_qs, s_qh, s_kb, s_ks, s_kh, s_vb, s_vs, s_vh, s_ob, s_os, s_oh, s_gb, s_gs, s_gh,
    OFF, STEP, W, NUM_WORDS,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    L_SEL: tl.constexpr, SELECT: tl.constexpr, HAS_DOCS: tl.constexpr, UPCAST: tl.constexpr,
    ADD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradient of BM queries of one head, into (ADD: onto) the fp32 [B, S, Hq, DK] buffer p_dq."""
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_b, i_h = (tl.program_id(1) // Hq).to(tl.int64), (tl.program_id(1) % Hq).to(tl.int64)
    i_g = i_h // G
    o_t = i_m * BM + tl.arange(0, BM)
    m_t = o_t < S
    o_dk, o_dv = tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
    m_dk, m_dv = (o_dk < DK), (o_dv < DV)
    rows = o_t.to(tl.int64)[:, None]
    p_rows_q = p_q + i_b * s_qb + i_h * s_qh + rows * s_qs + o_dk[None, :]
    b_q = tl.load(p_rows_q, mask=m_t[:, None] & m_dk[None, :], other=0.0)
    p_rows_o = p_dout + i_b * s_ob + i_h * s_oh + rows * s_os + o_dv[None, :]
    b_dout = tl.load(p_rows_o, mask=m_t[:, None] & m_dv[None, :], other=0.0)
    head_row = tl.program_id(1).to(tl.int64) * S + o_t
    lse = tl.load(p_lse + head_row, mask=m_t, other=float("inf"))
    delta = tl.load(p_delta + head_row, mask=m_t, other=0.0)
    gate = tl.load(p_gates + i_b * s_gb + i_h * s_gh + o_t.to(tl.int64) * s_gs, mask=m_t, other=0.0)
    base, first, last = _band(o_t, m_t, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS)
    start, full, masked, stop = _tile_range(
        i_m, S, K, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS, BM, BN
    )
    p_kh = p_k + i_b * s_kb + i_g * s_kh
    p_vh = p_v + i_b * s_vb + i_g * s_vh
    p_bits += (i_b * (Hq // G) + i_g) * S * NUM_WORDS

    b_dq = tl.zeros([BM, DK_PAD], tl.float32)
    for part in tl.static_range(1 if SELECT else 3):
        if SELECT:
            lo, hi = start, stop
        elif part == 0:
            lo, hi = start, full
        elif part == 1:
            lo, hi = full, masked
        else:
            lo, hi = masked, stop
        for k0 in range(lo, hi, BN):
            o_k = k0 + tl.arange(0, BN)
            keys = o_k.to(tl.int64)
            m_k = o_k < K
            p_keys = p_kh + keys[:, None] * s_ks + o_dk[None, :]
            b_k = tl.load(p_keys, mask=m_k[:, None] & m_dk[None, :], other=0.0)  # [BN, DK]
            p_values = p_vh + keys[None, :] * s_vs + o_dv[:, None]
            b_v = tl.load(p_values, mask=m_k[None, :] & m_dv[:, None], other=0.0)  # [DV, BN]
            b_s = _dot(b_q, tl.trans(b_k), UPCAST) * scale_log2
            b_p = tl.math.exp2(b_s - lse[:, None])
            if SELECT or part != 1:
                visible = (o_k[None, :] >= first[:, None]) & (o_k[None, :] <= last[:, None])
                if SELECT:
                    visible = visible & _selected(
                        o_t, m_t, o_k, base, p_bits, NUM_WORDS, L_SEL, BN, HAS_DOCS
                    )
                b_p = tl.where(visible, b_p, 0.0)
            b_dp = _dot(b_dout, b_v, UPCAST)
            b_ds = b_p * (b_dp - delta[:, None])
            b_dq += _dot(b_ds.to(b_k.dtype), b_k, UPCAST)

    b_dq = b_dq * (gate.to(tl.float32) * scale)[:, None]
    p_rows_dq = p_dq + ((i_b * S + rows) * Hq + i_h) * DK + o_dk[None, :]
    m_rows = m_t[:, None] & m_dk[None, :]
    if ADD:
        b_dq += tl.load(p_rows_dq, mask=m_rows, other=0.0)
    tl.store(p_rows_dq, b_dq, mask=m_rows)


@triton.jit
def band_dkv(
    p_q, p_k, p_v, p_dout, p_lse, p_delta, p_gates, p_dk, p_dv, p_bits,
    p_row_start, p_row_key, p_key_first, p_key_last,
    S, K, Hkv, G, scale, scale_log2,
    s_qb, s_qs, s_qh, s_kb, s_ks, s_kh, s_vb, s_vs, s_vh, s_ob, s_os, s_oh, s_gb, s_gs, s_gh,
    OFF, STEP, W, NUM_WORDS, HEADS, NUM_SPLITS,
    DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    L_SEL: tl.constexpr, SELECT: tl.constexpr, HAS_DOCS: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of BN keys and values from HEADS heads of their group and a part of the queries.

    Partial sums go to fp32 [B, Hkv, parts, K, D]; parts = G / HEADS * NUM_SPLITS, by heads first.
    """
    i_n, i_bg, i_part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_g = (i_bg // Hkv).to(tl.int64), (i_bg % Hkv).to(tl.int64)
    i_split, i_first_head = i_part % NUM_SPLITS, i_part // NUM_SPLITS * HEADS
    o_k = i_n * BN + tl.arange(0, BN)
    m_k = o_k < K
    keys = o_k.to(tl.int64)[:, None]
    o_dk, o_dv = tl.arange(0, DK_PAD), tl.arange(0, DV_PAD)
    m_dk, m_dv = (o_dk < DK), (o_dv < DV)
    p_keys = p_k + i_b * s_kb + i_g * s_kh + keys * s_ks + o_dk[None, :]
    b_k = tl.load(p_keys, mask=m_k[:, None] & m_dk[None, :], other=0.0)  # [BN, DK]
    p_values = p_v + i_b * s_vb + i_g * s_vh + keys * s_vs + o_dv[None, :]
    b_v = tl.load(p_values, mask=m_k[:, None] & m_dv[None, :], other=0.0)  # [BN, DV]
    # Queries that see any of these keys: a contiguous range, as both ends of the band only grow.
    if HAS_DOCS:
        first_query = tl.load(p_key_first + i_n * BN)
        last_query = tl.load(p_key_last + tl.minimum(i_n * BN + BN, K) - 1)
    else:
        first_query = i_n * BN * STEP + OFF
        last_query = S - 1
        if W > 0:
            last_query = tl.minimum(last_query, i_n * BN + BN - 1 + W - 1)
    num_tiles = tl.cdiv(tl.maximum(last_query + 1 - first_query // BM * BM, 0), BM)
    tiles_per_split = tl.cdiv(num_tiles, NUM_SPLITS)
    first_tile = i_split * tiles_per_split
    stop_tile = tl.minimum(first_tile + tiles_per_split, num_tiles)
    p_bits += (i_b * Hkv + i_g) * S * NUM_WORDS

    b_dk = tl.zeros([BN, DK_PAD], tl.float32)
    b_dv = tl.zeros([BN, DV_PAD], tl.float32)
    tile_0 = first_query // BM
    stop_tile = tl.maximum(stop_tile, first_tile)
    # From tile `full` to tile `masked` every query sees every key, and nothing needs a mask.
    full = stop_tile
    masked = stop_tile
    if not (SELECT or HAS_DOCS):
        last_key = tl.minimum(i_n * BN + BN, K) - 1
        full = tl.cdiv(last_key * STEP + OFF - tile_0 * BM, BM)
        if W > 0:
            masked = (i_n * BN + W) // BM - tile_0
        full = tl.minimum(tl.maximum(full, first_tile), stop_tile)
        masked = tl.minimum(tl.maximum(masked, full), stop_tile)
    for part in tl.static_range(1 if SELECT or HAS_DOCS else 3):
        if part == 0:
            lo, hi = first_tile, full
        elif part == 1:
            lo, hi = full, masked
        else:
            lo, hi = masked, stop_tile
        for i in range(lo * HEADS, hi * HEADS):
            i_h = i_g * G + i_first_head + i % HEADS
            o_t = (tile_0 + i // HEADS) * BM + tl.arange(0, BM)
            m_t = o_t < S
            rows = o_t.to(tl.int64)[:, None]
            p_rows_q = p_q + i_b * s_qb + i_h * s_qh + rows * s_qs + o_dk[None, :]
            b_q = tl.load(p_rows_q, mask=m_t[:, None] & m_dk[None, :], other=0.0)  # [BM, DK]
            p_rows_o = p_dout + i_b * s_ob + i_h * s_oh + rows * s_os + o_dv[None, :]
            b_dout = tl.load(p_rows_o, mask=m_t[:, None] & m_dv[None, :], other=0.0)  # [BM, DV]
            head_row = (i_b * Hkv * G + i_h) * S + o_t
            lse = tl.load(p_lse + head_row, mask=m_t, other=float("inf"))
            delta = tl.load(p_delta + head_row, mask=m_t, other=0.0)
            p_gate = p_gates + i_b * s_gb + i_h * s_gh + o_t.to(tl.int64) * s_gs
            gate = tl.load(p_gate, mask=m_t, other=0.0).to(tl.float32)
            b_s = _dot(b_q, tl.trans(b_k), UPCAST) * scale_log2  # [BM, BN]
            b_p = tl.math.exp2(b_s - lse[:, None])
            if part != 1:
                base, first, last = _band(o_t, m_t, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS)
                visible = (o_k[None, :] >= first[:, None]) & (o_k[None, :] <= last[:, None])
                if SELECT:
                    visible = visible & _selected(
                        o_t, m_t, o_k, base, p_bits, NUM_WORDS, L_SEL, BN, HAS_DOCS
                    )
                b_p = tl.where(visible, b_p, 0.0)
            b_p = b_p * gate[:, None]
            b_dv += _dot(tl.trans(b_p.to(b_dout.dtype)), b_dout, UPCAST)
            b_dp = _dot(b_dout, tl.trans(b_v), UPCAST)
            b_ds = b_p * (b_dp - delta[:, None])
            b_dk += _dot(tl.trans(b_ds.to(b_q.dtype)), b_q, UPCAST)

    part = (i_bg.to(tl.int64) * tl.num_programs(2) + i_part) * K
    tl.store(
        p_dk + (part + keys) * DK + o_dk[None, :], b_dk * scale, mask=m_k[:, None] & m_dk[None, :]
    )
    tl.store(p_dv + (part + keys) * DV + o_dv[None, :], b_dv, mask=m_k[:, None] & m_dv[None, :])

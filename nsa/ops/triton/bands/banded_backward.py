"""Gradients of attention over a band of keys: the branches of banded_forward.py.

Keys and values by tiles of keys (band_dkv), queries by tiles of queries (band_dq). With
P = sign * exp2(s' - lse), which is a probability times its gate, dP = dout V^T and
dS = P * (dP - delta):

    dV = P^T dout,  dK = scale * dS^T Q,  dQ = scale * dS K

lse, with the size of the gate, delta and the sign of the gate come from tile.gate_backward. One
pass for all three was slower: dq by additions in memory costs more than the two products that it
saves (docs/log/portable.md). tile.py has the names, the band and its letters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.launcher import Launch, ceil_div, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.tile import (
    COUNTS,
    _band,
    _dot,
    _dot_add,
    _is_selected,
    _load,
    _rows,
    _stats,
    _tile_range,
)
from nsa.ops.triton.tiles import dkv_tiles, dq_tiles


@triton.jit(do_not_specialize=COUNTS)
def band_dkv(
    t_q, t_q2, t_dout, p_k, p_v, p_stats, p_dk, p_dv, p_bits,
    p_row_start, p_row_key, p_key_first, p_key_last,
    S, K, Hkv, G, scale, scale_log2,
    s_kb, s_ks, s_kh, s_vb, s_vs, s_vh,
    OFF, STEP, W, NUM_WORDS, SEGMENTS, HEADS, SLICES,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L_SEL: tl.constexpr, SELECT: tl.constexpr, HAS_DOCS: tl.constexpr,
    UPCAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of BN keys and values from HEADS heads of their group and a slice of the queries.

    Partial sums go to dk, dv [B, parts, K, Hkv, D] with parts = G / HEADS * SLICES. Tiles are
    [keys, queries]: P^T and dS^T are left operands as they are, without a transposition.
    """
    # Early keys are seen by the most queries. The key tile is the slowest index of the grid, so
    # that the longest programs start first and none of them is left at the end.
    num_parts = G // HEADS * SLICES
    each = SEGMENTS * num_parts
    i_n = tl.program_id(0) // each
    i_bg, i_part = tl.program_id(0) % each // num_parts, tl.program_id(0) % num_parts
    h0, i_slice = i_part // SLICES * HEADS, i_part % SLICES
    i_b, i_g = (i_bg // Hkv).to(tl.int64), (i_bg % Hkv).to(tl.int64)
    o_m = tl.arange(0, BM)
    o_k = i_n * BN + tl.arange(0, BN)
    m_k = o_k < K
    keys = o_k.to(tl.int64)[:, None]
    o_dk, o_dv = tl.arange(0, DK1), tl.arange(0, DV_PAD)
    # k [BN, DK1 (+ DK2)] and v [BN, DV_PAD] stay for the whole program. They are read through
    # pointers: a descriptor would put them into registers here (docs/log/portable.md).
    p_rows = p_k + i_b * s_kb + i_g * s_kh + keys * s_ks
    b_k = _load(p_rows + o_dk[None, :], m_k, o_dk, DK, DK1, True)
    b_dk = tl.zeros([BN, DK1], tl.float32)
    if DK2 > 0:
        o_dk2 = DK1 + tl.arange(0, DK2)
        b_k2 = _load(p_rows + o_dk2[None, :], m_k, o_dk2, DK, DK1 + DK2, True)
        b_dk2 = tl.zeros([BN, DK2], tl.float32)
    p_rows = p_v + i_b * s_vb + i_g * s_vh + keys * s_vs + o_dv[None, :]
    b_v = _load(p_rows, m_k, o_dv, DV, DV_PAD, True)
    b_dv = tl.zeros([BN, DV_PAD], tl.float32)
    # Queries that see any of these keys: a contiguous range, as the band is monotonic.
    # From the band: key n is visible from t = n * STEP + OFF on, and up to n + W - 1 in a window.
    if HAS_DOCS:
        first_query = tl.load(p_key_first + i_n * BN)
        last_query = tl.load(p_key_last + tl.minimum(i_n * BN + BN, K) - 1)
    else:
        first_query = i_n * BN * STEP + OFF
        last_query = S - 1
        if W > 0:
            last_query = tl.minimum(last_query, i_n * BN + BN - 1 + W - 1)
    # Tiles of queries of this slice.
    per_slice = tl.cdiv(tl.cdiv(S, BM), SLICES)
    first_tile = tl.maximum(first_query // BM, i_slice * per_slice)
    stop_tile = tl.minimum(tl.cdiv(last_query + 1, BM), i_slice * per_slice + per_slice)
    stop_tile = tl.maximum(stop_tile, first_tile)
    # From tile `full` to tile `masked` every query sees every key, and no mask is needed. A tile of
    # keys that is cut off by K is masked throughout; so are packed documents and the selection.
    full = stop_tile
    masked = stop_tile
    if not (SELECT or HAS_DOCS):
        # From `full` on all queries see the tile's last key. From `masked` on some no longer have
        # its first key in their window, or lie beyond S.
        if i_n * BN + BN <= K:
            full = tl.cdiv((i_n * BN + BN - 1) * STEP + OFF, BM)
            masked = S // BM
            if W > 0:
                masked = tl.minimum(masked, (i_n * BN + W) // BM)
        full = tl.minimum(tl.maximum(full, first_tile), stop_tile)
        masked = tl.minimum(tl.maximum(masked, full), stop_tile)
    # Words of this segment; int64 through i_b and i_g. Then the three parts, as in band_forward.
    p_bits += (i_b * Hkv + i_g) * NUM_WORDS * S
    for part in tl.static_range(1 if SELECT or HAS_DOCS else 3):
        if part == 0:
            lo, hi = first_tile, full
        elif part == 1:
            lo, hi = full, masked
        else:
            lo, hi = masked, stop_tile
        # One flat loop over (tile of queries, head), heads fastest. Addresses are formed inside it:
        # hoisted by hand they stay in registers and spill (docs/log/portable.md).
        for i in range(lo * HEADS, hi * HEADS):
            i_h = i_g * G + h0 + i % HEADS
            t0 = i // HEADS * BM
            o_t = t0 + o_m
            m_t = o_t < S
            # s^T = k q^T: [BN, BM].
            b_q = _rows(t_q, i_b, t0, i_h, 0, BM, DK1)
            b_s = _dot(b_k, tl.trans(b_q), UPCAST)  # [BN, BM]
            if DK2 > 0:
                b_q2 = _rows(t_q2, i_b, t0, i_h, DK1, BM, DK2)
                b_s = _dot_add(b_s, b_k2, tl.trans(b_q2), UPCAST)
            lse, delta, sign, _ = _stats(p_stats, (i_b * Hkv * G + i_h) * S + o_t, m_t)
            # lse is NaN where a document holds a NaN: masked after it, it stays in its document.
            b_p = tl.math.exp2(b_s * scale_log2 - lse[None, :]) * sign[None, :]
            if part != 1:
                first, last = _band(o_t, m_t, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS)
                visible = (o_k[:, None] >= first[None, :]) & (o_k[:, None] <= last[None, :])
                if SELECT:
                    selected = _is_selected(
                        o_t, m_t, i_n * BN, o_k, p_bits, p_row_start, S,
                        L_SEL, BN, HAS_DOCS,
                    )  # fmt: skip
                    visible = visible & tl.trans(selected)
                b_p = tl.where(visible, b_p, 0.0)
            # dV += P^T dout: [BN, DV_PAD].
            b_dout = _rows(t_dout, i_b, t0, i_h, 0, BM, DV_PAD)
            b_dv = _dot_add(b_dv, b_p.to(b_dout.dtype), b_dout, UPCAST)
            # dS^T = P^T * (dP^T - delta), dK += dS^T q: [BN, DK1 (+ DK2)].
            b_dp = _dot(b_v, tl.trans(b_dout), UPCAST)  # [BN, BM]
            b_ds = (b_p * (b_dp - delta[None, :])).to(b_q.dtype)
            b_dk = _dot_add(b_dk, b_ds, b_q, UPCAST)
            if DK2 > 0:
                b_dk2 = _dot_add(b_dk2, b_ds, b_q2, UPCAST)

    # Each part has its own rows, so no two programs add to one address. scale is applied once.
    row = ((i_b * num_parts + i_part) * K + keys) * Hkv + i_g
    dtype = p_dk.dtype.element_ty
    m_rows = m_k[:, None]
    p_rows = p_dk + row * DK
    tl.store(p_rows + o_dk[None, :], (b_dk * scale).to(dtype), mask=m_rows & (o_dk < DK)[None, :])
    if DK2 > 0:
        m_rows2 = m_rows & (o_dk2 < DK)[None, :]
        tl.store(p_rows + o_dk2[None, :], (b_dk2 * scale).to(dtype), mask=m_rows2)
    tl.store(p_dv + row * DV + o_dv[None, :], b_dv.to(dtype), mask=m_rows & (o_dv < DV)[None, :])


# --- Sum of the partial gradients of band_dkv ---


@triton.jit
def _sum(p_parts, p_out, i_b, i_block, SIZE, PARTS, BLOCK: tl.constexpr):
    """BLOCK numbers of out[b] = sum over parts of parts[b, part], in the order of the parts."""
    # int64: PARTS * SIZE may pass 2^31.
    o = i_block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(0, PARTS):
        total += tl.load(p_parts + (i_b * PARTS + part) * SIZE + o, mask=mask, other=0.0)
    tl.store(p_out + i_b * SIZE + o, total.to(p_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def sum_parts(p_dk_parts, p_dv_parts, p_dk, p_dv, SIZE_K, SIZE_V, PARTS, BLOCK: tl.constexpr):
    """[B, PARTS, SIZE] fp32 -> [B, SIZE], for the gradients of keys and of values, in order."""
    i_b = tl.program_id(1).to(tl.int64)
    num_k = tl.cdiv(tl.cast(SIZE_K, tl.int64), BLOCK)  # it adds BLOCK - 1, beyond 2^31 perhaps
    # One launch for both: the first programs sum keys, the others values.
    if tl.program_id(0) < num_k:
        _sum(p_dk_parts, p_dk, i_b, tl.program_id(0), SIZE_K, PARTS, BLOCK)
    else:
        _sum(p_dv_parts, p_dv, i_b, tl.program_id(0) - num_k, SIZE_V, PARTS, BLOCK)


# --- Gradient of queries: all branches in one launch ---


@triton.jit
def _branch_dq(
    b_dq, b_dq2, b_q, b_q2, b_dout, t_k, t_k2, t_v, p_stats, p_bits,
    p_row_start, p_row_key, i_m, i_b, i_g, rows, o_t, m_t, S, K, scale_log2,
    OFF, STEP, W,
    DK1: tl.constexpr, DK2: tl.constexpr, DV_PAD: tl.constexpr, L_SEL: tl.constexpr,
    SELECT: tl.constexpr, BOUNDED: tl.constexpr, HAS_DOCS: tl.constexpr, UPCAST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """What one branch adds to dq / scale of a tile of queries: [BM, DK1] and [BM, DK2].

    BOUNDED: the band has a lower end within the sequence.
    """
    lse, delta, sign, _ = _stats(p_stats, rows, m_t)
    first, last = _band(o_t, m_t, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS)
    start, full, masked, stop = _tile_range(
        i_m, S, K, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS, BM, BN
    )
    # Masks are peeled as in band_forward. Without a lower end part 0 is always empty, and it is not
    # compiled: ptxas crashed on the first form, which had it, at D 128 (docs/log/faults.md).
    for part in tl.static_range(0 if SELECT or BOUNDED else 1, 1 if SELECT else 3):
        if SELECT:
            lo, hi = start, stop
        elif part == 0:
            lo, hi = start, full
        elif part == 1:
            lo, hi = full, masked
        else:
            lo, hi = masked, stop
        for k0 in range(lo, hi, BN):
            # s = q k^T, P = exp2(s' - lse): [BM, BN].
            b_k = _rows(t_k, i_b, k0, i_g, 0, BN, DK1)
            b_s = _dot(b_q, tl.trans(b_k), UPCAST)
            if DK2 > 0:
                b_k2 = _rows(t_k2, i_b, k0, i_g, DK1, BN, DK2)
                b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
            b_v = _rows(t_v, i_b, k0, i_g, 0, BN, DV_PAD)
            b_p = tl.math.exp2(b_s * scale_log2 - lse[:, None])
            # Edges of the band and holes of the selection: P = 0.
            if SELECT or part != 1:
                o_k = k0 + tl.arange(0, BN)
                visible = (o_k[None, :] >= first[:, None]) & (o_k[None, :] <= last[:, None])
                if SELECT:
                    visible = visible & _is_selected(
                        o_t, m_t, k0, o_k, p_bits, p_row_start, S, L_SEL, BN, HAS_DOCS
                    )
                b_p = tl.where(visible, b_p, 0.0)
            # dS = P * (dP - delta), dQ += dS k.
            b_p = b_p * sign[:, None]
            b_dp = _dot(b_dout, tl.trans(b_v), UPCAST)
            b_ds = (b_p * (b_dp - delta[:, None])).to(b_k.dtype)
            b_dq = _dot_add(b_dq, b_ds, b_k, UPCAST)
            if DK2 > 0:
                b_dq2 = _dot_add(b_dq2, b_ds, b_k2, UPCAST)
    return b_dq, b_dq2


@triton.jit(do_not_specialize=COUNTS)
def band_dq(
    p_q, p_dout, t_k_cmp, t_k2_cmp, t_v_cmp, t_k_sel, t_k2_sel, t_v_sel,
    t_k_win, t_k2_win, t_v_win, p_stats, p_bits, p_dq_more, p_dq,
    p_row_start, p_row_cmp, p_row_key,
    S, N, K, Hq, G, STATS, scale, scale_log2,
    s_qb, s_qs, s_qh, s_ob, s_os, s_oh,
    CMP_OFF, CMP_STEP, W, NUM_WORDS,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, L_SEL: tl.constexpr, SELECT: tl.constexpr, HAS_DOCS: tl.constexpr,
    UPCAST: tl.constexpr, HAS_CMP: tl.constexpr, HAS_WIN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradient of BM queries of one head, from all branches that are bands: [B, S, Hq, DK].

    SELECT: the selected branch is one (the whole past, masked). dq_more, laid out like dq, is what
    kernels of another library computed.
    STATS is the stride between the stats of two branches.
    """
    # One launch for all branches: q and dout are read once, and the final gradient is written
    # without a pass over partial ones. Late tiles, which see the most keys, start first.
    i_m = tl.num_programs(0) - 1 - tl.program_id(0)
    i_b, i_h = (tl.program_id(1) // Hq).to(tl.int64), (tl.program_id(1) % Hq).to(tl.int64)
    i_g = i_h // G
    o_t = i_m * BM + tl.arange(0, BM)
    m_t = o_t < S
    o_dk, o_dv = tl.arange(0, DK1), tl.arange(0, DV_PAD)
    # q: [BM, DK1] and [BM, DK2]. Without a rest, b_q2 and b_dq2 only fill the argument list.
    p_rows = p_q + i_b * s_qb + i_h * s_qh + o_t.to(tl.int64)[:, None] * s_qs
    b_q = _load(p_rows + o_dk[None, :], m_t, o_dk, DK, DK1, True)
    b_dq = tl.zeros([BM, DK1], tl.float32)
    b_q2 = b_q
    b_dq2 = b_dq
    if DK2 > 0:
        o_dk2 = DK1 + tl.arange(0, DK2)
        b_q2 = _load(p_rows + o_dk2[None, :], m_t, o_dk2, DK, DK1 + DK2, True)
        b_dq2 = tl.zeros([BM, DK2], tl.float32)
    # dout: [BM, DV_PAD].
    p_rows = p_dout + i_b * s_ob + i_h * s_oh + o_t.to(tl.int64)[:, None] * s_os + o_dv[None, :]
    b_dout = _load(p_rows, m_t, o_dv, DV, DV_PAD, True)
    # Rows of stats [3, B, Hq, S, 4]; int64, because they may pass 2^31.
    rows = tl.program_id(1).to(tl.int64) * S + o_t
    apart = tl.cast(STATS, tl.int64)
    # Compressed branch: OFF l-1, STEP d, no W; its document index is in compressed tokens.
    if HAS_CMP:
        b_dq, b_dq2 = _branch_dq(
            b_dq, b_dq2, b_q, b_q2, b_dout, t_k_cmp, t_k2_cmp, t_v_cmp, p_stats, p_bits,
            p_row_start, p_row_cmp, i_m, i_b, i_g, rows, o_t, m_t, S, N, scale_log2,
            CMP_OFF, CMP_STEP, 0,
            DK1, DK2, DV_PAD, L_SEL, False, HAS_DOCS, HAS_DOCS, UPCAST, BM, BN,
        )  # fmt: skip
    if HAS_WIN:
        b_dq, b_dq2 = _branch_dq(
            b_dq, b_dq2, b_q, b_q2, b_dout, t_k_win, t_k2_win, t_v_win, p_stats + 2 * apart, p_bits,
            p_row_start, p_row_key, i_m, i_b, i_g, rows, o_t, m_t, S, K, scale_log2,
            0, 1, W,
            DK1, DK2, DV_PAD, L_SEL, False, True, HAS_DOCS, UPCAST, BM, BN,
        )  # fmt: skip
    row = ((i_b * S + o_t) * Hq + i_h)[:, None] * DK
    m_dq = m_t[:, None] & (o_dk < DK)[None, :]
    if SELECT:
        p_bits += (i_b * (Hq // G) + i_g) * NUM_WORDS * S
        b_dq, b_dq2 = _branch_dq(
            b_dq, b_dq2, b_q, b_q2, b_dout, t_k_sel, t_k2_sel, t_v_sel, p_stats + apart, p_bits,
            p_row_start, p_row_key, i_m, i_b, i_g, rows, o_t, m_t, S, K,
            scale_log2, 0, 1, 0,
            DK1, DK2, DV_PAD, L_SEL, True, True, HAS_DOCS, UPCAST, BM, BN,
        )  # fmt: skip
    # Sum of all branches in fp32, rounded once: [BM, DK].
    b_dq = b_dq * scale
    if p_dq_more is not None:
        b_dq += tl.load(p_dq_more + row + o_dk[None, :], mask=m_dq, other=0.0).to(tl.float32)
    tl.store(p_dq + row + o_dk[None, :], b_dq.to(p_dq.dtype.element_ty), mask=m_dq)
    # The rest of the head: [BM, DK2].
    if DK2 > 0:
        b_dq2 = b_dq2 * scale
        m_dq = m_t[:, None] & (o_dk2 < DK)[None, :]
        if p_dq_more is not None:
            b_dq2 += tl.load(p_dq_more + row + o_dk2[None, :], mask=m_dq, other=0.0).to(tl.float32)
        tl.store(p_dq + row + o_dk2[None, :], b_dq2.to(p_dq.dtype.element_ty), mask=m_dq)


# --- Launchers ---

BUSY = 264
"""Programs that occupy a large GPU: two for each of 132 multiprocessors."""
SLICE_TILES = 8
"""Lower bound of the tiles of queries in a slice."""
SUM_BLOCK = 1024
"""Numbers that one program of sum_parts adds up."""
NONE = (None, None, None)
"""Keys and values of a branch that a kernel does not walk."""


def backward_kv(
    problem: Problem,
    branch: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    stats: Tensor,  # [3, B, Hq, S, 4] fp32
    bits: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v of one branch."""
    num_keys = k.shape[1]
    if num_keys == 0:
        return k.new_zeros(k.shape), v.new_zeros(v.shape)
    words = problem.bands[branch].SELECT and problem.words
    tiles = dkv_tiles(*problem.heads, problem.capability, words=words)
    num_tiles = ceil_div(num_keys, tiles.BN) * problem.num_segments
    shares, slices = _parts(problem, branch, num_tiles, tiles.BM)
    parts = shares * slices
    dtype = problem.dtype if parts == 1 else torch.float32
    dk = problem.empty(problem.batch, parts, *k.shape[1:], dtype=dtype)
    dv = problem.empty(problem.batch, parts, *v.shape[1:], dtype=dtype)
    start(
        problem.memo,
        ("dkv", branch),
        band_dkv,
        (
            *problem.rows_k(q, tiles.BM), problem.rows_v(dout, tiles.BM), k, v, stats[branch],
            dk, dv, bits, *problem.row_index(branch, q), *problem.key_index(branch, q),
        ),
        lambda: Launch.tiled(
            (num_tiles * parts,),
            (
                problem.seq_len, num_keys, problem.num_groups, problem.per_group,
                problem.scale, problem.scale_log2, *k.stride()[:3], *v.stride()[:3],
                *problem.bands[branch][:3], problem.num_words,
                problem.num_segments, problem.per_group // shares, slices,
            ),
            {**problem.dims(), **problem.branch_constants(problem.bands[branch].SELECT)},
            tiles,
        ),
    )  # fmt: skip
    if parts == 1:
        return dk.squeeze(1), dv.squeeze(1)
    return sum_all(problem, branch, (dk, dv), parts, k, v)


def _parts(problem: Problem, branch: int, num_tiles: int, num_rows: int) -> tuple[int, int]:
    """Programs per key tile: how many share the heads of a group, and how many slices of queries.

    Compressed tokens are few, and many queries see each of them: there every head has its own
    program, and slices of queries are added until the GPU is full.
    """
    per_group = problem.per_group
    if branch != 0:
        # The smallest split that fills the GPU: every part is one more pass over dk and dv.
        divisors = (n for n in range(1, per_group + 1) if per_group % n == 0)
        return next((n for n in divisors if n * num_tiles >= BUSY), per_group), 1
    slices, row_tiles = 1, ceil_div(problem.seq_len, num_rows)
    while slices * num_tiles * per_group < 3 * BUSY // 2 and slices * 2 * SLICE_TILES <= row_tiles:
        slices *= 2
    return per_group, slices


def sum_all(
    problem: Problem,
    branch: int,
    partial: tuple[Tensor, Tensor],  # [B, parts, K, Hkv, D] fp32
    parts: int,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor]:  # [B, K, Hkv, D]
    """Gradients of k and v, in their dtype, by one launch; of one part they are only rounded."""
    totals = problem.empty(*k.shape), problem.empty(*v.shape)
    sizes = (totals[0].numel() // problem.batch, totals[1].numel() // problem.batch)
    start(
        problem.memo,
        ("sums", branch),
        sum_parts,
        (*partial, *totals),
        lambda: Launch.plain(
            (sum(ceil_div(size, SUM_BLOCK) for size in sizes), problem.batch),
            (*sizes, parts),
            {"BLOCK": SUM_BLOCK},
        ),
    )
    return totals


def rounded(problem: Problem, place: str, total: Tensor) -> Tensor:
    """A sum in fp32 in the dtype of the inputs."""
    out, size = problem.empty(*total.shape), total.numel() // problem.batch
    start(
        problem.memo,
        ("rounded", place),
        sum_parts,
        (total, total, out, out),
        lambda: Launch.plain(
            (ceil_div(size, SUM_BLOCK), problem.batch), (size, 0, 1), {"BLOCK": SUM_BLOCK}
        ),
    )
    return out


def backward_q(
    problem: Problem,
    q: Tensor,
    keys: tuple[tuple[Tensor, Tensor], ...],  # k and v of the three branches
    dout: Tensor,
    stats: Tensor,  # [3, B, Hq, S, 4] fp32
    bits: Tensor,
    dq_more: Tensor | None = None,  # [B, S, Hq, Dk], contiguous
    *,
    walked: set[int],
) -> Tensor:
    """Gradient of q from the branches to walk, of which the selected one masks the past, and
    `dq_more`, the sum of what kernels of another library computed."""
    masked = 1 in walked
    words = masked and problem.words
    tiles = dq_tiles(*problem.heads, problem.capability, words=words)
    dq = problem.empty(*q.shape)
    has_cmp, has_win = keys[0][0].shape[1] > 0 and 0 in walked, 2 in walked
    given = [keys[i] if some else None for i, some in enumerate((has_cmp, masked, has_win))]
    branches = {"HAS_CMP": has_cmp, "HAS_WIN": has_win}
    start(
        problem.memo,
        ("dq", masked, dq_more is None, has_cmp, has_win),
        band_dq,
        (
            q, dout, *(x for kv in given for x in (problem.keys(*kv, tiles.BN) if kv else NONE)),
            stats, bits, dq_more, dq, *problem.row_index(0, q),
            problem.row_index(1, q)[1],
        ),
        lambda: Launch.tiled(
            (ceil_div(problem.seq_len, tiles.BM), problem.batch * problem.num_heads),
            (
                problem.seq_len, keys[0][0].shape[1], keys[2][0].shape[1], problem.num_heads,
                problem.per_group, stats[0].numel(), problem.scale, problem.scale_log2,
                *q.stride()[:3], *dout.stride()[:3],
                *problem.bands[0][:2], problem.spec.w, problem.num_words,
            ),
            {**problem.dims(), **problem.branch_constants(masked), **branches},
            tiles,
        ),
    )  # fmt: skip
    return dq

"""Device functions of the attention kernels: products, tile loads, the band, the gated sum.

Names in all kernels: i_ index of a program, o_ offsets, m_ masks, b_ blocks of values, p_ pointers,
t_ tensor descriptors, s_ strides. Tensors are [B, S, H, D] with a stride of 1 in D; lse and delta
are [B, Hq, S] fp32. A descriptor reads 0 outside of its tensor.

A head of DK numbers is read in two parts, DK1 = the largest power of two in it and DK2 = a power of
two that holds the rest (0: no rest): 192 is 128 + 64, not 256.

Query t of a document sees the keys lo(t) .. hi(t) of that document, with

    hi(t) = floor((t - OFF) / STEP)      window, selected: OFF 0, STEP 1; compressed: l-1 and d
    lo(t) = t - W + 1, or 0 if W is 0    only the window has a W

and, in the selected branch, only the keys in blocks whose bit is set in the query's column of
`bits`. Positions count from the start of the document. With packed documents, `row_start` holds
that start for every query and `row_key` the index of the document's first key; bits count from the
document's first block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

COUNTS = (
    *("K", "N", "NUM_WORDS", "NUM_BLOCKS", "NUM_ITEMS", "num_chunks", "first_chunk"),
    *("PARTS", "HEADS", "SLICES", "S", "SUB", "first_row", "num_rows", "stop_row", "num_together"),
    *("NUM_ROWS", "NUM_ENTRIES", "SUBS", "LOG_SUBS", "s_gb", "first_seg"),
)
"""Parameters that change with the length of a sequence and not the code of a kernel. Triton would
compile anew when one of them becomes 1, or a multiple of 16."""


@triton.jit
def _dot(a, b, UPCAST: tl.constexpr):
    """a @ b with fp32 accumulation.

    "ieee": fp32 inputs are not rounded to TF32. UPCAST: the interpreter cannot multiply bf16.
    """
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _dot_add(acc, a, b, UPCAST: tl.constexpr):
    """acc + a @ b; see _dot."""
    if UPCAST:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _rows(t, i_b, row, i_h, column: tl.constexpr, BM: tl.constexpr, D: tl.constexpr):
    """BM rows of one head from `row` on, D numbers each from `column` on: [BM, D]."""
    # Coordinates are int32, whatever the size of the tensor: no address lives in a register.
    b = t.load([tl.cast(i_b, tl.int32), tl.cast(row, tl.int32), tl.cast(i_h, tl.int32), column])
    return tl.reshape(b, [BM, D])


@triton.jit
def _offsets(o_t, s_t, o_h, s_h, NARROW: tl.constexpr):
    """Offsets of rows of [S, H, D]. NARROW: all are below 2^31, and int32 saves registers."""
    dtype: tl.constexpr = tl.int32 if NARROW else tl.int64
    return o_t.to(dtype) * s_t + o_h.to(dtype) * s_h


@triton.jit
def _load(p, m_rows, o_d, D: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr):
    """A [rows, D_PAD] tile; columns from D on read as 0, and so do rows outside of the mask."""
    # D and D_PAD are constants: a mask that is never needed is not compiled in.
    if D >= D_PAD:
        if MASKED:
            return tl.load(p, mask=m_rows[:, None], other=0.0)
        return tl.load(p)
    if MASKED:
        return tl.load(p, mask=m_rows[:, None] & (o_d < D)[None, :], other=0.0)
    return tl.load(p, mask=(o_d < D)[None, :], other=0.0)


@triton.jit
def _band(o_t, m_t, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS: tl.constexpr):
    """First and last visible key of each query (last < first: none)."""
    # [queries]: position within the document, and index of the document's first key.
    if HAS_DOCS:
        position = o_t - tl.load(p_row_start + o_t, mask=m_t, other=0)
        base = tl.load(p_row_key + o_t, mask=m_t, other=0)
    else:
        position = o_t
        base = o_t * 0
    # hi(t) as a count of visible keys, floor((t - OFF) / STEP) + 1, clamped at 0. Without the clamp
    # `last` would drop where the next document begins; _tile_range needs it to be monotonic.
    last = base + tl.maximum((position - OFF + STEP) // STEP, 0) - 1
    # lo(t)
    first = base
    if W > 0:
        first = base + tl.maximum(position - W + 1, 0)
    return first, last


@triton.jit
def _tile_range(
    i_m, S, K, p_row_start, p_row_key, OFF, STEP, W,
    HAS_DOCS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Keys that a tile of queries visits: start, full, masked, stop, all but stop multiples of BN.

    From `full` to `masked` every query of the tile sees every key, so that no mask is needed. Both
    ends of the band are monotonic in the query: the first and the last query of the tile decide.
    They are read as scalars, because a loop bound that is a reduction is not pipelined.
    """
    # First query: lo gives the first key of the tile, hi the last key that all queries see.
    t = i_m * BM
    start, first_last = _band(t, t < S, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS)
    # Last query: lo gives the first key that all queries see, hi the last key of the tile.
    t = tl.minimum(t + BM, S) - 1
    last_start, last = _band(t, t < S, p_row_start, p_row_key, OFF, STEP, W, HAS_DOCS)
    start = start // BN * BN
    stop = tl.minimum(last + 1, K)
    full = tl.minimum((last_start + BN - 1) // BN * BN, tl.maximum(stop, start))
    masked = tl.maximum((first_last + 1) // BN * BN, full)
    return start, full, masked, stop


@triton.jit
def _is_selected(
    o_t, m_t, k0, o_k, p_bits, p_row_start, S,
    L_SEL: tl.constexpr, BN: tl.constexpr, HAS_DOCS: tl.constexpr,
):  # fmt: skip
    """[queries, keys]: whether the key's block is chosen; `p_bits` is at the segment's words.

    Words are [words, S]: the word of neighbouring queries is one contiguous load.
    """
    # 32 blocks of L_SEL keys share a word. Where a tile of BN keys lies within one word, a query
    # needs a single word [queries, 1]; otherwise every pair of query and key loads its own.
    if (32 * L_SEL) % BN == 0 and not HAS_DOCS:
        p_words = p_bits + tl.cast(k0 // (32 * L_SEL), tl.int64) * S + o_t
        word = tl.load(p_words, mask=m_t, other=0)[:, None]
        bit = (o_k // L_SEL % 32)[None, :]
    else:
        # [queries, keys]: block of the key in the document of the query.
        if HAS_DOCS:
            start = tl.load(p_row_start + o_t, mask=m_t, other=0)
            block = tl.maximum(o_k[None, :] - start[:, None], 0) // L_SEL
        else:
            block = (o_k // L_SEL)[None, :] + (o_t * 0)[:, None]
        # A key after the query is masked by the band. Its word may lie outside of the tensor, so
        # the load is masked, too. int64: words * S may pass 2^31.
        inside = m_t[:, None] & (o_k[None, :] <= o_t[:, None])
        p_words = p_bits + (block // 32).to(tl.int64) * S + o_t[:, None]
        word = tl.load(p_words, mask=inside, other=0)
        bit = block % 32
    return ((word >> bit) & 1) != 0


@triton.jit
def _stats(p_stats, rows, m_r):
    """The numbers of gate_backward of rows of a branch's stats [B, Hq, S, 4]; masked: 0.

    One 16-byte load per row: narrow loads would be repeated by every thread that holds the row.
    """
    o_4 = tl.arange(0, 4)
    b_4 = tl.load(p_stats + (rows * 4)[:, None] + o_4[None, :], mask=m_r[:, None], other=0.0)
    # Each column of [rows, 4] is taken as a sum over a one-hot mask: exact, three terms are 0.
    lse = tl.sum(tl.where(o_4[None, :] == 0, b_4, 0.0), axis=1)
    delta = tl.sum(tl.where(o_4[None, :] == 1, b_4, 0.0), axis=1)
    gate = tl.sum(tl.where(o_4[None, :] == 2, b_4, 0.0), axis=1)
    token = tl.sum(tl.where(o_4[None, :] == 3, b_4, 0.0), axis=1)
    return lse, delta, gate, token


@triton.jit
def _wait(EARLY: tl.constexpr):
    """Programmatic dependent launch: block until the previous kernel's writes are visible."""
    if EARLY:
        gdc_wait()


@triton.jit
def _let_next_come(EARLY: tl.constexpr):
    """Programmatic dependent launch: the next kernel may start once all programs got here."""
    if EARLY:
        gdc_launch_dependents()


# --- The gated sum of the three branches and its gradient ---
# The selected branch runs last, and its kernels end with the sum: it needs no pass of its own.


@triton.jit
def _store_gated(p_o_cmp, p_o_win, p_out, p_gate, b_sel, at, m_rows, m_o):
    """out = sum of gate * branch (Eq. 5) at the offsets `at`; p_gate is at each row's gates."""
    # Rounded like the stored branch: the backward reads that one, so d gate fits this sum exactly.
    b_sel = b_sel.to(p_out.dtype.element_ty).to(tl.float32)
    b_sum = b_sel * tl.load(p_gate + 1, mask=m_rows, other=0.0).to(tl.float32)[:, None]
    # gates are [..., 3] in the order cmp, sel, win.
    b_o = tl.load(p_o_cmp + at, mask=m_o, other=0.0).to(tl.float32)
    b_sum += b_o * tl.load(p_gate, mask=m_rows, other=0.0).to(tl.float32)[:, None]
    b_o = tl.load(p_o_win + at, mask=m_o, other=0.0).to(tl.float32)
    b_sum += b_o * tl.load(p_gate + 2, mask=m_rows, other=0.0).to(tl.float32)[:, None]
    tl.store(p_out + at, b_sum.to(p_out.dtype.element_ty), mask=m_o)


@triton.jit
def _with_gate(lse, gate):
    """lse - log2 |gate|, with a last bit of 1 for a gate below 0: inf for a gate of 0."""
    lse -= tl.math.log2(tl.abs(gate))
    below = (gate < 0.0) & (lse < float("inf"))  # a last bit would make a NaN of infinity
    bits = (lse.to(tl.int32, bitcast=True) & -2) | below.to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=COUNTS)
def gate_backward(
    p_o_cmp, p_o_sel, p_o_win, p_dout, p_lse, p_gates, p_dgates, p_stats, p_dcmp, p_dwin,
    p_row_shift, p_bits, NUM_ROWS, Hq, G, S, s_ob, s_os, s_oh, s_gb, s_gs, s_gh,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BY_TOKEN: tl.constexpr, BT: tl.constexpr,
    BH: tl.constexpr,
):  # fmt: skip
    """delta = <dout, branch> of each row: the gradient of its gate, and what its softmax subtracts.

    dgates is [B, S, Hq, 3]. stats [3, B, Hq, S, 4] fp32 holds what the other backward kernels read
    of a row: log-sum-exp less log2 |gate|, delta, the sign of the gate as 1 or -1, and the key at
    its position; BY_TOKEN: those of the selected branch are [B, S, Hq, 4], as hopper/selected.py
    gathers them. So exp2(s' - first) is |gate| * P. The last bit of the first number is set for a
    gate below 0: a kernel that is short of loads needs no third. The fourth number of the selected
    branch is the word of p_bits [B, Hkv, 1, S], where given, for the kernels in hopper/ that mask
    the past. p_dcmp and p_dwin, where given, get gate * dout of that branch, [B, S, Hq, DV], for
    the kernels of another library.
    """
    # Rows of some heads of neighbouring tokens, whose stats are neighbours, too.
    i_b, o_r = tl.program_id(2).to(tl.int64), tl.arange(0, BT * BH)
    # int64: rows * DV may pass 2^31, and so may the distance of the first head and the last.
    i_s = (tl.program_id(0) * BT + o_r % BT).to(tl.int64)
    i_h = (tl.program_id(1) * BH + o_r // BT).to(tl.int64)
    m_r = (i_s < S) & (i_h < Hq)
    o_d, o_4 = tl.arange(0, DV_PAD), tl.arange(0, 4)
    mask = m_r[:, None] & (o_d < DV)[None, :]
    # [rows, DV_PAD]: dout, read once for all three branches. All loads come before all stores, of
    # which the compiler cannot know that they write elsewhere.
    rows = i_b * s_ob + i_s * s_os + i_h * s_oh
    dout = tl.load(p_dout + rows[:, None] + o_d[None, :], mask=mask, other=0.0)
    row = (i_b * S + i_s) * Hq + i_h
    at = row[:, None] * DV + o_d[None, :]
    o_cmp = tl.load(p_o_cmp + at, mask=mask, other=0.0)
    o_sel = tl.load(p_o_sel + at, mask=mask, other=0.0)
    o_win = tl.load(p_o_win + at, mask=mask, other=0.0)
    # Stats are by head, [B, Hq, S]: the kernels that read them take tiles of one head.
    place = (i_b * Hq + i_h) * S + i_s
    lse_cmp = tl.load(p_lse + place, mask=m_r, other=0.0)
    lse_sel = tl.load(p_lse + NUM_ROWS + place, mask=m_r, other=0.0)
    lse_win = tl.load(p_lse + NUM_ROWS * 2 + place, mask=m_r, other=0.0)
    p_gates += i_b * s_gb + i_s * s_gs + i_h * s_gh
    gate_cmp = tl.load(p_gates, mask=m_r, other=0.0).to(tl.float32)
    gate_sel = tl.load(p_gates + 1, mask=m_r, other=0.0).to(tl.float32)
    gate_win = tl.load(p_gates + 2, mask=m_r, other=0.0).to(tl.float32)
    # The index as fp32 is exact up to 2^24 tokens (MAX_TOKENS in problem.py).
    key = i_s
    if p_row_shift is not None:
        key += tl.load(p_row_shift + i_s, mask=m_r, other=0)
    key = key.to(tl.float32)
    if p_bits is not None:
        p_words = p_bits + (i_b * (Hq // G) + i_h // G) * S + i_s
        word = tl.load(p_words, mask=m_r, other=0).to(tl.float32, bitcast=True)
    dout = dout.to(tl.float32)
    for branch in tl.static_range(3):
        # static_range unrolls: `branch` is a constant.
        if branch == 0:
            b_o, lse, gate = o_cmp, lse_cmp, gate_cmp
        elif branch == 1:
            b_o, lse, gate = o_sel, lse_sel, gate_sel
        else:
            b_o, lse, gate = o_win, lse_win, gate_win
        # d gate = <dout, o>. With dO = gate * dout, softmax's backward is
        # dS = gate * P * (dP - <dout, o>) with dP = dout V^T: the same number serves both.
        delta = tl.sum(dout * b_o.to(tl.float32), axis=1)
        first = tl.where(o_4[None, :] == 0, _with_gate(lse, gate)[:, None], delta[:, None])
        fourth = key
        if branch == 1 and p_bits is not None:
            fourth = word
        sign = tl.where(gate < 0.0, -1.0, 1.0)
        second = tl.where(o_4[None, :] == 2, sign[:, None], fourth[:, None])
        b_4 = tl.where(o_4[None, :] < 2, first, second)
        if BY_TOKEN and branch == 1:
            p_row = p_stats + (NUM_ROWS + row)[:, None] * 4
        else:
            p_row = p_stats + (branch * NUM_ROWS + place)[:, None] * 4
        tl.store(p_row + o_4[None, :], b_4, mask=m_r[:, None])
        if branch == 0 and p_dcmp is not None:
            b_gated = (dout * gate[:, None]).to(p_dcmp.dtype.element_ty)
            tl.store(p_dcmp + at, b_gated, mask=mask)
        if branch == 2 and p_dwin is not None:
            b_gated = (dout * gate[:, None]).to(p_dwin.dtype.element_ty)
            tl.store(p_dwin + at, b_gated, mask=mask)
        tl.store(p_dgates + row * 3 + branch, delta.to(p_dgates.dtype.element_ty), mask=m_r)

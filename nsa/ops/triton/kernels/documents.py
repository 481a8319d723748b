"""What is not finite, taken out of packed documents before their tiles meet.

A tile may hold two documents. A mask makes the probabilities between them 0, but 0 * NaN is NaN, so
the values that they are multiplied by must be finite. Names as in tile.py.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite_rows(
    p_x, p_clean, p_first_bad, p_row_start, p_seen_from, ROWS, H, s_s, s_h,
    D: tl.constexpr, D_PAD: tl.constexpr, COMPRESSED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Copy x [ROWS, H, D], contiguous and with 0 for what is not finite.

    first_bad [S] holds, at the first token of each document, the first query that sees something
    that was not finite. COMPRESSED: `seen_from` says who first sees a row; others see themselves.
    """
    o_r = tl.program_id(0) * BM + tl.arange(0, BM)  # pairs of a row and a head
    m_r, row = o_r < ROWS * H, (o_r // H).to(tl.int64)
    o_d = tl.arange(0, D_PAD)
    mask = m_r[:, None] & (o_d < D)[None, :]
    p_rows = p_x + (row * s_s + (o_r % H).to(tl.int64) * s_h)[:, None] + o_d[None, :]
    b_x = tl.load(p_rows, mask=mask, other=0.0)
    finite = tl.abs(b_x.to(tl.float32)) < float("inf")
    at = o_r.to(tl.int64)[:, None] * D + o_d[None, :]
    tl.store(p_clean + at, tl.where(finite, b_x, 0.0), mask=mask)
    bad = m_r & (tl.min(finite.to(tl.int32), axis=1) == 0)
    query = row.to(tl.int32)
    if COMPRESSED:
        query = tl.load(p_seen_from + row, mask=bad, other=0)
    document = tl.load(p_row_start + query, mask=bad, other=0)
    tl.atomic_min(p_first_bad + document, query, mask=bad)

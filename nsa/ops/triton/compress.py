"""Mean compression (phi = avg), forward and backward: kernels and launchers, no atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.spec import BlockSpec
from nsa.ops.triton.documents import index_documents
from nsa.ops.triton.launcher import Launch, Memo, ceil_div, form, start
from nsa.ops.triton.tile import COUNTS
from nsa.ops.triton.tiles import padded


@triton.jit(do_not_specialize=COUNTS)
def mean_forward(
    p_x, p_out, p_cmp_first, N, H, s_xb, s_xs, s_xh,
    L: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    HAS_DOCS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Means of BLOCKS compression blocks of one head; out is contiguous [B, N, H, D].

    TILE tokens of each are loaded at once, all of them where a block is not long: with few programs
    this waits once for memory.
    """
    # int64: offsets of a batch element or a head may pass 2^31.
    i_b, i_h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    o_n = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    m_n = o_n < N
    # [BLOCKS]: first raw token of each block. p_cmp_first holds the first query that sees a
    # block, which is the block's last token.
    if HAS_DOCS:
        start = tl.load(p_cmp_first + o_n, mask=m_n, other=L - 1) - (L - 1)
    else:
        start = o_n * STRIDE
    o_i, o_d = tl.arange(0, TILE), tl.arange(0, D_PAD)
    p_head = p_x + i_b * s_xb + i_h * s_xh + o_d[None, None, :]
    # out[n] = 1/L * sum over i < L of x[start(n) + i]: [BLOCKS, TILE, D_PAD], fp32 sums.
    total = tl.zeros([BLOCKS, D_PAD], tl.float32)
    for i in tl.static_range(0, L, TILE):
        rows = (start[:, None] + i + o_i[None, :]).to(tl.int64)[:, :, None]
        mask = m_n[:, None, None] & (o_d < D)[None, None, :]
        if L % TILE:
            mask = mask & (i + o_i < L)[None, :, None]
        b_x = tl.load(p_head + rows * s_xs, mask=mask, other=0.0)
        total += tl.sum(b_x.to(tl.float32), axis=1)
    p_rows = p_out + ((i_b * N + o_n[:, None]) * H + i_h) * D + o_d[None, :]
    mask = m_n[:, None] & (o_d < D)[None, :]
    tl.store(p_rows, (total / L).to(p_out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def mean_backward(
    p_dout, p_dx, p_row_start, p_row_cmp, p_raw_last, S, N, H, s_ob, s_os, s_oh,
    L: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    HAS_DOCS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradient of ROWS tokens of one head: the sum over the blocks that hold them, over L."""
    i_b, i_h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    o_t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_t = o_t < S
    # [ROWS]: start and length of the token's document, index of its first compressed token.
    if HAS_DOCS:
        start = tl.load(p_row_start + o_t, mask=m_t, other=0)
        base = tl.load(p_row_cmp + o_t, mask=m_t, other=0)
        length = tl.load(p_raw_last + o_t, mask=m_t, other=0) + 1 - start
    else:
        start = o_t * 0
        base = o_t * 0
        length = start + S
    # Complete blocks of the document, BlockSpec.num_cmp: floor((length - L) / STRIDE) + 1.
    num_blocks = tl.maximum(length - L + STRIDE, 0) // STRIDE
    o_d = tl.arange(0, D_PAD)
    p_head = p_dout + i_b * s_ob + i_h * s_oh + o_d[None, :]
    # dx[t] = 1/L * sum of dout[n] over the blocks n that hold t. Those are the L / STRIDE
    # blocks n = t // STRIDE - back: the token gathers, so that no atomics are needed.
    total = tl.zeros([ROWS, D_PAD], tl.float32)
    for back in range(0, L // STRIDE):
        block = (o_t - start) // STRIDE - back
        m_b = m_t & (block >= 0) & (block < num_blocks)
        rows = (base + block).to(tl.int64)[:, None]
        mask = m_b[:, None] & (o_d < D)[None, :]
        total += tl.load(p_head + rows * s_os, mask=mask, other=0.0).to(tl.float32)
    p_rows = p_dx + ((i_b * S + o_t[:, None]) * H + i_h) * D + o_d[None, :]
    mask = m_t[:, None] & (o_d < D)[None, :]
    tl.store(p_rows, (total / L).to(p_dx.dtype.element_ty), mask=mask)


# --- Launchers ---

ROWS = 32
"""Tokens of one program of the backward pass."""
LOADED, BLOCKS = 8192, 2
"""Numbers that a program of the forward pass loads at once, and blocks that it takes at most. It is
one warp: several would have to add up what each has read of a block."""
MAX_CACHED = 1024
"""Cached launches; a full cache is cleared."""

_memo: Memo = {}
_memo_backward: Memo = {}


def forward(x: Tensor, spec: BlockSpec, doc_lens: list[int]) -> Tensor:
    """Mean of every complete block of l tokens, stride d: [B, S, H, D] -> [B, N, H, D]."""
    if len(_memo) >= MAX_CACHED:
        _memo.clear()
    batch, _, num_heads, dim = x.shape
    num_cmp = sum(spec.num_cmp(length) for length in doc_lens)
    out = torch.empty(batch, num_cmp, num_heads, dim, dtype=x.dtype, device=x.device)
    packed = len(doc_lens) > 1
    first = index_documents(doc_lens, spec, x.device).keys.cmp_first if packed else x
    wide = padded(dim)
    tokens = min(padded(spec.l), max(LOADED // wide, 1))
    together = max(min(LOADED // (wide * tokens), BLOCKS), 1)
    start(
        _memo,
        (form(x), spec, tuple(doc_lens)),
        mean_forward,
        (x, out, first),
        lambda: Launch.plain(
            (ceil_div(num_cmp, together), batch * num_heads),
            (num_cmp, num_heads, *x.stride()[:3]),
            dict(L=spec.l, STRIDE=spec.d, D=dim, D_PAD=wide, HAS_DOCS=packed)
            | dict(BLOCKS=together, TILE=tokens),
            num_warps=1,
        ),
    )
    return out


def backward(dout: Tensor, seq_len: int, spec: BlockSpec, doc_lens: list[int]) -> Tensor:
    """Gradient of x: [B, N, H, D] -> [B, S, H, D]."""
    if len(_memo_backward) >= MAX_CACHED:
        _memo_backward.clear()
    batch, num_cmp, num_heads, dim = dout.shape
    dx = torch.empty(batch, seq_len, num_heads, dim, dtype=dout.dtype, device=dout.device)
    packed = len(doc_lens) > 1
    # Without documents the kernel reads no index: any tensor stands for it.
    index: tuple[Tensor, Tensor, Tensor] = (dout, dout, dout)
    if packed:
        docs = index_documents(doc_lens, spec, dout.device)
        index = (docs.queries.row_start, docs.queries.row_cmp, docs.keys.raw_last)
    start(
        _memo_backward,
        (form(dout), spec, tuple(doc_lens)),
        mean_backward,
        (dout, dx, *index),
        lambda: Launch.plain(
            (ceil_div(seq_len, ROWS), batch * num_heads),
            (seq_len, num_cmp, num_heads, *dout.stride()[:3]),
            dict(L=spec.l, STRIDE=spec.d, D=dim, D_PAD=padded(dim), HAS_DOCS=packed, ROWS=ROWS),
        ),
    )
    return dx

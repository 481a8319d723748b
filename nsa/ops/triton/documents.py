"""Packed documents: index tensors of their bounds, and the pass that keeps a NaN in its document.

A tile may hold two documents. A mask makes the probabilities between them 0, but 0 * NaN is NaN.
So non-finite values are replaced by 0 before the kernels run, and the caller makes the rows that
saw one NaN. Names as in tile.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.checks import refuse_captured_documents
from nsa.ops.spec import BlockSpec
from nsa.ops.triton.launcher import Launch, Memo, ceil_div, form, start
from nsa.ops.triton.tiles import padded


@triton.jit
def finite_rows(
    p_x, p_clean, p_first_bad, p_row_start, p_seen_from, ROWS, H, s_s, s_h,
    D: tl.constexpr, D_PAD: tl.constexpr, COMPRESSED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Copy x [ROWS, H, D], contiguous and with 0 for non-finite values.

    first_bad [S] gets, at the first token of each document, the first query that sees a non-finite
    value. COMPRESSED: `seen_from` holds the first query that sees a row; a raw row is its own.
    """
    # [BM] rows (token, head).
    o_r = tl.program_id(0) * BM + tl.arange(0, BM)
    m_r, row = o_r < ROWS * H, (o_r // H).to(tl.int64)
    o_d = tl.arange(0, D_PAD)
    mask = m_r[:, None] & (o_d < D)[None, :]
    p_rows = p_x + (row * s_s + (o_r % H).to(tl.int64) * s_h)[:, None] + o_d[None, :]
    b_x = tl.load(p_rows, mask=mask, other=0.0)
    # NaN compares false, so NaN and both infinities count as bad. [BM, D_PAD].
    finite = tl.abs(b_x.to(tl.float32)) < float("inf")
    at = o_r.to(tl.int64)[:, None] * D + o_d[None, :]
    tl.store(p_clean + at, tl.where(finite, b_x, 0.0), mask=mask)
    bad = m_r & (tl.min(finite.to(tl.int32), axis=1) == 0)
    # A minimum does not depend on the order of the programs: the atomics are deterministic.
    query = row.to(tl.int32)
    if COMPRESSED:
        query = tl.load(p_seen_from + row, mask=bad, other=0)
    document = tl.load(p_row_start + query, mask=bad, other=0)
    tl.atomic_min(p_first_bad + document, query, mask=bad)


# --- Index tensors and launchers ---

ROWS_PER_PROGRAM = 16
MAX_CACHED = 256
"""Cached launches; a full cache is cleared."""

_memo: Memo = {}


class Documents(NamedTuple):
    """Index tensors, int32: [S] for raw tokens, [N] for compressed ones, [blocks] for blocks."""

    row_start: Tensor  # first token of the row's document
    row_cmp: Tensor  # first compressed token of the row's document
    row_block: Tensor  # first selection block of the row's document
    raw_first: Tensor  # first query that sees the raw token: itself
    raw_last: Tensor  # last token of its document
    win_last: Tensor  # last query whose window reaches the raw token
    cmp_first: Tensor  # first query that sees the compressed token
    cmp_last: Tensor  # last token of its document
    block_start: Tensor  # first token of the selection block
    block_stop: Tensor  # one past its last token


def index_documents(doc_lens: list[int], spec: BlockSpec, device: torch.device) -> Documents:
    """Build the index on the host, where the lengths are, and copy it in one piece.

    Cached: all layers of a step use the same index.
    """
    wanted = tuple(doc_lens), spec, device
    if device.type != "cuda":
        return _kept_index(*wanted, stream=0)
    refuse_captured_documents(device)
    return _kept_index(*wanted, stream=torch.cuda.current_stream(device).cuda_stream)


@lru_cache(maxsize=2)  # training, and an evaluation between its steps
def _kept_index(
    doc_lens: tuple[int, ...], spec: BlockSpec, device: torch.device, stream: int
) -> Documents:
    """`stream` is part of the key: another stream could read the index before it is copied."""
    lengths = torch.tensor(doc_lens)
    num_cmp = torch.tensor([spec.num_cmp(length) for length in doc_lens])
    num_blocks = torch.tensor([spec.num_blocks(length) for length in doc_lens])
    starts, cmp_starts = lengths.cumsum(0) - lengths, num_cmp.cumsum(0) - num_cmp
    block_starts = num_blocks.cumsum(0) - num_blocks
    token = torch.arange(int(lengths.sum()))
    raw_last = (starts + lengths - 1).repeat_interleave(lengths)
    compressed = torch.arange(int(num_cmp.sum())) - cmp_starts.repeat_interleave(num_cmp)
    block = torch.arange(int(num_blocks.sum())) - block_starts.repeat_interleave(num_blocks)
    block_start = starts.repeat_interleave(num_blocks) + block * spec.l_sel
    doc_stop = (starts + lengths).repeat_interleave(num_blocks)
    rows = [
        starts.repeat_interleave(lengths),
        cmp_starts.repeat_interleave(lengths),
        block_starts.repeat_interleave(lengths),
        token,
        raw_last,
        torch.minimum(raw_last, token + spec.w - 1),
        starts.repeat_interleave(num_cmp) + compressed * spec.d + spec.l - 1,
        (starts + lengths - 1).repeat_interleave(num_cmp),
        block_start,
        torch.minimum(block_start + spec.l_sel, doc_stop),
    ]
    packed = torch.cat(rows).to(torch.int32)
    if device.type == "cuda":
        packed = packed.pin_memory()  # so that the copy does not wait for the device
    packed = packed.to(device, non_blocking=True)
    return Documents(*packed.split([len(row) for row in rows]))


def finite_only(
    index: Documents,
    tensors: tuple[Tensor, ...],  # each [1, S or N, H, D]
    num_tokens: int,
) -> tuple[list[Tensor], Tensor]:  # the tensors, [S] bool
    """Copies with 0 for non-finite values, and the queries that would have seen one.

    These are all queries of a document from the first that sees it on; the caller makes their
    results NaN. No host sync.
    """
    first_bad = torch.full_like(index.row_start, num_tokens)
    clean = [_clean_copy(index, x, first_bad) for x in tensors]
    return clean, index.raw_first >= first_bad[index.row_start]


def _clean_copy(index: Documents, x: Tensor, first_bad: Tensor) -> Tensor:
    _, num_rows, num_heads, dim = x.shape
    copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    compressed = num_rows != len(first_bad)
    if len(_memo) >= MAX_CACHED:
        _memo.clear()
    start(
        _memo,
        (form(x), compressed),
        finite_rows,
        (x, copy, first_bad, index.row_start, index.cmp_first if compressed else first_bad),
        lambda: Launch.plain(
            (ceil_div(num_rows * num_heads, ROWS_PER_PROGRAM),),
            (num_rows, num_heads, *x.stride()[1:3]),
            {"D": dim, "D_PAD": padded(dim), "COMPRESSED": compressed, "BM": ROWS_PER_PROGRAM},
        ),
    )
    return copy

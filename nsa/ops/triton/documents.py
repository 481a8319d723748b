"""Packed documents and queries with an offset: index tensors of where they lie, and the pass that
keeps a NaN in its document.

A tile may hold two documents. A mask makes the probabilities between them 0, but 0 * NaN is NaN.
So non-finite values are replaced by 0 before the kernels run, and the caller makes the rows that
saw one NaN. Names as in tile.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
    p_x, p_clean, p_first_bad, p_row_first, p_seen_from, p_seen_to, ROWS, H, s_s, s_h,
    D: tl.constexpr, D_PAD: tl.constexpr, ARE_KEYS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Copy x [ROWS, H, D], contiguous and with 0 for non-finite values.

    first_bad [S] gets, at the first query of each document, the first query that sees a non-finite
    value. ARE_KEYS: queries seen_from .. seen_to see a row; a query's row is its own.
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
    if ARE_KEYS:
        query = tl.load(p_seen_from + row, mask=bad, other=0)
        bad = bad & (query <= tl.load(p_seen_to + row, mask=bad, other=-1))
    document = tl.load(p_row_first + query, mask=bad, other=0)
    tl.atomic_min(p_first_bad + document, query, mask=bad)


# --- Index tensors and launchers ---

ROWS_PER_PROGRAM = 16
MAX_CACHED = 256
"""Cached launches; a full cache is cleared."""

_memo: Memo = {}


class QueryIndex(NamedTuple):
    """Of each query, int32 [S], and of each selection block [blocks].

    A row is the index of a query. Without an offset, row t is also raw token t.
    """

    row: Tensor  # itself
    row_first: Tensor  # first row of its document
    row_start: Tensor  # the row where its document would begin: the position is row - row_start
    row_key: Tensor  # first raw token of its document
    row_win: Tensor  # the same in the tensors of the window, which may begin later
    row_shift: Tensor  # row_key - row_start: raw token row + row_shift has the row's position
    row_cmp: Tensor  # first compressed token of its document
    row_block: Tensor  # first selection block of its document
    block_start: Tensor  # first raw token of the selection block
    block_stop: Tensor  # one past its last token


class KeyIndex(NamedTuple):
    """Which rows see a token: int32, [K] for raw and [N] for compressed tokens."""

    raw_first: Tensor  # first row that sees the raw token
    raw_last: Tensor  # last row of its document
    win_last: Tensor  # last row whose window reaches the raw token
    cmp_first: Tensor  # first row that sees the compressed token
    cmp_last: Tensor  # last row of its document


@dataclass(frozen=True)
class Documents:
    """Where documents lie, and index tensors of it.

    They are built on the host, where the lengths are, when first asked for, and copied in one
    piece: a few queries of a long document need no index of its keys in the forward pass.
    """

    doc_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    offsets: tuple[int, ...]
    win_first: int
    spec: BlockSpec
    device: torch.device

    @cached_property
    def queries(self) -> QueryIndex:
        lengths, num_cmp, num_blocks, queries, offset = self._sizes
        # [docs]: first raw token, row, compressed token and block of each document.
        starts, firsts, cmp_starts, block_starts = (
            x.cumsum(0) - x for x in (lengths, queries, num_cmp, num_blocks)
        )
        row_start, row_key = (x.repeat_interleave(queries) for x in (firsts - offset, starts))
        block = torch.arange(int(num_blocks.sum())) - block_starts.repeat_interleave(num_blocks)
        block_start = starts.repeat_interleave(num_blocks) + block * self.spec.l_sel
        doc_stop = (starts + lengths).repeat_interleave(num_blocks)
        index = (
            torch.arange(sum(self.query_lens)),
            firsts.repeat_interleave(queries),
            row_start,
            row_key,
            row_key - self.win_first,
            row_key - row_start,
            cmp_starts.repeat_interleave(queries),
            block_starts.repeat_interleave(queries),
            block_start,
            torch.minimum(block_start + self.spec.l_sel, doc_stop),
        )
        return QueryIndex(*_copied(index, self.device))

    @cached_property
    def keys(self) -> KeyIndex:
        lengths, num_cmp, _, queries, offset = self._sizes
        starts, firsts, cmp_starts = (x.cumsum(0) - x for x in (lengths, queries, num_cmp))

        def seen(first: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
            """First and last row that sees a token which is visible from position `first` on."""
            rows = (first - offset.repeat_interleave(counts)).clamp(min=0)
            rows = torch.minimum(rows, queries.repeat_interleave(counts))
            return (
                firsts.repeat_interleave(counts) + rows,
                (firsts + queries - 1).repeat_interleave(counts),
            )

        token = torch.arange(sum(self.doc_lens)) - starts.repeat_interleave(lengths)
        raw_first, raw_last = seen(token, lengths)
        cmp = torch.arange(int(num_cmp.sum())) - cmp_starts.repeat_interleave(num_cmp)
        reached = (firsts - offset).repeat_interleave(lengths) + token + self.spec.w - 1
        before = (firsts - 1).repeat_interleave(lengths)  # where no row sees the token
        win_last = torch.maximum(torch.minimum(raw_last, reached), before)
        cmp_seen = seen(cmp * self.spec.d + self.spec.l - 1, num_cmp)
        return KeyIndex(*_copied((raw_first, raw_last, win_last, *cmp_seen), self.device))

    @property
    def _sizes(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of each document: raw tokens, compressed tokens, blocks, queries, first position."""
        num_cmp = [self.spec.num_cmp(length) for length in self.doc_lens]
        num_blocks = [self.spec.num_blocks(length) for length in self.doc_lens]
        lengths, queries, offset = (
            torch.tensor(x) for x in (self.doc_lens, self.query_lens, self.offsets)
        )
        return lengths, torch.tensor(num_cmp), torch.tensor(num_blocks), queries, offset


def index_documents(
    doc_lens: list[int],
    spec: BlockSpec,
    device: torch.device,
    query_lens: Sequence[int] = (),
    offsets: Sequence[int] = (),
    win_first: int = 0,
) -> Documents:
    """The documents of a call, cached: all layers of a step use the same index.

    Without `query_lens` and `offsets`, queries and raw tokens are the same. `win_first` is the
    first token that the window's tensors hold.
    """
    queries = tuple(query_lens or doc_lens)
    places = tuple(doc_lens), queries, tuple(offsets or [0] * len(queries)), win_first
    if device.type != "cuda":
        return _kept_index(*places, spec, device, stream=0)
    refuse_captured_documents(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    return _kept_index(*places, spec, device, stream=stream)


# Training, and an evaluation between its steps; a rank of several that share a row has two calls
# for each of its two parts.
@lru_cache(maxsize=8)
def _kept_index(
    doc_lens: tuple[int, ...],
    query_lens: tuple[int, ...],
    offsets: tuple[int, ...],
    win_first: int,
    spec: BlockSpec,
    device: torch.device,
    stream: int,
) -> Documents:
    """`stream` is part of the key: another stream could read the index before it is copied."""
    return Documents(doc_lens, query_lens, offsets, win_first, spec, device)


def _copied(index: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    """The tensors on the device, as int32, by one copy."""
    packed = torch.cat(index).to(torch.int32)
    if device.type == "cuda":
        packed = packed.pin_memory()  # so that the copy does not wait for the device
    packed = packed.to(device, non_blocking=True)
    return packed.split([len(row) for row in index])


QUERY, RAW, CMP = "query", "raw", "cmp"
"""What the rows of a tensor are."""


def finite_only(
    index: Documents,
    tensors: Sequence[Tensor],  # each [1, S, K or N, H, D]
    kinds: Sequence[str],  # QUERY, RAW or CMP of each
) -> tuple[list[Tensor], Tensor]:  # the tensors, [S] bool
    """Copies with 0 for non-finite values, and the queries that would have seen one.

    These are all queries of a document from the first that sees it on; the caller makes their
    results NaN. No host sync.
    """
    queries = index.queries
    first_bad = torch.full_like(queries.row, len(queries.row))
    pairs = zip(tensors, kinds, strict=True)
    clean = [_clean_copy(index, x, kind, first_bad) for x, kind in pairs]
    return clean, queries.row >= first_bad[queries.row_first]


def _clean_copy(index: Documents, x: Tensor, kind: str, first_bad: Tensor) -> Tensor:
    _, num_rows, num_heads, dim = x.shape
    copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(_memo) >= MAX_CACHED:
        _memo.clear()
    queries, keys = index.queries, index.keys
    seen = {
        QUERY: (queries.row, queries.row),
        RAW: (keys.raw_first, keys.raw_last),
        CMP: (keys.cmp_first, keys.cmp_last),
    }[kind]
    start(
        _memo,
        (form(x), kind == QUERY),
        finite_rows,
        (x, copy, first_bad, queries.row_first, *seen),
        lambda: Launch.plain(
            (ceil_div(num_rows * num_heads, ROWS_PER_PROGRAM),),
            (num_rows, num_heads, *x.stride()[1:3]),
            {"D": dim, "D_PAD": padded(dim), "ARE_KEYS": kind != QUERY, "BM": ROWS_PER_PROGRAM},
        ),
    )
    return copy

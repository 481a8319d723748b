"""The inverse of a selection: for each chunk of queries and each block, the queries that chose it.

The kernels count and list the queries from the bits of the selection, in the order of the queries
and without atomics: the list is always the same. A segment is one (batch element, KV head), a bin
the queries of one chunk that chose one block, an item a piece of a bin: the work of one program of
by_block_forward.py and by_block_backward.py. Below the kernels: what those two read of the index,
launchers and the sizes of chunks, and what the launchers of both passes share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.launcher import Launch, ceil_div, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.select import Selection
from nsa.ops.triton.tile import COUNTS
from nsa.ops.triton.tiles import Tiles, fitted_block_tiles, padded


@triton.jit
def _bits(p_words, o_t, m_t):
    """[32, queries]: whether a query chose each block of a word."""
    word = tl.load(p_words + o_t, mask=m_t, other=0)
    return (word[None, :] >> tl.arange(0, 32)[:, None]) & 1


@triton.jit(do_not_specialize=COUNTS)
def count_choices(
    p_bits, p_counts, S, SUB, NUM_BLOCKS, NUM_WORDS, SUBS: tl.constexpr, BQ: tl.constexpr
):  # fmt: skip
    """How many of SUB queries chose each of 32 blocks: [segments, chunks, blocks, SUBS].

    A chunk of queries is counted in SUBS parts by as many programs, to fill the GPU.
    """
    i_w, i_sub, i_seg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    # bits are [segments, words, S]: one program reads one word of SUB neighbouring queries.
    p_words = p_bits + (i_seg * NUM_WORDS + i_w) * S
    stop = tl.minimum(i_sub * SUB + SUB, S)
    # count[block] = sum over queries of the block's bit: [32].
    count = tl.zeros([32], tl.int32)
    for t0 in range(i_sub * SUB, stop, BQ):
        o_t = t0 + tl.arange(0, BQ)
        count += tl.sum(_bits(p_words, o_t, o_t < stop), axis=1)
    # SUBS is the fastest index, so that running sums list a bin's queries in order.
    block = i_w * 32 + tl.arange(0, 32)
    chunk = i_seg * (tl.num_programs(1) // SUBS) + i_sub // SUBS
    at = (chunk * NUM_BLOCKS + block) * SUBS + i_sub % SUBS
    tl.store(p_counts + at, count, mask=block < NUM_BLOCKS)


@triton.jit(do_not_specialize=COUNTS)
def add_up(p_counts, p_ends, NUM_COUNTS, SUBS: tl.constexpr, BLOCK: tl.constexpr):
    """Running sums of the NUM_COUNTS * SUBS counts of a segment.

    One program per segment, BLOCK counts at a time: torch.cumsum over a few long rows was much
    slower (docs/log/kernels.md).
    """
    size = NUM_COUNTS * SUBS  # a multiple of a constant: aligned loads
    start = tl.program_id(0).to(tl.int64) * size
    total = 0
    for i in range(0, size, BLOCK):
        o = i + tl.arange(0, BLOCK)
        counts = tl.load(p_counts + start + o, mask=o < size, other=0)
        tl.store(p_ends + start + o, total + tl.cumsum(counts, axis=0), mask=o < size)
        total += tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=COUNTS)
def list_choices(
    p_bits, p_before, p_counts, p_ends, p_queries, p_places, S, SUB, NUM_BLOCKS, NUM_WORDS,
    NUM_ENTRIES, SUBS: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """List the queries that chose each of 32 blocks, and the block's place among their choices.

    queries is [segments, NUM_ENTRIES], sorted by chunk, then block, then query; places, of the same
    shape, says which of the query's own choices the block is. `ends` are the running sums of the
    counts within a segment: the entries of a bin begin at its end minus its count.
    """
    i_w, i_sub, i_seg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    block = i_w * 32 + tl.arange(0, 32)
    chunk = i_seg * (tl.num_programs(1) // SUBS) + i_sub // SUBS
    bin = (chunk * NUM_BLOCKS + block) * SUBS + i_sub % SUBS
    m_b = block < NUM_BLOCKS
    count = tl.load(p_counts + bin, mask=m_b, other=0)
    if tl.sum(count, axis=0) == 0:
        return  # no query chose these blocks
    # [32]: next free entry of each block.
    at = tl.load(p_ends + bin, mask=m_b, other=0) - count
    words = (i_seg * NUM_WORDS + i_w) * S
    stop = tl.minimum(i_sub * SUB + SUB, S)
    for t0 in range(i_sub * SUB, stop, BQ):
        o_t = t0 + tl.arange(0, BQ)
        m_t = o_t < stop
        # [32, BQ]: bit, place among the query's choices, rank among the block's queries.
        chosen = _bits(p_bits + words, o_t, m_t)
        before = tl.load(p_before + words + o_t, mask=m_t, other=0).to(tl.int32)
        place = before[None, :] + tl.cumsum(chosen, axis=0) - 1
        rank = tl.cumsum(chosen, axis=1) - 1
        # int64 through i_seg: segments * entries may pass 2^31.
        here = i_seg * NUM_ENTRIES + at[:, None] + rank
        tl.store(p_queries + here, o_t[None, :] + chosen * 0, mask=chosen != 0)
        tl.store(p_places + here, place.to(tl.int16), mask=chosen != 0)
        at += tl.sum(chosen, axis=1)


@triton.jit(do_not_specialize=COUNTS)
def cut_bins(
    p_ends, p_items, p_item_ends, NUM_CHUNKS, NUM_BLOCKS, NUM_ITEMS, PIECE,
    SUBS: tl.constexpr, NB: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """Cut the bins of a chunk into items of up to PIECE queries.

    items is [segments, chunks, NUM_ITEMS]: the block of each item, NUM_BLOCKS after the last one;
    item_ends [segments, chunks, blocks]: one past the last item of each block.
    """
    i_c, i_seg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_b = tl.arange(0, NB)
    m_b = o_b < NUM_BLOCKS
    bin = (i_seg * NUM_CHUNKS + i_c) * NUM_BLOCKS + o_b
    # Entries of each bin: from the end of the bin before it to its own last part.
    end = tl.load(p_ends + bin * SUBS + SUBS - 1, mask=m_b, other=0)
    m_before = m_b & (i_c * NUM_BLOCKS + o_b > 0)
    start = tl.load(p_ends + bin * SUBS - 1, mask=m_before, other=0)
    # Items per bin, and their running sum: item k of bin b is item first[b] + k of the chunk.
    num_items = tl.where(m_b, tl.cdiv(end - start, PIECE), 0)
    item_end = tl.cumsum(num_items, axis=0)
    tl.store(p_item_ends + bin, item_end, mask=m_b)
    p_items += (i_seg * NUM_CHUNKS + i_c) * NUM_ITEMS
    first = item_end - num_items
    # Write the k-th item of all bins at a time.
    for k in range(0, tl.max(num_items, axis=0)):
        tl.store(p_items + first + k, o_b, mask=k < num_items)
    # The list is as long as the worst case, so that the host never waits for its length. Unused
    # items get the block NUM_BLOCKS, at which programs return.
    total = tl.sum(num_items, axis=0)
    for i in range(total, NUM_ITEMS, FILL):
        o_i = i + tl.arange(0, FILL)
        tl.store(p_items + o_i, tl.full([FILL], 0, tl.int32) + NUM_BLOCKS, mask=o_i < NUM_ITEMS)


# --- Device functions of both passes: how a program finds its item and its block ---


@triton.jit
def _item(
    p_items, p_item_ends, p_ends, chunk, num_chunks, NUM_BLOCKS, NUM_ITEMS, PIECE,
    SUBS: tl.constexpr,
):  # fmt: skip
    """Block of a program's item, its first entry, one past its last; block >= NUM_BLOCKS: none."""
    i_item, i_seg = tl.program_id(0), tl.program_id(2).to(tl.int64)
    # Block of the item, and its bin. min: unused items name a block that does not exist.
    block = tl.load(p_items + (i_seg * num_chunks + chunk) * NUM_ITEMS + i_item)
    bin = (i_seg * num_chunks + chunk) * NUM_BLOCKS + tl.minimum(block, NUM_BLOCKS - 1)
    # The item is number i_item - first_item of its bin; the bin's entries begin at `start`.
    first_item = tl.load(p_item_ends + bin - 1, mask=block > 0, other=0)
    start = tl.load(p_ends + bin * SUBS - 1, mask=(block > 0) | (chunk > 0), other=0)
    first = start + (i_item - first_item) * PIECE
    stop = tl.minimum(first + PIECE, tl.load(p_ends + bin * SUBS + SUBS - 1))
    return block, first, stop


@triton.jit
def _block_range(
    p_block_start, p_block_stop, block, S, L_SEL: tl.constexpr, HAS_DOCS: tl.constexpr
):
    """First token of a block, and one past its last."""
    if HAS_DOCS:
        return tl.load(p_block_start + block), tl.load(p_block_stop + block)
    return block * L_SEL, tl.minimum(block * L_SEL + L_SEL, S)


# --- Launchers, and the sizes of chunks and items ---

CACHE_BYTES = 24 << 20
"""L2 cache budget for the queries of one chunk and KV head, with their gradients."""
BIN_ROWS = 1024
"""Lower bound of the rows (query, head) in an average bin, even beyond the L2 budget: every bin
ends with a pass over the gradients of its block."""
MIN_CHUNK, MAX_CHUNK = 1024, 16384
PART_BYTES = 2 << 30
"""Workspace for partial results of queries; longer sequences are split into groups of chunks."""
MAX_PIECE, MIN_PIECE = 512, 32
"""Bounds of the queries of one item: long items have less overhead, short ones fill the GPU."""
ITEMS = 2048
"""Items that occupy a large GPU although their lengths differ."""
SUBS = 8
"""Parts in which a chunk is counted."""
COUNT_QUERIES = 128
"""Queries per tile of the index kernels."""
ADD_BLOCK = 8192
"""Counts per tile of add_up."""
FILL = 1024
"""Unused items that cut_bins marks with one store."""
CUT_BLOCKS = 1024
"""Blocks that cut_bins takes at least, so that shorter sequences share its code."""


class QueryLists(NamedTuple):
    """For every segment, chunk of queries and block, the queries that chose the block.

    The work list of a chunk is as long as its worst case.
    """

    ends: Tensor  # [segments, chunks, blocks, SUBS] int32: one past the last entry of each part
    queries: Tensor  # [segments, S * n_sel] int32
    places: Tensor  # [segments, S * n_sel] int16: the query's own number of the block
    item_block: Tensor  # [segments, chunks, items] int32; `blocks` where the list has ended
    item_ends: Tensor  # [segments, chunks, blocks] int32: one past the last item of each bin


def list_queries(problem: Problem, chosen: Selection) -> QueryLists:
    """Four launches: count the choices, sum the counts, list the queries, cut bins into items."""
    lists = empty_lists(problem, sized=True)
    segments, num_chunks, num_blocks, _ = lists.ends.shape
    sub = chunk_size(problem) // SUBS
    grid = (problem.num_words, num_chunks * SUBS, segments)
    sizes = (problem.seq_len, sub, num_blocks, problem.num_words)
    constants = {"SUBS": SUBS, "BQ": min(COUNT_QUERIES, max(sub, 16))}
    counts = problem.empty(*lists.ends.shape, dtype=torch.int32)
    start(
        problem.memo,
        "count",
        count_choices,
        (chosen.bits, counts),
        lambda: Launch.plain(grid, sizes, constants),
    )
    start(
        problem.memo,
        "add up",
        add_up,
        (counts, lists.ends),
        lambda: Launch.plain(
            (segments,), (num_chunks * num_blocks,), {"SUBS": SUBS, "BLOCK": ADD_BLOCK}, num_warps=8
        ),
    )
    start(
        problem.memo,
        "list",
        list_choices,
        (chosen.bits, chosen.before, counts, lists.ends, lists.queries, lists.places),
        lambda: Launch.plain(grid, (*sizes, lists.queries.shape[1]), constants),
    )
    start(
        problem.memo,
        "cut",
        cut_bins,
        (lists.ends, lists.item_block, lists.item_ends),
        lambda: Launch.plain(
            (num_chunks, segments),
            (num_chunks, num_blocks, lists.item_block.shape[2], piece_size(problem)),
            {"SUBS": SUBS, "NB": max(padded(num_blocks), CUT_BLOCKS), "FILL": FILL},
        ),
    )
    return lists


def empty_lists(problem: Problem, *, sized: bool = False) -> QueryLists:
    """Memory for the lists; not `sized`: five empty tensors, for calls that need none."""
    kinds = (torch.int32, torch.int32, torch.int16, torch.int32, torch.int32)
    if not sized:
        return QueryLists(*(problem.empty(0, dtype=kind) for kind in kinds))
    segments, num_blocks = problem.num_segments, problem.num_blocks
    chunk, num_entries = chunk_size(problem), problem.seq_len * problem.spec.n_sel
    num_chunks = ceil_div(problem.seq_len, chunk)
    # Worst case: besides the full items, every bin has one that is not full.
    num_items = chunk * problem.spec.n_sel // piece_size(problem) + num_blocks
    sizes = (
        (segments, num_chunks, num_blocks, SUBS),
        (segments, num_entries),
        (segments, num_entries),
        (segments, num_chunks, num_items),
        (segments, num_chunks, num_blocks),
    )
    pairs = zip(sizes, kinds, strict=True)
    return QueryLists(*(problem.empty(*size, dtype=kind) for size, kind in pairs))


def piece_size(problem: Problem) -> int:
    """Queries of one item, at most: a power of two."""
    each = problem.num_segments * problem.seq_len * problem.spec.n_sel // ITEMS
    return min(max(1 << max(each, 1).bit_length() - 1, MIN_PIECE), MAX_PIECE)


def chunk_size(problem: Problem) -> int:
    """Queries of one chunk, a power of two.

    The rows of one KV head fit the L2 budget. Where there are many blocks, chunks are longer, so
    that bins have BIN_ROWS rows on average.
    """
    width = 2 * problem.d_k + 2 * problem.d_v + 4 * problem.d_k
    cached = CACHE_BYTES // (problem.per_group * width)
    filled = ceil_div(problem.num_blocks * BIN_ROWS, problem.spec.n_sel * problem.per_group)
    rows = max(1 << cached.bit_length() - 1, 1 << (filled - 1).bit_length())
    if not problem.by_query:
        fitting = PART_BYTES // part_bytes(problem, max(problem.d_k, problem.d_v))
        rows = min(rows, 1 << max(fitting, 1).bit_length() - 1)
    rows = min(max(rows, MIN_CHUNK), MAX_CHUNK)
    return min(rows, max(1 << (problem.seq_len - 1).bit_length(), SUBS))


def part_bytes(problem: Problem, dim: int) -> int:
    """Bytes of the partial results of one query, all heads: n_sel rows of `dim` numbers."""
    num_rows = problem.batch * problem.num_heads * problem.spec.n_sel
    return num_rows * dim * problem.dtype.itemsize


# --- What the launchers of both passes share: groups of chunks, sizes, constants, tiles ---

WIDE = 1 << 31
"""Offsets from here on need int64."""


class Group(NamedTuple):
    """Chunks whose partial results are in the workspace together."""

    first_chunk: int
    num_chunks: int
    first_row: int
    num_rows: int


def group_chunks(
    problem: Problem, lists: QueryLists, row_bytes: int, ordered: bool = False
) -> list[Group]:
    """Chunks in groups whose partial results fit PART_BYTES.

    A query position has `row_bytes` of them; with `ordered` an item also has its slot.
    """
    chunk, seq_len = chunk_size(problem), problem.seq_len
    chunk_bytes = row_bytes * chunk
    if ordered:
        width = padded(problem.spec.l_sel) * (problem.d_k + problem.d_v)
        slot_bytes = problem.num_segments * lists.item_block.shape[2] * width * 4
        chunk_bytes = max(chunk_bytes, slot_bytes)
    num_chunks = ceil_div(seq_len, chunk)
    together = max(PART_BYTES // chunk_bytes, 1) if chunk_bytes else num_chunks
    return [
        Group(
            first,
            min(together, num_chunks - first),
            first * chunk,
            min(together * chunk, seq_len - first * chunk),
        )
        for first in range(0, num_chunks, together)
    ]


def item_sizes(problem: Problem, lists: QueryLists, group: Group) -> tuple[int, ...]:
    """The sizes that open the argument lists of both kernels."""
    _, num_chunks, num_items = lists.item_block.shape
    return (
        group.first_chunk, num_chunks, group.first_row, group.num_rows, problem.seq_len,
        lists.queries.shape[1], problem.num_blocks, num_items, piece_size(problem),
        problem.num_groups, problem.per_group,
    )  # fmt: skip


def fitted_tiles(problem: Problem, purpose: str = "forward") -> Tiles:
    tiles = fitted_block_tiles(*problem.sizes, purpose, problem.capability)
    assert tiles is not None, "a problem whose blocks do not fit is masked"
    return tiles


def item_constants(problem: Problem, *gathered: Tensor) -> dict[str, Any]:
    """Constants in the kernels' order; `gathered` are the tensors read with computed offsets."""
    return {
        **problem.dims(),
        "N_SEL": problem.spec.n_sel,
        "L_SEL": problem.spec.l_sel,
        "SUBS": SUBS,
        "HAS_DOCS": problem.packed,
        "UPCAST": problem.upcast,
        "NARROW": all(_extent(x) < WIDE for x in gathered),
    }


def _extent(x: Tensor) -> int:
    """Largest offset within one batch element of [B, S, H, D]."""
    return sum(
        (size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)
    )

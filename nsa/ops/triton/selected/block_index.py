"""The inverse of a selection: for each chunk of queries and each block, the queries that chose it.

A counting sort of the choices by chunk, block and query, in memory that is linear in their number.
Atomics only count, they decide no order: the list is always the same. A segment is one (batch
element, KV head), a bin the queries of one chunk that chose one block, an item a piece of a bin:
the work of one program of by_block_forward.py and by_block_backward.py. Below the kernels: what
those two read of the index, launchers and the sizes of chunks, and what the launchers of both
passes share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.choice.selection import Selection
from nsa.ops.triton.launcher import Launch, ceil_div, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.tile import COUNTS
from nsa.ops.triton.tiles import Tiles, fitted_block_tiles, padded


@triton.jit
def _choices(
    p_ids, p_num_chosen, p_row_block, i_seg, t0, stop, o_e, S, Hkv,
    N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, HAS_DOCS: tl.constexpr,
):  # fmt: skip
    """Blocks, over all documents, that the queries from t0 on chose, and how many each query did.

    Entry e is choice e % N_SEL_PAD of query t0 + e // N_SEL_PAD. Blocks beyond that number mean
    nothing. No load waits for another one.
    """
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    o_t, o_n = t0 + o_e // N_SEL_PAD, o_e % N_SEL_PAD
    m_t = o_t < stop
    num_chosen = tl.load(p_num_chosen + i_seg * S + o_t, mask=m_t, other=0)
    p_row = p_ids + ((i_b * S + o_t) * Hkv + i_g) * N_SEL
    block = tl.load(p_row + o_n, mask=m_t & (o_n < N_SEL), other=0)
    if HAS_DOCS:
        block += tl.load(p_row_block + o_t, mask=m_t, other=0)
    return block, num_chosen


@triton.jit(do_not_specialize=COUNTS)
def count_choices(
    p_ids, p_num_chosen, p_row_block, p_counts, S, Hkv, SUB, SUBS, NUM_BLOCKS, num_chunks,
    N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, HAS_DOCS: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Add the choices of BQ queries to the counts [segments, chunks, blocks, SUBS], 0 before.

    A chunk is counted in SUBS parts of SUB queries, so that list_choices can list them in parallel.
    """
    i_seg = tl.program_id(1).to(tl.int64)
    t0 = tl.program_id(0) * BQ
    o_e = tl.arange(0, BQ * N_SEL_PAD)
    block, num_chosen = _choices(
        p_ids, p_num_chosen, p_row_block, i_seg, t0, S, o_e, S, Hkv, N_SEL, N_SEL_PAD, HAS_DOCS
    )
    is_used = o_e % N_SEL_PAD < num_chosen
    # SUBS is the fastest index, so that running sums list a bin's queries in order.
    part = (t0 + o_e // N_SEL_PAD) // SUB
    bin = (i_seg * num_chunks + part // SUBS) * NUM_BLOCKS + block
    one = tl.full([BQ * N_SEL_PAD], 1, tl.int32)
    tl.atomic_add(p_counts + bin * SUBS + part % SUBS, one, mask=is_used, sem="relaxed")


@triton.jit(do_not_specialize=COUNTS)
def cut_bins(
    p_counts, p_starts, p_items, p_first_item,
    NUM_BLOCKS, NUM_ITEMS, NUM_ENTRIES, PIECE, LOG_SUBS, BLOCK: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """First entry of every part and bin of a chunk, and its bins in items of up to PIECE queries.

    A chunk owns NUM_ENTRIES entries, of which queries with fewer choices leave some unused: chunks
    do not wait for each other. Counts are replaced by the first entry of their part. starts and
    first_item are [segments, chunks, blocks + 1]: entry and item with which each bin begins. items
    [segments, chunks, NUM_ITEMS] holds the block of each item, NUM_BLOCKS after the last one.
    """
    i_c, row = tl.program_id(0), tl.program_id(1).to(tl.int64) * tl.num_programs(0)
    row += i_c
    size = NUM_BLOCKS << LOG_SUBS
    p_counts += row * size
    p_starts += row * (NUM_BLOCKS + 1)
    p_first_item += row * (NUM_BLOCKS + 1)
    p_items += row * NUM_ITEMS
    # Running sums, BLOCK counts at a time; the next ones are loaded ahead.
    o = tl.arange(0, BLOCK)
    total = i_c * NUM_ENTRIES
    tl.store(p_starts, total)
    counts = tl.load(p_counts + o, mask=o < size, other=0)
    for i in range(0, size, BLOCK):
        o = i + tl.arange(0, BLOCK)
        following = tl.load(p_counts + o + BLOCK, mask=o + BLOCK < size, other=0)
        sums = total + tl.cumsum(counts, axis=0)
        tl.store(p_counts + o, sums - counts, mask=o < size)
        # The last part of a bin ends where the next bin begins.
        is_last = ((o + 1) >> LOG_SUBS) << LOG_SUBS == o + 1
        tl.store(p_starts + ((o + 1) >> LOG_SUBS), sums, mask=is_last & (o < size))
        total += tl.sum(counts, axis=0)
        counts = following
    tl.debug_barrier()  # starts are read by other threads than those that wrote them
    # Items per bin, and their running sum: item k of bin b is item first[b] + k of the chunk.
    total = 0
    tl.store(p_first_item, total)
    for i in range(0, NUM_BLOCKS, NB):
        o_b = i + tl.arange(0, NB)
        m_b = o_b < NUM_BLOCKS
        num_entries = tl.load(p_starts + o_b + 1, mask=m_b, other=0)
        num_entries -= tl.load(p_starts + o_b, mask=m_b, other=0)
        num_items = tl.cdiv(num_entries, PIECE)
        item_end = total + tl.cumsum(num_items, axis=0)
        tl.store(p_first_item + o_b + 1, item_end, mask=m_b)
        # Write the k-th item of NB bins at a time.
        for k in range(0, tl.max(num_items, axis=0)):
            tl.store(p_items + item_end - num_items + k, o_b, mask=k < num_items)
        total += tl.sum(num_items, axis=0)
    # The list is as long as the worst case, so that the host never waits for its length. Unused
    # items get the block NUM_BLOCKS, at which programs return.
    for i in range(total, NUM_ITEMS, NB):
        o_i = i + tl.arange(0, NB)
        tl.store(p_items + o_i, tl.full([NB], 0, tl.int32) + NUM_BLOCKS, mask=o_i < NUM_ITEMS)


@triton.jit(do_not_specialize=COUNTS)
def list_choices(
    p_ids, p_num_chosen, p_row_block, p_next, p_queries, p_places,
    S, Hkv, SUB, SUBS, NUM_BLOCKS, num_chunks, NUM_ENTRIES,
    N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, HAS_DOCS: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """List the queries of one part of a chunk by block, and the block's place among their choices.

    queries is [segments, NUM_ENTRIES], sorted by chunk, then block, then query; places, of the same
    shape, says which of the query's own choices the block is. `next` [segments, chunks, blocks,
    SUBS] is the next free entry of each bin for the queries of a part; only this program uses it.
    """
    i_sub, i_seg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    p_next += (i_seg * num_chunks + i_sub // SUBS) * NUM_BLOCKS * SUBS + i_sub % SUBS
    p_queries += i_seg * NUM_ENTRIES
    p_places += i_seg * NUM_ENTRIES
    stop = tl.minimum(i_sub * SUB + SUB, S)
    o_e = tl.arange(0, BQ * N_SEL_PAD)
    next_block, next_num = _choices(
        p_ids, p_num_chosen, p_row_block, i_seg, i_sub * SUB, stop, o_e, S, Hkv,
        N_SEL, N_SEL_PAD, HAS_DOCS,
    )  # fmt: skip
    for t0 in range(i_sub * SUB, stop, BQ):
        # [entries] of BQ queries, in their order; those of the next are loaded ahead.
        is_used = o_e % N_SEL_PAD < next_num
        block = tl.where(is_used, next_block, -1)
        next_block, next_num = _choices(
            p_ids, p_num_chosen, p_row_block, i_seg, t0 + BQ, stop, o_e, S, Hkv,
            N_SEL, N_SEL_PAD, HAS_DOCS,
        )  # fmt: skip
        entry = tl.load(p_next + block * SUBS, mask=is_used, other=0)
        is_last = is_used
        if BQ > 1:
            # A query chooses a block once, so equal ones are of other queries: those before this
            # one have the entries before it, and the last of them says which entry is free then.
            # Unsigned, a difference below `many` is that of an equal block, and then it is e. A
            # thread has one choice, in axis 1, and all that it is compared with.
            many: tl.constexpr = BQ * N_SEL_PAD
            other = (block * many + o_e)[:, None] - (block * many)[None, :]
            other = other.to(tl.uint32, bitcast=True)
            num_before = tl.sum((other < o_e[None, :].to(tl.uint32)).to(tl.int32), axis=0)
            num_same = tl.sum((other < many).to(tl.int32), axis=0)
            entry += num_before
            is_last = is_used & (num_before + 1 == num_same)
        tl.store(p_queries + entry, t0 + o_e // N_SEL_PAD, mask=is_used)
        tl.store(p_places + entry, (o_e % N_SEL_PAD).to(tl.int16), mask=is_used)
        # Other threads may read the same place before, and will after it.
        tl.debug_barrier()
        tl.store(p_next + block * SUBS, entry + 1, mask=is_last)
        tl.debug_barrier()


@triton.jit(do_not_specialize=("SIZE_X", "SIZE_Y"))
def zero_two(p_x, p_y, SIZE_X, SIZE_Y, BLOCK: tl.constexpr):
    """Set BLOCK numbers of x or y to 0; the first programs are those of x."""
    i = tl.program_id(0).to(tl.int64)
    num_x = tl.cdiv(tl.cast(SIZE_X, tl.int64), BLOCK)  # it adds BLOCK - 1, beyond 2^31 perhaps
    if i < num_x:
        _zero(p_x, i * BLOCK, SIZE_X, BLOCK)
    else:
        _zero(p_y, (i - num_x) * BLOCK, SIZE_Y, BLOCK)


@triton.jit
def _zero(p, first, SIZE, BLOCK: tl.constexpr):
    o, b_none = first + tl.arange(0, BLOCK), tl.zeros([BLOCK], p.dtype.element_ty)
    if first + BLOCK <= SIZE:  # without a mask, a thread stores 16 bytes at a time
        tl.store(p + o, b_none)
    else:
        tl.store(p + o, b_none, mask=o < SIZE)


# --- Device functions of both passes: how a program finds its item and its block ---


@triton.jit
def _item(p_items, p_first_item, p_starts, chunk, num_chunks, NUM_BLOCKS, NUM_ITEMS, PIECE):
    """Block of a program's item, its first entry, one past its last; block >= NUM_BLOCKS: none."""
    i_item, i_seg = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row = i_seg * num_chunks + chunk
    # Block of the item, and its bin. min: unused items name a block that does not exist.
    block = tl.load(p_items + row * NUM_ITEMS + i_item)
    bin = row * (NUM_BLOCKS + 1) + tl.minimum(block, NUM_BLOCKS - 1)
    # The item is number i_item - first_item of its bin.
    first = tl.load(p_starts + bin) + (i_item - tl.load(p_first_item + bin)) * PIECE
    stop = tl.minimum(first + PIECE, tl.load(p_starts + bin + 1))
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
GLUON_CHUNK = 16384
"""The chunk of the kernel in Gluon, if its partial results fit. A program has an SM for itself:
short items would leave it idle at their beginning and end."""
MAX_CHUNKS = 64
"""Chunks of a sequence: the bins of a longer one would grow with the square of its length."""
PART_BYTES = 2 << 30
"""Workspace for partial results of queries; longer sequences are split into groups of chunks."""
PART_TOKENS = 16384
"""Tokens whose partial results, n_sel rows for each, are in the workspace together, or a chunk;
where `small_parts` says so."""
MAX_PIECE, MIN_PIECE = 512, 32
"""Bounds of the queries of one item: long items have less overhead, short ones fill the GPU."""
ITEMS = 2048
"""Items that occupy a large GPU although their lengths differ."""
MIN_SUB, MIN_SUBS = 64, 8
"""Lower bounds of the queries of a part, which one program of list_choices takes one after the
other, and of the parts of a chunk that is long enough."""
COUNTED = 1024
"""Choices that a program of count_choices takes."""
LISTED = 64
"""Choices that list_choices compares in pairs: those of several queries, where they are few."""
LISTED_PER_WARP = 32
"""Of these, choices of one warp."""
ZERO_BLOCK = 4096
"""Numbers that a program of zero_two sets."""
ADD_BLOCK = 2048
"""Counts that cut_bins adds up at a time."""
CUT_BLOCKS = 256
"""Bins that it cuts at a time."""
CUT_WARPS = 8


class QueryLists(NamedTuple):
    """For every segment, chunk of queries and block, the queries that chose the block.

    The work list of a chunk is as long as its worst case.
    """

    starts: Tensor  # [segments, chunks, blocks + 1] int32: first entry of each bin, then the end
    queries: Tensor  # [segments, S * n_sel] int32
    places: Tensor  # [segments, S * n_sel] int16: the query's own number of the block
    item_block: Tensor  # [segments, chunks, items] int32; `blocks` where the list has ended
    first_item: Tensor  # [segments, chunks, blocks + 1] int32: first item of each bin


def list_queries(problem: Problem, chosen: Selection) -> QueryLists:
    """Four launches: no counts, count the choices, sum the counts and cut the bins, list the
    queries."""
    lists = empty_lists(problem, sized=True)
    segments, num_chunks, num_items = lists.item_block.shape
    num_blocks, spec = problem.num_blocks, problem.spec
    chunk, sub = chunk_size(problem), sub_size(problem)
    subs, num_ids = chunk // sub, padded(spec.n_sel)
    given = chosen.ids, chosen.num_chosen, problem.row_block(chosen.ids)
    counts = problem.empty(segments, num_chunks, num_blocks, subs, dtype=torch.int32)
    fill_zeros(problem, "no counts", counts)
    sizes = (problem.seq_len, problem.num_groups, sub, subs, num_blocks, num_chunks)
    constants = {"N_SEL": spec.n_sel, "N_SEL_PAD": num_ids, "HAS_DOCS": problem.packed}
    counted, listed = (max(most // num_ids, 1) for most in (COUNTED, LISTED))
    start(
        problem.memo,
        "count",
        count_choices,
        (*given, counts),
        lambda: Launch.plain(
            (ceil_div(problem.seq_len, counted), segments), sizes, {**constants, "BQ": counted}
        ),
    )
    start(
        problem.memo,
        "cut",
        cut_bins,
        (counts, lists.starts, lists.item_block, lists.first_item),
        lambda: Launch.plain(
            (num_chunks, segments),
            (num_blocks, num_items, chunk * spec.n_sel, piece_size(problem), subs.bit_length() - 1),
            {"BLOCK": ADD_BLOCK, "NB": CUT_BLOCKS},
            num_warps=CUT_WARPS,
        ),
    )
    start(
        problem.memo,
        "list",
        list_choices,
        (*given, counts, lists.queries, lists.places),
        lambda: Launch.plain(
            (ceil_div(problem.seq_len, sub), segments),
            (*sizes, lists.queries.shape[1]),
            {**constants, "BQ": listed},
            num_warps=min(max(num_ids * listed // LISTED_PER_WARP, 1), 8),
        ),
    )
    return lists


def fill_zeros(problem: Problem, place: str, x: Tensor, y: Tensor | None = None) -> None:
    """Set one or two contiguous tensors to 0 by one launch."""
    sizes = (x.numel(), 0 if y is None else y.numel())
    start(
        problem.memo,
        place,
        zero_two,
        (x, x if y is None else y),
        lambda: Launch.plain(
            (sum(ceil_div(size, ZERO_BLOCK) for size in sizes),), sizes, {"BLOCK": ZERO_BLOCK}
        ),
    )


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
        (segments, num_chunks, num_blocks + 1),
        (segments, num_entries),
        (segments, num_entries),
        (segments, num_chunks, num_items),
        (segments, num_chunks, num_blocks + 1),
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
    in_gluon = problem.in_gluon
    if in_gluon:
        rows = GLUON_CHUNK
    if in_gluon or not problem.by_query:
        fitting = PART_BYTES // part_bytes(problem, max(problem.d_k, problem.d_v))
        rows = min(rows, 1 << max(fitting, 1).bit_length() - 1)
    rows = min(max(rows, MIN_CHUNK), MAX_CHUNK)
    length = 1 << (problem.seq_len - 1).bit_length()
    return min(max(rows, length // MAX_CHUNKS), length)


def sub_size(problem: Problem) -> int:
    """Queries of one part of a chunk, a power of two.

    Parts have no more counts than half of their choices, or a chunk has MIN_SUBS parts: memory is
    linear in the choices, or in the blocks.
    """
    chunk = chunk_size(problem)
    rows = max(2 * problem.num_blocks // problem.spec.n_sel, 1)
    rows = min(1 << (rows - 1).bit_length(), chunk // MIN_SUBS)
    return min(max(rows, MIN_SUB), chunk)


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
    """Chunks in groups whose partial results fit PART_BYTES and PART_TOKENS.

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
    if row_bytes and problem.small_parts:
        together = min(together, max(PART_TOKENS // (chunk * problem.batch), 1))
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
        "HAS_DOCS": problem.packed,
        "UPCAST": problem.upcast,
        "NARROW": all(_extent(x) < WIDE for x in gathered),
    }


def _extent(x: Tensor) -> int:
    """Largest offset within one batch element of [B, S, H, D]."""
    return sum(
        (size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True)
    )

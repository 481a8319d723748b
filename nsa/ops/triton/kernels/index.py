"""The inverse of a selection: for each chunk of queries and each block, the queries that chose it.

Read from the bits of the selection, in the order of the queries and without atomics, so the list is
always the same. A segment is one (batch element, KV head).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bits(p_words, o_t, m_t):
    """[32, queries]: whether a query chose each block of a word."""
    word = tl.load(p_words + o_t, mask=m_t, other=0)
    return (word[None, :] >> tl.arange(0, 32)[:, None]) & 1


@triton.jit
def count_choices(
    p_bits, p_counts, S, SUB, NUM_BLOCKS, NUM_WORDS, SUBS: tl.constexpr, BQ: tl.constexpr
):  # fmt: skip
    """How many of SUB queries chose each of 32 blocks: [segments, chunks, blocks, SUBS].

    A chunk of queries is counted in SUBS parts, so that many programs share the work.
    """
    i_w, i_sub, i_seg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    p_words = p_bits + (i_seg * NUM_WORDS + i_w) * S
    stop = tl.minimum(i_sub * SUB + SUB, S)
    count = tl.zeros([32], tl.int32)
    for t0 in range(i_sub * SUB, stop, BQ):
        o_t = t0 + tl.arange(0, BQ)
        count += tl.sum(_bits(p_words, o_t, o_t < stop), axis=1)
    block = i_w * 32 + tl.arange(0, 32)
    chunk = i_seg * (tl.num_programs(1) // SUBS) + i_sub // SUBS
    at = (chunk * NUM_BLOCKS + block) * SUBS + i_sub % SUBS
    tl.store(p_counts + at, count, mask=block < NUM_BLOCKS)


@triton.jit
def add_up(p_counts, p_ends, SIZE, BLOCK: tl.constexpr):
    """Running sums of the SIZE counts of a segment."""
    start = tl.program_id(0).to(tl.int64) * SIZE
    total = 0
    for i in range(0, SIZE, BLOCK):
        o = i + tl.arange(0, BLOCK)
        counts = tl.load(p_counts + start + o, mask=o < SIZE, other=0)
        tl.store(p_ends + start + o, total + tl.cumsum(counts, axis=0), mask=o < SIZE)
        total += tl.sum(counts, axis=0)


@triton.jit
def list_choices(
    p_bits, p_before, p_counts, p_ends, p_queries, p_places, S, SUB, NUM_BLOCKS, NUM_WORDS,
    NUM_ENTRIES, SUBS: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """Write the queries of 32 blocks where the counts say, and each one's place there.

    queries is [segments, NUM_ENTRIES], sorted by chunk, then block, then query; places says which
    of a query's own choices the block is: [segments, NUM_ENTRIES]. `ends` are the running sums of
    the counts within a segment.
    """
    i_w, i_sub, i_seg = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    block = i_w * 32 + tl.arange(0, 32)
    chunk = i_seg * (tl.num_programs(1) // SUBS) + i_sub // SUBS
    bin = (chunk * NUM_BLOCKS + block) * SUBS + i_sub % SUBS
    m_b = block < NUM_BLOCKS
    count = tl.load(p_counts + bin, mask=m_b, other=0)
    if tl.sum(count, axis=0) == 0:
        return  # nobody chose these blocks
    at = tl.load(p_ends + bin, mask=m_b, other=0) - count
    words = (i_seg * NUM_WORDS + i_w) * S
    stop = tl.minimum(i_sub * SUB + SUB, S)
    for t0 in range(i_sub * SUB, stop, BQ):
        o_t = t0 + tl.arange(0, BQ)
        m_t = o_t < stop
        chosen = _bits(p_bits + words, o_t, m_t)
        before = tl.load(p_before + words + o_t, mask=m_t, other=0).to(tl.int32)
        place = before[None, :] + tl.cumsum(chosen, axis=0) - 1
        rank = tl.cumsum(chosen, axis=1) - 1
        here = i_seg * NUM_ENTRIES + at[:, None] + rank
        tl.store(p_queries + here, o_t[None, :] + chosen * 0, mask=chosen != 0)
        tl.store(p_places + here, place.to(tl.int16), mask=chosen != 0)
        at += tl.sum(chosen, axis=1)


@triton.jit
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
    end = tl.load(p_ends + bin * SUBS + SUBS - 1, mask=m_b, other=0)
    m_before = m_b & (i_c * NUM_BLOCKS + o_b > 0)
    start = tl.load(p_ends + bin * SUBS - 1, mask=m_before, other=0)
    num_items = tl.where(m_b, tl.cdiv(end - start, PIECE), 0)
    item_end = tl.cumsum(num_items, axis=0)
    tl.store(p_item_ends + bin, item_end, mask=m_b)
    p_items += (i_seg * NUM_CHUNKS + i_c) * NUM_ITEMS
    first = item_end - num_items
    for k in range(0, tl.max(num_items, axis=0)):
        tl.store(p_items + first + k, o_b, mask=k < num_items)
    total = tl.sum(num_items, axis=0)
    for i in range(total, NUM_ITEMS, FILL):
        o_i = i + tl.arange(0, FILL)
        tl.store(p_items + o_i, tl.full([FILL], 0, tl.int32) + NUM_BLOCKS, mask=o_i < NUM_ITEMS)

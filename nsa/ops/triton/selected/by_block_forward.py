"""Selected attention in key-block order, forward: a program takes a block and who chose it.

The blocks of a query lie anywhere in the sequence: in query order every block is read again for
each query, in block order once for many. `p_queries` lists, chunk by chunk of queries and block by
block, who chose the block (block_index.py, which also defines segment, bin and item). The rows of a
tile are (query, head) pairs, so any group size fills a tile. Chunks keep what is gathered and
scattered within the L2 cache.

A query's results from its blocks are partial: each goes to a place of its own, [n_sel] per query,
and a second kernel sums the places in their order. by_block_backward.py has the gradients; names as
in tile.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.bands.banded_forward import NOT_GATED, Gated, gate_strides
from nsa.ops.triton.choice.selection import Selection
from nsa.ops.triton.launcher import Launch, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.selected.block_index import (
    PART_BYTES,
    Group,
    QueryLists,
    _block_range,
    _item,
    fitted_tiles,
    group_chunks,
    item_constants,
    item_sizes,
    part_bytes,
)
from nsa.ops.triton.tile import COUNTS, _dot, _dot_add, _load, _offsets, _rows, _store_gated
from nsa.ops.triton.tiles import padded

AT_ONCE = tl.constexpr(512)
"""Log-sum-exps of a query, over its places and heads, that merge_parts holds in registers."""


@triton.jit
def _masked_stop(p_queries, first, stop, k0, PER_TILE, ALWAYS: tl.constexpr, BN: tl.constexpr):
    """One past the last entry whose tile needs a mask, a whole number of tiles from `first`.

    Entries are in the order of the queries, so only the first BN of a bin can be queries within the
    block, which do not see all of it. ALWAYS: the block may end before the tile does.
    """
    if ALWAYS:
        return stop
    own = tl.load(p_queries + first) < k0 + BN
    return tl.where(own, tl.minimum(first + tl.cdiv(BN, PER_TILE) * PER_TILE, stop), first)


@triton.jit(do_not_specialize=COUNTS)
def block_forward(
    p_q, t_k, t_k2, t_v, p_part, p_part_lse, p_queries, p_places, p_items, p_first_item,
    p_starts, p_block_start, p_block_stop, p_row_shift,
    first_chunk, num_chunks, first_row, num_rows, S, NUM_ENTRIES, NUM_BLOCKS, NUM_ITEMS, PIECE,
    Hkv, G, scale_log2, s_qb, s_qs, s_qh,
    DK: tl.constexpr, DV: tl.constexpr, DK1: tl.constexpr, DK2: tl.constexpr,
    DV_PAD: tl.constexpr, N_SEL: tl.constexpr, L_SEL: tl.constexpr,
    HAS_DOCS: tl.constexpr, UPCAST: tl.constexpr, NARROW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Partial outputs of one item: up to PIECE queries that chose one block, all their heads.

    part is [segments, num_rows, N_SEL, G, DV], part_lse the same without DV, for the rows of the
    sequence from first_row on.
    """
    i_seg = tl.program_id(2).to(tl.int64)
    chunk = first_chunk + tl.program_id(1)
    block, first, stop = _item(
        p_items, p_first_item, p_starts, chunk, num_chunks, NUM_BLOCKS, NUM_ITEMS, PIECE
    )
    if block >= NUM_BLOCKS:
        return  # the list of items is as long as the worst case; this one is unused
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    # Row r of a tile is entry r // G and head r % G. Rows beyond (BM // G) * G are unused.
    o_r, o_dk, o_dv = tl.arange(0, BM), tl.arange(0, DK1), tl.arange(0, DV_PAD)
    nth, head = o_r // G, (o_r % G).to(tl.int64)
    k0, k_stop = _block_range(p_block_start, p_block_stop, block, S, L_SEL, HAS_DOCS)
    o_k = k0 + tl.arange(0, BN)
    # k [BN, DK1 (+ DK2)] and v [BN, DV_PAD] of the block stay for the whole item.
    b_k = _rows(t_k, i_b, k0, i_g, 0, BN, DK1)
    b_v = _rows(t_v, i_b, k0, i_g, 0, BN, DV_PAD)
    if DK2 > 0:
        o_dk2 = DK1 + tl.arange(0, DK2)
        b_k2 = _rows(t_k2, i_b, k0, i_g, DK1, BN, DK2)
    p_qh = p_q + i_b * s_qb + i_g * G * s_qh
    # The mask is peeled: only queries within their own block need one, and they come first.
    masked_stop = _masked_stop(
        p_queries + i_seg * NUM_ENTRIES, first, stop, k0, BM // G, HAS_DOCS or L_SEL < BN, BN
    )
    for part in tl.static_range(2):
        if part == 0:
            lo, hi = first, masked_stop
        else:
            lo, hi = masked_stop, stop
        for entry in range(lo, hi, BM // G):
            # Gather q of the tile's queries: [BM, DK1].
            m_r = (entry + nth < stop) & (nth < BM // G)
            at = i_seg * NUM_ENTRIES + entry + nth
            t = tl.load(p_queries + at, mask=m_r, other=0)
            p_rows = p_qh + _offsets(t, s_qs, head, s_qh, NARROW)[:, None]
            b_q = _load(p_rows + o_dk[None, :], m_r, o_dk, DK, DK1, True)
            if DK2 > 0:
                # Before the product, or it may take the address of b_q in shared memory, and the
                # two have different layouts there (docs/log/faults.md, "Miscompilation").
                b_q2 = _load(p_rows + o_dk2[None, :], m_r, o_dk2, DK, DK1 + DK2, True)
            # s = q k^T: [BM, BN].
            b_s = _dot(b_q, tl.trans(b_k), UPCAST)
            if DK2 > 0:
                b_s = _dot_add(b_s, b_q2, tl.trans(b_k2), UPCAST)
            if part == 0:
                last = t  # the key at the query's position
                if p_row_shift is not None:
                    last += tl.load(p_row_shift + t, mask=m_r, other=0)
                visible = (o_k < k_stop)[None, :] & (o_k[None, :] <= last[:, None])
                b_s = tl.where(visible, b_s, float("-inf"))
            # Softmax over this block alone: a chosen block holds a visible token, so a row in use
            # has a finite maximum. Unused rows may see nothing; 0 and 1 keep them finite.
            top = tl.where(m_r, tl.max(b_s, axis=1) * scale_log2, 0.0)
            b_p = tl.math.exp2(b_s * scale_log2 - top[:, None])
            total = tl.where(m_r, tl.sum(b_p, axis=1), 1.0)
            # out = p v / total: [BM, DV_PAD]. The reciprocal is faster than a division.
            b_out = _dot(b_p.to(b_v.dtype), b_v, UPCAST) * (1.0 / total)[:, None]
            place = tl.load(p_places + at, mask=m_r, other=0).to(tl.int32)
            # The query's own place for this block. int64 through i_seg: may pass 2^31.
            row = ((i_seg * num_rows + t - first_row) * N_SEL + place) * G + head
            tl.store(p_part_lse + row, top + tl.math.log2(total), mask=m_r)
            m_o = m_r[:, None] & (o_dv < DV)[None, :]
            p_rows_o = p_part + row[:, None] * DV + o_dv[None, :]
            tl.store(p_rows_o, b_out.to(p_part.dtype.element_ty), mask=m_o)


@triton.jit(do_not_specialize=COUNTS)
def merge_parts(
    p_part, p_part_lse, p_num_chosen, p_o, p_lse, p_gates, p_o_cmp, p_o_win, p_out,
    first_row, num_rows, S, Hkv, G, first_seg, s_gb, s_gs, s_gh,
    DV: tl.constexpr, DV_PAD: tl.constexpr, N_SEL: tl.constexpr, N_PAD: tl.constexpr,
    G_PAD: tl.constexpr,
):  # fmt: skip
    """Selected output of one query and group from its partial outputs, and the gated sum where
    there are gates; for the segments from first_seg on."""
    i_seg = (first_seg + tl.program_id(1)).to(tl.int64)
    i_b, i_g = i_seg // Hkv, i_seg % Hkv
    t = first_row + tl.program_id(0)
    o_h, o_d = tl.arange(0, G_PAD), tl.arange(0, DV_PAD)
    m_h = o_h < G
    m_o = m_h[:, None] & (o_d < DV)[None, :]
    num_chosen = tl.load(p_num_chosen + i_seg * S + t)
    # First place of the query: part is [segments, num_rows, N_SEL, G, DV], part_lse without DV.
    row = (tl.program_id(1).to(tl.int64) * num_rows + tl.program_id(0)) * N_SEL * G + o_h
    # With lse_n of each place: top = max lse_n, weight_n = exp2(lse_n - top),
    # out = sum of weight_n * out_n / sum of weight_n, lse = top + log2(sum of weight_n).
    # Places are summed in order, so the result does not depend on who wrote them when.
    total = tl.zeros([G_PAD], tl.float32)
    top = tl.full([G_PAD], float("-inf"), tl.float32)
    if N_PAD * G_PAD <= AT_ONCE:
        # Loaded without waiting for num_chosen: places that were not written are left out then.
        o_n = tl.arange(0, N_PAD)
        m_n = (o_n < N_SEL)[:, None] & m_h[None, :]
        p_lses = p_part_lse + row[None, :] + o_n[:, None] * G
        b_lse = tl.load(p_lses, mask=m_n, other=float("-inf"))
        b_lse = tl.where((o_n < num_chosen)[:, None], b_lse, float("-inf"))
        top = tl.max(b_lse, axis=0)
        safe_top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.math.exp2(b_lse - safe_top[None, :]), axis=0)
    else:
        for n in tl.range(0, num_chosen, loop_unroll_factor=8):
            lse = tl.load(p_part_lse + row + n * G, mask=m_h, other=float("-inf"))
            top = tl.maximum(top, lse)
        safe_top = tl.where(top == float("-inf"), 0.0, top)
        for n in tl.range(0, num_chosen, loop_unroll_factor=8):
            lse = tl.load(p_part_lse + row + n * G, mask=m_h, other=float("-inf"))
            total += tl.math.exp2(lse - safe_top)
    none = top == float("-inf")
    b_out = tl.zeros([G_PAD, DV_PAD], tl.float32)
    # Unrolled, so that the loads of eight places overlap.
    for n in tl.range(0, num_chosen, loop_unroll_factor=8):
        lse = tl.load(p_part_lse + row + n * G, mask=m_h, other=float("-inf"))
        p_rows = p_part + (row + n * G)[:, None] * DV + o_d[None, :]
        b_part = tl.load(p_rows, mask=m_o, other=0.0, eviction_policy="evict_first")
        b_out += b_part.to(tl.float32) * tl.math.exp2(lse - safe_top)[:, None]
    b_out = b_out * (1.0 / tl.where(none, 1.0, total))[:, None]
    lse = tl.where(none, float("inf"), top + tl.math.log2(total))
    # Store lse [B, Hq, S], the branch [G, DV] and the gated sum.
    i_h = i_g * G + o_h
    tl.store(p_lse + (i_b * Hkv * G + i_h) * S + t, lse, mask=m_h)
    at = ((i_b * S + t) * Hkv * G + i_h)[:, None] * DV + o_d[None, :]
    tl.store(p_o + at, b_out.to(p_o.dtype.element_ty), mask=m_o)
    if p_gates is not None:
        p_gate = p_gates + i_b * s_gb + tl.cast(t, tl.int64) * s_gs + i_h * s_gh
        _store_gated(p_o_cmp, p_o_win, p_out, p_gate, b_out, at, m_h, m_o)


# --- Launcher: groups of chunks whose partial results fit the workspace ---


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Selection,
    lists: QueryLists,
    lse: Tensor,  # [B, Hq, S] fp32, written
    gated: Gated | None,
) -> Tensor:  # [B, S, Hq, Dv]
    """Output of the selected branch; also writes the gated sum, if there is one."""
    out = problem.empty(problem.batch, problem.seq_len, problem.num_heads, problem.d_v)
    groups = group_chunks(problem, lists, part_bytes(problem, problem.d_v))
    slices = _slices(problem, groups[0].num_rows)
    size = len(slices[0]) * groups[0].num_rows * problem.spec.n_sel * problem.per_group
    part, part_lse = problem.empty(size, problem.d_v), problem.empty(size, dtype=torch.float32)
    for group in groups:
        for segments in slices:
            _forward_group(problem, group, segments, q, k, v, lists, part, part_lse)
            _merge_group(problem, group, segments, part, part_lse, chosen, out, lse, gated)
    return out


def _slices(problem: Problem, num_rows: int) -> list[range]:
    """The segments, as many at a time as fit the workspace with so many queries, or one.

    block_forward takes all: the chunks of its problems are short enough.
    """
    total = problem.num_segments
    if not problem.forward_in_gluon:
        return [range(total)]
    row_bytes = part_bytes(problem, problem.d_v) // total
    together = max(PART_BYTES // (row_bytes * num_rows), 1)
    return [range(first, min(first + together, total)) for first in range(0, total, together)]


def _forward_group(
    problem: Problem,
    group: Group,
    segments: range,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: QueryLists,
    part: Tensor,
    part_lse: Tensor,
) -> None:
    """On compute capability 9.0 a kernel in Gluon takes the items where it can."""
    if problem.forward_in_gluon:
        from nsa.ops.triton.hopper import selected_forward  # only there: see its docstring

        selected_forward.forward_group(problem, group, segments, q, k, v, lists, part, part_lse)
        return
    tiles = fitted_tiles(problem)
    start(
        problem.memo,
        ("by block", group),
        block_forward,
        (
            q, *problem.keys(k, v, tiles.BN), part, part_lse, lists.queries, lists.places,
            lists.item_block, lists.first_item, lists.starts, *problem.block_index(q),
            problem.row_shift,
        ),
        lambda: Launch.tiled(
            (lists.item_block.shape[2], group.num_chunks, problem.num_segments),
            (*item_sizes(problem, lists, group), problem.scale_log2, *q.stride()[:3]),
            item_constants(problem, q),
            tiles,
        ),
    )  # fmt: skip


def _merge_group(
    problem: Problem,
    group: Group,
    segments: range,
    part: Tensor,
    part_lse: Tensor,
    chosen: Selection,
    out: Tensor,
    lse: Tensor,
    gated: Gated | None,
) -> None:
    start(
        problem.memo,
        ("merge", group, segments),
        merge_parts,
        (part, part_lse, chosen.num_chosen, out, lse, *(gated or NOT_GATED)),
        lambda: Launch.plain(
            (group.num_rows, len(segments)),
            (
                group.first_row, group.num_rows, problem.seq_len, problem.num_groups,
                problem.per_group, segments.start, *gate_strides(gated),
            ),
            {"DV": problem.d_v, "DV_PAD": padded(problem.d_v), "N_SEL": problem.spec.n_sel}
            | {"N_PAD": padded(problem.spec.n_sel)}
            | {"G_PAD": 1 << (problem.per_group - 1).bit_length()},
            num_warps=1,
        ),
    )  # fmt: skip

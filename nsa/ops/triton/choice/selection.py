"""A selection in the forms that the kernels read, and one that the caller gives.

pack_selection puts the given ids in order, without repeated blocks and blocks of the future.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.ops.triton.launcher import Launch, ceil_div, start
from nsa.ops.triton.problem import Problem
from nsa.ops.triton.tile import COUNTS
from nsa.ops.triton.tiles import padded

FEW_IDS = tl.constexpr(16)
"""Ids of a query that pack_selection compares in pairs: faster than by the bits of all blocks."""


@triton.jit
def _or(a, b):
    """For tl.reduce."""
    return a | b


@triton.jit(do_not_specialize=COUNTS)
def pack_selection(
    p_selection, p_legal, p_num_chosen, p_bits, p_row_start, S, Hkv, NUM_WORDS,
    L_SEL: tl.constexpr, N_SEL: tl.constexpr, N_SEL_PAD: tl.constexpr, NW: tl.constexpr,
    HAS_DOCS: tl.constexpr, HAS_BITS: tl.constexpr, BQ: tl.constexpr,
):  # fmt: skip
    """The given ids of BQ queries, in any order, as a selection: no repeated or future blocks."""
    i_bg = tl.program_id(1).to(tl.int64)
    i_b, i_g = i_bg // Hkv, i_bg % Hkv
    o_t = tl.program_id(0) * BQ + tl.arange(0, BQ)
    m_t = o_t < S
    position = o_t
    if HAS_DOCS:
        position = o_t - tl.load(p_row_start + o_t, mask=m_t, other=0)
    # ids [BQ, N_SEL_PAD]; ids of the future and -1 are dropped.
    o_n, o_w, o_bit = tl.arange(0, N_SEL_PAD), tl.arange(0, NW), tl.arange(0, 32)
    rows = ((i_b * S + o_t) * Hkv + i_g) * N_SEL
    m_ids = m_t[:, None] & (o_n < N_SEL)[None, :]
    ids = tl.load(p_selection + rows[:, None] + o_n[None, :], mask=m_ids, other=-1)
    legal = (ids >= 0) & (ids <= (position // L_SEL)[:, None])
    p_rows = p_legal + rows[:, None]
    # Store the distinct ids in ascending order; count them: [BQ].
    if N_SEL_PAD <= FEW_IDS:
        # By pairs: an id is kept where no equal one is before it; its place is how many are less.
        earlier = (o_n[None, :] < o_n[:, None])[None, :, :]
        same = (ids[:, :, None] == ids[:, None, :]) & earlier
        kept = legal & (tl.sum(same.to(tl.int32), axis=2) == 0)
        less = (ids[:, None, :] < ids[:, :, None]) & kept[:, None, :]
        tl.store(p_rows + tl.sum(less.to(tl.int32), axis=2), ids, mask=kept)
        num_chosen = tl.sum(kept.to(tl.int32), axis=1)
        if HAS_BITS:
            words = _words(ids, kept, o_w)
    else:
        # By the bits of all blocks [BQ, NW, 32]; NW words hold every block.
        words = _words(ids, legal, o_w)
        chosen = (words[:, :, None] >> o_bit[None, None, :]) & 1
        counts = tl.sum(chosen, axis=2)
        before = tl.cumsum(counts, axis=1) - counts
        place = before[:, :, None] + tl.cumsum(chosen, axis=2) - 1
        id = (o_w[:, None] * 32 + o_bit[None, :])[None, :, :]
        tl.store(p_rows[:, :, None] + place, id + chosen * 0, mask=chosen != 0)
        num_chosen = tl.sum(counts, axis=1)
    tl.store(p_num_chosen + i_bg * S + o_t, num_chosen, mask=m_t)
    unused = m_ids & (o_n[None, :] >= num_chosen[:, None])
    tl.store(p_rows + o_n[None, :], tl.full([BQ, N_SEL_PAD], -1, tl.int32), mask=unused)
    if HAS_BITS:
        at = (i_bg * NUM_WORDS + o_w)[None, :] * S + o_t[:, None]
        tl.store(p_bits + at, words, mask=m_t[:, None] & (o_w < NUM_WORDS)[None, :])


@triton.jit
def _words(ids, kept, o_w):
    """Ids [queries, ids] as words of 32 bits, [queries, words]; or-ed: an id may be repeated."""
    block = tl.where(kept, ids, 0)
    here = kept[:, None, :] & ((block // 32)[:, None, :] == o_w[None, :, None])
    return tl.reduce(tl.where(here, (1 << (block % 32))[:, None, :], 0), 2, _or)


# --- Launcher ---

PACKED = 8192
"""Pairs of an id and a word, or of two ids, that a program of pack_selection compares."""
MIN_WORDS = 32
"""Words that pack_selection takes at least, so that shorter sequences share its code."""


class Selection(NamedTuple):
    """The chosen blocks in the forms that the kernels read."""

    ids: Tensor  # [B, S, Hkv, n_sel] int32, ascending, then -1
    num_chosen: Tensor  # [B, Hkv, S] int32
    bits: Tensor  # [B, Hkv, words, S] int32: a bit per block of a document; no words unless asked


def pack_given(problem: Problem, selection: Tensor, *, has_bits: bool = False) -> Selection:
    """A selection that the caller gave, without repeated blocks and blocks of the future."""
    selection = selection.contiguous()
    chosen = empty_selection(problem, has_bits=has_bits)
    row_start, _ = problem.row_index(1, selection)
    spec = problem.spec
    num_ids, num_words = padded(spec.n_sel), max(padded(problem.num_words), MIN_WORDS)
    # Few ids: neighbours are packed together, for wide stores. Many: a query alone.
    is_few = num_ids <= FEW_IDS.value
    wide = num_words if has_bits else num_ids
    together = max(PACKED // (wide * num_ids), 1) if is_few else 1
    start(
        problem.memo,
        ("given", has_bits),
        pack_selection,
        (selection, *chosen, row_start),
        lambda: Launch.plain(
            (ceil_div(problem.seq_len, together), problem.num_segments),
            (problem.seq_len, problem.num_groups, problem.num_words),
            {"L_SEL": spec.l_sel, "N_SEL": spec.n_sel, "N_SEL_PAD": num_ids}
            # Few ids without bits use no words: one form of the kernel for all lengths.
            | {"NW": num_words if has_bits or not is_few else MIN_WORDS}
            | {"HAS_DOCS": problem.packed, "HAS_BITS": has_bits, "BQ": together},
            num_warps=4 if together > 1 else 1,
        ),
    )
    return chosen


def no_choice(problem: Problem, ids: Tensor) -> Selection:
    """For calls whose selected branch does not run: nobody reads more than the given ids."""
    return empty_selection(problem, has_bits=problem.masked)._replace(ids=ids.contiguous())


def empty_selection(problem: Problem, *, has_bits: bool = False, zero: bool = False) -> Selection:
    """Memory for a choice; `zero` where the kernels do not write every word of the bits."""
    batch, groups, seq_len = problem.batch, problem.num_groups, problem.seq_len
    make = torch.zeros if zero and has_bits else torch.empty
    words = (batch, groups, problem.num_words if has_bits else 0, seq_len)
    return Selection(
        problem.empty(batch, seq_len, groups, problem.spec.n_sel, dtype=torch.int32),
        problem.empty(batch, groups, seq_len, dtype=torch.int32),
        make(words, dtype=torch.int32, device=problem.memory),
    )


def split_ids(index: Tensor, parts: int) -> Tensor:
    """The same tokens, where each block is `parts` shorter ones: [..., n * parts]."""
    if parts == 1:
        return index
    ids = index[..., None] * parts + torch.arange(parts, dtype=torch.int32, device=index.device)
    return ids.masked_fill(index[..., None] < 0, -1).flatten(-2)

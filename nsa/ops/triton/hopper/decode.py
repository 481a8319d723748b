"""A decode step in one launch, a program for each segment, in Gluon, for compute capability 9.0.

Where segments are about as many as multiprocessors, one program can read all that a segment attends
to, and no program waits for another. It has three roles:

- The reader, one warp, copies tiles of keys and values into a ring by TMA: compressed tokens,
  window, forced blocks, chosen blocks, 64 rows at a time.
- Two warpgroups attend (decode_attend.py), each to every other tile.
- The lead, one more (decode_lead.py), stores the new token, scores the blocks and chooses. Window
  and forced blocks need no choice: they are read meanwhile, so that the memory never rests.

WHOLE: a sequence has at most n_sel blocks, and all are read. Nothing is scored.

Names as in decode/attend.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from nsa.ops.triton.hopper.decode_attend import HEADS, ROWS, attend, known_block
from nsa.ops.triton.hopper.decode_lead import SCORED, News, Own, OwnRows, lead, load_new
from nsa.ops.triton.hopper.parts import sync_warps
from nsa.ops.triton.launcher import Launch, Rows, start
from nsa.ops.triton.problem import LOG2_E
from nsa.ops.triton.tiles import padded

SLOTS = 4
"""Buffers of the ring. Even, so that each is always read by the same warpgroup: a wait knows a
phase from the one before, but not from the one before that, and copies end in any order."""
ATTEND_REGISTERS = gl.constexpr(160)
READER_REGISTERS = gl.constexpr(80)
MOST_REGISTERS = 128
"""Before warp_specialize divides them: four warpgroups have those of a multiprocessor."""


class Ring(NamedTuple):
    """Buffers of tiles, keys before values; a tile is there, by buffer; it has been read."""

    tiles: Any
    full: Any
    empty: Any


class Shared(NamedTuple):
    """What is shared beside the ring.

    Of each warpgroup that attends: queries [2, HEADS, D], probabilities [2, ROWS, HEADS]. From the
    second to the first: output [D, HEADS], maxima and sums [2, HEADS]. From both to the lead: sums
    by block [tiles, blocks, HEADS], log-sum-exp of the compressed branch; and the lead's factors of
    the tiles [tiles, HEADS]. From the lead: rows of the new token, k and v of compressed branch,
    window and blocks. Barriers: the output is there, it was taken, the sums are there, the rows
    are, ids of the blocks are.
    """

    q: Any
    p: Any
    half: Any
    half_stats: Any
    sums: Any
    lse: Any
    factors: Any
    new_rows: Any
    has_half: Any
    took_half: Any
    has_new: Any
    has_sums: Any
    has_ids: Any


class Counts(NamedTuple):
    """Position of the new token; compressed tokens, with the one that it completes (its index, or
    -1), keys of the window and the place of the new one; its block, known blocks and all."""

    t: Any
    num_cmp: Any
    newest: Any
    num_win: Any
    new_in_win: Any
    current: Any
    num_known: Any
    num_blocks: Any


class Heads(NamedTuple):
    """Queries, gates and output of the group, with the distances of their heads."""

    p_q: Any
    p_gates: Any
    p_out: Any
    s_qh: Any
    s_gh: Any
    s_oh: Any
    scale_log2: Any


@gluon.jit
def counts_of(
    t, NUM_CMP, WIN, L: gl.constexpr, STEP: gl.constexpr, L_SEL: gl.constexpr,
    N_SEL: gl.constexpr, FORCED: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    num_cmp = gl.minimum(gl.maximum((t + 1 - L + STEP) // STEP, 0), NUM_CMP)
    completes = (t + 1 >= L) & ((t + 1 - L) % STEP == 0)
    current = t // L_SEL
    num_blocks = gl.minimum(current + 1, N_SEL)
    num_known = num_blocks
    if not WHOLE:
        num_known = gl.minimum(current + 1, FORCED)
    return Counts(
        t, num_cmp, gl.where(completes, num_cmp - 1, -1), gl.minimum(t + 1, WIN), t % WIN,
        current, num_known, num_blocks,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=("Hkv", "NUM_CMP", "NUM_BLOCKS", "MAX_LEN", "WIN", "cmp_rows", "sel_rows")
)
def step_by_segment(
    p_q, p_k_cmp_new, p_v_cmp_new, p_k_sel_new, p_v_sel_new, p_k_win_new, p_v_win_new,
    p_k_made, p_v_made, t_k_cmp, t_v_cmp, t_k_sel, t_v_sel, t_k_win, t_v_win,
    p_k_cmp, p_v_cmp, p_k_sel, p_v_sel, p_k_win, p_v_win, p_k_raw, p_v_raw,
    p_carried, p_tops, p_scores, p_selection, p_reads, p_last_reads, p_gates, p_out,
    p_lengths, p_current, p_tickets,
    Hkv, NUM_CMP, NUM_BLOCKS, MAX_LEN, WIN, cmp_rows, sel_rows, scale_log2,
    s_qb, s_qh, s_kb, s_kh, s_vb, s_vh, s_gb, s_gh, s_ob, s_oh,
    G: gl.constexpr, D: gl.constexpr, L: gl.constexpr, STEP: gl.constexpr, L_SEL: gl.constexpr,
    N_SEL: gl.constexpr, N_SEL_PAD: gl.constexpr, NUM_FIRST: gl.constexpr,
    NUM_LOCAL: gl.constexpr, LEVELS: gl.constexpr, NB: gl.constexpr, MADE: gl.constexpr,
    WHOLE: gl.constexpr, ADVANCE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """A decode step; grid (segments,). cmp_rows and sel_rows: rows of a head in the caches."""
    _wait_for_last()
    i_seg = gl.program_id(0)
    i_b, i_g = (i_seg // Hkv).to(gl.int64), i_seg % Hkv
    t = gl.load(p_lengths + i_b)
    new_k, new_v = i_b * s_kb + i_g * s_kh, i_b * s_vb + i_g * s_vh
    seg = i_seg.to(gl.int64)
    news = News(
        p_k_cmp_new + new_k, p_v_cmp_new + new_v, p_k_win_new + new_k, p_v_win_new + new_v,
        p_k_sel_new + new_k, p_v_sel_new + new_v, p_k_made + seg * D, p_v_made + seg * D,
    )  # fmt: skip
    rows = OwnRows(
        p_k_cmp + seg * cmp_rows * D, p_v_cmp + seg * cmp_rows * D,
        p_k_win + seg * WIN * D, p_v_win + seg * WIN * D,
        p_k_sel + seg * sel_rows * D, p_v_sel + seg * sel_rows * D,
        p_k_raw + seg * L * D, p_v_raw + seg * L * D,
    )  # fmt: skip
    # Before the reader fills the queue to memory, where these would wait 4 us.
    new = load_new(news, rows.p_k_raw, rows.p_v_raw, D, L, MADE)
    gl.store(p_current + i_b, t)
    # A full sequence, or a place without one, is skipped.
    if t < MAX_LEN:
        counts = counts_of(
            t, NUM_CMP, WIN, L, STEP, L_SEL, N_SEL, NUM_FIRST + NUM_LOCAL, WHOLE
        )  # fmt: skip
        tiles = seg * ((NUM_CMP + ROWS - 1) // ROWS) * HEADS
        own = Own(
            p_tops + tiles, p_carried + tiles, p_scores + seg * LEVELS * NUM_BLOCKS,
            p_selection + seg * N_SEL, p_reads + seg * 3, p_last_reads + seg * 3, NUM_BLOCKS,
        )  # fmt: skip
        heads = Heads(
            p_q + i_b * s_qb + i_g * G * s_qh, p_gates + i_b * s_gb + i_g * G * s_gh,
            p_out + i_b * s_ob + i_g * G * s_oh, s_qh, s_gh, s_oh, scale_log2,
        )  # fmt: skip
        _run(
            heads, new, rows, (t_k_cmp, t_v_cmp, t_k_win, t_v_win, t_k_sel, t_v_sel),
            (i_seg * cmp_rows, i_seg * WIN, i_seg * sel_rows), own, counts,
            G, D, L, STEP, L_SEL, N_SEL, N_SEL_PAD, NUM_FIRST, NUM_LOCAL, LEVELS, NB, MADE, WHOLE,
            SLOTS,
        )  # fmt: skip
        # The token counts once every segment of the sequence has read its length: the last of them
        # counts it.
        if ADVANCE:
            ticket = gl.atomic_add(p_tickets + i_b, 1)
            gl.store(p_lengths + i_b, t + 1, mask=(ticket + 1) % Hkv == 0)


@gluon.jit
def _wait_for_last():
    """Programmatic dependent launch: what the kernel before wrote is there; the next may start."""
    _instruction("griddepcontrol.wait; // dummy $0")
    _instruction("griddepcontrol.launch_dependents; // dummy $0")


@gluon.jit
def _instruction(CODE: gl.constexpr):
    gl.inline_asm_elementwise(CODE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _run(
    heads, new, rows, tensors, first_rows, own, counts,
    G: gl.constexpr, D: gl.constexpr, L: gl.constexpr, STEP: gl.constexpr, L_SEL: gl.constexpr,
    N_SEL: gl.constexpr, N_SEL_PAD: gl.constexpr, NUM_FIRST: gl.constexpr,
    NUM_LOCAL: gl.constexpr, LEVELS: gl.constexpr, NB: gl.constexpr, MADE: gl.constexpr,
    WHOLE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Shared memory, barriers and roles."""
    dtype: gl.constexpr = tensors[0].dtype
    BLOCKS: gl.constexpr = ROWS // (L_SEL // STEP)
    TILES: gl.constexpr = SCORED if WHOLE or NB < SCORED * BLOCKS else NB // BLOCKS
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(32, 16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    ring = Ring(
        gl.allocate_shared_memory(dtype, [2 * SLOTS, ROWS, D], TILE),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BAR),
    )
    shared = Shared(
        gl.allocate_shared_memory(dtype, [2, HEADS, D], TILE),
        gl.allocate_shared_memory(dtype, [2, ROWS, HEADS], NARROW),
        gl.allocate_shared_memory(gl.float32, [D, HEADS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [2, HEADS], ROW),
        gl.allocate_shared_memory(gl.float32, [TILES, BLOCKS, HEADS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [HEADS], ROW),
        gl.allocate_shared_memory(gl.float32, [TILES, HEADS], PLAIN),
        gl.allocate_shared_memory(dtype, [6, D], ROW),
        gl.allocate_shared_memory(gl.int64, [1], BAR),
        gl.allocate_shared_memory(gl.int64, [1], BAR),
        gl.allocate_shared_memory(gl.int64, [1], BAR),
        gl.allocate_shared_memory(gl.int64, [1], BAR),
        gl.allocate_shared_memory(gl.int64, [1], BAR),
    )
    gl.static_assert(SLOTS % 2 == 0)
    for i in gl.static_range(SLOTS):
        mbarrier.init(ring.full.index(i), count=1)
        mbarrier.init(ring.empty.index(i), count=1)
    mbarrier.init(shared.has_half, count=1)
    mbarrier.init(shared.took_half, count=1)
    mbarrier.init(shared.has_new, count=1)
    mbarrier.init(shared.has_sums, count=1)
    mbarrier.init(shared.has_ids, count=1)
    # TMA reaches barriers by another way than the threads that initialised them.
    fence_async_shared()
    sync_warps()
    gl.warp_specialize(
        [
            (lead, (
                new, rows, own, shared, counts, G, D, L, L_SEL // STEP, L_SEL, N_SEL, N_SEL_PAD,
                NUM_FIRST, NUM_LOCAL, LEVELS, NB, TILES, MADE, WHOLE,
            )),
            (attend, (
                0, heads, ring, shared, own, counts, G, D, L, STEP, L_SEL, NUM_FIRST, LEVELS,
                WHOLE, SLOTS,
            )),
            (attend, (
                1, heads, ring, shared, own, counts, G, D, L, STEP, L_SEL, NUM_FIRST, LEVELS,
                WHOLE, SLOTS,
            )),
            (_read, (
                tensors, first_rows, own.p_selection, ring, shared, counts,
                D, L_SEL, N_SEL, N_SEL_PAD, NUM_FIRST, SLOTS,
            )),
        ],
        [4, 4, 1],
        [ATTEND_REGISTERS, ATTEND_REGISTERS, READER_REGISTERS],
    )  # fmt: skip


# --- The reader ---


@gluon.jit
def _read(
    tensors, first_rows, p_ids, ring, shared, counts, D: gl.constexpr, L_SEL: gl.constexpr,
    N_SEL: gl.constexpr, N_SEL_PAD: gl.constexpr, NUM_FIRST: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Copy all tiles into the ring, in order."""
    STEPS: gl.constexpr = L_SEL // ROWS
    it = 0
    for i in range((counts.num_cmp + ROWS - 1) // ROWS):
        _copy(tensors[0], tensors[1], first_rows[0] + i * ROWS, ring, it, D, SLOTS)
        it += 1
    for i in range((counts.num_win + ROWS - 1) // ROWS):
        _copy(tensors[2], tensors[3], first_rows[1] + i * ROWS, ring, it, D, SLOTS)
        it += 1
    for i in range(counts.num_known * STEPS):
        row = known_block(i // STEPS, counts, NUM_FIRST) * L_SEL + i % STEPS * ROWS
        _copy(tensors[4], tensors[5], first_rows[2] + row, ring, it, D, SLOTS)
        it += 1
    # WHOLE: all blocks are known, and nothing is left. It is waited for even so: Triton would give
    # the memory of a barrier that nobody waits for to other values.
    mbarrier.wait(shared.has_ids, 0)
    # The ids ascend: the known blocks are the first and the last of them.
    o_s = gl.arange(0, N_SEL_PAD, gl.BlockedLayout([1], [32], [1], [0]))
    ids = gl.load(p_ids + NUM_FIRST + o_s, mask=NUM_FIRST + o_s < N_SEL, other=0)
    for i in range((counts.num_blocks - counts.num_known) * STEPS):
        block = gl.sum(gl.where(o_s == i // STEPS, ids, 0), 0)
        row = block * L_SEL + i % STEPS * ROWS
        _copy(tensors[4], tensors[5], first_rows[2] + row, ring, it, D, SLOTS)
        it += 1


@gluon.jit
def _copy(t_k, t_v, row, ring, it, D: gl.constexpr, SLOTS: gl.constexpr):
    slot = it % SLOTS
    mbarrier.wait(ring.empty.index(slot), (it // SLOTS & 1) ^ 1)
    full = ring.full.index(slot)
    mbarrier.expect(full, ROWS * D * 4)
    tma.async_copy_global_to_shared(t_k, [row, 0], full, ring.tiles.index(2 * slot))
    tma.async_copy_global_to_shared(t_v, [row, 0], full, ring.tiles.index(2 * slot + 1))


# --- Launcher ---


def start_step(decoder: Any, token: Any, out: Tensor, key: Any, advance: bool) -> None:
    """A step of a Decoder (decode/launch.py) whose segments each take a program."""
    caches, spec, dim = decoder.caches, decoder.spec, decoder.d_k
    news = (x for pair in zip(token.k, token.v, strict=True) for x in pair)
    made = token.made or (token.k[0], token.v[0])
    tiles = (_tiles(x) for kv in (caches.cmp, caches.sel, caches.win) for x in kv[:2])
    rows = (x for kv in caches[:4] for x in kv[:2])
    start(
        decoder.memo,
        ("by segment", key, advance),
        step_by_segment,
        (
            token.q, *news, *made, *tiles, *rows, decoder.carried, decoder.tops, decoder.scores,
            decoder.selection, caches.reads, caches.last_reads, token.gates, out,
            caches.lengths, decoder.current, decoder.tickets,
        ),
        lambda: Launch(
            (decoder.segments,),
            (
                decoder.num_groups, decoder.num_cmp, decoder.num_blocks, decoder.max_len,
                decoder.window, caches.cmp.k.shape[2], caches.sel.k.shape[2],
                decoder.scale * LOG2_E,
                *(x.stride(i) for x in (token.q, token.k[0], token.v[0]) for i in (0, 2)),
                *(x.stride(i) for x in (token.gates, out) for i in (0, 2)),
            ),
            {"G": decoder.per_group, "D": dim, "L": spec.l, "STEP": spec.d, "L_SEL": spec.l_sel}
            | {"N_SEL": spec.n_sel, "N_SEL_PAD": padded(spec.n_sel)}
            | {"NUM_FIRST": 0 if decoder.whole else spec.num_first}
            | {"NUM_LOCAL": 0 if decoder.whole else spec.num_local, "LEVELS": decoder.levels}
            | {"NB": max(padded(decoder.num_blocks), 128), "MADE": token.made is not None}
            | {"WHOLE": decoder.whole, "ADVANCE": advance, "SLOTS": SLOTS},
            {"num_warps": 4, "maxnreg": MOST_REGISTERS, "launch_pdl": True},
        ),
    )  # fmt: skip


def _tiles(x: Tensor) -> Rows:
    """Tiles of the rows of all heads of a cache, [B, Hkv, tokens, D]."""
    rows = Rows(x, ROWS.value, x.shape[3], gl.NVMMASharedLayout(128, 16, rank=2))
    rows.shape, rows.strides = (x.shape[:3].numel(), x.shape[3]), (x.shape[3], 1)
    rows.block_shape = (ROWS.value, x.shape[3])
    return rows

"""The warpgroups of a decode step that attend (decode.py), and the gated sum of the branches.

Products are transposed, s^T = k q^T and out^T = v^T p^T: the 64 keys of a tile are the rows that a
wgmma needs, and the heads of the group its columns. At the end of a branch the second warpgroup
gives the first what it has found.

The new token is not in the caches yet, nor is the compressed token that it completes. The lead puts
both into shared memory; who attends to their tile writes them into it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.ops.triton.hopper.parts import rounded, sync_warps

HEADS = gl.constexpr(16)
"""Query heads of a group, with padding: the columns of a product."""
ROWS = gl.constexpr(64)
"""Rows of a tile."""


@gluon.jit
def attend(
    C: gl.constexpr, heads, ring, shared, own, counts, G: gl.constexpr, D: gl.constexpr,
    L: gl.constexpr, STEP: gl.constexpr, L_SEL: gl.constexpr, NUM_FIRST: gl.constexpr,
    LEVELS: gl.constexpr, WHOLE: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Every other tile of all branches, one after another; the first, C 0, also their gated sum."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS.value, 16])
    HL: gl.constexpr = gl.SliceLayout(0, SL)
    STEPS: gl.constexpr = L_SEL // ROWS
    dtype: gl.constexpr = ring.tiles.dtype
    q, p = shared.q.index(C), shared.p.index(C)
    _load_queries(heads.p_q, heads.s_qh, q, G, D)
    q = q.permute((1, 0))
    o_k = gl.arange(0, ROWS, gl.SliceLayout(1, SL))
    o_h = gl.arange(0, HEADS, HL)
    m_h = o_h < G
    p_gate = heads.p_gates + o_h * heads.s_gh
    b_sum = gl.zeros([D, HEADS], gl.float32, SL)
    start = 0
    for branch in range(3):
        # Rows and the place of the new one.
        num = gl.where(branch == 0, counts.num_cmp, counts.num_win)
        newest = gl.where(branch == 0, counts.newest, counts.new_in_win)
        num_tiles = (num + ROWS - 1) // ROWS
        if branch == 2:
            num_tiles = counts.num_blocks * STEPS
        # Gates: compressed branch, blocks, window.
        gate = gl.load(p_gate + (3 - branch) % 3, mask=m_h, other=0.0).to(gl.float32)
        top = gl.full([HEADS], float("-inf"), gl.float32, HL)
        b_total = gl.zeros([ROWS, HEADS], gl.float32, SL)
        b_out = gl.zeros([D, HEADS], gl.float32, SL)
        for i in range((C - start) & 1, num_tiles, 2):
            row = i * ROWS
            if branch == 2:
                # Only the block of the new token has rows that do not count, and the new one.
                known = i // STEPS < counts.num_known
                block = known_block(i // STEPS, counts, NUM_FIRST)
                row = gl.where(known, block * L_SEL + i % STEPS * ROWS, 0)
                num = gl.where(known, counts.t + 1, ROWS)
                newest = gl.where(known, counts.t, -1)
            slot = (start + i) % SLOTS
            mbarrier.wait(ring.full.index(slot), (start + i) // SLOTS & 1)
            if (row + ROWS > num) | ((newest >= row) & (newest < row + ROWS)):
                mbarrier.wait(shared.has_new, 0)
                for i_kv in range(2):
                    tile, new_row = ring.tiles.index(2 * slot + i_kv), 2 * branch + i_kv
                    _complete(tile, shared.new_rows.index(new_row), newest - row, num - row, D)
                # The tensor cores read, and TMA will write, what these threads wrote.
                fence_async_shared()
                sync_warps()
            # s^T = k q^T * scale: [ROWS, HEADS].
            k = ring.tiles.index(2 * slot)
            zero = gl.zeros([ROWS, HEADS], gl.float32, SL)
            b_s = warpgroup_mma(k, q, zero, use_acc=False, is_async=True)
            b_s = warpgroup_mma_wait(0, deps=(b_s,)) * heads.scale_log2
            b_s = gl.where((o_k < num - row)[:, None], b_s, float("-inf"))
            # While no key was visible, top is -inf; 0 in its place avoids NaN.
            new_top = gl.maximum(top, gl.max(b_s, axis=0))
            safe_top = gl.where(new_top == float("-inf"), 0.0, new_top)
            b_p = gl.exp2(b_s - safe_top[None, :])
            shrink = gl.exp2(top - safe_top)
            top = new_top
            b_total = b_total * shrink[None, :] + b_p
            # out^T = v^T p^T: [D, HEADS].
            p.store(rounded(b_p, dtype))
            fence_async_shared()
            sync_warps()
            v = ring.tiles.index(2 * slot + 1).permute((1, 0))
            b_out = warpgroup_mma(v, p, b_out * shrink[None, :], is_async=True)
            if not WHOLE and branch == 0:
                _store_sums(shared.sums, own, b_p, top, i, L, STEP, L_SEL, LEVELS, SL)
            b_out = warpgroup_mma_wait(0, deps=(b_out,))
            sync_warps()
            mbarrier.arrive(ring.empty.index(slot))
        start += num_tiles
        total = gl.sum(b_total, axis=0)
        if C == 1:
            # The first has taken what it was given of the branch before.
            mbarrier.wait(shared.took_half, (branch & 1) ^ 1)
            shared.half.store(b_out)
            shared.half_stats.index(0).store(top)
            shared.half_stats.index(1).store(total)
            sync_warps()
            mbarrier.arrive(shared.has_half)
        else:
            mbarrier.wait(shared.has_half, branch & 1)
            their_top = shared.half_stats.index(0).load(HL)
            # A branch may have no key.
            new_top = gl.maximum(top, their_top)
            new_top = gl.where(new_top == float("-inf"), 0.0, new_top)
            mine, theirs = gl.exp2(top - new_top), gl.exp2(their_top - new_top)
            total = total * mine + shared.half_stats.index(1).load(HL) * theirs
            total = gl.where(total == 0.0, 1.0, total)
            share = gate / total
            b_sum += b_out * (mine * share)[None, :]
            b_sum += shared.half.load(SL) * (theirs * share)[None, :]
            if branch == 0:
                shared.lse.store(new_top + gl.log2(total))
            sync_warps()
            mbarrier.arrive(shared.took_half)
            if branch == 0:
                mbarrier.arrive(shared.has_sums)
    if C == 0:
        o_d = gl.arange(0, D, gl.SliceLayout(1, SL))
        p_rows = heads.p_out + (o_h * heads.s_oh)[None, :] + o_d[:, None]
        m_out = m_h[None, :] & (o_d < D)[:, None]
        gl.store(p_rows, b_sum.to(heads.p_out.dtype.element_ty), mask=m_out)


@gluon.jit
def _complete(tile, new_row, newest, num, D: gl.constexpr):
    """Write the new row into its tile, if it is there, and zeros after the last row: what lies
    there may be anything, and 0 * NaN is NaN. In pairs of numbers: half the instructions."""
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    OWN: gl.constexpr = gl.BlockedLayout([1, 4], [256 // D, D // 8], [4, 1], [1, 0])
    pairs = tile._reinterpret(gl.int32, [ROWS, D // 2], PAIRS)
    b_new = new_row._reinterpret(gl.int32, [D // 2], ROW).load(gl.SliceLayout(0, OWN))
    o_r = gl.arange(0, ROWS, gl.SliceLayout(1, OWN))
    b = gl.where((o_r == newest)[:, None], b_new[None, :], pairs.load(OWN))
    pairs.store(gl.where((o_r < num)[:, None], b, 0))


@gluon.jit
def _store_sums(
    sums, own, b_p, top, tile, L: gl.constexpr, STEP: gl.constexpr, L_SEL: gl.constexpr,
    LEVELS: gl.constexpr, SL: gl.constexpr,
):  # fmt: skip
    """Sums by block of exp2(logit - top) [ROWS, HEADS], in shared memory; and in memory top, and
    what the tile's last block carries into the next tile. Weights as in decode/score.py."""
    STRIDES: gl.constexpr = L_SEL // STEP
    BLOCKS: gl.constexpr = ROWS // STRIDES
    b_sum = _sum_blocks(b_p, 0, L // STEP, STRIDES, SL)
    RL: gl.constexpr = b_sum.type.layout
    at = tile * HEADS
    if LEVELS > 1:
        b_next = _sum_blocks(b_p, 1, L // STEP, STRIDES, SL)
        o_c = gl.arange(0, BLOCKS, gl.SliceLayout(1, RL))[:, None]
        o_h = gl.arange(0, HEADS, gl.SliceLayout(0, RL))[None, :]
        before = gl.maximum(o_c - 1, 0) + o_h * 0
        b_sum += gl.where(o_c > 0, gl.gather(b_next, before, 0), 0.0)
        gl.store(own.p_carried + at + o_h + o_c * 0, b_next, mask=(o_c == BLOCKS - 1) & (o_h >= 0))
    sums.index(tile).store(b_sum)
    o_h = gl.arange(0, HEADS, gl.SliceLayout(0, SL))
    gl.store(own.p_tops + at + o_h, top)


@gluon.jit
def _sum_blocks(
    b_p, LEVEL: gl.constexpr, OVERLAP: gl.constexpr, STRIDES: gl.constexpr, SL: gl.constexpr
):  # fmt: skip
    """What the tokens of each block give to it, or to the block LEVEL after it: [blocks, HEADS]."""
    o_s = gl.arange(0, ROWS, gl.SliceLayout(1, SL)) & (STRIDES - 1)
    # Strides that token s shares with that block.
    stop = gl.minimum(o_s + OVERLAP, LEVEL * STRIDES + STRIDES)
    weight = gl.maximum(stop - gl.maximum(o_s, LEVEL * STRIDES), 0).to(gl.float32)
    return gl.sum(gl.reshape(b_p * weight[:, None], [ROWS // STRIDES, STRIDES, HEADS]), axis=1)


@gluon.jit
def known_block(i, counts, NUM_FIRST: gl.constexpr):
    """Known block i: the first ones, then those up to the new token's."""
    return gl.where(i < NUM_FIRST, i, counts.current + 1 - counts.num_known + i)


@gluon.jit
def _load_queries(p_q, s_qh, buf, G: gl.constexpr, D: gl.constexpr):
    OWN: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    o_h = gl.arange(0, HEADS, gl.SliceLayout(1, OWN))
    o_d = gl.arange(0, D, gl.SliceLayout(0, OWN))
    p = p_q + (o_h * s_qh)[:, None] + o_d[None, :]
    buf.store(gl.load(p, mask=(o_h < G)[:, None], other=0.0))
    # Tensor cores read by another way than threads write.
    fence_async_shared()
    sync_warps()

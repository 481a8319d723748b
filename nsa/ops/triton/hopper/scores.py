"""Scores of the selection blocks on Hopper: what group_scores (choice/scores.py) gives, with the
same bits.

A program is one warpgroup. It keeps queries of all heads of a group in shared memory and walks
tiles of compressed tokens. The products of a tile follow each other without a branch or a barrier,
and each is begun before the exponentials of the one before: tensor cores and exponentials work side
by side. group_scores waits for memory between any two heads.

Few heads: 64 queries, a product for each head, the heads are summed product by product. Many heads
would not fit: 16 queries, and a product has the tokens as its rows and 4 heads of the 16 queries as
its columns. Names as in tile.py, barriers as in parts.py.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.ops.triton.choice.scores import Chunk, stride_constants
from nsa.ops.triton.hopper.parts import (
    TILE,
    TILE_ROWS,
    copy_in,
    head_rows,
    matrix,
    num_compressed,
    phase_of,
    stage_of,
    sync_warps,
    tile_rows,
)
from nsa.ops.triton.launcher import Launch, ceil_div, start
from nsa.ops.triton.problem import SCORED_TOGETHER, SCORES_WIDTH, Problem
from nsa.ops.triton.tile import COUNTS

STAGES = 2
"""Tiles of compressed tokens that are in flight or being read."""
FEW_QUERIES = gl.constexpr(16)
"""Queries of a tile with many heads."""
HEADS = gl.constexpr(SCORED_TOGETHER)
"""Heads of a product with many heads: 64 columns."""
REGISTERS = 168
"""Of a thread, at most, where a multiprocessor has the shared memory of three programs."""
MOST_TILES, ROUNDS = 16, 4
"""Of a program: tiles that it walks at most; fewer where the multiprocessors would not get this
many programs each."""


@gluon.jit(do_not_specialize=(*COUNTS, "TILES"))
def few_head_scores(
    t_q, t_k, p_lse, p_scores,
    first_row, stop_row, S, Hkv, WIDTH, TILES, scale_log2, OFF, STEP,
    D: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
    STRIDES: gl.constexpr, OVERLAP: gl.constexpr, LEVELS: gl.constexpr, LARGEST: gl.constexpr,
):  # fmt: skip
    """Parts of the block scores, as group_scores writes them: of 64 queries and up to TILES tiles
    of 64 compressed tokens."""
    i_bg = gl.program_id(2)
    i_b, i_g = i_bg // Hkv, i_bg % Hkv
    t0 = first_row + gl.program_id(1) * TILE_ROWS
    begin, num, whole = _tiles_of(t0, TILE_ROWS, stop_row, TILES, OFF, STEP)
    if num > 0:
        SIZE: gl.constexpr = TILE_ROWS * D * 2
        SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_ROWS, 16])
        q_bufs = gl.allocate_shared_memory(t_q.dtype, [G, 1, TILE_ROWS, 1, D], t_q.layout)
        k_bufs = gl.allocate_shared_memory(t_q.dtype, [STAGES, 1, TILE_ROWS, 1, D], t_k.layout)
        ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        lse_bufs = gl.allocate_shared_memory(gl.float32, [G, TILE_ROWS], ROW)
        full = _barriers(STAGES)
        mbarrier.expect(full.index(STAGES), G * SIZE)
        for g in gl.static_range(G):
            copy_in(t_q, i_b, t0, i_g * G + g, full.index(STAGES), q_bufs.index(g))
        _copy_first(t_k, i_b, i_g, begin, num, full, k_bufs, SIZE, STAGES)
        o_t = t0 + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))
        o_k = gl.arange(0, TILE_ROWS, gl.SliceLayout(0, SL))
        seen = num_compressed(o_t, OFF, STEP)
        _keep_lse(p_lse + i_bg.to(gl.int64) * G * S, lse_bufs, t0, stop_row, S, G, 1)
        none = gl.zeros([TILE_ROWS, TILE_ROWS], gl.float32, SL)
        place = (i_bg.to(gl.int64) * LEVELS, t0 - first_row, stop_row - first_row, WIDTH)
        sync_warps()  # all log-sum-exps are there
        mbarrier.wait(full.index(STAGES), 0)
        for i in range(num):
            stage = stage_of(i, STAGES)
            mbarrier.wait(full.index(stage), phase_of(i, STAGES))
            b_k = matrix(k_bufs, stage).permute((1, 0))
            s = warpgroup_mma(matrix(q_bufs, 0), b_k, none, use_acc=False, is_async=True)
            total = none
            for g in gl.static_range(G):
                coming = s
                if g + 1 < G:
                    b_q = matrix(q_bufs, g + 1)
                    coming = warpgroup_mma(b_q, b_k, none, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(1, deps=(s,))
                else:
                    s = warpgroup_mma_wait(0, deps=(s,))
                lse = lse_bufs.index(g).load(gl.SliceLayout(1, SL))
                total = total + gl.exp2(s * scale_log2 - lse[:, None])
                s = coming
            sync_warps()  # all have read the tokens
            if i + STAGES < num:
                _copy_tile(t_k, i_b, i_g, begin + i + STAGES, stage, full, k_bufs, SIZE)
            if begin + i >= whole:
                visible = ((begin + i) * TILE_ROWS + o_k)[None, :] < seen[:, None]
                total = gl.where(visible, total, 0.0)
            _store_rows(p_scores, total, begin + i, place, STRIDES, OVERLAP, LEVELS, LARGEST)


@gluon.jit(do_not_specialize=(*COUNTS, "TILES"))
def many_head_scores(
    t_q, t_k, p_lse, p_scores,
    first_row, stop_row, S, Hkv, WIDTH, TILES, scale_log2, OFF, STEP,
    D: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
    STRIDES: gl.constexpr, OVERLAP: gl.constexpr, LEVELS: gl.constexpr, LARGEST: gl.constexpr,
):  # fmt: skip
    """The same of 16 queries; G is a multiple of 4. Tokens are in registers, as left operands."""
    i_bg = gl.program_id(2)
    i_b, i_g = i_bg // Hkv, i_bg % Hkv
    t0 = first_row + gl.program_id(1) * FEW_QUERIES
    begin, num, whole = _tiles_of(t0, FEW_QUERIES, stop_row, TILES, OFF, STEP)
    if num > 0:
        SIZE: gl.constexpr = TILE_ROWS * D * 2
        PARTS: gl.constexpr = G // HEADS
        SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_ROWS, 16])
        TL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FEW_QUERIES, 16])
        q_bufs = gl.allocate_shared_memory(t_q.dtype, [PARTS, 1, HEADS, FEW_QUERIES, D], t_q.layout)
        k_bufs = gl.allocate_shared_memory(t_q.dtype, [STAGES, 1, TILE_ROWS, 1, D], t_k.layout)
        ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        lse_bufs = gl.allocate_shared_memory(gl.float32, [PARTS, TILE_ROWS], ROW)
        full = _barriers(STAGES)
        mbarrier.expect(full.index(STAGES), PARTS * SIZE)
        for part in gl.static_range(PARTS):
            h0 = i_g * G + part * HEADS
            copy_in(t_q, i_b, h0, t0, full.index(STAGES), q_bufs.index(part))
        _copy_first(t_k, i_b, i_g, begin, num, full, k_bufs, SIZE, STAGES)
        _keep_lse(p_lse + i_bg.to(gl.int64) * G * S, lse_bufs, t0, stop_row, S, PARTS, HEADS)
        o_t = t0 + gl.arange(0, FEW_QUERIES, gl.SliceLayout(0, TL))
        o_k = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, TL))
        seen = num_compressed(o_t, OFF, STEP)
        none = gl.zeros([TILE_ROWS, TILE_ROWS], gl.float32, SL)
        place = (i_bg.to(gl.int64) * LEVELS, t0 - first_row, stop_row - first_row, WIDTH)
        sync_warps()  # all log-sum-exps are there
        mbarrier.wait(full.index(STAGES), 0)
        for i in range(num):
            stage = stage_of(i, STAGES)
            mbarrier.wait(full.index(stage), phase_of(i, STAGES))
            b_k = matrix(k_bufs, stage).load(gl.DotOperandLayout(0, SL, 2))
            fence_async_shared()
            sync_warps()  # all have read the tokens
            if i + STAGES < num:
                _copy_tile(t_k, i_b, i_g, begin + i + STAGES, stage, full, k_bufs, SIZE)
            s = warpgroup_mma(b_k, _columns(q_bufs, 0), none, use_acc=False, is_async=True)
            total = gl.zeros([TILE_ROWS, FEW_QUERIES], gl.float32, TL)
            for part in gl.static_range(PARTS):
                coming = s
                if part + 1 < PARTS:
                    b_q = _columns(q_bufs, part + 1)
                    coming = warpgroup_mma(b_k, b_q, none, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(1, deps=(s,))
                else:
                    s = warpgroup_mma_wait(0, deps=(s,))
                lse = lse_bufs.index(part).load(gl.SliceLayout(0, SL))
                p = gl.exp2(s * scale_log2 - lse[None, :])
                # Head by head, in the order of group_scores; nothing moves.
                p = gl.permute(gl.reshape(p, [TILE_ROWS, 2, 2, FEW_QUERIES]), (0, 3, 1, 2))
                even, odd = gl.split(p)
                for head in gl.static_range(HEADS):
                    low, high = gl.split(even if head % 2 == 0 else odd)
                    one = low if head < 2 else high
                    total = total + gl.convert_layout(one, TL)
                s = coming
            if begin + i >= whole:
                visible = ((begin + i) * TILE_ROWS + o_k)[:, None] < seen[None, :]
                total = gl.where(visible, total, 0.0)
            _store_columns(p_scores, total, begin + i, place, STRIDES, OVERLAP, LEVELS, LARGEST)


@gluon.jit
def _tiles_of(t0, NUM: gl.constexpr, stop_row, TILES, OFF, STEP):
    """Of NUM queries: first tile of this program, how many it walks, and how many tiles the first
    query sees whole."""
    begin = gl.program_id(0) * TILES
    last = num_compressed(gl.minimum(t0 + NUM, stop_row) - 1, OFF, STEP)
    num = gl.minimum((last + TILE_ROWS - 1) // TILE_ROWS - begin, TILES)
    return begin, num, num_compressed(t0, OFF, STEP) // TILE_ROWS


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    """One for each tile of tokens, and one for the queries."""
    BAR: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], BAR)
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    sync_warps()
    return full


@gluon.jit
def _copy_first(
    t_k, i_b, i_g, begin, num, full, k_bufs, SIZE: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    for i in gl.static_range(STAGES):
        if i < num:
            _copy_tile(t_k, i_b, i_g, begin + i, i, full, k_bufs, SIZE)


@gluon.jit
def _copy_tile(t_k, i_b, i_g, tile, stage, full, k_bufs, SIZE: gl.constexpr):
    mbarrier.expect(full.index(stage), SIZE)
    copy_in(t_k, i_b, tile * TILE_ROWS, i_g, full.index(stage), k_bufs.index(stage))


@gluon.jit
def _columns(q_bufs, part):
    """Heads and queries of a part as the columns of a right operand."""
    buf = q_bufs.index(part)
    return buf.reshape([TILE_ROWS, buf.shape[3]]).permute((1, 0))


@gluon.jit
def _keep_lse(p_lse, lse_bufs, t0, stop_row, S, NUM: gl.constexpr, HEADS: gl.constexpr):
    """Log-sum-exps of NUM products, of HEADS heads each, in the order of its rows or columns."""
    LL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    QUERIES: gl.constexpr = TILE_ROWS // HEADS
    o_r = gl.arange(0, TILE_ROWS, LL)
    head, t = o_r // QUERIES, t0 + o_r % QUERIES
    rows = ()
    for i in gl.static_range(NUM):  # all loads before the first store waits for one
        p = p_lse + (i * HEADS + head) * S + t
        rows = rows + (gl.load(p, mask=t < stop_row, other=float("inf")),)  # type: ignore[assignment]
    for i in gl.static_range(NUM):
        lse_bufs.index(i).store(rows[i])


@gluon.jit
def _weights(o_s, level, STRIDES: gl.constexpr, OVERLAP: gl.constexpr):
    """Of the tokens o_s of a block, for the block `level` further on: see group_scores."""
    stop = gl.minimum(o_s + OVERLAP, level * STRIDES + STRIDES)
    return gl.maximum(stop - gl.maximum(o_s, level * STRIDES), 0).to(gl.float32)


@gluon.jit
def _folded(
    total, weight, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr,
    AXIS: gl.constexpr, LARGEST: gl.constexpr,
):  # fmt: skip
    """Weighted sums over the tokens of a block, which are axis AXIS of [A, B, C]; LARGEST: the
    largest number with a weight."""
    if LARGEST:
        part = gl.max(gl.reshape(gl.where(weight > 0.0, total, 0.0), [A, B, C]), AXIS)
    else:
        part = gl.sum(gl.reshape(total * weight, [A, B, C]), AXIS)
    return part


@gluon.jit
def _store_rows(
    p_scores, total, tile, place,
    STRIDES: gl.constexpr, OVERLAP: gl.constexpr, LEVELS: gl.constexpr, LARGEST: gl.constexpr,
):  # fmt: skip
    """Fold sums [queries, tokens] into blocks and store the part of each level."""
    first_level, r0, num_rows, WIDTH = place
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_ROWS, 16])
    BLOCKS: gl.constexpr = TILE_ROWS // STRIDES
    WIDE: gl.constexpr = min(BLOCKS, 4)
    LANES: gl.constexpr = BLOCKS // WIDE
    IO: gl.constexpr = gl.BlockedLayout([1, WIDE], [32 // LANES, LANES], [4, 1], [1, 0])
    o_s = gl.arange(0, TILE_ROWS, gl.SliceLayout(0, SL)) % STRIDES
    o_r = r0 + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, IO))
    o_j = tile * BLOCKS + gl.arange(0, BLOCKS, gl.SliceLayout(0, IO))
    for level in gl.static_range(LEVELS):
        weight = _weights(o_s, level, STRIDES, OVERLAP)[None, :]
        part = _folded(total, weight, TILE_ROWS, BLOCKS, STRIDES, 2, LARGEST)
        p_rows = p_scores + (first_level + level) * num_rows * WIDTH
        at = o_r.to(gl.int64)[:, None] * WIDTH + (o_j + level)[None, :]
        mask = (o_r < num_rows)[:, None] & (o_j + level < WIDTH)[None, :]
        gl.store(p_rows + at, gl.convert_layout(part, IO), mask=mask)


@gluon.jit
def _store_columns(
    p_scores, total, tile, place,
    STRIDES: gl.constexpr, OVERLAP: gl.constexpr, LEVELS: gl.constexpr, LARGEST: gl.constexpr,
):  # fmt: skip
    """The same for sums [tokens, queries]."""
    first_level, r0, num_rows, WIDTH = place
    TL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FEW_QUERIES, 16])
    BLOCKS: gl.constexpr = TILE_ROWS // STRIDES
    WIDE: gl.constexpr = min(BLOCKS, 2)
    LANES: gl.constexpr = BLOCKS // WIDE
    IO: gl.constexpr = gl.BlockedLayout([WIDE, 1], [LANES, 32 // LANES], [1, 4], [0, 1])
    o_s = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, TL)) % STRIDES
    o_r = r0 + gl.arange(0, FEW_QUERIES, gl.SliceLayout(0, IO))
    o_j = tile * BLOCKS + gl.arange(0, BLOCKS, gl.SliceLayout(1, IO))
    for level in gl.static_range(LEVELS):
        weight = _weights(o_s, level, STRIDES, OVERLAP)[:, None]
        part = _folded(total, weight, BLOCKS, STRIDES, FEW_QUERIES, 1, LARGEST)
        p_rows = p_scores + (first_level + level) * num_rows * WIDTH
        at = o_r.to(gl.int64)[None, :] * WIDTH + (o_j + level)[:, None]
        mask = (o_r < num_rows)[None, :] & (o_j + level < WIDTH)[:, None]
        gl.store(p_rows + at, gl.convert_layout(part, IO), mask=mask)


# --- Launcher ---


def score(
    problem: Problem,
    q: Tensor,  # [B, S, Hq, D]
    k_cmp: Tensor,  # [B, K, Hkv, D]
    lse: Tensor,  # [B, Hq, S] fp32
    scores: Tensor,
    chunk: Chunk,
    levels: int,
) -> None:
    """Scores of a chunk by the compressed branch."""
    few = problem.per_group * problem.d_k <= SCORES_WIDTH
    three = (problem.per_group + STAGES) * problem.d_k <= SCORES_WIDTH
    queries = TILE if few else FEW_QUERIES.value
    rows, tiles = ceil_div(chunk.stop - chunk.first, queries), ceil_div(chunk.num_cmp, TILE)
    wanted = ROUNDS * problem.processors
    walked = min(max(rows * problem.num_segments * tiles // wanted, 1), MOST_TILES)
    start(
        problem.memo,
        ("score", chunk),
        few_head_scores if few else many_head_scores,
        (tile_rows(q) if few else head_rows(q, SCORED_TOGETHER, queries), tile_rows(k_cmp))
        + (lse, scores),
        lambda: Launch(
            (ceil_div(tiles, walked), rows, problem.num_segments),
            (
                chunk.first, chunk.stop, problem.seq_len, problem.num_groups, chunk.width, walked,
                problem.scale_log2, *problem.bands[0][:2],
            ),
            {"D": problem.d_k, "G": problem.per_group, "STAGES": STAGES}
            | stride_constants(problem, levels),
            {"num_warps": 4} | ({"maxnreg": REGISTERS} if three else {}),
        ),
    )  # fmt: skip

"""Block scores from the compressed branch, on Hopper, with the levels of select.py added up.

Programs are persistent: each takes items of work in turn, which are 64 queries and PAIR compressed
tokens of one group. Each of two consumers has half of the tokens, and all heads of the group pass
by both: q is read once for 256 tokens. A product runs beside the exponentials of the head before,
also from one item to the next. parts.py has the names.
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

from nsa.ops.triton.hopper.parts import (
    PRODUCER_REGISTERS,
    TILE,
    TILE_ROWS,
    copy_in,
    launch,
    matrix,
    num_compressed,
    tile_rows,
)
from nsa.ops.triton.launcher import ceil_div, start
from nsa.ops.triton.problem import Problem

STAGES = 4
"""Tiles of queries, one head each, that are in flight or being read."""
KEYS = 128
"""Compressed tokens of a consumer."""
MODE = 3
"""Experiment: 1 turns, 2 guarded, 4 single."""
EDGE = 32
"""Blocks of a consumer."""
EDGE_BLOCKS, EDGE_SHARE = gl.constexpr(EDGE), gl.constexpr(EDGE // 2)
KEY_ROWS, PAIR = gl.constexpr(KEYS), gl.constexpr(2 * KEYS)
COUNTS = ("FIRST", "STOP", "S", "NUM_ITEMS", "NUM_TILES", "SEGMENTS", "Hkv", "OFF", "STEP", "ONE")


@gluon.jit(do_not_specialize=COUNTS)
def gluon_scores(
    t_q, t_k, p_lse, p_scores,
    FIRST, STOP, S, NUM_ITEMS, NUM_TILES, SEGMENTS, Hkv, WIDTH, OFF, STEP, ONE, scale_log2,
    D: gl.constexpr, G: gl.constexpr,
    STRIDES: gl.constexpr, OVERLAP: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
    NC: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Block scores of the rows FIRST .. STOP - 1, fp32 [B * Hkv, rows, WIDTH], but for what a block
    gets from the tokens of the consumer before. Those edges follow, [B * Hkv, rows, WIDTH // 16]:
    number e belongs to block 32 e. Number 0, and what no query of a tile sees, are not written.

    G is even, a block has two levels.
    """
    dtype: gl.constexpr = t_q.dtype
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, TILE_ROWS, 1, D], t_q.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [2 * NC, 1, KEY_ROWS, 1, D], t_k.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bar)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=NC)
    for i in gl.static_range(2):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=NC)
        mbarrier.init(turns.index(i), count=1)
    # The copies are asynchronous, and must see the barriers as they were just written.
    fence_async_shared()
    bufs = (q_bufs, k_bufs)
    bars = (q_full, q_empty, k_full, k_empty, turns)
    sizes = (FIRST, NUM_ITEMS, NUM_TILES, SEGMENTS, Hkv, OFF, STEP)
    shared = (p_lse, p_scores, bufs, bars, sizes, STOP, S, WIDTH, ONE, scale_log2)
    gl.warp_specialize(
        [
            (_consume, (0, shared, D, G, STRIDES, OVERLAP, STAGES, MODE)),
            (_consume, (1, shared, D, G, STRIDES, OVERLAP, STAGES, MODE)),
            (_produce, ((t_q, t_k), bufs, bars, sizes, D, G, STAGES, MODE)),
        ],
        [4, 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _first_tile(pairs, sizes):
    """The first tile of queries that sees more than so many pairs."""
    first_row, num_items, num_tiles, segments, Hkv, OFF, STEP = sizes
    rows = pairs * (PAIR * STEP) + OFF - first_row  # from here on
    return gl.minimum(gl.maximum(rows, 0) // TILE_ROWS, num_tiles)


@gluon.jit
def _place_of(item, sizes):
    """Segment, first query and first token of an item; those of one tile of queries follow each
    other, so that programs that run at a time read the same q."""
    first_row, num_items, num_tiles, segments, Hkv, OFF, STEP = sizes
    # Tiles that see equally many pairs are a run; a chunk of queries has few runs.
    pairs = num_compressed(first_row + (TILE_ROWS - 1), OFF, STEP)
    pairs = gl.maximum((pairs + PAIR - 1) // PAIR, 1)
    tile = _first_tile(pairs - 1, sizes)
    stop = _first_tile(pairs, sizes)
    count = (stop - tile) * (segments * pairs)
    while item >= count:
        item -= count
        pairs += 1
        tile = stop
        stop = _first_tile(pairs, sizes)
        count = (stop - tile) * (segments * pairs)
    below = item // (segments * pairs)
    rest = item - below * (segments * pairs)
    segment = rest // pairs
    return segment, first_row + (tile + below) * TILE_ROWS, (rest - segment * pairs) * PAIR


@gluon.jit
def _num_rounds(num_items):
    """Items of this program: all are equally long."""
    return (num_items - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _produce(
    copied, bufs, bars, sizes, D: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
    MODE: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of all items, in the order in which the consumers read them."""
    it = 0
    rounds = _num_rounds(sizes[1])
    for n in range(rounds):
        item = n * gl.num_programs(0) + gl.program_id(0)
        it = _copy_item(copied, bufs, bars, sizes, item, it, n, G, D, G, STAGES)
    # The consumers begin one item more than there are, and do not end it.
    if MODE < 4:
        _copy_item(copied, bufs, bars, sizes, gl.program_id(0), it, rounds, 1, D, G, STAGES)


@gluon.jit
def _copy_item(
    copied, bufs, bars, sizes, item, it, n, num_heads,
    D: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The keys of both consumers, then the queries head by head."""
    t_q, t_k = copied
    q_bufs, k_bufs = bufs
    q_full, q_empty, k_full, k_empty, turns = bars
    segment, t0, k0 = _place_of(item, sizes)
    i_b = segment // sizes[4]
    i_g = segment - i_b * sizes[4]
    pair = n % 2
    mbarrier.wait(k_empty.index(pair), (n // 2 & 1) ^ 1)
    mbarrier.expect(k_full.index(pair), PAIR * D * 2)
    copy_in(t_k, i_b, k0, i_g, k_full.index(pair), k_bufs.index(pair * 2))
    copy_in(t_k, i_b, k0 + KEY_ROWS, i_g, k_full.index(pair), k_bufs.index(pair * 2 + 1))
    for g in range(num_heads):
        stage = it % STAGES
        mbarrier.wait(q_empty.index(stage), (it // STAGES & 1) ^ 1)
        mbarrier.expect(q_full.index(stage), TILE_ROWS * D * 2)
        copy_in(t_q, i_b, t0, i_g * G + g, q_full.index(stage), q_bufs.index(stage))
        it += 1
    return it


@gluon.jit
def _consume(
    C: gl.constexpr, shared, D: gl.constexpr,
    G: gl.constexpr,
    STRIDES: gl.constexpr, OVERLAP: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """KEYS tokens of every item.

    p_cmp = exp2(q k^T * scale_log2 - lse), summed over the heads.
    """
    p_lse, p_scores, bufs, bars, sizes, STOP, S, WIDTH, ONE, scale_log2 = shared
    q_full, q_empty, k_full, k_empty, turns = bars
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_ROWS, 16])
    o_m = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL))
    rounds = _num_rounds(sizes[1])
    segment, t0, k0 = _place_of(gl.program_id(0), sizes)
    s = gl.zeros([TILE_ROWS, KEY_ROWS], gl.float32, SL)
    if MODE < 4:
        mbarrier.wait(k_full.index(0), 0)
        s = _product(bufs, bars, 0, 0, C, SL, STAGES, MODE)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(q_empty.index(0))
    it = 0
    for n in range(rounds):
        p_row = p_lse + (segment.to(gl.int64) * (G * S) + gl.minimum(t0 + o_m, S - 1))
        total = gl.zeros([TILE_ROWS, KEY_ROWS], gl.float32, SL)
        if MODE < 4:
            total, s = _add_heads(
                total, s, p_row, bufs, bars, it, n, S, ONE, scale_log2, C, SL, G, STAGES, MODE
            )
            it += G
        else:
            mbarrier.wait(k_full.index(n % 2), n // 2 & 1)
            lse = gl.load(p_row)
            for g in range(G):
                one = _product(bufs, bars, it, n, C, SL, STAGES, MODE)
                p_row += gl.where(g + 1 < G, S, 0)
                next_lse = gl.load(p_row)
                one = warpgroup_mma_wait(0, deps=(one,))
                mbarrier.arrive(q_empty.index(it % STAGES))
                total += gl.exp2(one * scale_log2 - lse[:, None])
                lse = next_lse
                it += 1
        mbarrier.arrive(k_empty.index(n % 2))
        at = k0 + C * KEY_ROWS
        _store(total, p_scores, segment, t0, at, sizes, STOP, WIDTH, SL, STRIDES, OVERLAP)
        # After the last item, the first one is begun again.
        item = gl.where(n + 1 < rounds, (n + 1) * gl.num_programs(0), 0) + gl.program_id(0)
        segment, t0, k0 = _place_of(item, sizes)
        if MODE < 4:
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(q_empty.index(it % STAGES))


@gluon.jit
def _add_heads(
    total, s, p_row, bufs, bars, it, n, S, ONE, scale_log2,
    C: gl.constexpr, SL: gl.constexpr, G: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Add the probabilities of all heads of item n. s is the product of the first one, and then, in
    flight, that of the next item's first one.

    Products take turns on two sets of registers. Each is begun before the wait for the one before:
    else ptxas would move the exponentials of that one ahead of it, and nothing would overlap. It
    does so with the first ones.
    """
    q_empty = bars[1]
    even, odd = s, s
    lse = gl.load(p_row)
    for g in gl.static_range(G):
        if g == G - 1:
            mbarrier.wait(bars[2].index((n + 1) % 2), (n + 1) // 2 & 1)  # the next item's keys
        product = _product(bufs, bars, it + g + 1, n + g // (G - 1), C, SL, STAGES, MODE)
        next_lse = gl.load(p_row + (g + 1) % G * S)
        if g % 2 == 0:
            odd = product
            if g > 0:
                even = warpgroup_mma_wait(1, deps=(even,))
                mbarrier.arrive(q_empty.index((it + g) % STAGES))
            total = _added(total, even, lse, ONE, scale_log2, MODE)
        else:
            even = product
            odd = warpgroup_mma_wait(1, deps=(odd,))
            mbarrier.arrive(q_empty.index((it + g) % STAGES))
            total = _added(total, odd, lse, ONE, scale_log2, MODE)
        lse = next_lse
    return total, even


@gluon.jit
def _added(total, s, lse, ONE, scale_log2, MODE: gl.constexpr):
    if MODE % 4 >= 2:
        if ONE > 0:
            total += gl.exp2(s * scale_log2 - lse[:, None])
    else:
        total += gl.exp2(s * scale_log2 - lse[:, None])
    return total


@gluon.jit
def _product(
    bufs, bars, it, n,
    C: gl.constexpr, SL: gl.constexpr, STAGES: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Begin q k^T of tile `it`, with the keys of item n, which are there."""
    q_bufs, k_bufs = bufs
    q_full = bars[0]
    stage = it % STAGES
    mbarrier.wait(q_full.index(stage), it // STAGES & 1)
    none = gl.zeros([TILE_ROWS, KEY_ROWS], gl.float32, SL)
    keys = matrix(k_bufs, n % 2 * 2 + C).permute((1, 0))
    if MODE % 2 == 1:
        mbarrier.wait(bars[4].index(C), (it & 1) ^ (1 - C))
    s = warpgroup_mma(matrix(q_bufs, stage), keys, none, use_acc=False, is_async=True)
    if MODE % 2 == 1:
        mbarrier.arrive(bars[4].index(1 - C))
    return s


@gluon.jit
def _store(
    total, p_scores, segment, t0, k0, sizes, STOP, WIDTH, SL: gl.constexpr,
    STRIDES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Mask the sums [64, KEYS], fold them into blocks, and store those and the edge."""
    first_row, segments, OFF, STEP = sizes[0], sizes[3], sizes[5], sizes[6]
    if k0 + KEY_ROWS > num_compressed(t0, OFF, STEP):
        seen = num_compressed(t0 + gl.arange(0, TILE_ROWS, gl.SliceLayout(1, SL)), OFF, STEP)
        o_k = gl.arange(0, KEY_ROWS, gl.SliceLayout(0, SL))
        total = gl.where(o_k[None, :] < (seen - k0)[:, None], total, 0.0)
    # A warp has the 32 blocks of a row, one in a lane.
    BL: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    own = gl.convert_layout(_folded(total, 0, SL, STRIDES, OVERLAP), BL)
    later = gl.convert_layout(_folded(total, 1, SL, STRIDES, OVERLAP), BL)
    before = gl.inline_asm_elementwise(
        "shfl.sync.up.b32 $0, $1, 1, 0, 0xffffffff;", "=f,f", [later],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip
    o_j = gl.arange(0, EDGE_BLOCKS, gl.SliceLayout(0, BL))
    own = own + gl.where(o_j[None, :] > 0, before, 0.0)
    o_m = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, BL))
    m_t = (t0 + o_m < STOP)[:, None]
    num_rows = STOP - first_row
    row = segment.to(gl.int64) * num_rows + (t0 - first_row)
    block = k0 // STRIDES
    at = o_m[:, None] * WIDTH + (block + o_j)[None, :]
    gl.store(p_scores + row * WIDTH + at, own, mask=m_t & (block + o_j < WIDTH)[None, :])
    # The last block's part of the next one, which another consumer has.
    edges = WIDTH // EDGE_SHARE
    edge = block // EDGE_BLOCKS + 1
    p_edges = p_scores + num_rows.to(gl.int64) * segments * WIDTH + row * edges + edge
    m_edge = m_t & ((o_j == EDGE_BLOCKS - 1) & (edge < edges))[None, :]
    gl.store(p_edges + o_m[:, None] * edges + (o_j * 0)[None, :], later, mask=m_edge)


@gluon.jit
def _folded(
    total, LEVEL: gl.constexpr, SL: gl.constexpr, STRIDES: gl.constexpr, OVERLAP: gl.constexpr
):
    """What the tokens of each block give to the block LEVEL further on (Eq. 9), as in
    select.group_scores."""
    o_s = gl.arange(0, KEY_ROWS, gl.SliceLayout(0, SL)) % STRIDES
    stop = gl.minimum(o_s + OVERLAP, LEVEL * STRIDES + STRIDES)
    weight = gl.maximum(stop - gl.maximum(o_s, LEVEL * STRIDES), 0).to(gl.float32)
    return gl.sum((total * weight[None, :]).reshape([TILE_ROWS, EDGE_BLOCKS, STRIDES]), axis=2)


# --- Launcher ---


def score(
    problem: Problem,
    q: Tensor,  # [B, S, Hq, D]
    k_cmp: Tensor,  # [B, N, Hkv, D]
    lse: Tensor,  # [B, Hq, S] fp32, base 2
    scores: Tensor,  # fp32, written
    rows: tuple[int, int],
    width: int,
) -> None:
    """Block scores and edges of the rows first .. stop - 1."""
    spec, (first, stop) = problem.spec, rows
    tiles = ceil_div(stop - first, TILE)
    items = problem.num_segments * num_pairs(problem, first, tiles)
    start(
        problem.memo,
        ("gluon scores", first),
        gluon_scores,
        (tile_rows(q), tile_rows(k_cmp, KEYS), lse, scores),
        lambda: launch(
            min(problem.processors, items),
            (
                first, stop, problem.seq_len, items, tiles, problem.num_segments,
                problem.num_groups, width, *problem.bands[0][:2], 1,
                problem.scale_log2,
            ),
            {"D": problem.d_k, "G": problem.per_group, "STRIDES": spec.l_sel // spec.d, "OVERLAP": spec.l // spec.d}
            | {"STAGES": STAGES, "MODE": MODE},
            2,
        ),
    )  # fmt: skip


def num_pairs(problem: Problem, first: int, tiles: int) -> int:
    """Pairs of a tile of queries and PAIR tokens of which it sees one."""
    spec = problem.spec
    last_rows = (first + TILE * (i + 1) - 1 for i in range(tiles))
    seen = (max(row - (spec.l - 1) + spec.d, 0) // spec.d for row in last_rows)
    return sum(ceil_div(n, 2 * KEYS) for n in seen)

"""Tiles of rows (query, head) that chose a block, gathered by TMA.

A query takes `group_rows` rows of a tile of 64: its group of heads, rounded up to a power of two
and at least to the 8 rows after which the pattern of the swizzle repeats. TMA copies the rows of
one query at a time, in panels of 64 columns, because 128 bytes are what it swizzles. Heads beyond
the group and queries beyond the list are outside of the tensor, and read as 0. Names as in
tile.py; R is the rows of a query.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from nsa.ops.triton.launcher import Rows

ROWS = gl.constexpr(64)
"""Rows of a tile, keys of a block, and columns of a panel."""
LEAST_ROWS = 8
"""Rows that a query takes at least."""


@gluon.jit
def queries_of(p_queries, first, stop, i, S, R: gl.constexpr):
    """The query of each piece of tile i; past the end of the item query S, which TMA reads as 0."""
    PIECES: gl.constexpr = ROWS // R
    queries = ()
    for j in gl.static_range(PIECES):
        entry = first + i * PIECES + j
        t = gl.load(p_queries + entry, mask=entry < stop, other=S)
        queries = queries + (t,)  # type: ignore[assignment]
    return queries


@gluon.jit
def copy_rows(t_x, i_b, i_g, queries, bar, pieces, stage, R: gl.constexpr, D: gl.constexpr):
    """Start copying a tile of x [B, S, Hkv, G, D]; `pieces` is from pieces_of."""
    PIECES: gl.constexpr = ROWS // R
    for j in gl.static_range(PIECES):
        for c in gl.static_range(D // ROWS):
            panel = (stage * (D // ROWS) + c) * PIECES + j
            at = [i_b, queries[j], i_g, 0, c * ROWS]
            tma.async_copy_global_to_shared(t_x, at, bar, pieces.index(panel))


@gluon.jit
def pieces_of(b_x, R: gl.constexpr):
    """The memory of tiles [STAGES, ROWS, D] as the pieces that TMA writes."""
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    NUM: gl.constexpr = b_x.numel // (R * ROWS)
    return b_x._reinterpret(b_x.dtype, [NUM, R, ROWS], TILE)


@gluon.jit
def copy_stats(t_stats, i_b, i_g, queries, bar, pieces, stage, R: gl.constexpr):
    """Start copying the stats of a tile, of [B, S, Hkv, G * 4]."""
    PIECES: gl.constexpr = ROWS // R
    for j in gl.static_range(PIECES):
        at = [i_b, queries[j], i_g, 0]
        tma.async_copy_global_to_shared(t_stats, at, bar, pieces.index(stage * PIECES + j))


@gluon.jit
def stat_pieces_of(b_stats, R: gl.constexpr):
    """The memory of stats [STAGES, ROWS, 4] as the pieces of TMA, rows of R * 4 numbers."""
    PLAIN: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
    return b_stats._reinterpret(gl.float32, [b_stats.numel // (R * 4), R * 4], PLAIN)


# --- Descriptors ---


def group_rows(per_group: int) -> int:
    """Rows of a tile that a query takes: a power of two; 64 / them are the queries of a tile."""
    assert 1 <= per_group <= ROWS.value, "a query fits one tile"
    return max(1 << (per_group - 1).bit_length(), LEAST_ROWS)


def query_rows(x: Tensor, num_groups: int) -> Rows:
    """The rows of one query and group of x [B, S, Hq, D], a panel of columns at a time."""
    batch, seq_len, num_heads, dim = x.shape
    s_b, s_s, s_h, s_d = x.stride()
    per_group = num_heads // num_groups
    rows = Rows(x, 0, 0, gl.NVMMASharedLayout(128, 8 * x.element_size(), rank=5))
    rows.shape = (batch, seq_len, num_groups, per_group, dim)
    rows.strides = (s_b, s_s, per_group * s_h, s_h, s_d)
    rows.block_shape = (1, 1, 1, group_rows(per_group), ROWS.value)
    return rows


def query_stats(stats: Tensor, num_groups: int) -> Rows:
    """The stats of one query and group, of [B, S, Hq, 4]: one row."""
    batch, seq_len, num_heads, _ = stats.shape
    per_group = num_heads // num_groups
    rows = Rows(stats, 0, 0, gl.NVMMASharedLayout(0, 32, rank=4))
    rows.shape = (batch, seq_len, num_groups, per_group * 4)
    rows.strides = (seq_len * num_heads * 4, num_heads * 4, per_group * 4, 1)
    rows.block_shape = (1, 1, 1, 4 * group_rows(per_group))
    return rows


def place_rows(part: Tensor, per_group: int) -> Rows:
    """The rows of one query and place of part [queries * places * G, D], a panel at a time."""
    num_rows, dim = part.shape
    rows = Rows(part, 0, 0, gl.NVMMASharedLayout(128, 8 * part.element_size(), rank=3))
    rows.shape = (num_rows // per_group, per_group, dim)
    rows.strides = (per_group * dim, dim, 1)
    rows.block_shape = (1, group_rows(per_group), ROWS.value)
    return rows


def block_rows(x: Tensor) -> Rows:
    """The keys or values of one block, of x [B, S, Hkv, D]."""
    return Rows(x, ROWS.value, x.shape[3], gl.NVMMASharedLayout(128, 8 * x.element_size(), rank=4))

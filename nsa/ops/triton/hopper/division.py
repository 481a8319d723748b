"""How dk and dv of keys without a window are divided between programs, for keys.py.

Compressed keys are few, and early keys are seen by nearly all queries. So the heads of a group and
slices of the queries are given to different programs, as many as end earliest.
"""

from __future__ import annotations

import heapq
from functools import cache

from nsa.ops.triton.launcher import ceil_div
from nsa.ops.triton.problem import Problem

TILE = 64
"""Queries and keys of a tile; a program has two tiles of keys."""
BEGINNING = 3
"""What a program takes beside its tiles of queries, in tiles."""
PART_BYTES = 4 << 20
"""Bytes of partial sums that are written, read and added in the time of a tile."""
MANY = 16
"""Programs for each multiprocessor that are never too few."""


def divided(problem: Problem, branch: int) -> tuple[int, int]:
    """Programs for 128 keys of the compressed (0) or the masked selected branch (1): those that
    share the heads of a group, and slices of queries."""
    num_keys, band = problem.num_cmp if branch == 0 else problem.seq_len, problem.bands[branch]
    return earliest(
        num_keys, problem.seq_len, problem.num_segments, problem.per_group, problem.d_k,
        band.OFF, band.STEP, problem.processors,
    )  # fmt: skip


@cache
def earliest(
    num_keys: int, seq_len: int, segments: int, group: int, dim: int, off: int, step: int,
    processors: int,
) -> tuple[int, int]:  # fmt: skip
    """The division with the earliest end: programs start in their order, where one has ended."""
    best, least = (1, 1), float("inf")
    for shares in (n for n in range(group, 0, -1) if group % n == 0):
        for slices in (1, 2, 3, 4, 6, 8):
            parts = shares * slices
            programs = ceil_div(num_keys, 2 * TILE) * segments * parts
            if parts > 1 and programs > MANY * processors:
                continue
            ends = [0.0] * processors
            for length in lengths(num_keys, seq_len, off, step, slices):
                work = BEGINNING + length * (group // shares)
                for _ in range(segments * shares):
                    heapq.heapreplace(ends, ends[0] + work)
            took = max(ends)
            if parts > 1:
                took += parts * 2 * segments * num_keys * dim * 4 / PART_BYTES
            if took < least:
                best, least = (shares, slices), took
    return best


def lengths(num_keys: int, seq_len: int, off: int, step: int, slices: int) -> list[int]:
    """Tiles of queries of each program of a head, in the order in which they start."""
    num_tiles = ceil_div(seq_len, TILE)
    per_slice = ceil_div(num_tiles, slices)
    found = []
    for k0 in range(0, num_keys, 2 * TILE):
        for i in range(slices):
            first = max((k0 * step + off) // TILE, i * per_slice)
            found.append(max(min((i + 1) * per_slice, num_tiles) - first, 0))
    return found

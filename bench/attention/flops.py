"""Work of the attention, counted from its definition, and the least time it can take.

A pair is one query of one head and one key it sees; masked keys are not counted. A product of a
pair costs two operations per head dim. Forward: q k and p v, and q k once more for the scores.
Backward: q k again, dO v, and the products into dQ, dK and dV.
"""

from __future__ import annotations

from typing import NamedTuple

import nsa
from bench.attention.cases import Case
from nsa.model.cost import Pairs, count_pairs, dense_pairs

__all__ = ["Pairs", "Work", "count_pairs", "dense_work", "nsa_work", "products"]

FLOPS_PER_S = 790e12
"""Dense bf16 products of large matrices; measured on an H200."""
BYTES_PER_S = 4.3e12
"""Device memory, by a large copy; measured on an H200."""


class Work(NamedTuple):
    """Operations and least traffic of one call: every input read once, every result written."""

    fwd_flops: float
    bwd_flops: float
    fwd_bytes: float
    bwd_bytes: float

    def floor_ms(self, *, backward: bool) -> float:
        """The larger of the time for the products and of the time for the traffic."""
        flops = self.fwd_flops + backward * self.bwd_flops
        traffic = self.fwd_bytes + backward * self.bwd_bytes
        return 1e3 * max(flops / FLOPS_PER_S, traffic / BYTES_PER_S)


def nsa_work(case: Case, spec: nsa.BlockSpec, *, scored: bool, itemsize: int) -> Work:
    """All three branches, and the scores where the call chooses the blocks itself."""
    shape, tokens = case.shape, case.batch * case.length
    pairs = count_pairs(case.length, spec)
    heads = case.batch * shape.Hq
    scores = 2 * shape.Dk * pairs.cmp * heads if scored else 0
    fwd_flops, bwd_flops = products(sum(pairs) * heads, case)
    q, kv = shape.Hq * shape.Dk, 3 * shape.Hkv * (shape.Dk + shape.Dv)
    gates = 4 * 3 * shape.Hq  # fp32
    inputs = tokens * ((q + kv) * itemsize + gates)
    out = tokens * shape.Hq * shape.Dv * itemsize
    return Work(fwd_flops + scores, bwd_flops, inputs + out, inputs + out + inputs)


def dense_work(case: Case, *, itemsize: int) -> Work:
    """Causal attention over every earlier key."""
    shape, tokens = case.shape, case.batch * case.length
    pairs = dense_pairs(case.length)
    fwd_flops, bwd_flops = products(pairs * case.batch * shape.Hq, case)
    size = shape.Hq * shape.Dk + shape.Hkv * (shape.Dk + shape.Dv)
    inputs, out = tokens * size * itemsize, tokens * shape.Hq * shape.Dv * itemsize
    return Work(fwd_flops, bwd_flops, inputs + out, inputs + out + inputs)


def products(pairs: int, case: Case) -> tuple[float, float]:
    """Operations of two products forward and five backward."""
    d_k, d_v = case.shape.Dk, case.shape.Dv
    return 2.0 * pairs * (d_k + d_v), 2.0 * pairs * (3 * d_k + 2 * d_v)

"""Chunked prefill: many queries that continue a cached sequence, forward only.

There is no kernel of its own: to the kernels the queries are rows of a packed document that began
before their first row. The selected branch runs in query order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.plan import NO_FLAGS, Flags
from nsa.ops.spec import BlockSpec
from nsa.ops.triton import banded_forward, by_query, select
from nsa.ops.triton.banded_forward import Gated
from nsa.ops.triton.launcher import describable
from nsa.ops.triton.operators import padded_head
from nsa.ops.triton.problem import Problem


class Continued(Problem):
    """T queries from position `first` on, and keys of all that came before."""

    masked = False
    by_query = True
    long = False
    documents = None

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        spec: BlockSpec,
        scale: float,
        first: int,
        win_first: int,
        flags: Flags,
    ) -> None:
        super().__init__(q, v, spec, scale, [first + q.shape[1]], flags)
        self.packed = True
        # The same for all rows: first key, start of the document, first key of the window.
        rows = (0, -first, -win_first)
        index = torch.tensor(rows, dtype=torch.int32).to(q.device, non_blocking=True)
        self._zero, self._start, self._win = index[:, None].expand(3, q.shape[1]).contiguous()

    def row_index(self, branch: int, placeholder: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The document begins at row -first. Its keys begin with their tensor; only the window's
        tensor begins with token win_first."""
        return self._start, self._win if branch == 2 else self._zero, self._zero


@torch.no_grad()
def attend_continued(
    q: Tensor,  # [B, T, Hq, Dk]
    cmp: tuple[Tensor, Tensor],  # k, v [B, N, Hkv, D]: all compressed tokens
    sel: tuple[Tensor, Tensor],  # [B, first + T, Hkv, D]
    win: tuple[Tensor, Tensor],  # [B, first + T - win_first, Hkv, D]
    gates: Tensor,  # [B, T, Hq, 3]
    spec: BlockSpec,
    scale: float,
    *,
    first: int,
    win_first: int,
    flags: Flags = NO_FLAGS,
) -> Tensor:  # [B, T, Hq, Dv]
    """Gated sum of the three branches."""
    d_v = sel[1].shape[3]
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = (
        describable(padded_head(x)) for x in (q, *cmp, *sel, *win)
    )
    # Head dims were padded to a multiple of 8; the padding of the output is cut off at the end.
    problem = Continued(q, v_sel, spec, scale, first, win_first, flags)
    lse = problem.empty(3, problem.batch, problem.num_heads, problem.seq_len, dtype=torch.float32)
    o_cmp = banded_forward.forward(problem, 0, q, k_cmp, v_cmp, lse[0])
    chosen = select.choose(problem, q, k_cmp, lse[0])
    o_win = banded_forward.forward(problem, 2, q, k_win, v_win, lse[2])
    gated = Gated(gates, o_cmp, o_win, torch.empty_like(o_cmp))
    by_query.forward(problem, q, k_sel, v_sel, chosen, lse[1], gated)
    return gated.out[..., :d_v]

"""A virtual split on one device: what each rank computes, one rank after another, no collectives.

Every rank gets the keys of all others as it would have them after its exchange: compressed and
selected K and V of the whole row, window and raw tokens with their halos. Then it makes the calls
of a real rank (attend_windows and attend_parts of nsa.parallel.attention, and the compression of
its own tokens), forward and backward. What is left out is the exchange: its bytes are counted in
received.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import nsa
from bench.attention.cases import Case, make_inputs
from nsa.parallel import Split
from nsa.parallel.attention import Keys, Pair, attend_parts, attend_windows
from nsa.parallel.split import block_starts, window_starts


class Done(NamedTuple):
    """Results of a call; detached, so that nothing saved for the backward outlives it."""

    out: Tensor  # [1, T, Hq, Dv]
    chosen: Tensor  # [1, T, Hkv, n_sel] int32
    dq: Tensor  # [1, T, Hq, Dk]
    dk_sel: Tensor  # [1, S, Hkv, Dk], of the whole row


class Whole:
    """The row on one device, and the inputs that ranks share."""

    def __init__(self, case: Case, spec: nsa.BlockSpec, dtype: torch.dtype, device: str) -> None:
        self.spec, self.length = spec, case.length
        self.inputs = make_inputs(case, dtype, device)
        if dtype == torch.float64:  # gates are fp32 otherwise
            self.inputs[-1] = _leaf(self.inputs[-1].double())
        size = (1, case.length, case.shape.Hq, case.shape.Dv)
        self.dout = torch.randn(size, dtype=dtype, device=device)

    def run(self, backend: str = "auto") -> Done:
        """Compression and attention of the whole row, forward and backward."""
        q, k_raw, v_raw, k_sel, v_sel, k_win, v_win, gates = self.inputs
        made = [nsa.compress(x, self.spec, backend=backend) for x in (k_raw, v_raw)]
        out, chosen = nsa.nsa_attention(
            q, made[0], made[1], k_sel, v_sel, k_win, v_win, gates, self.spec,
            backend=backend, return_selection=True,
        )  # fmt: skip
        dq, _, _, dk_sel, *_ = torch.autograd.grad(out, self.inputs, self.dout)
        return Done(out.detach(), chosen, dq, dk_sel)

    @torch.no_grad()
    def compressed(self) -> Pair:
        """K and V of the compressed branch, as all ranks make them together."""
        return tuple(nsa.compress(x, self.spec) for x in self.inputs[1:3])


class Rank:
    """One rank of a split, with all that has arrived."""

    def __init__(self, whole: Whole, split: Split, rank: int, *, one_call: bool = False) -> None:
        """`one_call`: the three branches of a part together. A real rank computes the window's
        apart, while other keys are in flight."""
        self.split, self.rank, self.spec, self.one_call = split, rank, whole.spec, one_call
        q, *pairs, gates = whole.inputs
        raw, selected, window = pairs[:2], pairs[2:4], pairs[4:]
        self.q, self.gates = self._own(q), self._own(gates)
        self.dout = self._own(whole.dout).detach()
        self.raw = self._extended(block_starts(split, self.spec), raw)
        self.windows = self._extended(window_starts(split, self.spec.w), window)
        self.keys = Keys(
            tuple(_leaf(x) for x in whole.compressed()),
            tuple(_leaf(x) for x in selected),
            self.windows,
        )

    def rows(self, x: Tensor) -> Tensor:  # [1, S, ...] -> [1, T, ...]
        """Those of this rank's tokens."""
        own = [x[:, self.split.tokens(part)] for part in self.split.parts_of(self.rank)]
        return torch.cat(own, dim=1)

    def run(self, backend: str = "auto") -> Done:
        """Compression of its own tokens and attention of its queries, forward and backward."""
        made = [nsa.compress(x, self.spec, backend=backend) for pair in self.raw for x in pair]
        out, chosen = self._attend(backend)
        # Gradients of compressed tokens come from all ranks; here any will do.
        grads = [self.dout, *(x.detach() for x in made)]
        found = torch.autograd.grad([out, *made], self._leaves(), grads)
        return Done(out.detach(), chosen, found[0], found[-2])

    def _attend(self, backend: str) -> tuple[Tensor, Tensor]:
        given = self.split, self.rank, self.q
        rest: Any = {"gates": self.gates, "spec": self.spec, "backend": backend}
        if self.one_call:
            return attend_parts(*given, self.keys, **rest)
        near = attend_windows(*given, self.windows, **rest)
        out, chosen = attend_parts(*given, self.keys._replace(windows=None), **rest)
        return near + out, chosen

    def _leaves(self) -> list[Tensor]:
        """What gets gradients: queries first, selected keys and values last."""
        runs = [x for pair in (*self.raw, *self.windows) for x in pair]
        return [self.q, self.gates, *runs, *self.keys.compressed, *self.keys.selected]

    def _own(self, x: Tensor) -> Tensor:
        return _leaf(self.rows(x.detach()))

    def _extended(self, starts: tuple[int, ...], pair: list[Tensor]) -> list[Pair]:
        """K and V of each own part, with the tokens on its left from its start on."""
        spans = [
            slice(starts[part], self.split.tokens(part).stop)
            for part in self.split.parts_of(self.rank)
        ]
        return [tuple(_leaf(x[:, span]) for x in pair) for span in spans]


def compare(rank: Rank, done: Done, whole: Done) -> dict[str, Any]:
    """How far a rank is from the rows of the whole; a block less in common is no error.

    Kernels of the whole round otherwise, so that two scores in a near tie may change places.
    """
    return {
        "out_error": relative_rms(done.out, rank.rows(whole.out)),
        "dq_error": relative_rms(done.dq, rank.rows(whole.dq)),
        "same_blocks": float((done.chosen == rank.rows(whole.chosen)).float().mean()),
    }


def relative_rms(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference, over that of what is wanted."""
    difference, size = ((x.float() ** 2).mean() for x in (found - wanted, wanted))
    return float((difference / size) ** 0.5)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().contiguous().requires_grad_()

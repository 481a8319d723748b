"""Measuring one case: every implementation on the same inputs gives one row."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

import nsa
from bench import timing
from bench.attention import flops, peers
from bench.attention.cases import Case, make_inputs

TOP_KERNELS = 12
MAX_NAME = 80
"""Longest kernel name that is kept: the names of torch's own kernels fill pages."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is the same for every case of a run."""

    device: str
    dtype: torch.dtype
    backend: str
    """Of nsa.compress and nsa.nsa_attention."""
    spec: nsa.BlockSpec
    peer_names: tuple[str, ...]
    dense_long: bool
    """Whether dense attention is measured above peers.DENSE_MAX_LENGTH."""
    select: Callable[[Case], Tensor | None]
    """The selection of a case, on the CPU; None lets nsa_attention choose."""


@dataclass(kw_only=True)
class Row:
    """One implementation on one case; None is what was not measured."""

    name: str
    Hq: int
    Hkv: int
    Dk: int
    Dv: int
    B: int
    S: int
    repeats: int
    fwd_ms: float | None = None
    """Median time of the forward alone; `both` is forward and backward."""
    both_ms: float | None = None
    fwd_graph_ms: float | str | None = None
    """Time of a CUDA-graph replay, or the reason why there is none."""
    both_graph_ms: float | str | None = None
    peak_mib: float | None = None
    """Memory beyond inputs, output and gradients at the peak of forward and backward."""
    fwd_tflops: float | None = None
    """Rate by the eager time, in 1e12 operations per second; see bench/attention/flops.py."""
    both_tflops: float | None = None
    fwd_floor_ms: float | None = None
    both_floor_ms: float | None = None
    fwd_floor_share: float | None = None
    """Floor / eager time: 1 would be the best possible."""
    both_floor_share: float | None = None
    wall_s: float = 0.0
    """Everything this row took, compilation included."""
    reason: str = ""
    """Why times are missing; empty otherwise."""
    note: str = ""
    """What is compared, where the name does not say it."""


def measure_case(case: Case, setup: Setup) -> list[Row]:
    """Ours first, then the peers."""
    inputs = make_inputs(case, setup.dtype, setup.device)
    selection = _on_device(setup.select(case), setup.device)
    ours = partial(peers.build_nsa, inputs, setup.spec, selection, setup.backend)
    rows = [_measure_row("nsa", ours, case, setup, scored=selection is None)]
    for name in setup.peer_names:
        build = partial(_build_peer, name, inputs, case, setup, selection)
        rows.append(_measure_row(name, build, case, setup))
    if setup.device == "cuda":
        torch.cuda.empty_cache()  # memory of graphs stays reserved otherwise
    return rows


def kernel_breakdown(case: Case, setup: Setup) -> dict[str, Any]:
    """Device time of ours by kernel, one forward and backward; CUDA only."""
    inputs = make_inputs(case, setup.dtype, setup.device)
    selection = _on_device(setup.select(case), setup.device)
    ours = peers.build_nsa(inputs, setup.spec, selection, setup.backend)
    grad = torch.randn_like(ours.call())
    times = timing.kernel_ms(partial(_forward_backward, ours, grad))
    top = [{"name": name[:MAX_NAME], "ms": ms} for name, ms in list(times.items())[:TOP_KERNELS]]
    where = {**case.shape._asdict(), "B": case.batch, "S": case.length}
    return {**where, "total_ms": sum(times.values()), "num_names": len(times), "kernels": top}


def as_json(row: Row) -> dict[str, Any]:
    """A row as the JSON output holds it: what was measured, to six digits; no note."""
    fields = {name: value for name, value in asdict(row).items() if name != "note"}
    measured = {name: value for name, value in fields.items() if value not in (None, "")}
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in measured.items()
    }


def _build_peer(
    name: str, inputs: list[Tensor], case: Case, setup: Setup, selection: Tensor | None
) -> peers.Attention:
    left_out = dict(case.left_out).get(name)
    if left_out:
        raise peers.CannotRun(left_out)
    if name in peers.DENSE and case.length > peers.DENSE_MAX_LENGTH and not setup.dense_long:
        raise peers.CannotRun(
            f"dense is skipped above S={peers.DENSE_MAX_LENGTH}; add --dense-long to measure it"
        )
    return peers.build_peer(name, inputs, case, setup.spec, selection)


def _measure_row(
    name: str,
    build: Callable[[], peers.Attention],
    case: Case,
    setup: Setup,
    *,
    scored: bool = False,
) -> Row:
    """Measure, or keep the reason why it cannot run."""
    start = time.perf_counter()
    row = Row(name=name, **case.shape._asdict(), B=case.batch, S=case.length, repeats=case.repeats)
    try:
        attention = build()
        row.note = attention.note
        _fill_times(row, attention, setup)
    except peers.CannotRun as error:
        row.reason = str(error)
    except _failures() as error:
        row.reason = f"{type(error).__name__}: {timing.first_line(error)}"
    if row.both_ms is not None and setup.device == "cuda":
        _fill_rates(row, _work(name, case, setup, scored))
    row.wall_s = time.perf_counter() - start
    return row


def _fill_times(row: Row, attention: peers.Attention, setup: Setup) -> None:
    with attention.context():
        grad = torch.randn_like(attention.call())
        both = partial(_forward_backward, attention, grad)
        with torch.no_grad():
            row.fwd_ms = timing.median_ms(attention.call, row.repeats, setup.device)
        row.both_ms = timing.median_ms(both, row.repeats, setup.device)
        if setup.device != "cuda":
            return
        row.peak_mib = timing.peak_mib(both)
        if row.name == "nsa":
            with torch.no_grad():
                row.fwd_graph_ms = timing.graph_ms(attention.call, row.repeats)
            row.both_graph_ms = timing.graph_ms(both, row.repeats)


def _forward_backward(attention: peers.Attention, grad: Tensor) -> list[Tensor | None]:
    """Output and gradients; detached, so that nothing saved for the backward outlives the call."""
    out = attention.call()
    grads = torch.autograd.grad(out, attention.leaves, grad, allow_unused=True)
    return [out.detach(), *grads]


def _fill_rates(row: Row, work: flops.Work | None) -> None:
    if work is None or row.fwd_ms is None or row.both_ms is None:
        return
    row.fwd_tflops = work.fwd_flops / row.fwd_ms / 1e9
    row.both_tflops = (work.fwd_flops + work.bwd_flops) / row.both_ms / 1e9
    row.fwd_floor_ms = work.floor_ms(backward=False)
    row.both_floor_ms = work.floor_ms(backward=True)
    row.fwd_floor_share = row.fwd_floor_ms / row.fwd_ms
    row.both_floor_share = row.both_floor_ms / row.both_ms


def _work(name: str, case: Case, setup: Setup, scored: bool) -> flops.Work | None:
    """Work of an implementation; None for fla, whose branches are not ours."""
    itemsize = setup.dtype.itemsize
    if name == "nsa":
        return flops.nsa_work(case, setup.spec, scored=scored, itemsize=itemsize)
    return flops.dense_work(case, itemsize=itemsize) if name in peers.DENSE else None


def _failures() -> tuple[type[Exception], ...]:
    """What a call that cannot run raises: torch's errors, out of memory too, and Triton's."""
    if find_spec("triton") is None:
        return (RuntimeError,)
    from triton.errors import TritonError

    return (RuntimeError, TritonError)


def _on_device(selection: Tensor | None, device: str) -> Tensor | None:
    return None if selection is None else selection.to(device)

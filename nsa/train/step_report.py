"""The numbers of a logged step, gathered once for everyone who shows or keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nsa.model.selection_map import LayerMap
from nsa.telemetry import GpuReading, TrainingRow

MIB_PER_GIB = 1024


class FetchTimes(NamedTuple):
    """How long the last batch was waited for, and the last ones; all None before the first."""

    last_s: float | None = None
    p50_ms: float | None = None
    p95_ms: float | None = None

    @staticmethod
    def of(seconds: Sequence[float]) -> FetchTimes:
        """Summarize the waits of the last batches, in their order."""
        if not seconds:
            return FetchTimes()
        times = sorted(seconds)
        return FetchTimes(seconds[-1], _percentile_ms(times, 0.50), _percentile_ms(times, 0.95))


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """A logged step: what training.csv has of it, and what else was measured."""

    row: TrainingRow
    eta_s: float
    """Seconds that the rest of the run will take at this speed."""
    step_time_s: float
    """Of an update, since the line before."""
    grad_norm: float
    """Before clipping."""
    shows_norm: bool = False
    """Whether the line shows it; files have it always."""
    fetch: FetchTimes = field(default_factory=FetchTimes)
    mfu: float | None = None
    """Share of the device's peak, 0 to 1, since the line before; None where that is not known."""
    gpu: GpuReading = field(default_factory=GpuReading)
    rss_mib: float | None = None
    """Memory of the process; None where the device has its own."""
    attention: Mapping[str, Any] | None = None
    """AttentionStats.summary(), if it was collected."""
    layers: Sequence[Mapping[str, float]] | None = None
    """AttentionStats.per_layer(), if it was collected."""
    maps: Sequence[LayerMap] | None = None
    """AttentionStats.selection_maps(), on steps that have them."""


def step_line(report: StepReport) -> str:
    """The line of a logged step in a pipe or a file; other programs read its beginning."""
    eta = f"eta {clock(report.eta_s)}"
    return " | ".join([f"step {report.row.step:04d}", *step_numbers(report), eta])


def step_numbers(report: StepReport) -> list[str]:
    """The numbers one by one, in their order; those that are not known are left out."""
    row, fetch, gpu = report.row, report.fetch, report.gpu
    parts = [f"loss {row.loss:.4f}", f"lr {row.lr:.2e}", f"toks/s {row.toks_per_s:.0f}"]
    if report.shows_norm:
        parts.append(f"grad_norm {report.grad_norm:.4f}")
    if fetch.last_s is not None:
        parts.append(f"fetch {1e3 * fetch.last_s:.0f}ms")
        parts += [f"fetch_p50 {fetch.p50_ms:.0f}ms", f"fetch_p95 {fetch.p95_ms:.0f}ms"]
    if report.mfu is not None:
        parts.append(f"mfu {report.mfu:.1%}")
    if gpu.gpu_mem_alloc is not None and gpu.gpu_mem_reserved is not None:
        parts.append(f"mem {_gib(gpu.gpu_mem_alloc)}/{_gib(gpu.gpu_mem_reserved)}GiB")
    elif report.rss_mib is not None:
        parts.append(f"rss {_gib(report.rss_mib)}GiB")
    return parts


def clock(seconds: float) -> str:
    """Write a duration as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _gib(mib: float) -> str:
    return f"{mib / MIB_PER_GIB:.2f}"


def _percentile_ms(times: Sequence[float], share: float) -> float:
    return 1e3 * times[min(int(share * len(times)), len(times) - 1)]

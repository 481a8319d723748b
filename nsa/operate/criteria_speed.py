"""Criteria about speed: enough, steady, on busy GPUs, without waiting for data."""

from __future__ import annotations

from statistics import median

from nsa.operate.criterion import judged, known, missing, percentile, thirds
from nsa.operate.evidence import Evidence, Point
from nsa.operate.limits import Limits
from nsa.operate.snapshot import START_LINES, number
from nsa.operate.verdict import Row
from nsa.telemetry.heartbeat import PROGRESS

NO_LINES = "no logged step that can be read"


def throughput(e: Evidence, limits: Limits) -> Row:
    """That the run is as fast as it must be."""
    limit = f">= {limits.toks_per_s_min:,.0f} tokens/s"
    values = _settled(e, "toks_per_s")
    if not values:
        todo = "wait for the first logged step"
        return missing("throughput", limit=limit, evidence=NO_LINES, advice=todo, essential=True)
    speed = median(value for value, _ in values)
    return judged(
        "throughput",
        speed >= limits.toks_per_s_min,
        f"{speed:,.0f} tokens/s, median of {len(values)}",
        limit=limit,
        evidence=f"{values[0][1].where} to step {values[-1][1].step}",
        advice="compare dt_fetch_s (data), gpu_util_pct (who else uses the GPU), `nsa plan`",
    )


def throughput_stable(e: Evidence, limits: Limits) -> Row:
    """That it does not become slower."""
    name, limit = "stable speed", f"last third >= {limits.stable_share:g} x the first"
    values = _settled(e, "toks_per_s")
    if len(values) < limits.steady_lines:
        return _too_few(name, limit, len(values), limits)
    first, last = thirds([value for value, _ in values])
    return judged(
        name,
        last >= limits.stable_share * first,
        f"{first:,.0f} to {last:,.0f} tokens/s",
        limit=limit,
        evidence=f"{values[0][1].where} to step {values[-1][1].step}",
        advice="look at gpu_temp_c, dt_fetch_s and at other programs on the machine",
    )


def steady_steps(e: Evidence, limits: Limits) -> Row:
    """That steps take about the same time."""
    name, limit = "steady steps", f"90th percentile <= {limits.step_time_ratio:g} x the median"
    values = _settled(e, "step_time_s")
    if len(values) < limits.steady_lines:
        return _too_few(name, limit, len(values), limits)
    seconds = [value for value, _ in values]
    usual, long = median(seconds), percentile(seconds, 0.9)
    return judged(
        name,
        long <= limits.step_time_ratio * usual,
        f"median {usual:.3g} s, 90th percentile {long:.3g} s",
        limit=limit,
        evidence=f"{values[0][1].where} to step {values[-1][1].step}",
        advice="look at dt_fetch_s, and at what else runs on the machine",
    )


def gpu_load(e: Evidence, limits: Limits) -> Row | None:
    """That every GPU is busy."""
    if e.run.metrics is not None and e.run.metrics.device.startswith("cpu"):
        return None
    limit, loads = f">= {limits.gpu_util_pct:g} % on each", []
    for rank in e.run.ranks:
        lines = [b for b in rank.beats if b.msg == PROGRESS]
        near = [b for b in lines if e.window.first <= b.step <= e.window.last] or lines
        values = [v for b in near[START_LINES:] if (v := number(b, "gpu_util_pct")) is not None]
        if values:
            loads.append((rank.rank, median(values)))
    if not loads:
        evidence = "gpu_util_pct is null: no driver library, or too few lines"
        todo = "install the nvml library that comes with the driver"
        return missing("GPU load", limit=limit, evidence=evidence, advice=todo, essential=False)
    return judged(
        "GPU load",
        min(load for _, load in loads) >= limits.gpu_util_pct,
        ", ".join(f"{rank}: {load:.0f} %" for rank, load in loads),
        limit=limit,
        evidence="heartbeat_rank*.jsonl, gpu_util_pct, medians by rank",
        advice="runtime.cuda_graph=true or a larger train.batch_size keep a GPU busy",
    )


def fetch(e: Evidence, limits: Limits) -> Row:
    """That batches are there when they are needed."""
    limit = f"95th percentile < {limits.fetch_s:g} s"
    values = known(e.points("dt_fetch_s"))
    if not values:
        todo = "wait for the first logged step"
        return missing("fetch", limit=limit, evidence=NO_LINES, advice=todo, essential=False)
    seconds = percentile([value for value, _ in values], 0.95)
    worst = max(values, key=lambda pair: pair[0])
    return judged(
        "fetch",
        seconds < limits.fetch_s,
        f"{seconds:.3g} s, worst {worst[0]:.3g} s",
        limit=limit,
        evidence=worst[1].where,
        advice="prepare shards (`nsa data prepare`), or look at the network and its cache",
    )


def _settled(e: Evidence, name: str) -> list[tuple[float, Point]]:
    """Values with their records, without the first lines, which also warm up, where more follow."""
    values = known(e.points(name))
    return values[min(START_LINES, len(values) - 1) :] if values else []


def _too_few(name: str, limit: str, count: int, limits: Limits) -> Row:
    return missing(
        name,
        limit=limit,
        evidence=f"{count} logged steps after the first; {limits.steady_lines} are needed",
        advice="judge again after more steps, or set train.log_every lower",
        essential=False,
    )

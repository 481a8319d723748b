"""The rules about what a run uses: memory, the kernels that were asked for, the disk."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from nsa.operate.limits import Limits
from nsa.operate.snapshot import START_LINES, Run, number
from nsa.telemetry.alarms import Alarm

GIB = 1 << 30


def memory_creep(run: Run, limits: Limits) -> list[Alarm]:
    """Memory that rises from each third of the last lines to the next."""
    lines = run.progress[START_LINES:][-limits.creep_lines :]
    if len(lines) < limits.creep_lines:
        return []
    name = "rss_mib" if number(lines[-1], "gpu_mem_alloc") is None else "gpu_mem_alloc"
    values = [value for beat in lines if (value := number(beat, name)) is not None]
    if len(values) < limits.creep_lines:
        return []
    third = len(values) // 3
    first, middle, last = (median(values[i * third : (i + 1) * third]) for i in range(3))
    limit = max(limits.creep_mib, limits.creep_share * first)
    if not first < middle < last or last - first <= limit:
        return []
    return [
        Alarm(
            type="memory_creep",
            step=lines[-1].step,
            file=run.heartbeat,
            values={name: [first, middle, last]},
            limits={"rise_mib": round(limit, 1), "lines": limits.creep_lines},
            text=f"{name} rose from {first:.0f} to {last:.0f} MiB over {len(values)} lines",
            advice="NSA_MEM_DUMP_EVERY=N writes snapshots; stop at a checkpoint before it runs out",
        )
    ]


def fallbacks_rising(run: Run, limits: Limits) -> list[Alarm]:
    """Fallback counters that go up with every line: something never runs as it was asked for."""
    lines = run.progress[-limits.fallbacks_n - 1 :]
    counts = [number(beat, "fb_total_fallbacks") for beat in lines]
    if len(counts) <= limits.fallbacks_n or None in counts:
        return []
    totals = [count for count in counts if count is not None]
    rises = [later - before for before, later in pairwise(totals)]
    if min(rises) <= 0 or sum(rises) < limits.fallbacks_rise:
        return []
    fb = {k: v for k, v in lines[-1].extra.items() if k.startswith("fb_") and v}
    return [
        Alarm(
            type="fallbacks_rising",
            step=lines[-1].step,
            file=run.heartbeat,
            values=fb | {"rise": sum(rises)},
            limits={"rise": limits.fallbacks_rise, "lines": limits.fallbacks_n},
            text=f"{sum(rises):.0f} fallbacks in {len(rises)} lines, more with each of them",
            advice="`nsa plan` says which way attention takes, and why",
        )
    ]


def disk_full(run: Run, limits: Limits) -> list[Alarm]:
    """Too little room for the next checkpoints."""
    if run.free_bytes is None:
        return []
    newest = run.checkpoints[-1].num_bytes if run.checkpoints else 0
    limit = max(limits.free_gib * GIB, limits.free_checkpoints * newest)
    if run.free_bytes >= limit:
        return []
    return [
        Alarm(
            type="disk_full",
            step=run.progress[-1].step if run.progress else None,
            values={"free_gib": round(run.free_bytes / GIB, 3)},
            limits={"free_gib": round(limit / GIB, 3)},
            file=".",
            text=f"{run.free_bytes / GIB:.2f} GiB are free on the disk of {run.folder}, less than "
            f"{limit / GIB:.2f}",
            advice="make room; lines and checkpoints that find none are lost, the run goes on",
        )
    ]

"""Criteria about the state of model and memory: gates, fallbacks, bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from nsa.operate.criterion import Criterion, judged, known, missing, thirds
from nsa.operate.evidence import Evidence, Point
from nsa.operate.limits import Limits
from nsa.operate.resource_rules import fallbacks_rising
from nsa.operate.snapshot import number
from nsa.operate.verdict import Row
from nsa.telemetry.heartbeat import PROGRESS

MIB_IN_GIB = 1024
NO_STATS = "not in the heartbeat: NSA_DISABLE_AUX_STATS=1, or no logged step"


def gate_entropy(e: Evidence, limits: Limits) -> Row | None:
    """That the gates stay undecided between the branches."""
    points = known(e.points("entropy_mean"))
    worst = min(points, key=lambda pair: pair[0], default=None)
    limit = limits.gate_entropy_low
    return _gate(e, "gate entropy", worst, f"> {limit:g} nats", lambda value: value > limit)


def largest_gate(e: Evidence, limits: Limits) -> Row | None:
    """That no gate takes all."""
    worst = max(known(e.points("max_gate_mean")), key=lambda pair: pair[0], default=None)
    limit = limits.gate_max
    return _gate(e, "largest gate", worst, f"< {limit:g}", lambda value: value < limit)


def collapsed_gates(e: Evidence, limits: Limits) -> Row | None:
    """That next to no gate has chosen one branch."""
    worst = max(known(e.points("collapse_fraction")), key=lambda pair: pair[0], default=None)
    limit = limits.collapse_fraction
    return _gate(e, "collapsed gates", worst, f"<= {limit:g}", lambda value: value <= limit)


def fallbacks(e: Evidence, limits: Limits) -> Row:
    """That the kernels which were asked for run."""
    limit = f"<= {limits.fallbacks_max}, not rising"
    points = known(e.points("fb_total_fallbacks"))
    if not points:
        todo = "wait for the first logged step"
        evidence = "no logged step that can be read"
        return missing("fallbacks", limit=limit, evidence=evidence, advice=todo, essential=False)
    total, last = points[-1]
    rising = fallbacks_rising(e.run, limits)
    return judged(
        "fallbacks",
        total <= limits.fallbacks_max and not rising,
        f"{total:.0f}{', rising' if rising else ''}",
        limit=limit,
        evidence=last.where,
        advice="`nsa plan` says which way attention takes, and why",
    )


def memory(limit_name: str) -> Criterion:
    """That memory stays below a limit, given by its name."""
    return partial(_memory, limit_name=limit_name)


def _memory(e: Evidence, limits: Limits, *, limit_name: str) -> Row:
    limit_gib = float(getattr(limits, limit_name))
    limit = f"< {limit_gib:g} GiB"
    name = memory_field(e)
    points = known(e.points(name))
    if not points:
        todo = "wait for the first logged step"
        evidence = "neither gpu_mem_reserved nor rss_mib in the heartbeat"
        return missing("memory", limit=limit, evidence=evidence, advice=todo, essential=False)
    worst, point = max(points, key=lambda pair: pair[0])
    where = point.where
    for rank in e.run.ranks[1:]:
        for beat in rank.beats:
            value = number(beat, name) if beat.msg == PROGRESS else None
            if value is not None and value > worst and beat.step <= e.window.last:
                worst, where = value, f'{rank.path.name}, "step": {beat.step}'
    return judged(
        "memory",
        worst < limit_gib * MIB_IN_GIB,
        f"{worst / MIB_IN_GIB:.2f} GiB, {name}",
        limit=limit,
        evidence=where,
        advice="train.batch_size lower with more accumulation, or gradient checkpointing; a "
        "larger model may need another limit (--limit)",
    )


def memory_flat(e: Evidence, limits: Limits) -> Row:
    """That memory does not creep."""
    name = "gpu_mem_alloc" if memory_field(e) == "gpu_mem_reserved" else "rss_mib"
    points = known(e.points(name))
    limit = f"rise <= {limits.creep_mib:g} MiB or {limits.creep_share:.0%}"
    if len(points) < limits.steady_lines:
        evidence = f"{len(points)} logged steps"
        todo = "judge again after more steps"
        return missing("flat memory", limit=limit, evidence=evidence, advice=todo, essential=False)
    first, last = thirds([value for value, _ in points])
    return judged(
        "flat memory",
        last - first <= max(limits.creep_mib, limits.creep_share * first),
        f"{first:.0f} to {last:.0f} MiB, {name}",
        limit=limit,
        evidence=f"{points[0][1].where} to step {points[-1][1].step}",
        advice="NSA_MEM_DUMP_EVERY=N writes snapshots; stop at a checkpoint before it runs out",
    )


def memory_field(e: Evidence) -> str:
    """The field that says how much memory a rank holds."""
    return "gpu_mem_reserved" if known(e.points("gpu_mem_reserved")) else "rss_mib"


def _gate(
    e: Evidence,
    name: str,
    worst: tuple[float, Point] | None,
    limit: str,
    is_good: Callable[[float], bool],
) -> Row | None:
    if e.config is not None and e.config.model.attention != "nsa":
        return None  # dense attention has no gates
    if worst is None:
        todo = "unset NSA_DISABLE_AUX_STATS for some steps"
        return missing(name, limit=limit, evidence=NO_STATS, advice=todo, essential=False)
    return judged(
        name,
        is_good(worst[0]),
        f"{worst[0]:.3f}, the worst",
        limit=limit,
        evidence=worst[1].where,
        advice="resume from a checkpoint before it with a lower train.lr; look at every layer",
    )

"""Report criteria about training: the loss, the speed, the gates, kernel fallbacks and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import fmean, median, stdev

from nsa.operate.limits import Limits
from nsa.operate.report.evidence import (
    Criterion,
    Evidence,
    Point,
    Question,
    known,
    percentile,
    thirds,
)
from nsa.operate.report.verdict import Row
from nsa.operate.run_folder import START_LINES, number
from nsa.operate.watch.rules import fallbacks_rising, loss_plateau, plateau_window
from nsa.records import TRAINING
from nsa.records.heartbeat import PROGRESS
from nsa.records.metrics import METRICS_FILE

# --- loss ---

RANDOM = "synthetic"
"""The dataset of random tokens: nothing can be learned from it."""
LEAST_LINES = 3
"""Fewer logged losses show no trend."""
CLEAR_LINES = 10
"""With fewer logged losses, noise may hide whether the loss falls."""


def loss_finite(e: Evidence, limits: Limits) -> Row:
    """Every logged loss is finite."""
    asked = Question("loss finite", "every logged loss")
    points = e.points("loss")
    if not points:
        return asked.missing(
            "no logged step that can be read", "wait for the first step", essential=True
        )
    bad = [point for point in points if point.value is None]
    last = points[-1]
    value = f"not finite at step {bad[0].step}" if bad else f"{last.value:.4f} at step {last.step}"
    return asked.judged(
        not bad,
        value,
        evidence=f"{(bad or points[-1:])[0].where}; {len(points)} lines",
        advice="look at the data and the learning rate of that step; resume from before it",
    )


def loss_start(e: Evidence, limits: Limits) -> Row | None:
    """The first loss is near ln V, a uniform guess: higher is a bug, lower is a leak."""
    guess, metrics = guess_loss(e), e.run.metrics
    if metrics is not None and metrics.resumed_at:
        return None  # a resumed run: its first logged loss is not that of an untrained model
    asked = Question(
        "first loss",
        "about ln V" if guess is None else f"{guess:.3f} +- {limits.loss_start_nats:g} nats",
    )
    if guess is None or metrics is None or metrics.loss_first is None:
        return asked.missing(
            f"no config.yaml, or no loss_first in {METRICS_FILE}", "wait for the first step"
        )
    return asked.judged(
        abs(metrics.loss_first - guess) <= limits.loss_start_nats,
        f"{metrics.loss_first:.4f}",
        evidence=f'{METRICS_FILE}, "loss_first"',
        advice="compare the tokenizer of the data with the model's; run the causality tests",
    )


def loss_falls(e: Evidence, limits: Limits) -> Row | None:
    """The median of the last third of the losses is below that of the first third."""
    asked = Question("loss falls", "last third below the first")
    if _dataset(e) == RANDOM:
        return None
    values = known(e.points("loss"))
    if len(values) < LEAST_LINES:
        return asked.missing(
            f"{len(values)} logged losses",
            "judge again after more steps, or set train.log_every lower",
        )
    losses = [value for value, _ in values]
    first, last = thirds(losses)
    # A rise within one standard deviation of few points proves nothing either way.
    if len(values) < CLEAR_LINES and 0 <= last - first <= stdev(losses):
        return asked.missing(
            f"{first:.4f} to {last:.4f} in {len(values)} logged losses: too few to tell",
            "judge again after more steps, or set train.log_every lower",
        )
    return asked.judged(
        last < first,
        f"{first:.4f} to {last:.4f}",
        evidence=f"{values[0][1].where} to step {values[-1][1].step}",
        advice="look at the learning rate, the gradient norm and the data",
    )


def no_plateau(e: Evidence, limits: Limits) -> Row | None:
    """The loss still falls at the end of the records."""
    if _dataset(e) == RANDOM:
        return None
    asked = Question("plateau", f"falls within {limits.plateau_steps} steps")
    window, span = plateau_window(e.run, limits)
    if not window:
        return asked.missing(
            f"{len(e.run.losses)} logged losses up to step {e.step}", "judge again after more steps"
        )
    alarms = loss_plateau(e.run, limits)
    return asked.judged(
        not alarms,
        alarms[0].text if alarms else "none",
        evidence=f"{TRAINING if e.run.rows else e.run.heartbeat}, the last {span} steps",
        advice="expected at the end of a schedule; else check the learning rate and the data",
    )


def no_leak(e: Evidence, limits: Limits) -> Row | None:
    """Random tokens are not predicted: a loss below ln V means that the model sees its targets."""
    guess = guess_loss(e)
    values = [value for value, _ in known(e.points("loss"))]
    if _dataset(e) != RANDOM or guess is None or len(values) < LEAST_LINES:
        return None
    # Three standard errors of the mean: noise must not look like a leak.
    end = values[-max(LEAST_LINES, len(values) // 3) :]
    last, noise = fmean(end), 3 * stdev(end) / math.sqrt(len(end))
    least = guess - limits.leak_nats
    return Question("no leak", f">= ln V - {limits.leak_nats:g} = {least:.4f}").judged(
        last >= least - noise,
        f"{last:.4f}, give or take {noise:.4f}",
        evidence=f"{e.points('loss')[-1].where}; the mean of the last third",
        advice="attention is not causal: run scripts/run_gpu_causality_test.sh --full",
    )


def held_out(e: Evidence, limits: Limits) -> Row:
    """The held-out loss was measured."""
    asked = Question("held-out loss", "measured and finite")
    metrics = e.run.metrics
    if metrics is None or metrics.val_loss is None:
        return asked.missing(f'{METRICS_FILE}, "val_loss": null', "set train.eval_every")
    where = f"val.csv, step {e.vals[-1].step}" if e.vals else f'{METRICS_FILE}, "val_loss"'
    value = f"{metrics.val_loss:.4f} nats"
    ok = math.isfinite(metrics.val_loss)
    return asked.judged(ok, value, evidence=where)


def guess_loss(e: Evidence) -> float | None:
    """The loss of a uniform guess, ln V; None if the vocabulary size is unknown."""
    try:
        return None if e.config is None else math.log(e.config.data.vocab)
    except (OSError, ValueError):  # e.g. the tokenizer file is not on this machine
        return None


def _dataset(e: Evidence) -> str | None:
    # After a fallback the run trains on random tokens, whatever its config says.
    if e.run.metrics is not None and e.run.metrics.data_fallback:
        return RANDOM
    return e.config.data.dataset if e.config else None


# --- speed: fast, steady, GPUs busy, no waiting for data ---

NO_LINES = "no logged step that can be read"


def throughput(e: Evidence, limits: Limits) -> Row:
    """Throughput reaches the required tokens/s."""
    asked = Question("throughput", f">= {limits.toks_per_s_min:,.0f} tokens/s")
    values = _settled(e, "toks_per_s")
    if not values:
        return asked.missing(NO_LINES, "wait for the first logged step", essential=True)
    # Median, not mean: single slow steps must not fail the run.
    speed = median(value for value, _ in values)
    return asked.judged(
        speed >= limits.toks_per_s_min,
        f"{speed:,.0f} tokens/s, median of {len(values)}",
        evidence=f"{values[0][1].where} to step {values[-1][1].step}",
        advice="compare dt_fetch_s (data), gpu_util_pct (who else uses the GPU), `nsa plan`",
    )


def throughput_stable(e: Evidence, limits: Limits) -> Row:
    """Throughput does not degrade over the run."""
    asked = Question("stable speed", f"last third >= {limits.stable_share:g} x the first")
    values = _settled(e, "toks_per_s")
    if len(values) < limits.steady_lines:
        return _too_few(asked, len(values), limits)
    first, last = thirds([value for value, _ in values])
    return asked.judged(
        last >= limits.stable_share * first,
        f"{first:,.0f} to {last:,.0f} tokens/s",
        evidence=f"{values[0][1].where} to step {values[-1][1].step}",
        advice="look at gpu_temp_c, dt_fetch_s and at other programs on the machine",
    )


def steady_steps(e: Evidence, limits: Limits) -> Row:
    """Step times vary little."""
    asked = Question("steady steps", f"90th percentile <= {limits.step_time_ratio:g} x the median")
    values = _settled(e, "step_time_s")
    if len(values) < limits.steady_lines:
        return _too_few(asked, len(values), limits)
    seconds = [value for value, _ in values]
    usual, long = median(seconds), percentile(seconds, 0.9)
    return asked.judged(
        long <= limits.step_time_ratio * usual,
        f"median {usual:.3g} s, 90th percentile {long:.3g} s",
        evidence=f"{values[0][1].where} to step {values[-1][1].step}",
        advice="look at dt_fetch_s, and at what else runs on the machine",
    )


def gpu_load(e: Evidence, limits: Limits) -> Row | None:
    """Every GPU is busy."""
    if e.run.metrics is not None and e.run.metrics.device.startswith("cpu"):
        return None
    loads, asked = [], Question("GPU load", f">= {limits.gpu_util_pct:g} % on each")
    for rank in e.ranks:
        lines = [b for b in rank.beats if b.msg == PROGRESS]
        # A sample may have no line of the window: then use all of it.
        near = [b for b in lines if e.window.first <= b.step <= e.window.last] or lines
        values = [v for b in near[START_LINES:] if (v := number(b, "gpu_util_pct")) is not None]
        if values:
            loads.append((rank.rank, median(values)))
    if not loads:
        return asked.missing(
            "gpu_util_pct is null: no driver library, or too few lines",
            "install the nvml library that comes with the driver",
        )
    return asked.judged(
        min(load for _, load in loads) >= limits.gpu_util_pct,
        ", ".join(f"{rank}: {load:.0f} %" for rank, load in loads),
        evidence="heartbeat_rank*.jsonl, gpu_util_pct, medians by rank",
        advice="runtime.cuda_graph=true or a larger train.batch_size keep a GPU busy",
    )


def fetch(e: Evidence, limits: Limits) -> Row:
    """The trainer does not wait for batches."""
    asked = Question("fetch", f"95th percentile < {limits.fetch_s:g} s")
    values = known(e.points("dt_fetch_s"))
    if not values:
        return asked.missing(NO_LINES, "wait for the first logged step")
    seconds = percentile([value for value, _ in values], 0.95)
    worst = max(values, key=_value)
    return asked.judged(
        seconds < limits.fetch_s,
        f"{seconds:.3g} s, worst {worst[0]:.3g} s",
        evidence=worst[1].where,
        advice="prepare shards (`nsa data prepare`), or look at the network and its cache",
    )


def _settled(e: Evidence, name: str) -> list[tuple[float, Point]]:
    """(value, point) pairs without the warm-up steps, when enough others follow."""
    values = known(e.points(name))
    return values[min(START_LINES, len(values) - 1) :] if values else []


def _too_few(asked: Question, count: int, limits: Limits) -> Row:
    return asked.missing(
        f"{count} logged steps after the first; {limits.steady_lines} are needed",
        "judge again after more steps, or set train.log_every lower",
    )


# --- state: gates, fallbacks, memory ---

MIB_IN_GIB = 1024
NO_STATS = "not in the heartbeat: NSA_DISABLE_AUX_STATS=1, or no logged step"


def gate_entropy(e: Evidence, limits: Limits) -> Row | None:
    """Gate entropy stays high: the gates have not collapsed onto one branch."""
    least = limits.gate_entropy_low
    worst = min(known(e.points("entropy_mean")), key=_value, default=None)
    return _gate(e, Question("gate entropy", f"> {least:g} nats"), worst, lambda x: x > least)


def largest_gate(e: Evidence, limits: Limits) -> Row | None:
    """No gate saturates."""
    most = limits.gate_max
    worst = max(known(e.points("max_gate_mean")), key=_value, default=None)
    return _gate(e, Question("largest gate", f"< {most:g}"), worst, lambda x: x < most)


def collapsed_gates(e: Evidence, limits: Limits) -> Row | None:
    """The fraction of collapsed gates is small."""
    most = limits.collapse_fraction
    worst = max(known(e.points("collapse_fraction")), key=_value, default=None)
    return _gate(e, Question("collapsed gates", f"<= {most:g}"), worst, lambda x: x <= most)


def _gate(
    e: Evidence,
    asked: Question,
    worst: tuple[float, Point] | None,
    is_good: Callable[[float], bool],
) -> Row | None:
    if e.config is not None and not any(e.config.model.branched):
        return None  # only the branches of NSA have gates
    if worst is None:
        return asked.missing(NO_STATS, "unset NSA_DISABLE_AUX_STATS for some steps")
    return asked.judged(
        is_good(worst[0]),
        f"{worst[0]:.3f}, the worst",
        evidence=worst[1].where,
        advice="resume from a checkpoint before it with a lower train.lr; look at every layer",
    )


def _value(pair: tuple[float, Point]) -> float:
    return pair[0]


def fallbacks(e: Evidence, limits: Limits) -> Row:
    """The requested kernels run, without fallbacks."""
    asked = Question("fallbacks", f"<= {limits.fallbacks_max}, not rising")
    points = known(e.points("fb_total_fallbacks"))
    if not points:
        return asked.missing("no logged step that can be read", "wait for the first logged step")
    # The counter is cumulative since the start of the process.
    total, last = points[-1]
    rising = fallbacks_rising(e.run, limits)
    return asked.judged(
        total <= limits.fallbacks_max and not rising,
        f"{total:.0f}{', rising' if rising else ''}",
        evidence=last.where,
        advice="`nsa plan` shows which attention backend runs, and why",
    )


def memory(limit_name: str) -> Criterion:
    """Memory stays below a limit, which is given by name."""
    return partial(_memory, limit_name=limit_name)


def _memory(e: Evidence, limits: Limits, *, limit_name: str) -> Row:
    limit_gib = float(getattr(limits, limit_name))
    asked = Question("memory", f"< {limit_gib:g} GiB")
    name = memory_field(e)
    points = known(e.points(name))
    if not points:
        return asked.missing(
            "neither gpu_mem_reserved nor rss_mib in the heartbeat",
            "wait for the first logged step",
        )
    worst, point = max(points, key=_value)
    where = point.where
    for rank in e.ranks[1:]:
        for beat in rank.beats:
            value = number(beat, name) if beat.msg == PROGRESS else None
            if value is not None and value > worst and beat.step <= e.window.last:
                worst, where = value, f'{rank.path.name}, "step": {beat.step}'
    return asked.judged(
        worst < limit_gib * MIB_IN_GIB,
        f"{worst / MIB_IN_GIB:.2f} GiB, {name}",
        evidence=where,
        advice="train.batch_size lower with more accumulation, or gradient checkpointing; a "
        "larger model may need another limit (--limit)",
    )


def memory_flat(e: Evidence, limits: Limits) -> Row:
    """Memory does not grow over the run."""
    # Reserved memory grows in steps as the allocator caches; a leak shows in allocated memory.
    name = "gpu_mem_alloc" if memory_field(e) == "gpu_mem_reserved" else "rss_mib"
    points = known(e.points(name))
    asked = Question("flat memory", f"rise <= {limits.creep_mib:g} MiB or {limits.creep_share:.0%}")
    if len(points) < limits.steady_lines:
        return asked.missing(f"{len(points)} logged steps", "judge again after more steps")
    first, last = thirds([value for value, _ in points])
    return asked.judged(
        last - first <= max(limits.creep_mib, limits.creep_share * first),
        f"{first:.0f} to {last:.0f} MiB, {name}",
        evidence=f"{points[0][1].where} to step {points[-1][1].step}",
        advice="NSA_MEM_DUMP_EVERY=N writes snapshots; stop at a checkpoint before it runs out",
    )


def memory_field(e: Evidence) -> str:
    """The heartbeat field with a rank's memory: reserved GPU memory, else RSS."""
    return "gpu_mem_reserved" if known(e.points("gpu_mem_reserved")) else "rss_mib"

"""The rules of the watchdog: pure functions from a `Run` and its limits to alarms.

A rule stays silent about anything that was not recorded: without gate statistics there is no gate
alarm, which does not mean that the gates are healthy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

from nsa.files import GIB
from nsa.operate.limits import Limits
from nsa.operate.run_folder import START_LINES, Rank, Run, number
from nsa.records import TRAINING, Beat
from nsa.records.alarms import Alarm
from nsa.records.heartbeat import BOOT, NON_FINITE

# --- loss: spikes and plateaus ---

MAD_TO_DEVIATION = 1.4826
"""Standard deviation of normal noise = this times the median absolute deviation."""
MEDIAN_ERROR = 1.2533
"""For normal noise, standard error of the median = this times standard error of the mean."""


def loss_spike(run: Run, limits: Limits) -> list[Alarm]:
    """Several consecutive losses far above the running median; a single one the trainer handles."""
    points = _finite(run)
    usual, last = points[: -limits.spike_n], points[-limits.spike_n :]
    usual = usual[-limits.spike_usual_n :]
    if len(usual) < limits.spike_usual_n // 2:
        return []
    middle = median(loss for _, loss in usual)
    # Robust spread: one earlier spike must not widen the limit.
    scatter = MAD_TO_DEVIATION * median(abs(loss - middle) for _, loss in usual)
    limit = middle + max(limits.spike_deviations * scatter, limits.spike_rise)
    # While the loss falls fast, as in the first steps, half of the window lies above its median.
    limit = max(limit, max(loss for _, loss in usual))
    if any(loss <= limit for _, loss in last):
        return []
    return [
        Alarm(
            type="loss_spike",
            step=last[-1][0],
            values={"loss": [loss for _, loss in last], "usual": round(middle, 4)},
            limits={"loss": round(limit, 4), "lines": limits.spike_n},
            file=_source(run),
            text=f"loss {last[-1][1]:.4f}, above {limit:.4f} in {len(last)} lines in a row; "
            f"the median is {middle:.4f}",
            advice="check whether it recovers; if not, resume from an earlier checkpoint "
            "(train.spike_rule=rollback does that automatically)",
        )
    ]


def loss_plateau(run: Run, limits: Limits) -> list[Alarm]:
    """The loss has stopped falling over many steps."""
    window, span = plateau_window(run, limits)
    if not window:
        return []
    step, half = window[-1][0], len(window) // 2
    halves = [loss for _, loss in window[:half]], [loss for _, loss in window[half:]]
    before, after = (median(half) for half in halves)
    noise = max(_error(half) for half in halves)
    if before - after >= limits.plateau_gain - noise:
        return []
    # Compare two half-window medians; noise alone may move each by about one standard error.
    return [
        Alarm(
            type="loss_plateau",
            step=step,
            values={"before": round(before, 4), "after": round(after, 4), "noise": round(noise, 4)},
            limits={"fall": limits.plateau_gain, "steps": span},
            file=_source(run),
            text=f"the loss did not fall over {span} steps: {before:.4f}, then {after:.4f}",
            advice="expected on random tokens and at the end of a schedule; else check the "
            "learning rate, the gradient norm and the data",
        )
    ]


def plateau_window(run: Run, limits: Limits) -> tuple[list[tuple[int, float]], int]:
    """The losses that must show progress, and the steps they span; empty while too early."""
    points = _finite(run)
    step = points[-1][0] if points else 0
    span = max(limits.plateau_steps, int(limits.plateau_share * step))
    window = [(at, loss) for at, loss in points if at > step - span]
    is_short = not points or points[0][0] > step - span or len(window) < limits.plateau_lines
    return ([] if is_short else window), span


def _error(losses: list[float]) -> float:
    """Standard error of the median of these losses."""
    middle = median(losses)
    scatter = MAD_TO_DEVIATION * median(abs(loss - middle) for loss in losses)
    return MEDIAN_ERROR * scatter / math.sqrt(len(losses))


def _finite(run: Run) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in run.losses if loss is not None]


def _source(run: Run) -> str:
    return TRAINING if run.rows else run.heartbeat


# --- model: gates and gradients ---


def gate_collapse(run: Run, limits: Limits) -> list[Alarm]:
    """The gates chose almost only one branch in several consecutive logged steps."""
    if run.env is not None and run.env.env.get("NSA_FORCE_BRANCH"):
        return []  # NSA_FORCE_BRANCH makes one-branch gates the expected state
    lines = run.progress[-limits.gate_n :]
    if len(lines) < limits.gate_n or not all(_collapsed(beat, limits) for beat in lines):
        return []
    last = lines[-1]
    names = ("entropy_mean", "max_gate_mean", "collapse_fraction")
    shares = last.extra.get("gate_branch_shares")
    return [
        Alarm(
            type="gate_collapse",
            step=last.step,
            file=run.heartbeat,
            values={name: number(last, name) for name in names} | {"branch_shares": shares},
            limits={"entropy_mean": limits.gate_entropy, "max_gate_mean": limits.gate_max},
            text=f"the gates have collapsed: entropy {number(last, 'entropy_mean')} nats, largest "
            f"gate {number(last, 'max_gate_mean')}, in {limits.gate_n} lines in a row",
            advice="gate_collapse_details.json has every layer; resume from a checkpoint before "
            "it with a lower train.lr",
        )
    ]


def _collapsed(beat: Beat, limits: Limits) -> bool:
    entropy, largest = number(beat, "entropy_mean"), number(beat, "max_gate_mean")
    return (entropy is not None and entropy < limits.gate_entropy) or (
        largest is not None and largest > limits.gate_max
    )


def zero_grad(run: Run, limits: Limits) -> list[Alarm]:
    """The gradient norm is zero: nothing is learned."""
    lines = run.progress[-limits.zero_grad_n :]
    norms = [number(beat, "grad_norm") for beat in lines]
    if len(lines) < limits.zero_grad_n or any(n is None or n > limits.zero_grad for n in norms):
        return []
    return [
        Alarm(
            type="zero_grad",
            step=lines[-1].step,
            file=run.heartbeat,
            values={"grad_norm": norms},
            limits={"grad_norm": limits.zero_grad, "lines": limits.zero_grad_n},
            text=f"the gradient is zero in {len(norms)} logged lines in a row",
            advice="check the loss and its targets, frozen weights, and with fp16 the loss scale",
        )
    ]


def nan_loss(run: Run, limits: Limits) -> list[Alarm]:
    """A non-finite loss; or more non-finite gradients in a row than fp16 loss scaling explains."""
    lines = run.progress
    if not lines:
        return []
    # fp16 loss scaling skips single steps with non-finite gradients on purpose.
    lost = [_lost(beat) for beat in lines[-limits.bad_grad_n :]]
    grads = len(lost) == limits.bad_grad_n and all("grad_norm" in names for names in lost)
    if "loss" not in lost[-1] and not grads:
        return []
    what = "loss" if "loss" in lost[-1] else "grad_norm"
    return [
        Alarm(
            type="nan_loss",
            step=lines[-1].step,
            file=run.heartbeat,
            values={what: lost[-1][what]},
            limits={what: "finite"},
            text=f"{what} is {lost[-1][what]}",
            advice="lower train.lr, or check the data of that step; resume from the checkpoint "
            "before it",
        )
    ]


def _lost(beat: Beat) -> dict[str, Any]:
    """Non-finite values of a logged step, by field name."""
    names = beat.extra.get(NON_FINITE)
    return names if isinstance(names, dict) else {}


# --- resources: memory, kernels, disk ---


def memory_creep(run: Run, limits: Limits) -> list[Alarm]:
    """Memory that rises from each third of the recent logged steps to the next."""
    lines = run.progress[START_LINES:][-limits.creep_lines :]
    if len(lines) < limits.creep_lines:
        return []
    name = "rss_mib" if number(lines[-1], "gpu_mem_alloc") is None else "gpu_mem_alloc"
    values = [value for beat in lines if (value := number(beat, name)) is not None]
    if len(values) < limits.creep_lines:
        return []
    # Medians of thirds: a single peak, e.g. an evaluation, is not a trend.
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
    """Fallback counters that rise with every logged step: a requested kernel never runs."""
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
            text=f"{sum(rises):.0f} fallbacks in {len(rises)} lines, rising with every line",
            advice="`nsa plan` shows which attention backend runs, and why",
        )
    ]


def disk_full(run: Run, limits: Limits) -> list[Alarm]:
    """Too little free disk space for the next checkpoints."""
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
            advice="free some space; the run continues, but loses log lines and checkpoints that "
            "do not fit",
        )
    ]


# --- time: silent ranks and slow runs ---


def heartbeat_stall(run: Run, limits: Limits) -> list[Alarm]:
    """A rank silent for much longer than its steps take, or whose process is gone."""
    found = []
    for rank in run.ranks:
        last, age_s = rank.last, rank.age_s(run.now)
        if last is None or age_s is None:
            continue
        limit_s, why = allowed_silence(run, rank, limits)
        gone = bool(rank.gone) and age_s > limits.gone_s
        if age_s <= limit_s and not gone:
            continue
        text = f"rank {rank.rank} has been silent for {age_s:.0f} s, since step {last.step}"
        advice = "look at stackdump_*.txt (kill -USR1 PID writes one), then at the data and the GPU"
        if gone:
            text += f"; its process {last.pid} is gone, and metrics.json still says running"
            advice = "look at the log and `dmesg` (out of memory?); the same command resumes it"
        found.append(
            Alarm(
                type="heartbeat_stall",
                rank=rank.rank,
                step=last.step,
                values={"age_s": round(age_s, 1), "pid": last.pid, "gone": rank.gone},
                limits={"age_s": round(limit_s, 1)},
                file=rank.path.name,
                text=f"{text} (allowed: {limit_s:.0f} s, {why})",
                advice=advice,
            )
        )
    return found


def allowed_silence(run: Run, rank: Rank, limits: Limits) -> tuple[float, str]:
    """Seconds that a rank may be silent, and the reason for this limit."""
    lines, gaps = rank.since_boot, rank.gaps
    is_start = bool(lines) and lines[0].msg == BOOT and not gaps
    steps = run.metrics.steps if run.metrics else None
    # The first step compiles kernels and the last one saves the model: both are much longer.
    if is_start or (rank.last is not None and rank.last.step == steps):
        return max(limits.first_step_s, limits.stall_s), "while it starts or finishes"
    if rank.last is not None and rank.last.is_pause:
        phase = str(rank.last.extra.get("phase"))[:20]
        return max(limits.pause_s, limits.stall_s), f"in the phase {phase}"
    if not gaps:
        return limits.stall_s, "the least"
    usual, longest = limits.stall_gaps * median(gaps), limits.stall_longest * max(gaps)
    return max(
        (limits.stall_s, "the least"),
        (usual, f"{limits.stall_gaps:g} x the median {median(gaps):.1f} s between beats"),
        (longest, f"{limits.stall_longest:g} x the longest {max(gaps):.1f} s between beats"),
    )


def throughput_flatline(run: Run, limits: Limits) -> list[Alarm]:
    """Several consecutive logged steps, over a minimum time, at a fraction of the usual speed."""
    lines = [
        (beat, speed)
        for beat in run.progress[START_LINES:]
        if (speed := number(beat, "toks_per_s")) is not None
    ]
    before, slow = lines[: -limits.flatline_n], lines[-limits.flatline_n :]
    if len(before) < limits.flatline_usual_n:
        return []
    usual = median(speed for _, speed in before)
    floor = limits.flatline_share * usual
    spanned_s = slow[-1][0].ts - before[-1][0].ts
    if any(speed >= floor for _, speed in slow) or spanned_s < limits.flatline_s:
        return []
    speeds = [round(speed, 1) for _, speed in slow]
    return [
        Alarm(
            type="throughput_flatline",
            step=slow[-1][0].step,
            file=run.heartbeat,
            values={"toks_per_s": speeds, "usual_toks_per_s": round(usual, 1)},
            limits={"toks_per_s": round(floor, 1), "lines": limits.flatline_n},
            text=f"{speeds[-1]:g} tokens/s, and {len(slow)} lines in a row below {floor:.0f}; "
            f"the median is {usual:.0f}",
            advice="compare dt_fetch_s (data), gpu_temp_c and gpu_util_pct (the GPU, or what else "
            "uses it), and the ranks with each other (the network)",
        )
    ]


# --- all rules, in evaluation order ---

Rule = Callable[[Run, Limits], list[Alarm]]
RULES: tuple[Rule, ...] = (
    heartbeat_stall,
    throughput_flatline,
    gate_collapse,
    zero_grad,
    nan_loss,
    loss_spike,
    loss_plateau,
    memory_creep,
    fallbacks_rising,
    disk_full,
)


def judge(run: Run, limits: Limits) -> list[Alarm]:
    """All active alarms; none for a run that has ended."""
    if run.ended or run.status == "absent":
        return []
    return [alarm for rule in RULES for alarm in rule(run, limits)]

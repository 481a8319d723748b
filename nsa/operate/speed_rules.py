"""The rules about time: a rank that is silent, and a run that crawls."""

from __future__ import annotations

from statistics import median

from nsa.operate.limits import Limits
from nsa.operate.snapshot import START_LINES, Rank, Run, number
from nsa.telemetry.alarms import Alarm
from nsa.telemetry.heartbeat import BOOT


def heartbeat_stall(run: Run, limits: Limits) -> list[Alarm]:
    """A rank that is silent for much longer than its steps take, or whose process is gone."""
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
    """Seconds that a rank may be silent, and where they come from."""
    lines, gaps = rank.since_boot, rank.gaps
    is_start = bool(lines) and lines[0].msg == BOOT and not gaps
    steps = run.metrics.steps if run.metrics else None
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
        (usual, f"{limits.stall_gaps:g} x the usual {median(gaps):.1f} s between beats"),
        (longest, f"{limits.stall_longest:g} x the longest {max(gaps):.1f} s between beats"),
    )


def throughput_flatline(run: Run, limits: Limits) -> list[Alarm]:
    """Several logged lines in a row, over a minute at least, at a fraction of the usual speed."""
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
            text=f"{speeds[-1]:g} tokens/s, and {len(slow)} lines in a row below {floor:.0f}, a "
            f"share of the usual {usual:.0f}",
            advice="compare dt_fetch_s (data), gpu_temp_c and gpu_util_pct (the GPU, or who else "
            "uses it), and the ranks with each other (the network)",
        )
    ]

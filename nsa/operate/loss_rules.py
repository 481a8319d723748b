"""The rules about the loss: a rise that stays, and progress that ends."""

from __future__ import annotations

import math
from statistics import median

from nsa.operate.limits import Limits
from nsa.operate.snapshot import Run
from nsa.telemetry import TRAINING
from nsa.telemetry.alarms import Alarm

MAD_TO_DEVIATION = 1.4826
"""The median distance from the median, times this, is the standard deviation of normal noise."""
MEDIAN_ERROR = 1.2533
"""The standard error of a median is that of a mean times this, for normal noise."""


def loss_spike(run: Run, limits: Limits) -> list[Alarm]:
    """Several logged losses in a row far above those before; one alone is left to the trainer."""
    points = _finite(run)
    usual, last = points[: -limits.spike_n], points[-limits.spike_n :]
    usual = usual[-limits.spike_usual_n :]
    if len(usual) < limits.spike_usual_n // 2:
        return []
    middle = median(loss for _, loss in usual)
    scatter = MAD_TO_DEVIATION * median(abs(loss - middle) for _, loss in usual)
    limit = middle + max(limits.spike_deviations * scatter, limits.spike_rise)
    # Where the loss falls fast, as in the first steps, half of the usual ones are above it.
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
            f"usual are {middle:.4f}",
            advice="look whether it falls again; if not, resume from a checkpoint before it "
            "(train.spike_rule=rollback does that by itself)",
        )
    ]


def loss_plateau(run: Run, limits: Limits) -> list[Alarm]:
    """A loss that over many steps does not fall any more."""
    window, span = plateau_window(run, limits)
    if not window:
        return []
    step, half = window[-1][0], len(window) // 2
    halves = [loss for _, loss in window[:half]], [loss for _, loss in window[half:]]
    before, after = (median(half) for half in halves)
    noise = max(_error(half) for half in halves)
    if before - after >= limits.plateau_gain - noise:
        return []
    return [
        Alarm(
            type="loss_plateau",
            step=step,
            values={"before": round(before, 4), "after": round(after, 4), "noise": round(noise, 4)},
            limits={"fall": limits.plateau_gain, "steps": span},
            file=_source(run),
            text=f"the loss did not fall over {span} steps: {before:.4f}, then {after:.4f}",
            advice="expected on random tokens and at the end of a schedule; else look at the "
            "learning rate, the gradient norm and the data",
        )
    ]


def plateau_window(run: Run, limits: Limits) -> tuple[list[tuple[int, float]], int]:
    """The losses that must show progress, and the steps they span; none where it is too early."""
    points = _finite(run)
    step = points[-1][0] if points else 0
    span = max(limits.plateau_steps, int(limits.plateau_share * step))
    window = [(at, loss) for at, loss in points if at > step - span]
    is_short = not points or points[0][0] > step - span or len(window) < limits.plateau_lines
    return ([] if is_short else window), span


def _error(losses: list[float]) -> float:
    """How far noise alone may move their median, as one standard error."""
    middle = median(losses)
    scatter = MAD_TO_DEVIATION * median(abs(loss - middle) for loss in losses)
    return MEDIAN_ERROR * scatter / math.sqrt(len(losses))


def _finite(run: Run) -> list[tuple[int, float]]:
    return [(step, loss) for step, loss in run.losses if loss is not None]


def _source(run: Run) -> str:
    return TRAINING if run.rows else run.heartbeat

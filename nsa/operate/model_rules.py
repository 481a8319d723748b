"""The rules about the model: its gates and its gradient."""

from __future__ import annotations

from typing import Any

from nsa.operate.limits import Limits
from nsa.operate.snapshot import Run, number
from nsa.telemetry import Beat
from nsa.telemetry.alarms import Alarm
from nsa.telemetry.strict_json import NON_FINITE


def gate_collapse(run: Run, limits: Limits) -> list[Alarm]:
    """Several logged lines in a row in which the gates all but chose one branch."""
    if run.env is not None and run.env.env.get("NSA_FORCE_BRANCH"):
        return []  # they were told to
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
    """A gradient that is zero: nothing is learned."""
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
            advice="look at the loss and its targets, at frozen weights, and with fp16 at the loss "
            "scale",
        )
    ]


def nan_loss(run: Run, limits: Limits) -> list[Alarm]:
    """A loss that is not finite; or a gradient, more often than loss scaling would explain."""
    lines = run.progress
    if not lines:
        return []
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
            advice="lower train.lr, or look at the data of that step; resume from the checkpoint "
            "before it",
        )
    ]


def _lost(beat: Beat) -> dict[str, Any]:
    """What of a line was not finite, by name."""
    names = beat.extra.get(NON_FINITE)
    return names if isinstance(names, dict) else {}

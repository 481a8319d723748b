"""All rules of the watchdog: each looks at a run as it is now, and gives the alarms that it sees.

A rule is a function of the records and the limits alone. It says nothing about what was not
recorded: a run without statistics has no gate alarm, and none that is healthy either.
"""

from __future__ import annotations

from collections.abc import Callable

from nsa.operate.limits import Limits
from nsa.operate.loss_rules import loss_plateau, loss_spike
from nsa.operate.model_rules import gate_collapse, nan_loss, zero_grad
from nsa.operate.resource_rules import disk_full, fallbacks_rising, memory_creep
from nsa.operate.snapshot import Run
from nsa.operate.speed_rules import heartbeat_stall, throughput_flatline
from nsa.telemetry.alarms import Alarm

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
    """Every alarm that rings now; a run that has ended has none."""
    if run.ended or run.status == "absent":
        return []
    return [alarm for rule in RULES for alarm in rule(run, limits)]

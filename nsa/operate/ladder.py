"""What is done about alarms, step by step: note, .HALT, SIGUSR1, SIGTERM, SIGKILL.

Every alarm is noted once, when it begins. An alarm of limits.HALTING then climbs: each step comes
only when the one before has had its time and the alarm still rings. Signals go only to processes
that are this run (process.py).
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence

from nsa.operate.limits import HALTING, Limits
from nsa.operate.process import send
from nsa.operate.snapshot import Rank, Run
from nsa.telemetry.alarms import Alarm
from nsa.telemetry.gate_details import write_gate_details
from nsa.telemetry.sentinels import write_anomaly, write_halt

SIGNALS = {"dump": signal.SIGUSR1, "term": signal.SIGTERM, "kill": signal.SIGKILL}
STEPS = ("note", "halt", *SIGNALS)
NOWHERE = -1


class Ladder:
    """Remembers which alarms ring, and how far it has gone because of them."""

    def __init__(self, *, halt: bool = True, kill: bool = False) -> None:
        """`halt`: it may write .HALT. `kill`: after that it may also send signals."""
        self._top = STEPS.index("kill" if halt and kill else "halt" if halt else "note")
        self._ringing: dict[tuple[str, int | None], Alarm] = {}
        self._step, self._since = NOWHERE, 0.0  # where it stands on STEPS, and since when

    def climb(self, run: Run, alarms: Sequence[Alarm], limits: Limits) -> list[Alarm]:
        """Do what is due; return what is new, in order, each with what was done."""
        now = {alarm.key: alarm for alarm in alarms}
        over = [alarm for key, alarm in self._ringing.items() if key not in now]
        new = [alarm for key, alarm in now.items() if key not in self._ringing]
        self._ringing = now
        for alarm in new:
            if alarm.type == "gate_collapse":
                write_gate_details(run.folder, run.progress[-1])
        return [*map(_cleared, over), *new, *self._escalate(run, alarms, limits)]

    def _escalate(self, run: Run, alarms: Sequence[Alarm], limits: Limits) -> list[Alarm]:
        cause = next((alarm for alarm in alarms if alarm.type in HALTING), None)
        if cause is None or all(rank.gone for rank in run.ranks):  # nobody is there to be stopped
            self._step = NOWHERE
            return []
        if self._step == NOWHERE:
            self._step, self._since = STEPS.index("note"), run.now
        done = []
        while self._step < self._top and run.now - self._since >= self._wait_s(run, limits):
            self._step, self._since = self._step + 1, run.now
            text = self._take(STEPS[self._step], run, cause)
            done.append(dataclasses.replace(cause, action=STEPS[self._step], text=text))
        return done

    def _wait_s(self, run: Run, limits: Limits) -> float:
        """Seconds from where it stands to the next step; a step of the run must fit in."""
        following = STEPS[self._step + 1]
        wait_s: float = getattr(limits, f"{following}_after_s")
        return wait_s if following == "halt" else max(wait_s, 2 * run.usual_gap_s)

    def _take(self, step: str, run: Run, cause: Alarm) -> str:
        if step == "halt":
            if run.halt is not None:
                return f".HALT was there already: {run.halt.text or 'empty'}"
            wrote = write_anomaly(run.folder, cause.type) and write_halt(run.folder, cause.type)
            return "wrote .anomaly_type and .HALT" if wrote else ".HALT could not be written"
        return "; ".join(_signal(rank, step, run) for rank in run.ranks)


def _signal(rank: Rank, step: str, run: Run) -> str:
    number = SIGNALS[step]
    if rank.last is None:
        return f"rank {rank.rank} not signalled: it wrote no heartbeat"
    reason = send(rank.last.pid, number, rank.last.ts, run.env)
    if reason:
        return f"rank {rank.rank} not signalled: {reason}"
    return f"{number.name} to pid {rank.last.pid} of rank {rank.rank}"


def _cleared(alarm: Alarm) -> Alarm:
    return dataclasses.replace(alarm, action="clear", text=f"{alarm.type} is over")

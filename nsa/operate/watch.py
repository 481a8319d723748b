"""`nsa watch`: judge a run folder again and again, from outside, and act on what is found."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nsa.config.env import check_environment, read
from nsa.operate.ladder import Ladder
from nsa.operate.limits import Limits, limits_for
from nsa.operate.rules import judge
from nsa.operate.snapshot import Run, read_run
from nsa.operate.text import printable
from nsa.operate.webhook import Webhook
from nsa.telemetry.alarms import Alarm, append_alarm, note_watch

HEALTHY, ALARM, NOTHING = 0, 1, 3
"""Exit codes: no alarm rang; one did; there was nothing to judge. 2 is bad input, as everywhere."""


class Judgement(NamedTuple):
    """One look at a run."""

    run: Run
    alarms: list[Alarm]
    """What rings now."""
    new: list[Alarm]
    """What was written to alarms.jsonl."""

    @property
    def code(self) -> int:
        """As an exit code."""
        if self.alarms:
            return ALARM
        was_seen = self.run.ended or any(rank.last for rank in self.run.ranks)
        return HEALTHY if was_seen else NOTHING


class Watch:
    """Watches one run folder; it keeps what it has done between two looks."""

    def __init__(
        self,
        folder: Path,
        *,
        halt: bool = True,
        kill: bool = False,
        webhook: Webhook | None = None,
        say: Callable[[str], None] = print,
        adapt: Callable[[Limits], Limits] = lambda limits: limits,
    ) -> None:
        """`adapt` changes the limits of the run's device."""
        self.folder = folder
        self._ladder = Ladder(halt=halt, kill=kill)
        self._webhook, self._say, self._adapt = webhook, say, adapt
        self._said: tuple[str, ...] = ()

    def look(self, now: float | None = None) -> Judgement:
        """Judge the folder as it is, write down what is new, and do what is due."""
        run = read_run(self.folder, now=now)
        if run.status != "absent" and not run.ended:
            note_watch(self.folder)
        limits = self._adapt(limits_for(run.metrics.device if run.metrics else None))
        alarms = judge(run, limits)
        new = [
            append_alarm(self.folder, alarm, run.now)
            for alarm in self._ladder.climb(run, alarms, limits)
        ]
        for alarm in new:
            self._say(f"[watch] {describe_alarm(alarm)}")
            if self._webhook is not None:
                self._webhook.post(self.folder, alarm)
        self._say_changes(run, alarms)
        return Judgement(run, alarms, new)

    def _say_changes(self, run: Run, alarms: list[Alarm]) -> None:
        """The state in a line, and what cannot be read; only when it is not as it was."""
        state = (run.status, *(alarm.type for alarm in alarms), *run.problems)
        if state == self._said:
            return
        self._said = state
        self._say(f"[watch] {describe_run(run, len(alarms))}")
        for problem in run.problems:
            self._say(f"[watch] cannot be read: {problem}")


def describe_alarm(alarm: Alarm) -> str:
    """An alarm in a line."""
    step = "" if alarm.step is None else f" at step {alarm.step}"
    advice = f"; {alarm.advice}" if alarm.advice and alarm.action == "note" else ""
    return f"{alarm.action.upper()} {alarm.type}{step}: {alarm.text}{advice}"


def describe_run(run: Run, num_alarms: int) -> str:
    """The state of a run in a line."""
    if run.status == "absent":
        return f"{run.folder}: no files of a run in it yet"
    parts = [f"{run.folder}: {run.standing}"]
    if run.metrics is not None:
        parts.append(f"step {run.metrics.step} of {run.metrics.steps}")
    for rank in run.ranks:
        age_s = rank.age_s(run.now)
        if age_s is not None and not run.ended:
            parts.append(f"rank {rank.rank} beat {age_s:.0f} s ago")
    parts.append(f"alarms: {num_alarms}")
    return ", ".join(parts)


def watch(folder: Path, args: argparse.Namespace) -> int:
    """Watch as the flags say; the exit code is that of the last judgement, or that any rang."""
    check_environment()
    interval_s = read("NSA_WATCH_INTERVAL_S") if args.interval is None else args.interval
    if not 0 < interval_s < float("inf"):
        raise ValueError(f"--interval {interval_s:g} is not a number of seconds above 0; use one")
    webhook = Webhook(args.webhook, _say) if args.webhook else None
    halt = read("NSA_WATCH_HALT") if args.halt is None else bool(args.halt)
    if args.kill and not halt:
        raise ValueError("--kill comes after .HALT, which --halt 0 forbids; use --halt 1")
    watching = Watch(
        folder, halt=halt, kill=args.kill, webhook=webhook, say=_say, adapt=with_environment
    )
    code, rang = NOTHING, False
    try:
        while True:
            judgement = watching.look()
            rang |= bool(judgement.alarms)
            code = ALARM if rang else judgement.code
            if args.once or (args.until_ended and judgement.run.ended):
                return code
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return code
    finally:
        if webhook is not None:
            webhook.close()


def with_environment(limits: Limits) -> Limits:
    """The limits with what the environment sets."""
    chosen = {
        "stall_s": read("NSA_WATCH_HEARTBEAT_STALL_S"),
        "flatline_n": read("NSA_WATCH_FLATLINE_N"),
        "gate_n": read("NSA_WATCH_GATE_COLLAPSE_N"),
    }
    return dataclasses.replace(limits, **{name: v for name, v in chosen.items() if v})


def _say(text: str) -> None:
    print(printable(text), flush=True)

"""`nsa watch`: judge a run folder again and again, from outside, and act on what is found."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from nsa.config.env import check_environment, read
from nsa.operate.limits import HALTING, Limits, limits_for
from nsa.operate.process import send
from nsa.operate.run_folder import Rank, Run, read_run
from nsa.operate.text import printable
from nsa.operate.watch.rules import judge
from nsa.records.alarms import Alarm, append_alarm, as_line, note_watch, write_gate_details
from nsa.records.sentinels import write_anomaly, write_halt

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


# What is done about alarms, step by step: note, .HALT, SIGUSR1, SIGTERM, SIGKILL.
#
# Every alarm is noted once, when it begins. An alarm of limits.HALTING then climbs: each step comes
# only when the one before has had its time and the alarm still rings. Signals go only to processes
# that are this run (process.py).

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


# Alarms to a web address: one POST of JSON each, from a thread that nobody waits for.

TIMEOUT_S = 5.0
WAITING = 100
"""Alarms that may wait for a slow address; more are dropped, and that is said."""


class Webhook:
    """Sends alarms in their order; an address that does not answer costs them, nothing else."""

    def __init__(self, url: str, say: Callable[[str], None], timeout_s: float = TIMEOUT_S) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"--webhook {url!r} is no address; give one of http:// or https://")
        self._url, self._say, self._timeout_s = url, say, timeout_s
        self._queue: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name="nsa-webhook", daemon=True)
        self._thread.start()

    def post(self, folder: Path, alarm: Alarm) -> None:
        """Hand an alarm over, and return at once."""
        content = {"folder": str(folder), "hostname": platform.node(), **as_line(alarm)}
        try:
            self._queue.put_nowait(json.dumps(content).encode())
        except queue.Full:
            self._say(f"webhook: {WAITING} alarms wait already; {alarm.type} was not sent")

    def close(self) -> None:
        """Give what waits a last moment."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(self._timeout_s + 1)

    def _work(self) -> None:
        while (body := self._queue.get()) is not None:
            request = Request(self._url, body, {"Content-Type": "application/json"})
            try:
                urlopen(request, timeout=self._timeout_s).close()
            except (URLError, OSError, ValueError) as error:
                self._say(f"webhook: not sent ({error})")

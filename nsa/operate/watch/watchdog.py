"""`nsa watch`: poll a run folder from outside, log alarms, escalate, and post to a webhook."""

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

from nsa.config.describe import printable
from nsa.config.env import check_environment, read
from nsa.operate.limits import HALTING, Limits, limits_for
from nsa.operate.process import send
from nsa.operate.run_folder import Rank, Run, read_run
from nsa.operate.watch.rules import judge
from nsa.records.alarms import Alarm, append_alarm, as_line, note_watch, write_gate_details
from nsa.records.sentinels import write_anomaly, write_halt

HEALTHY, ALARM, NOTHING = 0, 1, 3
"""Exit codes: no alarm; at least one alarm; nothing to judge. 2 is bad input, as everywhere."""


# --- the polling loop ---


class Judgement(NamedTuple):
    """The result of one poll."""

    run: Run
    alarms: list[Alarm]
    """Active alarms."""
    new: list[Alarm]
    """Lines appended to alarms.jsonl by this poll."""

    @property
    def code(self) -> int:
        """The exit code for this poll."""
        if self.alarms:
            return ALARM
        was_seen = self.run.ended or any(rank.last for rank in self.run.ranks)
        return HEALTHY if was_seen else NOTHING

    @property
    def is_final(self) -> bool:
        """Whether nothing more will come: the run ended, or died and the alarm for that is out."""
        # A launcher may restart a dead run at once; the alarm waits long enough to see that.
        return self.run.ended or (self.run.over and bool(self.alarms))


class Watch:
    """Watches one run folder; keeps the escalation state between polls."""

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
        """`adapt` maps the limits of the run's device to the limits to use."""
        self.folder = folder
        self._escalation = Escalation(halt=halt, kill=kill)
        self._webhook, self._say, self._adapt = webhook, say, adapt
        self._said: tuple[str, ...] = ()

    def look(self, now: float | None = None) -> Judgement:
        """Poll once: judge the folder, append new alarms, escalate where due."""
        run = read_run(self.folder, now=now)
        # An empty alarms.jsonl tells `nsa report` that the run was watched.
        if run.status != "absent" and not run.ended:
            note_watch(self.folder)
        limits = self._adapt(limits_for(run.metrics.device if run.metrics else None))
        alarms = judge(run, limits)
        new = [
            append_alarm(self.folder, alarm, run.now)
            for alarm in self._escalation.update(run, alarms, limits)
        ]
        for alarm in new:
            self._say(f"[watch] {describe_alarm(alarm)}")
            if self._webhook is not None:
                self._webhook.post(self.folder, alarm)
        self._say_changes(run, alarms)
        return Judgement(run, alarms, new)

    def _say_changes(self, run: Run, alarms: list[Alarm]) -> None:
        """Log the state and unreadable files, only when they changed since the last poll."""
        state = (run.status, *(alarm.type for alarm in alarms), *run.problems)
        if state == self._said:
            return
        self._said = state
        self._say(f"[watch] {describe_run(run, len(alarms))}")
        for problem in run.problems:
            self._say(f"[watch] cannot be read: {problem}")


def describe_alarm(alarm: Alarm) -> str:
    """One log line for an alarm."""
    step = "" if alarm.step is None else f" at step {alarm.step}"
    advice = f"; {alarm.advice}" if alarm.advice and alarm.action == "note" else ""
    return f"{alarm.action.upper()} {alarm.type}{step}: {alarm.text}{advice}"


def describe_run(run: Run, num_alarms: int) -> str:
    """One log line for the state of a run."""
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
    """Poll until stopped; the exit code is ALARM if any poll raised one."""
    check_environment()
    interval_s = read("NSA_WATCH_INTERVAL_S") if args.interval is None else args.interval
    if not 0 < interval_s < float("inf"):
        raise ValueError(f"--interval {interval_s:g} is not a number of seconds above 0; use one")
    webhook = Webhook(args.webhook, _say) if args.webhook else None
    halt = read("NSA_WATCH_HALT") if args.halt is None else bool(args.halt)
    if args.kill and not halt:
        raise ValueError("--kill needs .HALT first, which --halt 0 forbids; use --halt 1")
    watching = Watch(
        folder, halt=halt, kill=args.kill, webhook=webhook, say=_say, adapt=with_environment
    )
    code, rang = NOTHING, False
    try:
        while True:
            judgement = watching.look()
            rang |= bool(judgement.alarms)
            code = ALARM if rang else judgement.code
            if args.once or (args.until_ended and judgement.is_final):
                return code
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return code
    finally:
        if webhook is not None:
            webhook.close()


def with_environment(limits: Limits) -> Limits:
    """Apply the overrides from NSA_WATCH_* variables."""
    chosen = {
        "stall_s": read("NSA_WATCH_HEARTBEAT_STALL_S"),
        "flatline_n": read("NSA_WATCH_FLATLINE_N"),
        "gate_n": read("NSA_WATCH_GATE_COLLAPSE_N"),
    }
    return dataclasses.replace(limits, **{name: v for name, v in chosen.items() if v})


def _say(text: str) -> None:
    print(printable(text), flush=True)


# --- escalation: note, .HALT, SIGUSR1, SIGTERM, SIGKILL ---
# Every alarm is noted once, when it starts. An alarm in limits.HALTING then escalates: the next
# step is taken only after the previous one had its waiting time and the alarm is still active.
# Signals are sent only to processes verified to be this run (process.py).

SIGNALS = {"dump": signal.SIGUSR1, "term": signal.SIGTERM, "kill": signal.SIGKILL}
STEPS = ("note", "halt", *SIGNALS)
IDLE = -1


class Escalation:
    """Tracks which alarms are active and how far the escalation has gone."""

    def __init__(self, *, halt: bool = True, kill: bool = False) -> None:
        """`halt` allows writing .HALT; `kill` also allows signals after it."""
        self._top = STEPS.index("kill" if halt and kill else "halt" if halt else "note")
        self._ringing: dict[tuple[str, int | None], Alarm] = {}
        self._step, self._since = IDLE, 0.0  # index into STEPS, and Unix time when reached

    def update(self, run: Run, alarms: Sequence[Alarm], limits: Limits) -> list[Alarm]:
        """Take the actions that are due; return cleared, new and escalated alarms, in order."""
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
        if cause is None or all(rank.gone for rank in run.ranks):  # no process left to stop
            self._step = IDLE
            return []
        if self._step == IDLE:
            self._step, self._since = STEPS.index("note"), run.now
        done = []
        while self._step < self._top and run.now - self._since >= self._wait_s(run, limits):
            self._step, self._since = self._step + 1, run.now
            text = self._take(STEPS[self._step], run, cause)
            done.append(dataclasses.replace(cause, action=STEPS[self._step], text=text))
        return done

    def _wait_s(self, run: Run, limits: Limits) -> float:
        """Seconds before the next step; at least two training steps, so that .HALT is seen."""
        following = STEPS[self._step + 1]
        wait_s: float = getattr(limits, f"{following}_after_s")
        return wait_s if following == "halt" else max(wait_s, 2 * run.usual_gap_s)

    def _take(self, step: str, run: Run, cause: Alarm) -> str:
        if step == "halt":
            if run.halt is not None:
                return f".HALT already exists: {run.halt.text or 'empty'}"
            # .anomaly_type first: the trainer may stop as soon as it sees .HALT.
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


# --- webhook: one JSON POST per alarm, from a background thread ---

TIMEOUT_S = 5.0
QUEUE_SIZE = 100
"""Queue size for a slow endpoint; further alarms are dropped with a log line."""


class Webhook:
    """Posts alarms in order; a dead endpoint loses alarms but never blocks the watchdog."""

    def __init__(self, url: str, say: Callable[[str], None], timeout_s: float = TIMEOUT_S) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(
                f"--webhook {url!r} is not a URL; use one that starts with http:// or https://"
            )
        self._url, self._say, self._timeout_s = url, say, timeout_s
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUE_SIZE)
        self._thread = threading.Thread(target=self._work, name="nsa-webhook", daemon=True)
        self._thread.start()

    def post(self, folder: Path, alarm: Alarm) -> None:
        """Queue an alarm and return immediately."""
        content = {"folder": str(folder), "hostname": platform.node(), **as_line(alarm)}
        try:
            self._queue.put_nowait(json.dumps(content).encode())
        except queue.Full:
            self._say(f"webhook: {QUEUE_SIZE} alarms are queued already; {alarm.type} was dropped")

    def close(self) -> None:
        """Wait for queued alarms, at most about one request timeout."""
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

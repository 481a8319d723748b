"""What a run folder says about its run, as one `Run` object: status, ranks, losses, checkpoints.

`run_files.py` opens the files; here they are put together and interpreted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median, median_high

from nsa.config.describe import duration
from nsa.operate.process import is_gone
from nsa.operate.run_files import Checkpoint, RunFiles
from nsa.records import Beat, Metrics, RunEnvironment, TrainingRow
from nsa.records.alarms import Alarm
from nsa.records.heartbeat import BEAT, BOOT, PROGRESS, SEARCH_BYTES, WATCHDOG_DUMP
from nsa.records.numbers import finite
from nsa.records.sentinels import Halt

# --- what is read, and how much of it ---

ROWS = 20_000
"""Lines read from the end of training.csv."""
RECENT_GAPS = 200
"""Intervals between beats that define the usual interval."""
RECENT_STEPS = 10
"""Logged steps that the ETA is computed from."""
SHOWN_ALARMS = 20
DIED = "died"
"""Status of a run whose metrics.json says `running` but whose processes are gone."""
LOST_S, LOST_GAPS = 3600.0, 20.0
"""A run on a host we cannot inspect counts as dead after this silence: at least LOST_S seconds,
and at least LOST_GAPS times its longest interval between two beats."""
START_LINES = 2
"""Logged lines to ignore after a start, while memory and speed settle."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank's heartbeat file, as far back as it was read."""

    rank: int
    path: Path
    beats: list[Beat]
    """Oldest first."""
    gone: bool | None = None
    """Whether its process has ended; None on another host, where we cannot tell."""

    @property
    def last(self) -> Beat | None:
        """The last line the process wrote itself (a stack dump is not a sign of life)."""
        return next((b for b in reversed(self.beats) if b.msg != WATCHDOG_DUMP), None)

    @property
    def since_boot(self) -> list[Beat]:
        """The lines of the current process."""
        # Without a boot line in the tail, all of the tail is from the current process.
        boots = [i for i, beat in enumerate(self.beats) if beat.msg == BOOT]
        return self.beats[boots[-1] :] if boots else self.beats

    @property
    def gaps(self) -> list[float]:
        """Seconds between recent beats, without intervals that contain an evaluation or a save.

        Falls back to the intervals between logged steps when there are no two beats in a row.
        """
        for kind in (BEAT, PROGRESS):
            # An evaluation or a save makes an interval long without being a stall.
            pairs = pairwise([b for b in self.since_boot if b.msg == kind][-RECENT_GAPS - 1 :])
            gaps = [y.ts - x.ts for x, y in pairs if not x.is_pause and not y.is_pause]
            if gaps:
                return gaps
        return []

    def all_gaps(self, first_step_s: float) -> list[float]:
        """Like `gaps`, over every process in `beats`, which may be a sample of the file.

        Left out: the time between two processes, the first step of each unless it took more than
        `first_step_s`, and intervals that have lost lines to sampling.
        """
        for kind in (BEAT, PROGRESS):
            lines = [beat for beat in self.beats if beat.msg in (kind, BOOT) and not beat.is_pause]
            pairs = [(x, y) for x, y in pairwise(lines) if x.msg == y.msg == kind]
            first = {id(y) for x, y in pairwise(lines) if x.msg == BOOT}
            steps = [y.step - x.step for x, y in pairs]
            apart = median_high(steps) if steps else 0
            gaps = [
                y.ts - x.ts
                for x, y in pairs
                if 0 < y.step - x.step <= apart
                and (id(x) not in first or y.ts - x.ts > first_step_s)
            ]
            if gaps:
                return gaps
        return []

    @property
    def progress(self) -> list[Beat]:
        """Logged steps of the current process, in rising order; rolled-back steps are dropped."""
        return rising([b for b in self.since_boot if b.msg == PROGRESS])

    def age_s(self, now: float) -> float | None:
        """Seconds since the last beat."""
        return None if self.last is None else max(0.0, now - self.last.ts)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that the watch rules and the monitor read."""

    folder: Path
    now: float
    metrics: Metrics | None
    env: RunEnvironment | None
    ranks: list[Rank]
    rows: list[TrainingRow]
    checkpoints: list[Checkpoint]
    halt: Halt | None
    anomaly: str | None
    alarms: list[Alarm]
    free_bytes: int | None
    problems: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        """The status in metrics.json, or DIED; `unknown` without that file, `absent` if empty."""
        if self.metrics is not None:
            return DIED if self.death else self.metrics.status
        return "unknown" if self.ranks or self.rows else "absent"

    @property
    def standing(self) -> str:
        """The status; for a dead run also the step and the reason."""
        return f"{DIED} at step {self.last_step}: {self.death}" if self.death else self.status

    @property
    def death(self) -> str:
        """Why a run that claims to be running is dead; empty while it may be alive."""
        if self.metrics is None or self.metrics.status != "running":
            return ""
        ages = [age for rank in self.ranks if (age := rank.age_s(self.now)) is not None]
        gone = [rank.gone for rank in self.ranks if rank.last is not None]
        # One live process, or no heartbeat at all, is enough to call the run alive.
        if not gone or False in gone:
            return ""
        if all(gone):
            return "its process is gone" if len(gone) == 1 else "its processes are gone"
        longest_s = max((gap for rank in self.ranks for gap in rank.gaps), default=0.0)
        # Some ranks cannot be inspected from here: only a very long silence proves them dead.
        if min(ages) <= max(LOST_S, LOST_GAPS * longest_s):
            return ""
        return (
            f"no sign of life for {duration(min(ages))}; its machine cannot be inspected from here"
        )

    @property
    def last_step(self) -> int:
        """The last optimizer step that any file records."""
        known = [self.metrics.step if self.metrics else 0]
        known += [rank.last.step for rank in self.ranks if rank.last is not None]
        return max(known + [row.step for row in self.rows[-1:]])

    @property
    def ended(self) -> bool:
        """Whether the run itself recorded its end."""
        return self.metrics is not None and self.metrics.status != "running"

    @property
    def over(self) -> bool:
        """Whether nothing more will be written: the run ended or died."""
        return self.ended or bool(self.death)

    @property
    def progress(self) -> list[Beat]:
        """Logged steps of the first rank."""
        return self.ranks[0].progress if self.ranks else []

    @property
    def heartbeat(self) -> str:
        """Name of the file that `progress` was read from."""
        return self.ranks[0].path.name if self.ranks else ""

    @property
    def losses(self) -> list[tuple[int, float | None]]:
        """(step, loss) from training.csv, else from the heartbeat; None for a non-finite loss."""
        if self.rows:
            return [(row.step, finite(row.loss)) for row in self.rows]
        beats = self.ranks[0].beats if self.ranks else []
        lines = rising([beat for beat in beats if beat.msg == PROGRESS])
        return [(beat.step, number(beat, "loss")) for beat in lines]

    @property
    def usual_gap_s(self) -> float:
        """Median interval between beats of the slowest rank; 0 while unknown."""
        return max((median(rank.gaps) for rank in self.ranks if rank.gaps), default=0.0)

    def eta_s(self, step: int) -> float | None:
        """Seconds from `step` to the last one, at the recent median step time."""
        recent = self.progress[-RECENT_STEPS:]
        times = [t for beat in recent if (t := number(beat, "step_time_s")) is not None]
        if self.metrics is None or not times:
            return None
        # Evaluations and saves are not in step_time_s: add their share of the time so far.
        train_s = self.metrics.train_s
        pauses = self.metrics.eval_and_save_s / train_s if train_s else 0.0
        return (self.metrics.steps - step) * median(times) * (1 + pauses)


def read_run(
    folder: Path,
    *,
    now: float | None = None,
    tail_bytes: int = SEARCH_BYTES,
) -> Run:
    """Read a run folder; of growing files read at most the last `tail_bytes`.

    A symlink, pipe or folder in place of a file is not read, and is listed in `problems`.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; use the run folder (train.out_dir)")
    files = RunFiles(folder)
    now = time.time() if now is None else now
    env = files.env()
    # Ranks before metrics.json: a run that ends writes metrics.json first and then exits. The
    # other order could see "running" and then a process that is gone, and report a death.
    ranks = _ranks(files, env, tail_bytes)
    return Run(
        folder=folder,
        now=now,
        metrics=files.metrics(),
        env=env,
        ranks=ranks,
        rows=files.last_training(ROWS),
        checkpoints=files.checkpoints(),
        halt=files.halt(),
        anomaly=files.anomaly(),
        alarms=files.alarms(SHOWN_ALARMS),
        free_bytes=files.free_bytes(),
        problems=files.problems,
    )


def number(beat: Beat, name: str) -> float | None:
    """A field of a heartbeat line as a finite number, else None."""
    return finite(beat.extra.get(name))


def _ranks(files: RunFiles, env: RunEnvironment | None, tail_bytes: int) -> list[Rank]:
    ranks = []
    for rank, path in files.heartbeats():
        beats = files.last_beats(path, tail_bytes)
        files.problems.extend(mixed_writers(path, beats))
        # The start time guards against a pid that the system has given to another process.
        pid = next((beat.pid for beat in reversed(beats) if beat.pid), None)
        place = files.span(rank)
        started = place.started if place is not None and place.pid == pid else 0
        gone = is_gone(pid, env, started) if pid and env else None
        ranks.append(Rank(rank=rank, path=path, beats=beats, gone=gone))
    return ranks


def mixed_writers(path: Path, beats: list[Beat]) -> list[str]:
    """One problem line if several processes wrote since the last boot, else nothing."""
    lines = Rank(rank=0, path=path, beats=beats).since_boot
    pids = sorted({beat.pid for beat in lines if beat.pid is not None})
    if len(pids) < 2:
        return []
    return [f"{path}: processes {pids} write it at the same time; stop all but one of these runs"]


def rising(beats: list[Beat]) -> list[Beat]:
    """Drop lines whose step a later line reaches again, as after a rollback."""
    kept: list[Beat] = []
    for beat in reversed(beats):
        if not kept or beat.step < kept[-1].step:
            kept.append(beat)
    return kept[::-1]

"""Read a run folder into one `Run` object: status, ranks, losses, checkpoints, alarms.

Nothing is written or locked. Files that are torn, foreign or of a newer version are listed in
`Run.problems`; everything else is still read.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import stat
import time
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from nsa.files import read_text
from nsa.operate.process import is_gone
from nsa.operate.text import duration
from nsa.records import (
    TRAINING,
    Beat,
    Metrics,
    RunEnvironment,
    TrainingRow,
    last_rows,
    read_env,
    read_metrics,
)
from nsa.records.alarms import NAME as ALARMS
from nsa.records.alarms import Alarm, last_alarms
from nsa.records.env import NAME as ENV
from nsa.records.heartbeat import BEAT, BOOT, PROGRESS, SEARCH_BYTES, WATCHDOG_DUMP, tail_beats
from nsa.records.metrics import NAME as METRICS
from nsa.records.numbers import finite
from nsa.records.sentinels import ANOMALY, HALT, Halt, read_anomaly, read_halt
from nsa.records.spans import read_span

# --- what is read, and how much of it ---

HEARTBEAT = re.compile(r"heartbeat_rank(\d+)\.jsonl")
CHECKPOINT = re.compile(r"checkpoint_step(\d+)(\.pt)?")
"""One file, or a folder of shards."""
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
T = TypeVar("T")


class Checkpoint(NamedTuple):
    """A checkpoint on disk; not verified here (`nsa checkpoint verify` does that)."""

    step: int
    num_bytes: int
    written: float
    """Unix time."""


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
            f"no sign of life for {duration(min(ages))}, and its machine cannot be seen from here"
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
        raise ValueError(f"{folder} is not a folder; give the run folder (train.out_dir)")
    attempt = _Attempt([])
    now = time.time() if now is None else now
    table = folder / TRAINING
    # .HALT counts even when its content is unreadable; this read only records the problem.
    attempt(folder / HALT, partial(read_text, folder / HALT))
    env = attempt(folder / ENV, lambda: _typed(read_env(folder), folder / ENV))
    # Ranks before metrics.json: a run that ends writes metrics.json first and then exits. The
    # other order could see "running" and then a process that is gone, and report a death.
    ranks = _ranks(folder, env, tail_bytes, attempt)
    return Run(
        folder=folder,
        now=now,
        metrics=attempt(folder / METRICS, lambda: _typed(read_metrics(folder), folder / METRICS)),
        env=env,
        ranks=ranks,
        rows=attempt(table, lambda: last_rows(TrainingRow, table, ROWS)) or [],
        checkpoints=attempt(folder, lambda: _checkpoints(folder)) or [],
        halt=attempt(folder / HALT, lambda: read_halt(folder)),
        anomaly=attempt(folder / ANOMALY, lambda: read_anomaly(folder)),
        alarms=attempt(folder / ALARMS, lambda: last_alarms(folder, SHOWN_ALARMS)) or [],
        free_bytes=attempt(folder, lambda: shutil.disk_usage(folder).free),
        problems=attempt.problems,
    )


def number(beat: Beat, name: str) -> float | None:
    """A field of a heartbeat line as a finite number, else None."""
    return finite(beat.extra.get(name))


def _typed(record: T, path: Path) -> T:
    require_types(record, str(path))
    return record


def try_read(path: Path, load: Callable[[], T], problems: list[str]) -> T | None:
    """Call a reader; None if the file is missing, None plus a problem if it is malformed."""
    try:
        return load()
    except FileNotFoundError:
        return None
    # Anything a hostile or foreign JSON file can cause in a parser or in the type checks.
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        text = str(error)
        problems.append(text if path.name in text else f"{path}: {text}")
        return None


class _Attempt(NamedTuple):
    """Calls readers and collects what they could not read."""

    problems: list[str]

    def __call__(self, path: Path, load: Callable[[], T]) -> T | None:
        """See `try_read`."""
        return try_read(path, load, self.problems)


def _ranks(
    folder: Path, env: RunEnvironment | None, tail_bytes: int, attempt: _Attempt
) -> list[Rank]:
    found = attempt(folder, lambda: heartbeat_files(folder)) or []
    ranks = []
    for rank, path in found:
        beats, bad = attempt(path, partial(tail_beats, path, tail_bytes)) or ([], [])
        if bad:
            attempt.problems.append(f"{len(bad)} lines cannot be read, the last: {bad[-1]}")
        attempt.problems.extend(mixed_writers(path, beats))
        # The start time guards against a pid that the system has given to another process.
        pid = next((beat.pid for beat in reversed(beats) if beat.pid), None)
        place = read_span(folder, rank)
        started = place.started if place is not None and place.pid == pid else 0
        gone = is_gone(pid, env, started) if pid and env else None
        ranks.append(Rank(rank=rank, path=path, beats=beats, gone=gone))
    return ranks


def heartbeat_files(folder: Path) -> list[tuple[int, Path]]:
    """Heartbeat files of a folder as (rank, path), in rank order."""
    return sorted((int(m[1]), p) for p in folder.iterdir() if (m := HEARTBEAT.fullmatch(p.name)))


def mixed_writers(path: Path, beats: list[Beat]) -> list[str]:
    """One problem line if several processes wrote since the last boot, else nothing."""
    lines = Rank(rank=0, path=path, beats=beats).since_boot
    pids = sorted({beat.pid for beat in lines if beat.pid is not None})
    if len(pids) < 2:
        return []
    return [f"{path}: processes {pids} write it at the same time; end all but one of these runs"]


def _checkpoints(folder: Path) -> list[Checkpoint]:
    found = []
    for path in folder.glob("checkpoint_step*"):
        if match := CHECKPOINT.fullmatch(path.name):
            with suppress(FileNotFoundError):  # the trainer may delete an old checkpoint meanwhile
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                    continue
                files = list(path.iterdir()) if stat.S_ISDIR(status.st_mode) else [path]
                size = sum(file.lstat().st_size for file in files)
                found.append(Checkpoint(int(match[1]), size, status.st_mtime))
    return sorted(found)


def rising(beats: list[Beat]) -> list[Beat]:
    """Drop lines whose step a later line reaches again, as after a rollback."""
    kept: list[Beat] = []
    for beat in reversed(beats):
        if not kept or beat.step < kept[-1].step:
            kept.append(beat)
    return kept[::-1]


# --- type checks for records read from disk ---


def require_types(record: Any, where: str) -> None:
    """Raise ValueError where a field of a dataclass does not have its declared type."""
    for name, kind in get_type_hints(type(record)).items():
        if dataclasses.is_dataclass(record) and not _fits(getattr(record, name), kind):
            raise ValueError(
                f"{where}: {name}={getattr(record, name)!r:.60} is not of type {kind}; the file is "
                "damaged, or of another program"
            )


def _fits(value: Any, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, parts[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, parts[1]) for item in value.values())
    # JSON writes 1.0 as 1, so an int is a valid float. A bool is an int in Python, but not here.
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)

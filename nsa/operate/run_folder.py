"""Whether a record that was read has the types that it should: files may hold anything."""

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
from nsa.records.sentinels import ANOMALY, HALT, Halt, read_anomaly, read_halt
from nsa.records.spans import read_span


def require_types(record: Any, where: str) -> None:
    """Raise ValueError where a field of a dataclass has another type than it says."""
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
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind is Any or isinstance(value, kind)


# A run folder as it is now, read from its files alone; nothing is written or locked.
#
# What cannot be read, because it is torn, foreign or of a newer version, is named in `problems`,
# and the rest is there.

HEARTBEAT = re.compile(r"heartbeat_rank(\d+)\.jsonl")
CHECKPOINT = re.compile(r"checkpoint_step(\d+)(\.pt)?")
"""A file, or a folder of parts."""
ROWS = 20_000
"""The last so many lines of training.csv; also the most that its tail can hold."""
RECENT_GAPS = 200
"""Times between beats that say what is usual now."""
SHOWN_ALARMS = 20
DIED = "died"
"""The status of a run whose metrics.json says `running`, and which does not."""
LOST_S, LOST_GAPS = 3600.0, 20.0
"""Silence after which a run on a machine that cannot be seen counts as dead: so many seconds, and
so many times the longest between two beats."""
START_LINES = 2
"""Lines at the start of a process, while memory and speed settle, that say nothing yet."""
T = TypeVar("T")


class Checkpoint(NamedTuple):
    """A checkpoint in the folder; whether it is whole, `nsa checkpoint verify` says."""

    step: int
    num_bytes: int
    written: float
    """Unix time."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The heartbeat of a rank, as far back as it was read."""

    rank: int
    path: Path
    beats: list[Beat]
    """Oldest first."""
    gone: bool | None = None
    """Whether its process is; None where that cannot be seen from here."""

    @property
    def last(self) -> Beat | None:
        """The last sign of life."""
        return next((b for b in reversed(self.beats) if b.msg != WATCHDOG_DUMP), None)

    @property
    def since_boot(self) -> list[Beat]:
        """The lines of the process that writes now."""
        boots = [i for i, beat in enumerate(self.beats) if beat.msg == BOOT]
        return self.beats[boots[-1] :] if boots else self.beats

    @property
    def gaps(self) -> list[float]:
        """Seconds between the updates that beat, lately, without those that an evaluation lies in.

        Where none beat one after the other, those between what is logged.
        """
        for kind in (BEAT, PROGRESS):
            pairs = pairwise([b for b in self.since_boot if b.msg == kind][-RECENT_GAPS - 1 :])
            gaps = [y.ts - x.ts for x, y in pairs if not x.is_pause and not y.is_pause]
            if gaps:
                return gaps
        return []

    @property
    def progress(self) -> list[Beat]:
        """The numbers that this process logged, by rising step: what a rollback undid is out."""
        return rising([b for b in self.since_boot if b.msg == PROGRESS])

    def age_s(self, now: float) -> float | None:
        """Seconds since the last sign of life."""
        return None if self.last is None else max(0.0, now - self.last.ts)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that the rules and the monitor look at."""

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
        """As metrics.json says, or DIED; `unknown` without it, `absent` without files of a run."""
        if self.metrics is not None:
            return DIED if self.death else self.metrics.status
        return "unknown" if self.ranks or self.rows else "absent"

    @property
    def standing(self) -> str:
        """The status, and of a run that died where and why."""
        return f"{DIED} at step {self.last_step}: {self.death}" if self.death else self.status

    @property
    def death(self) -> str:
        """Why a run that says it is running is not; empty while it may be."""
        if self.metrics is None or self.metrics.status != "running":
            return ""
        ages = [age for rank in self.ranks if (age := rank.age_s(self.now)) is not None]
        gone = [rank.gone for rank in self.ranks if rank.last is not None]
        if not gone or False in gone:
            return ""
        if all(gone):
            return "its process is gone" if len(gone) == 1 else "its processes are gone"
        longest_s = max((gap for rank in self.ranks for gap in rank.gaps), default=0.0)
        if min(ages) <= max(LOST_S, LOST_GAPS * longest_s):
            return ""
        return (
            f"no sign of life for {duration(min(ages))}, and its machine cannot be seen from here"
        )

    @property
    def last_step(self) -> int:
        """The last update that any file knows of."""
        known = [self.metrics.step if self.metrics else 0]
        known += [rank.last.step for rank in self.ranks if rank.last is not None]
        return max(known + [row.step for row in self.rows[-1:]])

    @property
    def ended(self) -> bool:
        """Whether the run says so itself."""
        return self.metrics is not None and self.metrics.status != "running"

    @property
    def over(self) -> bool:
        """Whether nothing more will come: it has ended, or died."""
        return self.ended or bool(self.death)

    @property
    def progress(self) -> list[Beat]:
        """What the first rank logged."""
        return self.ranks[0].progress if self.ranks else []

    @property
    def heartbeat(self) -> str:
        """The name of the file that `progress` is from."""
        return self.ranks[0].path.name if self.ranks else ""

    @property
    def losses(self) -> list[tuple[int, float | None]]:
        """Step and loss: of training.csv, else of the heartbeat; None where it was not finite."""
        if self.rows:
            return [(row.step, row.loss if _is_number(row.loss) else None) for row in self.rows]
        beats = self.ranks[0].beats if self.ranks else []
        lines = rising([beat for beat in beats if beat.msg == PROGRESS])
        return [(beat.step, number(beat, "loss")) for beat in lines]

    @property
    def usual_gap_s(self) -> float:
        """The usual time between beats of the slowest rank; 0 while it is not known."""
        return max((median(rank.gaps) for rank in self.ranks if rank.gaps), default=0.0)


def read_run(
    folder: Path,
    *,
    now: float | None = None,
    tail_bytes: int = SEARCH_BYTES,
) -> Run:
    """Read a run folder; of files that grow, at most `tail_bytes` from their end.

    A link, a pipe or a folder under the name of a file is not read, and that is said.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the run folder (train.out_dir)")
    attempt = _Attempt([])
    now = time.time() if now is None else now
    table = folder / TRAINING
    attempt(folder / HALT, partial(read_text, folder / HALT))  # it asks also where it is unreadable
    env = attempt(folder / ENV, lambda: _typed(read_env(folder), folder / ENV))
    # Before metrics.json, which a run that ends writes before its process goes.
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
    """A field of a line as a number; None where it is null, absent or something else."""
    value = beat.extra.get(name)
    return float(value) if isinstance(value, int | float) and _is_number(value) else None


def _typed(record: T, path: Path) -> T:
    require_types(record, str(path))
    return record


def try_read(path: Path, load: Callable[[], T], problems: list[str]) -> T | None:
    """What a reader gives; a file that is not there is None, and one that is not as we would write
    it is a problem, too.
    """
    try:
        return load()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        text = str(error)
        problems.append(text if path.name in text else f"{path}: {text}")
        return None


class _Attempt(NamedTuple):
    """Calls readers, and notes what they could not read."""

    problems: list[str]

    def __call__(self, path: Path, load: Callable[[], T]) -> T | None:
        """What `try_read` gives."""
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
        pid = next((beat.pid for beat in reversed(beats) if beat.pid), None)
        place = read_span(folder, rank)
        started = place.started if place is not None and place.pid == pid else 0
        gone = is_gone(pid, env, started) if pid and env else None
        ranks.append(Rank(rank=rank, path=path, beats=beats, gone=gone))
    return ranks


def heartbeat_files(folder: Path) -> list[tuple[int, Path]]:
    """The heartbeats in a folder, by rank."""
    return sorted((int(m[1]), p) for p in folder.iterdir() if (m := HEARTBEAT.fullmatch(p.name)))


def mixed_writers(path: Path, beats: list[Beat]) -> list[str]:
    """Say so when the lines since the last start come from more than one process."""
    lines = Rank(rank=0, path=path, beats=beats).since_boot
    pids = sorted({beat.pid for beat in lines if beat.pid is not None})
    if len(pids) < 2:
        return []
    return [f"{path}: processes {pids} write it at the same time; end all but one of these runs"]


def _checkpoints(folder: Path) -> list[Checkpoint]:
    found = []
    for path in folder.glob("checkpoint_step*"):
        if match := CHECKPOINT.fullmatch(path.name):
            with suppress(FileNotFoundError):  # an old one may go while it is looked at
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                    continue
                files = list(path.iterdir()) if stat.S_ISDIR(status.st_mode) else [path]
                size = sum(file.lstat().st_size for file in files)
                found.append(Checkpoint(int(match[1]), size, status.st_mtime))
    return sorted(found)


def rising(beats: list[Beat]) -> list[Beat]:
    """Without the lines whose step a later line has reached again."""
    kept: list[Beat] = []
    for beat in reversed(beats):
        if not kept or beat.step < kept[-1].step:
            kept.append(beat)
    return kept[::-1]


def _is_number(value: float) -> bool:
    return not isinstance(value, bool) and abs(value) < float("inf")

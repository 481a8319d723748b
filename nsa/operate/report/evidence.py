"""Evidence for a verdict: the records of a run, read with bounded memory and time.

Of a large file only the start, the end and samples in between are read, so that a run of any
length is judged in seconds. Nothing is written; unreadable files are listed in `problems`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from nsa.config import Config
from nsa.operate.limits import Limits
from nsa.operate.report.verdict import FAIL, NOT_MEASURED, PASS, Row
from nsa.operate.run_files import RunFiles
from nsa.operate.run_folder import Rank, Run, mixed_writers, number, read_run, rising
from nsa.records import TRAINING, Beat, TrainingRow, ValRow
from nsa.records.heartbeat import BOOT, NON_FINITE, PROGRESS
from nsa.records.metrics import METRICS_FILE
from nsa.records.numbers import SCALARS, finite, scalars_of

MOST_BYTES = 16 << 20
"""Read at most from the first rank's heartbeat, from all others, and from each CSV table."""
LEAST_BYTES = 1 << 20
"""Read at least from each heartbeat, however many ranks there are."""
LOG_BYTES = 1 << 20
"""Read from the end of each log."""
STARTED = "[boot] loading config"
"""First log line of a process; lines above it belong to an earlier process."""
ERRORS = re.compile(
    r"Traceback \(most recent call last\)|\[FATAL\]|NCCL (error|WARN.*fail)|ncclUnhandled|"
    r"CUDA error|CUDA out of memory|Watchdog caught collective|AssertionError"
)


# --- reading the records ---


class Point(NamedTuple):
    """One value at a logged step."""

    step: int
    value: float | None
    """None for a non-finite value."""
    where: str
    """File and line of the value, so that a person can find it."""


class Window(NamedTuple):
    """The steps that a verdict is about, inclusive."""

    first: int
    last: float


ALL = Window(0, float("inf"))


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The records of a run, ready to be judged."""

    run: Run
    ranks: list[Rank]
    """The ranks with their heartbeats from the start of the run; `run` has only the ends."""
    config: Config | None
    lines: list[Beat]
    """Logged steps of the first rank, in rising order."""
    events: list[Beat]
    """All heartbeat lines of the first rank that were read, in file order."""
    rows: list[TrainingRow]
    vals: list[ValRow]
    mixed: str
    """Why the records mix several runs or writers; empty if they do not."""
    errors: list[str]
    """Log lines that report a failure."""
    window: Window = ALL
    problems: list[str] = field(default_factory=list)

    @property
    def step(self) -> int:
        """Optimizer steps done, as far as any file records."""
        known = [self.run.metrics.step] if self.run.metrics else []
        known += [line.step for line in self.lines[-1:]] + [row.step for row in self.rows[-1:]]
        return max(known, default=0)

    @property
    def logged(self) -> list[Beat]:
        """Logged steps inside the window."""
        return [b for b in self.lines if self.window.first <= b.step <= self.window.last]

    def points(self, name: str) -> list[Point]:
        """Values of a field inside the window: from the heartbeat, else from training.csv."""
        found = []
        for beat in self.logged:
            value, lost = number(beat, name), beat.extra.get(NON_FINITE)
            if value is not None or (isinstance(lost, dict) and name in lost):
                found.append(Point(beat.step, value, f"{self.run.heartbeat}, {record(beat)}"))
        if found or name not in TrainingRow._fields:
            return found
        # training.csv is the fallback: it has fewer columns, but survives a lost heartbeat.
        for row in self.rows:
            if self.window.first <= row.step <= self.window.last:
                value = finite(getattr(row, name))
                found.append(Point(row.step, value, f"{TRAINING}, step {row.step}"))
        return found

    def curves(self) -> dict[str, list[tuple[float, float]]]:
        """(step, value) of every number, over the whole run; finite values only."""
        found: dict[str, list[tuple[float, float]]] = {number.name: [] for number in SCALARS}
        for beat in self.lines:
            for name, value in scalars_of(beat.extra):
                if value is not None:
                    found[name].append((beat.step, value))
        whole = dataclasses.replace(self, window=ALL)
        for name in TrainingRow._fields[1:]:
            found[name] = found[name] or [(p.step, value) for value, p in known(whole.points(name))]
        return found


def record(beat: Beat) -> str:
    """A heartbeat line by step and kind, in a form that grep finds."""
    return f'"step": {beat.step}, "msg": "{beat.msg}"'


def read_evidence(folder: Path, *, now: float | None = None) -> Evidence:
    """Read a run folder for a verdict."""
    try:
        run = read_run(folder, now=now)
        next(folder.iterdir(), None)  # raises for a folder without read permission
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be read ({error.strerror}); read it as its owner, or copy it"
        ) from None
    files = RunFiles(folder)
    ranks, other = _sampled_ranks(run, files)
    beats = ranks[0].beats if ranks else []
    together = [text for rank in run.ranks for text in mixed_writers(rank.path, rank.beats)]
    return Evidence(
        run=run,
        ranks=ranks,
        config=files.config(),
        lines=rising([beat for beat in beats if beat.msg == PROGRESS]),
        events=beats,
        rows=files.sampled_training(MOST_BYTES),
        vals=files.sampled_val(MOST_BYTES),
        mixed="; ".join([*together, *([other] if other else [])]),
        errors=_log_errors(files),
        problems=list(dict.fromkeys([*run.problems, *files.problems])),
    )


def _sampled_ranks(run: Run, files: RunFiles) -> tuple[list[Rank], str]:
    """The ranks with all of their heartbeats, or samples, and a note if two runs are mixed.

    Only the last run in a file is judged; an earlier one is named in the note.
    """
    ranks, note = [], ""
    for rank in run.ranks:
        # The others share as much as the first has for itself.
        share = 1 if rank is run.ranks[0] else len(run.ranks) - 1
        beats = files.sampled_beats(rank.path, max(MOST_BYTES // share, LEAST_BYTES))
        begin, other = last_run(beats)
        ranks.append(dataclasses.replace(rank, beats=beats[begin:]))
        if rank is run.ranks[0]:
            note = other
    return ranks, note


def last_run(beats: Sequence[Beat]) -> tuple[int, str]:
    """Index where the last run in a heartbeat starts, and a note if another run precedes it.

    A resumed run boots at the step it has reached. A boot at step 0 by another process, after
    lines with higher steps, is a second run in the same file.
    """
    begin, text, reached, pid = 0, "", 0, None
    for i, beat in enumerate(beats):
        # A resumed run does not boot at step 0; the same pid is the same run.
        if beat.msg == BOOT and beat.step == 0 and reached > 0 and beat.pid != pid:
            begin = i
            text = (
                f"two runs are mixed: process {pid} had reached step {reached} when process "
                f"{beat.pid} started over; only the latter is judged"
            )
            reached = 0
        reached, pid = max(reached, beat.step), beat.pid
    return begin, text


def _log_errors(files: RunFiles) -> list[str]:
    found: list[str] = []
    for path, lines in files.log_ends(LOG_BYTES):
        for line in lines:  # newest first: stop at the start of the current process
            if STARTED in line.text:
                break
            if ERRORS.search(line.text):
                found.append(f"{path.name}, {line.where}: {line.text.strip()[:160]}")
    return found[::-1]


# --- building blocks of the criteria ---

NO_METRICS = f"no {METRICS_FILE} that can be read"

Criterion = Callable[[Evidence, Limits], Row | None]
"""Judges one thing; None where it does not apply, e.g. gates of a model with dense attention."""


class Question(NamedTuple):
    """What a criterion asks; its methods make the row of the answer."""

    name: str
    limit: str
    """What is allowed."""

    def judged(self, ok: bool, value: str, *, evidence: str, advice: str = "") -> Row:
        """A value was measured; `advice` is for the case that it is not good."""
        return Row(
            name=self.name,
            value=value,
            limit=self.limit,
            verdict=PASS if ok else FAIL,
            evidence=evidence,
            advice="" if ok else advice,
        )

    def missing(self, evidence: str, advice: str, *, essential: bool = False) -> Row:
        """Nothing was recorded; without an essential answer there is no GO."""
        return Row(
            name=self.name,
            value="-",
            limit=self.limit,
            verdict=NOT_MEASURED,
            evidence=evidence,
            advice=advice,
            essential=essential,
        )


def known(points: Sequence[Point]) -> list[tuple[float, Point]]:
    """The finite points as (value, point) pairs."""
    return [(point.value, point) for point in points if point.value is not None]


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last third; needs at least three values."""
    third = max(1, len(values) // 3)
    return median(values[:third]), median(values[-third:])


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile; `share` is a fraction between 0 and 1."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, round(share * (len(ranked) - 1)))]

"""The runs behind the dashboard: one thread reads their folders, requests get what it has read."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa.config.describe import printable
from nsa.operate.followed_run import FollowedRun
from nsa.operate.run_files import find_log
from nsa.operate.run_folder import Run, read_run
from nsa.records import TRAINING, VAL, Beat, TrainingRow, ValRow
from nsa.records.numbers import SCALARS, finite, scalars_of
from nsa.web import timeline
from nsa.web.header import (
    MOST_PROBLEMS,
    MOST_TEXT,
    Settings,
    describe,
    describe_log,
    describe_samples,
    samples_stamp,
    side_by_side,
)
from nsa.web.table import LayerTable, Table
from nsa.web.timeline import Timeline

# --- History of a run: its curves, layers and timelines, in bounded memory ---


COLUMNS = tuple(number.name for number in SCALARS if number.curve)
"""Numbers of a progress line that a chart draws."""


class History:
    """Tables of one run folder; `read` updates them with what the files grew by."""

    def __init__(self, folder: Path) -> None:
        self.progress = Table(COLUMNS)
        self.tables = {
            TRAINING: Table(TrainingRow._fields[1:]),
            VAL: Table(ValRow._fields[1:]),
        }
        self.layers = LayerTable()
        self.timelines: dict[int, Timeline] = {}
        self._files = FollowedRun(folder, self)
        self.selection = self._files.selection
        self.read, self.problems = self._files.read, self._files.problems

    @property
    def version(self) -> int:
        """Increases with every update."""
        return self._files.version

    # --- answers ---

    def series(self, first: float, last: float, points: int) -> dict[str, Any]:
        """All curves between two steps; `training` only if it covers more than `progress`."""
        tables = {"progress": self.progress, "val": self.tables[VAL]}
        if self._has_training:
            tables["training"] = self.tables[TRAINING]
        return {name: table.window(first, last, points) for name, table in tables.items()}

    def newest(self) -> dict[str, float]:
        """The last losses of the curves, so that header and curves show the same numbers."""
        table = self.tables[TRAINING] if self._has_training else self.progress
        found = {"loss": table.last("loss"), "val_loss": self.tables[VAL].last("loss")}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def _has_training(self) -> bool:
        """Whether training.csv reaches further than the heartbeat."""
        one, other = self.tables[TRAINING], self.progress
        if one.first_step is None or one.last_step is None:
            return False
        if other.first_step is None or other.last_step is None:
            return True
        return one.first_step < other.first_step or one.last_step > other.last_step

    # --- what FollowedRun read ---

    def restart_table(self, name: str) -> None:
        """A CSV file was replaced."""
        self.tables[name].clear()

    def add_row(self, name: str, row: TrainingRow | ValRow) -> None:
        """A line of a CSV file."""
        values = {column: finite(getattr(row, column)) for column in row._fields[1:]}
        self.tables[name].add(row.step, 0.0, values)

    def restart_rank(self, rank: int) -> None:
        """The heartbeat of a rank is new."""
        self.timelines[rank] = Timeline()

    def add_beat(self, rank: int, beat: Beat) -> None:
        """Any line of a heartbeat."""
        self.timelines[rank].add(beat)

    def restart_progress(self) -> None:
        """The heartbeat of the first rank is new."""
        self.progress.clear()
        self.layers.clear()

    def add_progress(self, beat: Beat) -> None:
        """A logged step of the first rank."""
        self.progress.add(beat.step, beat.ts, dict(scalars_of(beat.extra)))
        self.layers.add(beat)

    def resume_at(self, step: int) -> None:
        """A boot starts at the resumed step: later points of the old process are undone."""
        self.progress.cut(step)
        self.layers.cut(step)


INTERVAL_S = 1.0
"""Seconds between polls of files that did not grow."""
TAIL_BYTES = 1 << 20
"""Read from the end of each heartbeat for the verdict, as in `nsa monitor`."""
COST_RATIO = 10.0
"""A verdict is renewed after this many times its own cost: at most a tenth of a core."""
MOST_POINTS = 2000
FOREVER = float("inf")


class Source:
    """One run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._history, self._settings = History(folder), Settings(folder)
        self._lock = threading.RLock()
        # Written by the reader thread under the lock; kept if a later read fails.
        self._run: Run | None = None
        self._error = ""
        self._log: Path | None = None
        self._due, self._judged = 0.0, -1
        self._more = True

    def refresh(self) -> bool:
        """Read for a moment; returns whether more is left."""
        with self._lock:
            self._more = self._history.read()
        if time.monotonic() >= self._due:
            self._judge()
        return self._more

    def header(self) -> dict[str, Any]:
        """The current state of the run."""
        with self._lock:
            run, problems = self._run, self._history.problems()
            version, more = self._history.version, self._more
            maps = self._history.selection.steps
            newest = self._history.newest()
        found: dict[str, Any] = {"status": "absent", "level": "idle", "verdict": "not read yet"}
        if run is not None:
            found = describe(dataclasses.replace(run, now=time.time()))
            found |= self._newest_beats(found) | newest
            problems = [*run.problems, *problems]
        if self._error:
            problems.append(self._error)
            found |= {"level": "bad", "verdict": "cannot be read"} if run is None else {}
        problems += self._settings.problems.values()
        shown = list(dict.fromkeys(printable(text)[:MOST_TEXT] for text in problems))
        return found | {
            "version": version,
            "reading": more,
            "maps": maps[-1] if maps else None,
            "samples": samples_stamp(self.folder),
            "problems": shown[:MOST_PROBLEMS],
        }

    def _newest_beats(self, found: dict[str, Any]) -> dict[str, Any]:
        """Rank ages, updated from lines followed since the verdict was made."""
        now, ranks = time.time(), []
        for rank in found["ranks"]:
            line = self._history.timelines.get(rank["rank"])
            age_s = rank["age_s"]
            if line is not None and line.span is not None and age_s is not None:
                # Clocks of two machines may differ: an age is never negative.
                age_s = min(age_s, max(0.0, now - line.span[1]))
            ranks.append(rank | {"age_s": age_s})
        ages = [rank["age_s"] for rank in ranks if rank["age_s"] is not None]
        return {"ranks": ranks, "beat_age_s": max(ages, default=None)}

    def series(self, first: float, last: float, points: int) -> dict[str, Any]:
        """The curves between two steps."""
        with self._lock:
            return self._history.series(first, last, points)

    def layers(self, first: float, last: float, points: int) -> dict[str, Any]:
        """Gates and selection per layer between two steps."""
        with self._lock:
            return self._history.layers.window(first, last, points)

    def selection(self, step: int) -> dict[str, Any]:
        """The selection map of a step, or the last one before it."""
        with self._lock:
            try:
                return self._history.selection.load(step) or {"steps": []}
            except (OSError, ValueError) as error:
                return {"steps": self._history.selection.steps, "problem": str(error)[:MOST_TEXT]}

    def timeline(self, last_s: float, cells: int) -> dict[str, Any]:
        """What every rank did in the last `last_s` seconds of the run."""
        now, run = time.time(), self._run
        with self._lock:
            spans = [line.span for line in self._history.timelines.values()]
            known = [span for span in spans if span is not None]
            if not known:
                return {"ranks": []}
            ended = run is None or run.over
            end = max(span[1] for span in known)
            end = end if ended else max(end, now)
            begin = max(min(span[0] for span in known), end - last_s)
            allowed = {
                # A rank already judged late is drawn as silent at once.
                rank["rank"]: 0.0 if rank["late"] else rank["allowed_s"]
                for rank in self.header().get("ranks", [])
            }
            strips = [
                line.strip(
                    begin,
                    end,
                    cells,
                    now=None if ended else now,
                    allowed_s=allowed.get(rank, FOREVER),
                )
                for rank, line in self._history.timelines.items()
            ]
            ranks = list(self._history.timelines)
        return {
            "states": timeline.STATES,
            "begin": begin,
            "end": end,
            "ranks": [
                {"rank": rank, "segments": timeline.as_json(strip)}
                for rank, strip in zip(ranks, strips, strict=True)
            ],
        }

    def samples(self) -> dict[str, Any]:
        """The texts that the model generated."""
        return describe_samples(self.folder)

    def log(self) -> dict[str, Any]:
        """The last lines of the log."""
        return describe_log(self.folder, self._log)

    def settings(self) -> tuple[dict[str, str], dict[str, str]]:
        """Config and environment as flat tables."""
        with self._lock:
            return self._settings.config(), self._settings.env()

    def _judge(self) -> None:
        """Read the run again for its verdict; without the lock, since this may take long."""
        start = time.monotonic()
        try:
            run, self._error = read_run(self.folder, tail_bytes=TAIL_BYTES), ""
            self._log = find_log(self.folder)
        except (OSError, ValueError) as error:
            run, self._error = None, str(error)
        took = time.monotonic() - start
        with self._lock:
            self._run = run or self._run
            # Called for their side effect: both record what cannot be read.
            self._settings.config(), self._settings.env()
        self._due = time.monotonic() + max(2 * INTERVAL_S, COST_RATIO * took)


class Sources:
    """All runs of the page, and the thread that reads them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.names = names(folders)
        self._sources = [Source(folder) for folder in folders]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="nsa-dashboard", daemon=True)

    def start(self) -> None:
        """Start the reader thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the reader thread."""
        self._stop.set()
        self._thread.join(10.0)

    def runs(self) -> dict[str, Any]:
        """The current state of every run."""
        return {
            "now": time.time(),
            "runs": [
                {"id": index, "name": name, "folder": printable(str(source.folder))}
                | source.header()
                for index, (name, source) in enumerate(zip(self.names, self._sources, strict=True))
            ],
        }

    def get(self, index: int) -> Source:
        """A run by index; LookupError if it does not exist."""
        if not 0 <= index < len(self._sources):
            raise LookupError(f"run {index} of {len(self._sources)}")
        return self._sources[index]

    def settings(self) -> dict[str, Any]:
        """Config and environment of all runs, side by side."""
        configs, envs = zip(*(source.settings() for source in self._sources), strict=True)
        return {
            "names": self.names,
            "config": side_by_side(configs),
            "env": side_by_side(envs),
        }

    def _work(self) -> None:
        while not self._stop.is_set():
            more = [source.refresh() for source in self._sources]
            # Return quickly while a backlog is read, so that the page fills within seconds.
            self._stop.wait(0.01 if any(more) else INTERVAL_S)


def names(folders: Sequence[Path]) -> list[str]:
    """Shortest path suffixes that tell the runs apart."""
    parts = [folder.parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-count:]) for part in parts]
        if len(set(found)) == len(found):
            break
    return [printable(name) for name in found]

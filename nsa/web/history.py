"""History of a run for the dashboard: its curves, layers and timelines, in bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa.operate.followed_run import FollowedRun
from nsa.records import TRAINING, VAL, Beat, TrainingRow, ValRow
from nsa.records.numbers import SCALARS, finite, scalars_of
from nsa.web.table import LayerTable, Table
from nsa.web.timeline import Timeline

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

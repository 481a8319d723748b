"""Time series for the dashboard: scalars and per-layer values over steps, in bounded memory.

A row stores minimum, maximum, sum and count of each column over the lines merged into it. When a
table is full, neighbouring rows are merged in pairs. Queries merge in the same way, so that a spike
of one step in 50,000 is visible at every zoom level.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.records import Beat
from nsa.records.numbers import ATTENTION

Array = NDArray[np.float64]
DIGITS = 6
"""Significant digits in answers."""


# --- scalars ---


class Table:
    """Rows by rising step, shared by all columns; a column may have gaps."""

    def __init__(self, columns: Sequence[str], most_rows: int = 1 << 14) -> None:
        """`most_rows` is even; memory is 32 bytes per row and column."""
        self.columns = tuple(columns)
        self._most = most_rows
        self._rows = 0
        self._each = 1  # lines per full row; doubles with every halving
        self._last_lines = 0  # lines merged into the last row
        self._step, self._ts = np.empty((2, 64, 2))  # each [rows, (first, last)]
        self._low, self._high, self._sum, self._count = np.empty((4, 64, len(self.columns)))
        self._last = np.full(len(self.columns), np.nan)  # newest value of each column, not merged

    def __len__(self) -> int:
        return self._rows

    @property
    def first_step(self) -> float | None:
        """The step of the first line."""
        return float(self._step[0, 0]) if self._rows else None

    @property
    def last_step(self) -> float | None:
        """The step of the last line."""
        return float(self._step[self._rows - 1, 1]) if self._rows else None

    def last(self, name: str) -> float | None:
        """The newest value of a column, unmerged; None if there is none."""
        (value,) = _plain(self._last[[self.columns.index(name)]])
        return value

    def clear(self) -> None:
        """Remove all rows."""
        self._last[:] = np.nan
        self._rows, self._each, self._last_lines = 0, 1, 0

    def add(self, step: int, ts: float, values: Mapping[str, float | None]) -> None:
        """Add a line; it replaces lines with the same or a later step."""
        # A resumed or rolled-back run repeats steps: the newer line wins.
        self.cut(step - 1)
        line = np.array([_or_nan(values.get(name)) for name in self.columns])
        self._last = np.where(np.isnan(line), self._last, line)
        if self._rows and self._last_lines < self._each:
            self._join(step, ts, line)
            return
        if self._rows == self._most:
            self._halve()
        if self._rows == len(self._step):
            self._grow()
        row, known = self._rows, ~np.isnan(line)
        self._step[row], self._ts[row] = step, ts
        self._low[row] = self._high[row] = line
        self._sum[row], self._count[row] = np.where(known, line, 0.0), known
        self._rows, self._last_lines = row + 1, 1

    def cut(self, step: int) -> None:
        """Drop rows that end after this step."""
        if not self._rows or self._step[self._rows - 1, 1] <= step:
            return
        self._rows = int(np.searchsorted(self._step[: self._rows, 1], step, side="right"))
        self._last_lines = self._each
        self._last[:] = np.nan

    def window(self, first: float, last: float, points: int) -> dict[str, Any]:
        """The rows between two steps, merged into at most `points` points, ready for JSON.

        `step` and `ts` are those of a point's first line. Each column has `mean`, and `low` and
        `high` where they differ from it. A column without values is left out. If the window
        includes the last row, `last` is the newest value, since a point may average many lines.
        """
        steps = self._step[: self._rows]
        begin = int(np.searchsorted(steps[:, 1], first, side="left"))
        end = int(np.searchsorted(steps[:, 0], last, side="right"))
        count = end - begin
        if count <= 0:
            return {"step": [], "ts": [], "columns": {}}
        # Equal step spans, not equal row counts: merged rows span more steps than recent ones.
        edges = begin + even_edges(steps[begin:end, 0], points)
        low, high, total, number = self._merged(edges, end)
        mean = np.divide(total, number, out=np.full_like(total, np.nan), where=number > 0)
        columns: dict[str, Any] = {}
        for index, name in enumerate(self.columns):
            if number[:, index].any():
                columns[name] = {"mean": _plain(mean[:, index])}
                if end == self._rows:
                    columns[name]["last"] = self.last(name)
                if (low[:, index] < high[:, index]).any():
                    columns[name] |= {"low": _plain(low[:, index]), "high": _plain(high[:, index])}
        return {
            "step": steps[edges, 0].astype(int).tolist(),
            "ts": np.round(self._ts[edges, 0], 1).tolist(),
            "columns": columns,
        }

    def _join(self, step: int, ts: float, line: Array) -> None:
        row, known = self._rows - 1, ~np.isnan(line)
        self._step[row, 1], self._ts[row, 1] = step, ts
        self._low[row] = np.fmin(self._low[row], line)
        self._high[row] = np.fmax(self._high[row], line)
        self._sum[row] += np.where(known, line, 0.0)
        self._count[row] += known
        self._last_lines += 1

    def _merged(self, edges: NDArray[np.int64], end: int) -> tuple[Array, Array, Array, Array]:
        """Merge the rows from each edge to the next; the last group ends at `end`."""
        return (
            np.fmin.reduceat(self._low[:end], edges, axis=0),
            np.fmax.reduceat(self._high[:end], edges, axis=0),
            np.add.reduceat(self._sum[:end], edges, axis=0),
            np.add.reduceat(self._count[:end], edges, axis=0),
        )

    def _halve(self) -> None:
        rows = self._rows
        edges = np.arange(0, rows, 2)
        merged = self._merged(edges, rows)
        for array in (self._step, self._ts):
            array[: len(edges), 0] = array[edges, 0]
            array[: len(edges), 1] = array[np.minimum(edges + 1, rows - 1), 1]
        for array, new in zip((self._low, self._high, self._sum, self._count), merged, strict=True):
            array[: len(edges)] = new
        self._rows, self._each = len(edges), 2 * self._each
        self._last_lines = self._each

    def _grow(self) -> None:
        room = min(2 * len(self._step), self._most)
        for name in ("_step", "_ts", "_low", "_high", "_sum", "_count"):
            old = getattr(self, name)
            new = np.empty((room, old.shape[1]))
            new[: len(old)] = old
            setattr(self, name, new)


def even_edges(steps: Array, points: int) -> NDArray[np.int64]:
    """Start indices of at most `points` groups that span equally many steps."""
    if len(steps) <= points:
        return np.arange(len(steps))
    targets = np.linspace(steps[0], steps[-1], points, endpoint=False)
    return np.unique(np.searchsorted(steps, targets, side="left"))


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _plain(values: Array) -> list[float | None]:
    """Rounded values; None for NaN."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        size = np.floor(np.log10(np.abs(values)))
        scale = 10.0 ** (DIGITS - 1 - np.where(np.isfinite(size), size, 0.0))
        rounded = np.round(values * scale) / scale
    rounded = np.where(np.isfinite(rounded), rounded, values)
    return [x if np.isfinite(x) else None for x in rounded.tolist()]


# --- per-layer gates and selection ---

FIELDS = tuple(number.name for number in ATTENTION if number.layer)
LISTS = {
    number.name: tuple(part.name for part in number.parts) for number in ATTENTION if number.parts
}
"""Fields that are lists, with the names of their entries."""
COLUMNS = (*FIELDS, *chain.from_iterable(LISTS.values()))
MOST_LAYERS = 512


class LayerTable:
    """One row per logged line; when full, neighbouring rows are averaged."""

    def __init__(self, most_rows: int = 1024) -> None:
        self._most = most_rows
        self.clear()

    def clear(self) -> None:
        """Remove all rows."""
        self._steps: list[int] = []
        self._rows: list[NDArray[np.float32]] = []  # each [layers, fields]
        self._each, self._pending = 1, 0

    @property
    def num_layers(self) -> int:
        """Number of layers; 0 before the first line."""
        return self._rows[0].shape[0] if self._rows else 0

    def add(self, beat: Beat) -> None:
        """Add the per-layer values of a progress line; lines without them are skipped."""
        self.cut(beat.step - 1)
        row = _matrix(beat)
        if row is None or (self._rows and row.shape != self._rows[0].shape):
            return
        self._pending += 1
        if self._pending < self._each and self._rows:
            return  # already downsampled; exact values are in the scalar table
        if len(self._rows) == self._most:
            self._halve()
        self._steps.append(beat.step)
        self._rows.append(row)
        self._pending = 0

    def cut(self, step: int) -> None:
        """Drop rows after this step."""
        while self._steps and self._steps[-1] > step:
            self._steps.pop()
            self._rows.pop()

    def window(self, first: float, last: float, points: int) -> dict[str, Any]:
        """For each field, per layer, values at no more than `points` steps."""
        chosen = [i for i, step in enumerate(self._steps) if first <= step <= last]
        if not chosen:
            return {"step": [], "fields": {}}
        steps = np.array([self._steps[i] for i in chosen], dtype=float)
        edges = [chosen[i] for i in even_edges(steps, points)]
        stop = [*edges[1:], chosen[-1] + 1]
        means = [_mean(self._rows[a:b]) for a, b in zip(edges, stop, strict=True)]
        table = np.round(np.stack(means).astype(float), 4)  # [points, layers, fields]
        return {
            "step": [self._steps[i] for i in edges],
            "fields": {
                name: [_gaps(table[:, layer, index]) for layer in range(table.shape[1])]
                for index, name in enumerate(COLUMNS)
            },
        }

    def _halve(self) -> None:
        self._rows = [_mean(self._rows[i : i + 2]) for i in range(0, len(self._rows), 2)]
        self._steps = self._steps[::2]
        self._each *= 2


def _matrix(beat: Beat) -> NDArray[np.float32] | None:
    """[layers, fields] of a line; None if it is malformed."""
    fields = beat.extra.get("layers")
    try:
        lists = [np.array(fields[name], dtype=np.float32) for name in LISTS]  # type: ignore[index]
        columns = [fields[name] for name in FIELDS]  # type: ignore[index]
        matrix = np.concatenate([np.array(columns, dtype=np.float32).T, *lists], axis=1)
    except (KeyError, TypeError, ValueError):
        return None
    fits = matrix.shape[1] == len(COLUMNS) and 0 < len(matrix) <= MOST_LAYERS
    return matrix if fits else None


def _mean(rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all-NaN fields were not measured
        mean: NDArray[np.float32] = np.nanmean(np.stack(rows), axis=0)
    return mean


def _gaps(values: NDArray[np.float64]) -> list[float | None]:
    return [x if np.isfinite(x) else None for x in values.tolist()]

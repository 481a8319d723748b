"""The gates and the selection of every layer over the steps of a run, in bounded memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.telemetry import Beat
from nsa.web.table import even_edges

FIELDS = (
    "entropy_mean",
    "gate_entropy_min",
    "max_gate_mean",
    "collapse_fraction",
    "sel_k_mean",
    "sel_pct_at_max",
)
SHARES = ("share_cmp", "share_sel", "share_win")
MOST_LAYERS = 512


class LayerTable:
    """A row for each logged line, until it is full; then neighbours become their mean."""

    def __init__(self, most_rows: int = 1024) -> None:
        self._most = most_rows
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._steps: list[int] = []
        self._rows: list[NDArray[np.float32]] = []  # each [layers, fields]
        self._each, self._pending = 1, 0

    @property
    def num_layers(self) -> int:
        """As many as the lines have; 0 before the first."""
        return self._rows[0].shape[0] if self._rows else 0

    def add(self, beat: Beat) -> None:
        """Take what a progress line has of its layers; a line that has nothing is passed over."""
        self.cut(beat.step - 1)
        row = _matrix(beat)
        if row is None or (self._rows and row.shape != self._rows[0].shape):
            return
        self._pending += 1
        if self._pending < self._each and self._rows:
            return  # thinned out: these are pictures, and the numbers are in the other table
        if len(self._rows) == self._most:
            self._halve()
        self._steps.append(beat.step)
        self._rows.append(row)
        self._pending = 0

    def cut(self, step: int) -> None:
        """Drop what is later than this step."""
        while self._steps and self._steps[-1] > step:
            self._steps.pop()
            self._rows.pop()

    def window(self, first: float, last: float, points: int) -> dict[str, Any]:
        """For each field a list over layers, each a list over at most `points` steps."""
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
                for index, name in enumerate(FIELDS + SHARES)
            },
        }

    def _halve(self) -> None:
        self._rows = [_mean(self._rows[i : i + 2]) for i in range(0, len(self._rows), 2)]
        self._steps = self._steps[::2]
        self._each *= 2


def _matrix(beat: Beat) -> NDArray[np.float32] | None:
    """[layers, fields] of a line; None where a run of ours would not have written it so."""
    fields = beat.extra.get("layers")
    try:
        columns = [fields[name] for name in FIELDS]  # type: ignore[index]
        shares = np.array(fields["gate_branch_shares"], dtype=np.float32)  # type: ignore[index]
        matrix = np.concatenate([np.array(columns, dtype=np.float32).T, shares], axis=1)
    except (KeyError, TypeError, ValueError):
        return None
    fits = matrix.shape[1] == len(FIELDS) + len(SHARES) and 0 < len(matrix) <= MOST_LAYERS
    return matrix if fits else None


def _mean(rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a field that nobody measured
        mean: NDArray[np.float32] = np.nanmean(np.stack(rows), axis=0)
    return mean


def _gaps(values: NDArray[np.float64]) -> list[float | None]:
    return [x if np.isfinite(x) else None for x in values.tolist()]

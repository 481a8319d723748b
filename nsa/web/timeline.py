"""Rank timelines for the dashboard: what a rank was doing when, from the times of its beats."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nsa.records import Beat
from nsa.records.heartbeat import BEAT, BOOT, STEP_END, WATCHDOG_DUMP

STATES = ("step", "evaluate", "save", "start", "down", "slow", "waiting", "silent", "other")
"""`down`: between the last line of a process and the next boot. `slow`: a step longer than SLOW
times the usual. `waiting`, `silent`: since the last line, within or beyond the allowed silence."""
CODES = {state: code for code, state in enumerate(STATES)}
SLOW = 10.0
MOST_BEATS = 1 << 17
"""Lines kept per rank; when full, the older half is dropped."""


class Segment(NamedTuple):
    """A time span with one state."""

    state: str
    begin: float
    end: float
    longest_s: float
    """Longest interval between two lines in it."""


class Timeline:
    """Times and phases of one rank's heartbeat lines."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all lines."""
        self._ts, self._codes = array("d"), array("b")

    @property
    def span(self) -> tuple[float, float] | None:
        """Times of the first and the last line."""
        return (self._ts[0], self._ts[-1]) if self._ts else None

    def add(self, beat: Beat) -> None:
        """Add a line; stack dumps and step ends carry no new state and are ignored."""
        if beat.msg in (WATCHDOG_DUMP, STEP_END) or (self._ts and beat.ts < self._ts[-1]):
            return
        if len(self._ts) >= MOST_BEATS:
            del self._ts[: MOST_BEATS // 2], self._codes[: MOST_BEATS // 2]
        self._ts.append(beat.ts)
        self._codes.append(CODES[_phase(beat)])

    def strip(
        self, begin: float, end: float, cells: int, *, now: float | None, allowed_s: float
    ) -> list[Segment]:
        """The states from `begin` to `end`, at a resolution of `cells` cells.

        `now` is the time until which beats are expected; None for a run that has ended.
        """
        if not self._ts or end <= begin:
            return []
        ts, codes = np.array(self._ts), np.array(self._codes)
        gaps = np.diff(ts)
        # codes[i] is the state between lines i and i + 1; before a boot the process was down.
        codes[:-1][codes[1:] == CODES["start"]] = CODES["down"]
        usual = float(np.median(gaps[-1000:])) if len(gaps) else 0.0
        is_slow = (codes[:-1] == CODES["step"]) & (gaps > max(SLOW * usual, 1.0))
        codes[:-1][is_slow] = CODES["slow"]
        if now is None:
            ts, codes = ts, codes[:-1]
        else:
            silence = max(0.0, now - ts[-1])
            codes[-1] = CODES["silent" if silence > allowed_s else "waiting"]
            ts = np.append(ts, max(now, ts[-1]))
        return _join(_cells(ts, codes, np.linspace(begin, end, cells + 1)))


def _phase(beat: Beat) -> str:
    if beat.msg == BOOT:
        return "start"
    if beat.msg != BEAT:
        return "step"
    phase = beat.extra.get("phase")
    if phase == "step_start":
        return "step"
    return phase if phase in ("evaluate", "save") else "other"


def _cells(
    ts: NDArray[np.float64], codes: NDArray[np.int8], edges: NDArray[np.float64]
) -> list[Segment]:
    """The dominant state of each cell; intervals are ts[i] to ts[i + 1]."""
    gaps, found = np.diff(ts), []
    firsts = np.searchsorted(ts, edges[:-1], side="right") - 1
    lasts = np.searchsorted(ts, edges[1:], side="left") - 1
    for cell, (first, last) in enumerate(zip(firsts, lasts, strict=True)):
        first, last = max(int(first), 0), min(int(last), len(gaps) - 1)
        if first > last:
            continue
        begin, end = edges[cell], edges[cell + 1]
        part = slice(first, last + 1)
        inside = np.minimum(ts[1:][part], end) - np.maximum(ts[:-1][part], begin)
        if (share := float(inside.clip(min=0).sum())) <= 0:
            continue
        times = np.bincount(codes[part], weights=inside.clip(min=0), minlength=len(STATES))
        code = int(times.argmax())
        for rare in ("save", "evaluate"):  # short, but worth seeing: 10 % of a cell is enough
            if times[CODES[rare]] > 0.1 * share:
                code = CODES[rare]
        # Bad states win over everything, however short they are.
        for bad in ("slow", "silent", "down"):
            if times[CODES[bad]] > 0:
                code = CODES[bad]
        found.append(Segment(STATES[code], float(begin), float(end), float(gaps[part].max())))
    return found


def _join(cells: list[Segment]) -> list[Segment]:
    joined: list[Segment] = []
    for cell in cells:
        last = joined[-1] if joined else None
        if last is not None and last.state == cell.state and abs(last.end - cell.begin) < 1e-6:
            longest = max(last.longest_s, cell.longest_s)
            joined[-1] = last._replace(end=cell.end, longest_s=longest)
        else:
            joined.append(cell)
    return joined


def as_json(segments: list[Segment]) -> list[list[Any]]:
    """Compact lists instead of objects, as there are hundreds."""
    return [
        [STATES.index(state), round(begin, 2), round(end, 2), round(longest, 2)]
        for state, begin, end, longest in segments
    ]

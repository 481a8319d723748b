"""span_rank{r}.json: what a rank is doing right now; readable after the rank hangs or dies.

Schema, version 1: the fields of Place as one JSON object, padded with blanks to SIZE bytes. The
file is overwritten in a single write at each change (a few microseconds), because a stopped or hung
rank can no longer write. Clocks of different ranks are never compared: a watcher measures how long
`count` stays the same.

Spans are global to the process: use `with span("fetch"):` anywhere in the training thread.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType

from nsa.files import best_effort, open_regular, read_text, start_ticks

SCHEMA = 1
SPAN_FILE = "span_rank{rank}.json"
SIZE = 512

START, UPDATE, EVALUATE, SAVE = "start", "update", "evaluate", "save"
PAUSES = (START, EVALUATE, SAVE)
"""Spans without a typical duration."""
PAUSE_S = 1800.0
"""Limit in pauses, and until the update time is known: the first updates compile kernels."""
MEASURED, KEPT = 3, 50
"""Updates needed before a limit is computed, and size of the window it is computed from."""
USUAL, LONGEST = 10.0, 3.0
"""Limit: the larger of USUAL x median and LONGEST x maximum of the recent update times."""
LEAST_S = 180.0
"""Lower bound of every limit, however fast the updates are."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a rank is doing."""

    rank: int
    pid: int
    host: str
    started: int
    """Start time of the process in clock ticks since boot; 0 if unknown."""
    count: int
    """Span changes so far."""
    step: int
    """The update; 0 before the first."""
    span: str
    waits: bool
    """Whether the span blocks until other ranks arrive, as in a collective."""
    allowed_s: float
    """How long the span may last before it counts as a hang."""
    ts: float
    """Unix time of the last change, by the clock of this rank."""
    schema: int = SCHEMA


class Spans:
    """The stack of nested spans of this process."""

    def __init__(self) -> None:
        self._head, self._descriptor, self._path = "", -1, Path()
        self._reset(LEAST_S)

    def _reset(self, least_s: float) -> None:
        self.least_s = least_s
        self.broken = ""
        """Name of the first waiting span that was left by an exception; empty if none was."""
        self._open = [(START, False)]
        self._step = self._count = 0
        self._times = deque[float](maxlen=KEPT)
        self._usual_s = 0.0
        self._begun: float | None = None  # start of the update being timed

    def open(self, folder: Path, rank: int, least_s: float = LEAST_S) -> None:
        """Reset, and write to this run folder from now on; best effort, like all telemetry."""
        self.close()
        self._reset(least_s)
        # The constant part of the JSON is formatted once per run.
        self._head = (
            f'{{"schema": {SCHEMA}, "rank": {rank}, "pid": {os.getpid()}, '
            f'"host": {json.dumps(platform.node()[:64])}, "started": {start_ticks()}, '
        )
        self._path = folder / SPAN_FILE.format(rank=rank)
        self.renew()

    def renew(self) -> None:
        """Recreate the file after its folder was removed; the measured times are kept."""
        self.close()
        with best_effort(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_regular(self._path, os.O_WRONLY | os.O_CREAT)
        self._changed()

    def close(self) -> None:
        """Stop writing; the file stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def begin_update(self, step: int) -> None:
        """An update begins, and the previous one ends."""
        self._measure()
        self._begun, self._step = time.monotonic(), step
        self._open[0] = (UPDATE, False)
        self._changed()

    def enter(self, name: str, waits: bool) -> None:
        """A nested span begins."""
        if name in PAUSES:
            self._measure()  # a pause is not part of the update time
        self._open.append((name, waits))
        self._changed()

    def leave(self) -> None:
        """The innermost span ends."""
        self._open.pop()
        self._changed()

    @property
    def folder(self) -> Path:
        """The run folder, where all ranks have such a file."""
        return self._path.parent

    @property
    def count(self) -> int:
        """Span changes so far."""
        return self._count

    def allowed_s(self) -> float:
        """How long the current span may last before it counts as a hang."""
        if len(self._times) < MEASURED or any(name in PAUSES for name, _ in self._open):
            return max(PAUSE_S, self.least_s)
        return max(self.least_s, self._usual_s)

    def text(self) -> str:
        """The content of the file. Formatted by hand: this runs at every span change."""
        name, waits = self._open[-1]
        return (
            f'{self._head}"count": {self._count}, "step": {self._step}, "span": "{name}", '
            f'"waits": {"true" if waits else "false"}, "allowed_s": {self.allowed_s():.3f}, '
            f'"ts": {time.time():.3f}}}'
        )

    def place(self) -> Place:
        """The same as a Place, for another thread of this process."""
        return Place(**json.loads(self.text()))

    def _measure(self) -> None:
        if self._begun is not None:
            self._times.append(time.monotonic() - self._begun)
            self._usual_s = max(USUAL * median(self._times), LONGEST * max(self._times))
        self._begun = None

    def _changed(self) -> None:
        self._count += 1
        if self._descriptor >= 0:
            try:
                os.pwrite(self._descriptor, self.text().ljust(SIZE).encode(), 0)
            except OSError:  # disk error: the file keeps the previous place
                return


here = Spans()
"""The spans of this process."""


class span:
    """Context manager for work that may take long or block; `waits` as in Place."""

    def __init__(self, name: str, *, waits: bool = False) -> None:
        self._name, self._waits = name, waits

    def __enter__(self) -> None:
        here.enter(self._name, self._waits)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Keep the first one: outer spans are left by the same exception.
        if kind is not None and self._waits and not here.broken:
            here.broken = self._name
        here.leave()


def forget(folder: Path) -> None:
    """Remove the files of an earlier start: its ranks are gone, and their number may differ."""
    for path in folder.glob(SPAN_FILE.format(rank="*")):
        path.unlink(missing_ok=True)


def read_span(folder: Path | str, rank: int) -> Place | None:
    """The last known place of a rank; None if the file is missing or invalid."""
    try:
        text = read_text(Path(folder) / SPAN_FILE.format(rank=rank))
        place = Place(**json.loads(text))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    # The file may hold anything: check the types before anybody computes with them.
    numbers = (place.rank, place.pid, place.started, place.count, place.step)
    whole = all(isinstance(number, int) and abs(number) < 1e18 for number in numbers)
    texts = isinstance(place.span, str) and isinstance(place.host, str)
    times = all(isinstance(seconds, int | float) for seconds in (place.allowed_s, place.ts))
    fits = whole and texts and times and place.schema == SCHEMA and place.rank == rank
    return place if fits and isinstance(place.waits, bool) else None

"""span_rank{r}.json: what a rank is doing at this moment; it stays when the rank hangs or is gone.

Schema, version 1: one JSON object, followed by blanks up to SIZE bytes: the fields of Place. It is
written over in a single write at each change, which costs some microseconds: a rank that is stopped
or stuck can write nothing any more, so what it does must be there before. No two clocks are
compared: whoever watches counts how long `count` stays what it is.

The spans of a process are global to it, as its stacks are: `with span("fetch"):` anywhere in the
thread that trains.
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

from nsa.files import best_effort, open_regular, read_text
from nsa.records.machine import start_ticks

SCHEMA = 1
NAME = "span_rank{rank}.json"
SIZE = 512

START, UPDATE, EVALUATE, SAVE = "start", "update", "evaluate", "save"
PAUSES = (START, EVALUATE, SAVE)
"""Spans without a usual time."""
PAUSE_S = 1800.0
"""Allowed in those, and before the usual time of an update is known: the first ones compile."""
MEASURED, KEPT = 3, 50
"""Updates after which the usual time is known, and how many of the last make it."""
USUAL, LONGEST = 10.0, 3.0
"""Times the median, and times the longest update of late, that a span may take."""
LEAST_S = 180.0
"""A span may always take that long, however quick the updates are."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank is."""

    rank: int
    pid: int
    host: str
    started: int
    """Clock ticks from the boot of the machine to the start of the process; 0 if unknown."""
    count: int
    """Changes so far."""
    step: int
    """The update; 0 before the first."""
    span: str
    waits: bool
    """Whether it is something that ends only when other ranks come there, too."""
    allowed_s: float
    """How long this may take before it counts as a hang."""
    ts: float
    """Unix time of the change, by the clock of this rank."""
    schema: int = SCHEMA


class Spans:
    """The spans that the process is in, one inside the other."""

    def __init__(self) -> None:
        self._head, self._descriptor, self._path = "", -1, Path()
        self._reset(LEAST_S)

    def _reset(self, least_s: float) -> None:
        self.least_s = least_s
        self.broken = ""
        """The span that waits for other ranks and was left by an error; empty if none was."""
        self._open = [(START, False)]
        self._step = self._count = 0
        self._times = deque[float](maxlen=KEPT)
        self._usual_s = 0.0
        self._begun: float | None = None  # when the update that is being measured began

    def open(self, folder: Path, rank: int, least_s: float = LEAST_S) -> None:
        """Begin anew, and write into a run folder from now on; at best, as all telemetry."""
        self.close()
        self._reset(least_s)
        self._head = (
            f'{{"schema": {SCHEMA}, "rank": {rank}, "pid": {os.getpid()}, '
            f'"host": {json.dumps(platform.node()[:64])}, "started": {start_ticks()}, '
        )
        self._path = folder / NAME.format(rank=rank)
        self.renew()

    def renew(self) -> None:
        """Make the file anew where it was removed; what was measured stays."""
        self.close()
        with best_effort(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_regular(self._path, os.O_WRONLY | os.O_CREAT)
        self._changed()

    def close(self) -> None:
        """Write no more; the file stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def begin_update(self, step: int) -> None:
        """An update begins; the one before is over."""
        self._measure()
        self._begun, self._step = time.monotonic(), step
        self._open[0] = (UPDATE, False)
        self._changed()

    def enter(self, name: str, waits: bool) -> None:
        """A span begins, inside the one before."""
        if name in PAUSES:
            self._measure()
        self._open.append((name, waits))
        self._changed()

    def leave(self) -> None:
        """The innermost span is over."""
        self._open.pop()
        self._changed()

    @property
    def count(self) -> int:
        """Changes so far."""
        return self._count

    def allowed_s(self) -> float:
        """How long the present span may take."""
        if len(self._times) < MEASURED or any(name in PAUSES for name, _ in self._open):
            return max(PAUSE_S, self.least_s)
        return max(self.least_s, self._usual_s)

    def text(self) -> str:
        """The content of the file."""
        name, waits = self._open[-1]
        return (
            f'{self._head}"count": {self._count}, "step": {self._step}, "span": "{name}", '
            f'"waits": {"true" if waits else "false"}, "allowed_s": {self.allowed_s():.3f}, '
            f'"ts": {time.time():.3f}}}'
        )

    def place(self) -> Place:
        """The same as a value; for another thread of this process."""
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
            except OSError:  # a disk that fails: the old place stays
                return


here = Spans()
"""Those of this process."""


class span:
    """Around what may take long or block: `with span("fetch"):`; `waits` as in Place."""

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
        if kind is not None and self._waits and not here.broken:
            here.broken = self._name
        here.leave()


def forget(folder: Path) -> None:
    """Remove the places of an earlier start: its ranks are gone, and may have been others."""
    for path in folder.glob(NAME.format(rank="*")):
        path.unlink(missing_ok=True)


def read_span(folder: Path | str, rank: int) -> Place | None:
    """Where a rank was last; None where it never said so, or what is there cannot be read."""
    try:
        text = read_text(Path(folder) / NAME.format(rank=rank))
        place = Place(**json.loads(text))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    numbers = (place.rank, place.pid, place.started, place.count, place.step)
    whole = all(isinstance(number, int) and abs(number) < 1e18 for number in numbers)
    texts = isinstance(place.span, str) and isinstance(place.host, str)
    times = all(isinstance(seconds, int | float) for seconds in (place.allowed_s, place.ts))
    fits = whole and texts and times and place.schema == SCHEMA and place.rank == rank
    return place if fits and isinstance(place.waits, bool) else None

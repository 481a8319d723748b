"""Telemetry of a run: heartbeat, env.json, TensorBoard, tracker, counters and dumps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType

from nsa.config.env import read
from nsa.records import CounterFiles, Heartbeat, MemoryDumps, open_tensorboard
from nsa.records.dumps import Installed, install
from nsa.records.env import write_env
from nsa.records.heartbeat import BEAT
from nsa.records.sinks import Scalars, Tracker, attention_scalars, train_scalars, val_scalars
from nsa.records.spans import here
from nsa.records.tables import SelectionFile, fallback_counts
from nsa.train.loss import Evaluation
from nsa.train.progress import FetchTimes, StepReport
from nsa.train.runtime import Runtime

FETCHES = 200
"""Number of recent batch waits in the percentiles."""


class Telemetry:
    """Telemetry of a run while it trains; calls take microseconds, and I/O errors never raise."""

    def __init__(
        self,
        folder: Path,
        runtime: Runtime,
        resumed_at: int,
        say: Callable[[str], None],
        tracker: Tracker | None = None,
        *,
        rank: int = 0,
        on_signal: Callable[[int], None] | None = None,
    ) -> None:
        """`on_signal` is called for every signal, even while the main thread hangs."""
        self._rank, self._on_signal = rank, on_signal
        self._folder, self.device, self._resumed_at = folder, runtime.device, resumed_at
        self.heartbeat = Heartbeat(folder, rank, every=read("NSA_HEARTBEAT_EVERY"))
        self._open_board = partial(
            open_tensorboard, folder, rank=rank, disabled=read("NSA_TB_DISABLE"), say=say
        )
        self._board = self._open_board(resumed_at=resumed_at)
        self._tracker = tracker or Tracker()
        csv = rank == 0 and not read("NSA_DISABLE_CSV_LOGS")
        self._counters = CounterFiles(folder, resumed_at) if csv else None
        self._selection = SelectionFile(folder) if rank == 0 else None
        every = read("NSA_MEM_DUMP_EVERY")
        self._memory = MemoryDumps(folder, runtime.device, every=every, rank=rank)
        self._fetches: deque[float] = deque(maxlen=FETCHES)
        self._dumps: Installed | None = None

    def __enter__(self) -> Telemetry:
        if self._rank == 0:
            write_env(self._folder)
        self._dumps = install(self._folder, self._rank, self._on_signal)
        here.open(self._folder, self._rank, read("NSA_HANG_LEAST_S"))
        self.heartbeat.boot(self._resumed_at)
        self._memory.boot()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._dumps is not None:
            self._dumps.uninstall()
        here.close()
        self._board.close()
        self.heartbeat.close()

    def renew(self, step: int) -> None:
        """Recreate all files after the folder was removed and created again in update `step`."""
        self.heartbeat.close()
        self.heartbeat.boot(step - 1)
        here.renew()
        if self._dumps is not None:
            self._dumps.renew()
        if self._rank != 0:
            return
        write_env(self._folder)
        self._tracker.renew()
        self._board.close()
        self._board = self._open_board(resumed_at=step - 1)
        for file in (self._counters, self._selection):
            if file is not None:
                file.renew()

    def before_step(self, step: int) -> None:
        """An update begins."""
        here.begin_update(step)
        self.heartbeat.beat(step)
        self._memory.before_step(step)

    def entering(self, step: int, phase: str) -> None:
        """A phase between updates begins (evaluate, save); it may take longer than an update."""
        self.heartbeat.write(step, BEAT, {"phase": phase})

    def after_step(self, step: int) -> None:
        """All kernels of an update have been launched."""
        self._memory.after_step(step)

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Time the wait for a batch."""
        start = time.perf_counter()
        yield
        self._fetches.append(time.perf_counter() - start)

    def fetch_times(self) -> FetchTimes:
        """Summary of the recent batch waits."""
        return FetchTimes.of(self._fetches)

    def logged(self, report: StepReport) -> None:
        """Record a logged update in all sinks."""
        step = report.row.step
        self.heartbeat.progress(
            step,
            **report.numbers,
            attention=report.attention,
            layers=report.layers,
            fallbacks=fallback_counts(),
        )
        self.heartbeat.step_end(step)
        scalars = train_scalars(**report.numbers)
        self._curves(step, scalars | attention_scalars(report.attention, report.layers))
        if self._counters is not None:
            self._counters.append(step, report.attention)
        if self._selection is not None and report.maps:
            self._selection.append(step, report.maps)

    def evaluated(self, step: int, found: Evaluation) -> None:
        """Record an evaluation."""
        self._curves(step, val_scalars(loss=found.loss, ppl=found.ppl))

    def _curves(self, step: int, scalars: Scalars) -> None:
        self._board.add(step, scalars)
        self._tracker.add(step, scalars)

"""The signs of life of a run: heartbeat, environment, TensorBoard, counters, dumps on request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from nsa.config.env import read
from nsa.telemetry import CounterFiles, Heartbeat, MemoryDumps, TrainingRow, open_tensorboard
from nsa.telemetry.counter_files import fallback_counts
from nsa.telemetry.env_file import write_env
from nsa.telemetry.gpu import read_gpu
from nsa.telemetry.stack_dump import install
from nsa.train.evaluate import Evaluation
from nsa.train.runtime import Runtime

FETCHES = 200
"""The last so many times to get a batch make the percentiles."""


class Vitals:
    """Open while a run trains; every call costs microseconds, and none can end the run."""

    def __init__(
        self, folder: Path, runtime: Runtime, resumed_at: int, say: Callable[[str], None]
    ) -> None:
        self._folder, self._device, self._resumed_at = folder, runtime.device, resumed_at
        self.heartbeat = Heartbeat(folder, every=read("NSA_HEARTBEAT_EVERY"))
        self._board = open_tensorboard(
            folder, disabled=read("NSA_TB_DISABLE"), resumed_at=resumed_at, say=say
        )
        csv = not read("NSA_DISABLE_CSV_LOGS")
        self._counters = CounterFiles(folder, resumed_at) if csv else None
        self._memory = MemoryDumps(folder, runtime.device, every=read("NSA_MEM_DUMP_EVERY"))
        self._fetches: deque[float] = deque(maxlen=FETCHES)
        self._uninstall: Callable[[], None] | None = None

    def __enter__(self) -> Vitals:
        write_env(self._folder)
        self._uninstall = install(self._folder)
        self.heartbeat.boot(self._resumed_at)
        self._memory.boot()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._uninstall is not None:
            self._uninstall()
        self._board.close()
        self.heartbeat.close()

    def before_step(self, step: int) -> None:
        """An update begins."""
        self.heartbeat.beat(step)
        self._memory.before_step(step)

    def after_step(self, step: int) -> None:
        """An update has been handed to the device."""
        self._memory.after_step(step)

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Time how long a batch takes."""
        start = time.perf_counter()
        yield
        self._fetches.append(time.perf_counter() - start)

    def logged(
        self,
        row: TrainingRow,
        *,
        grad_norm: float,
        step_time_s: float,
        attention: Mapping[str, Any] | None,
    ) -> None:
        """An update got a line in the log."""
        times = sorted(self._fetches)
        self.heartbeat.progress(
            row.step,
            loss=row.loss,
            toks_per_s=row.toks_per_s,
            lr=row.lr,
            grad_norm=grad_norm,
            step_time_s=step_time_s,
            dt_fetch_s=self._fetches[-1] if times else None,
            fetch_p50_ms=_percentile(times, 0.50),
            fetch_p95_ms=_percentile(times, 0.95),
            gpu=read_gpu(self._device),
            attention=attention,
            fallbacks=fallback_counts(),
        )
        self.heartbeat.step_end(row.step)
        self._board.train(row.step, loss=row.loss, toks_per_s=row.toks_per_s, lr=row.lr)
        self._board.gates(row.step, attention)
        if self._counters is not None:
            self._counters.append(row.step, attention)

    def evaluated(self, step: int, found: Evaluation) -> None:
        """The held-out loss was measured."""
        self._board.val(step, loss=found.loss, ppl=found.ppl)


def _percentile(sorted_s: list[float], share: float) -> float | None:
    """In milliseconds; None of nothing."""
    if not sorted_s:
        return None
    return 1e3 * sorted_s[min(int(share * len(sorted_s)), len(sorted_s) - 1)]

"""Logging of a run. `Vitals` owns the telemetry (heartbeat, env.json, TensorBoard, tracker,
counters, dumps); `RunLog` turns the results of steps into log lines, CSV rows and metrics.json.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from nsa.config import TrainConfig
from nsa.config.env import read
from nsa.files import complain
from nsa.model.cost import utilization
from nsa.model.stats import AttentionStats, HostCopy
from nsa.records import (
    TRAINING,
    VAL,
    CounterFiles,
    CsvLog,
    Heartbeat,
    MemoryDumps,
    Metrics,
    TrainingRow,
    ValRow,
    open_tensorboard,
    write_metrics,
)
from nsa.records.dumps import Installed, install, peak_memory_mib, rss_mib
from nsa.records.env import write_env
from nsa.records.heartbeat import BEAT
from nsa.records.machine import read_gpu
from nsa.records.metrics import METRICS_FILE
from nsa.records.sinks import Scalars, Tracker, attention_scalars, train_scalars, val_scalars
from nsa.records.spans import here, span
from nsa.records.tables import SelectionFile, fallback_counts
from nsa.train.distributed.strategy import Strategy
from nsa.train.errors import NonFiniteLoss
from nsa.train.loss import Evaluation
from nsa.train.progress import FetchTimes, Progress, StepReport
from nsa.train.runtime import Runtime
from nsa.train.step import Updated

FETCHES = 200
"""Number of recent batch waits in the percentiles."""


class Vitals:
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
        hear: Callable[[int], None] | None = None,
    ) -> None:
        """`hear` is called for every signal, even while the main thread hangs."""
        self._rank, self._hear = rank, hear
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

    def __enter__(self) -> Vitals:
        if self._rank == 0:
            write_env(self._folder)
        self._dumps = install(self._folder, self._rank, self._hear)
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


# --- RunLog: when and what the steps of a run log ---
# Results are copied to the host asynchronously and checked one step late, so that logging never
# stalls the device.

MAX_OVERFLOWS = 40
"""Consecutive fp16 overflows allowed: from a scale of 2^16, 40 halvings reach 2^-24."""

MAPS = 64
"""Approximate number of selection.jsonl lines per run; each takes about ten kilobytes."""

LATE = ("cuda",)
"""Asynchronous devices, whose lines are written one step late. All ranks must decide alike."""

SHOWN_INPUTS = 5
"""Updates at the start of a process whose input shape is logged."""


class Line(NamedTuple):
    """What is known about a log line before its loss arrives from the device."""

    step: int
    num_steps: int
    """Steps since the previous line."""
    lr: float
    stats: AttentionStats | None


class RunLog:
    """Checks and logs the results of each step one step late, when they are on the host."""

    def __init__(
        self,
        folder: Path,
        metrics: Metrics,
        train: TrainConfig,
        progress: Progress,
        vitals: Vitals,
        *,
        resumed_at: int = 0,
        overflows: bool = False,
        ranks: Strategy | None = None,
    ) -> None:
        """`overflows`: tolerate occasional gradient overflows, as loss scaling produces them.

        All ranks check the same reduced numbers; rank 0 writes them.
        """
        self._ranks = ranks or Strategy()
        csv = self._ranks.is_first and not read("NSA_DISABLE_CSV_LOGS")
        self.training = CsvLog(TrainingRow, folder / TRAINING if csv else None, resumed_at)
        self.val = CsvLog(ValRow, folder / VAL if csv else None, resumed_at)
        self._line_step = resumed_at  # step of the last line, written or pending
        self._first_step = resumed_at + 1
        self.metrics, self.progress, self.vitals = metrics, progress, vitals
        self._norm = math.nan  # gradient norm of the last step checked
        self._shows_norm: bool = read("NSA_LOG_GRAD_NORM")
        self._tolerated, self._overflows = MAX_OVERFLOWS if overflows else 0, 0
        self.folder, self._every = folder, train.log_every
        self._spike_rule = train.spike_rule
        self.is_ours: Callable[[], bool] = lambda: True
        """Whether the folder still belongs to this run."""
        self.roll_back: Callable[[int, str], None] | None = None
        """Called with the step of a loss spike if spike_rule is rollback; it may raise."""
        self._waiting: deque[HostCopy] = deque()  # in flight: stacked loss, norm, limit per step
        self._line: Line | None = None  # pending until the results of its step are checked
        self._writes_late = vitals.device.type in LATE
        self._stale = False  # the last write of metrics.json failed
        self._since = time.perf_counter()
        self._first_s = 0.0

    def is_logged(self, step: int) -> bool:
        """Whether a step gets a line: the first, every log_every-th, and the last."""
        return step == self._first_step or step % self._every == 0 or step == self.metrics.steps

    def is_mapped(self, step: int) -> bool:
        """Whether a logged step also writes selection maps: about MAPS times per run."""
        every = max(1, self.metrics.steps // MAPS)
        is_edge = step in (self._first_step, self.metrics.steps)
        return is_edge or step // every != self._line_step // every

    def is_new(self, step: int) -> bool:
        """Whether this process ran the step, not one before the resume."""
        return step >= self._first_step

    def loader_failed(self, error: str) -> None:
        """Record a failure of the data source."""
        self.vitals.heartbeat.loader_error(error, self.metrics.step)

    def saw_input(self, step: int, shape: torch.Size) -> None:
        """Log the input shape of the first updates, so that a wrong shape is seen early."""
        if step < self._first_step + SHOWN_INPUTS:
            rank = f" | {self._ranks.name}" if self._ranks.name else ""
            self.progress.say_from_each(f"[debug] step {step}: input shape {shape}{rank}")

    def add(self, step: int, done: Updated, lr: float, stats: AttentionStats | None) -> None:
        """Take the results of an update. On a GPU its line is written one step late, while the
        device is busy with the next step."""
        self._waiting.append(HostCopy([torch.stack([x.detach() for x in done])]))
        self.progress.advance()
        if stats is not None:
            stats.send()
        self._look(at_most=len(self._waiting) - 1)
        if self.is_logged(step):
            self._line = Line(step, step - self._line_step, lr, stats)
            self._line_step = step
            # The first step includes warm-up: settle it now, so that it is timed separately.
            if not self._writes_late or step == self._first_step:
                self.settle()

    def settle(self) -> None:
        """Wait for all results in flight and write the pending line; raise NonFiniteLoss.

        Called before anything is saved, so that a broken model never replaces a good one.
        """
        self._look(at_most=len(self._waiting))

    def _look(self, at_most: int) -> None:
        """Check the oldest results in flight; blocks until they have arrived."""
        for _ in range(at_most):
            with span("the device", waits=True) if self._writes_late else nullcontext():
                loss, norm, limit = self._waiting.popleft().wait()[0].tolist()
            # metrics.step counts checked steps, not launched ones.
            self.metrics.step += 1
            self._overflows = 0 if math.isfinite(norm) else self._overflows + 1
            if not math.isfinite(loss) or self._overflows > self._tolerated:
                raise NonFiniteLoss(
                    "[train][FATAL] non-finite loss detected — aborting run. "
                    f"Step {self.metrics.step}: loss {loss}, gradient norm {norm}"
                    f"{self._ranks.culprits(late=len(self._waiting))}; its update was not "
                    "done; lower train.lr, or look at the data of that step",
                    step=self.metrics.step,
                )
            self.metrics.loss_last, self._norm = loss, norm
            if self.metrics.loss_first is None:
                self.metrics.loss_first = loss
            if loss > limit:
                self._report_spike(loss, limit)
            line = self._line
            if line is not None and line.step == self.metrics.step:
                self._line = None
                self._write_line(line)

    def _report_spike(self, loss: float, limit: float) -> None:
        self.metrics.spikes += 1
        text = f"loss {loss:.4f} at step {self.metrics.step} is a spike: above {limit:.4f}"
        then = {"skip": "; its update was left out", "log": "; training goes on"}
        self.progress.say(f"[spike] {text}{then.get(self._spike_rule, '')}")
        if self._spike_rule == "rollback" and self.roll_back is not None:
            self.roll_back(self.metrics.step, text)

    def add_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write a row of val.csv; raise NonFiniteLoss if the loss is not finite."""
        if not math.isfinite(evaluation.loss):
            raise NonFiniteLoss(
                f"[train][FATAL] non-finite loss on held-out rows after step {step}: "
                f"{evaluation.loss}; no model was written; lower train.lr",
                step=step,
            )
        self.val.append(ValRow(step, evaluation.loss, evaluation.ppl))
        self.vitals.evaluated(step, evaluation)
        self.metrics.val_loss, self.metrics.val_ppl = evaluation.loss, evaluation.ppl
        self.metrics.val_bits_per_byte = evaluation.bits_per_byte
        self.write()
        self.progress.say(
            f"step {step:04d} | held-out loss {evaluation.loss:.4f} nats per token | "
            f"ppl {evaluation.ppl:.2f} | {evaluation.bits_per_byte:.3f} bits per byte | "
            f"{evaluation.num_tokens} tokens"
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Settle, then exclude the time of the block from the training time."""
        self.settle()
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._since += seconds
        self.metrics.eval_and_save_s += seconds

    def renew(self, step: int) -> None:
        """Rewrite all files from step 1 after the folder was removed."""
        self.training.renew()
        self.val.renew()
        self.write()

    def write(self) -> Path:
        """Replace metrics.json; on failure the old file stays, and the first failure is logged."""
        try:
            if self.is_ours():
                self._ranks.on_first(write_metrics, self.folder, self.metrics)
        except OSError as error:
            if not self._stale:
                complain(self.folder / METRICS_FILE, error)
            self._stale = True
        else:
            self._stale = False
        return self.folder / METRICS_FILE

    def _write_line(self, line: Line) -> None:
        now, metrics, stats = time.perf_counter(), self.metrics, line.stats
        # Excludes evaluations and saves: `paused` moves `_since` forward.
        seconds, self._since = now - self._since, now
        metrics.train_s += seconds
        metrics.toks_per_s = metrics.tokens_per_step * line.step / metrics.train_s
        metrics.mfu = self._mfu(metrics.toks_per_s)
        metrics.peak_mem_mib = peak_memory_mib(self.vitals.device)
        if stats is not None:
            metrics.attention_stats = stats.summary()
        assert metrics.loss_last is not None, "the line is written when its step was looked at"
        speed = metrics.tokens_per_step * line.num_steps / seconds
        row = TrainingRow(line.step, metrics.loss_last, line.lr, speed)
        self.training.append(row)
        self.write()
        step_s = self._step_s(line.step, seconds)
        report = self._report(row, seconds / line.num_steps, step_s, stats)
        self.vitals.logged(report)
        self.progress.show(report)

    def _report(
        self, row: TrainingRow, step_time_s: float, usual_s: float, stats: AttentionStats | None
    ) -> StepReport:
        device = self.vitals.device
        return StepReport(
            row=row,
            eta_s=(self.metrics.steps - row.step) * usual_s,
            numbers={
                "loss": row.loss,
                "toks_per_s": row.toks_per_s,
                "lr": row.lr,
                "step_time_s": step_time_s,
                "mfu": self._mfu(row.toks_per_s),
                "grad_norm": self._norm,
                **self.vitals.fetch_times()._asdict(),
                **read_gpu(device)._asdict(),
                "rss_mib": rss_mib() if device.type == "cpu" else None,
            },
            shows_norm=self._shows_norm,
            attention=None if stats is None else stats.summary(),
            layers=None if stats is None else stats.per_layer(),
            maps=None if stats is None else stats.selection_maps(),
        )

    def _mfu(self, toks_per_s: float) -> float | None:
        return utilization(self.metrics.flops_per_token, toks_per_s, self.metrics.peak_flops)

    def _step_s(self, step: int, seconds: float) -> float:
        """Mean seconds per step; the first step includes warm-up and is left out of the mean."""
        if step == self._first_step:
            self._first_s = self.metrics.train_s
            return seconds
        return (self.metrics.train_s - self._first_s) / (step - self._first_step)

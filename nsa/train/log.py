"""The signs of life of a run: heartbeat, environment, TensorBoard, counters, dumps on request."""

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
from nsa.records.metrics import NAME as METRICS
from nsa.records.scalars import Scalars, attention_scalars, train_scalars, val_scalars
from nsa.records.sinks import Tracker
from nsa.records.spans import here, span
from nsa.records.tables import SelectionFile, fallback_counts
from nsa.train.distributed.strategy import Strategy
from nsa.train.errors import NonFiniteLoss
from nsa.train.loss import Evaluation
from nsa.train.progress import FetchTimes, Progress, StepReport
from nsa.train.runtime import Runtime
from nsa.train.step import Updated

FETCHES = 200
"""The last so many times to get a batch make the percentiles."""


class Vitals:
    """Open while a run trains; every call costs microseconds, and none can end the run."""

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
        """`hear` is told of every signal, also while the main thread hangs."""
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
        """Write on in a folder that was removed, and made anew, in the update `step`."""
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
        """Something begins after an update that may take longer than one; it has its own name."""
        self.heartbeat.write(step, BEAT, {"phase": phase})

    def after_step(self, step: int) -> None:
        """An update has been handed to the device."""
        self._memory.after_step(step)

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Time how long a batch takes."""
        start = time.perf_counter()
        yield
        self._fetches.append(time.perf_counter() - start)

    def fetch_times(self) -> FetchTimes:
        """How long batches took, up to now."""
        return FetchTimes.of(self._fetches)

    def logged(self, report: StepReport) -> None:
        """An update got a line in the log."""
        row, fetch = report.row, report.fetch
        self.heartbeat.progress(
            row.step,
            loss=row.loss,
            toks_per_s=row.toks_per_s,
            lr=row.lr,
            grad_norm=report.grad_norm,
            step_time_s=report.step_time_s,
            mfu=report.mfu,
            dt_fetch_s=fetch.last_s,
            fetch_p50_ms=fetch.p50_ms,
            fetch_p95_ms=fetch.p95_ms,
            gpu=report.gpu,
            rss_mib=report.rss_mib,
            attention=report.attention,
            layers=report.layers,
            fallbacks=fallback_counts(),
        )
        self.heartbeat.step_end(row.step)
        self._curves(row.step, _scalars(report))
        if self._counters is not None:
            self._counters.append(row.step, report.attention)
        if self._selection is not None and report.maps:
            self._selection.append(row.step, report.maps)

    def evaluated(self, step: int, found: Evaluation) -> None:
        """The held-out loss was measured."""
        self._curves(step, val_scalars(loss=found.loss, ppl=found.ppl))

    def _curves(self, step: int, scalars: Scalars) -> None:
        self._board.add(step, scalars)
        self._tracker.add(step, scalars)


def _scalars(report: StepReport) -> Scalars:
    row = report.row
    scalars = train_scalars(
        loss=row.loss,
        toks_per_s=row.toks_per_s,
        lr=row.lr,
        grad_norm=report.grad_norm,
        mfu=report.mfu,
    )
    return scalars | attention_scalars(report.attention, report.layers)


# What the steps of a run report, and when it is written: CSV lines, metrics.json, the screen.

MAX_OVERFLOWS = 40
"""In a row, with fp16: from a scale of 65536 even 2^-24 would have been tried by then."""

MAPS = 64
"""Lines of selection.jsonl in a run, about: each takes some ten kilobytes."""

LATE = ("cuda",)
"""Devices that go on while a line is written; the same for all ranks, who must look together."""

SHOWN_INPUTS = 5
"""Updates at the start of a process whose input shape is said."""


class Line(NamedTuple):
    """What a line of the log needs that is not on its way from the device."""

    step: int
    num_steps: int
    """Since the line before."""
    lr: float
    stats: AttentionStats | None


class RunLog:
    """Looks at the numbers of a step one step late, when they have arrived from the device."""

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
        """`overflows`: a gradient may do so now and then; loss scaling skips it and goes lower.

        All ranks look at the same numbers, and the first writes them.
        """
        self._ranks = ranks or Strategy()
        csv = self._ranks.is_first and not read("NSA_DISABLE_CSV_LOGS")
        self.training = CsvLog(TrainingRow, folder / TRAINING if csv else None, resumed_at)
        self.val = CsvLog(ValRow, folder / VAL if csv else None, resumed_at)
        self._line_step = resumed_at  # the step of the last line, written or not
        self._first_step = resumed_at + 1
        self.metrics, self.progress, self.vitals = metrics, progress, vitals
        self._norm = math.nan  # of the last step looked at
        self._shows_norm: bool = read("NSA_LOG_GRAD_NORM")
        self._tolerated, self._overflows = MAX_OVERFLOWS if overflows else 0, 0
        self.folder, self._every = folder, train.log_every
        self._spike_rule = train.spike_rule
        self.is_ours: Callable[[], bool] = lambda: True
        """Whether the folder is still that of this run."""
        self.roll_back: Callable[[int, str], None] | None = None
        """Called with a step whose loss was a spike, where the rule is to go back; it may raise."""
        self._waiting: deque[HostCopy] = deque()  # loss, norm, limit of each step, stacked
        self._line: Line | None = None  # to be written when its step has been looked at
        self._writes_late = vitals.device.type in LATE
        self._stale = False  # metrics.json could not be replaced last time
        self._since = time.perf_counter()
        self._first_s = 0.0

    def is_logged(self, step: int) -> bool:
        """The first step, every log_every-th and the last get a line."""
        return step == self._first_step or step % self._every == 0 or step == self.metrics.steps

    def is_mapped(self, step: int) -> bool:
        """Whether a logged step also says which blocks were read: about MAPS of them in a run."""
        every = max(1, self.metrics.steps // MAPS)
        is_edge = step in (self._first_step, self.metrics.steps)
        return is_edge or step // every != self._line_step // every

    def is_new(self, step: int) -> bool:
        """Whether the step was done by this process."""
        return step >= self._first_step

    def loader_failed(self, error: str) -> None:
        """No more data will come."""
        self.vitals.heartbeat.loader_error(error, self.metrics.step)

    def saw_input(self, step: int, shape: torch.Size) -> None:
        """Say what the first updates of a process read: a wrong shape shows before hours pass."""
        if step < self._first_step + SHOWN_INPUTS:
            rank = f" | {self._ranks.name}" if self._ranks.name else ""
            self.progress.say_from_each(f"[debug] step {step}: input shape {shape}{rank}")

    def add(self, step: int, done: Updated, lr: float, stats: AttentionStats | None) -> None:
        """Take the result of an update. A line that is due is written one step later on a GPU: it
        has the next step to do then, and does not wait for the pen."""
        self._waiting.append(HostCopy([torch.stack([x.detach() for x in done])]))
        self.progress.advance()
        if stats is not None:
            stats.send()
        self._look(at_most=len(self._waiting) - 1)
        if self.is_logged(step):
            self._line = Line(step, step - self._line_step, lr, stats)
            self._line_step = step
            if not self._writes_late or step == self._first_step:  # which warms up, alone
                self.settle()

    def settle(self) -> None:
        """Wait for the device and write what is due; raise NonFiniteLoss if a step went wrong.

        It is called before anything is saved, so a broken model never replaces a good one.
        """
        self._look(at_most=len(self._waiting))

    def _look(self, at_most: int) -> None:
        for _ in range(at_most):
            with span("the device", waits=True) if self._writes_late else nullcontext():
                loss, norm, limit = self._waiting.popleft().wait()[0].tolist()
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
        """Write a line of val.csv; a loss that is not finite ends the run here, too."""
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
        """What happens inside does not count as training time."""
        self.settle()
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._since += seconds
        self.metrics.eval_and_save_s += seconds

    def renew(self, step: int) -> None:
        """Write everything anew, from its start, into a folder that was removed."""
        self.training.renew()
        self.val.renew()
        self.write()

    def write(self) -> Path:
        """Replace metrics.json; where that fails the old one stays, and it is said once."""
        try:
            if self.is_ours():
                self._ranks.on_first(write_metrics, self.folder, self.metrics)
        except OSError as error:
            if not self._stale:
                complain(self.folder / METRICS, error)
            self._stale = True
        else:
            self._stale = False
        return self.folder / METRICS

    def _write_line(self, line: Line) -> None:
        now, metrics, stats = time.perf_counter(), self.metrics, line.stats
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
            step_time_s=step_time_s,
            grad_norm=self._norm,
            shows_norm=self._shows_norm,
            fetch=self.vitals.fetch_times(),
            mfu=self._mfu(row.toks_per_s),
            gpu=read_gpu(device),
            rss_mib=rss_mib() if device.type == "cpu" else None,
            attention=None if stats is None else stats.summary(),
            layers=None if stats is None else stats.per_layer(),
            maps=None if stats is None else stats.selection_maps(),
        )

    def _mfu(self, toks_per_s: float) -> float | None:
        return utilization(self.metrics.flops_per_token, toks_per_s, self.metrics.peak_flops)

    def _step_s(self, step: int, seconds: float) -> float:
        """Seconds for each step so far; the first one also warms up, and counts only alone."""
        if step == self._first_step:
            self._first_s = self.metrics.train_s
            return seconds
        return (self.metrics.train_s - self._first_s) / (step - self._first_step)

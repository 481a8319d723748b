"""The log of a run: RunLog checks the results of steps and turns them into log lines, CSV rows and
metrics.json.

Results are copied to the host asynchronously and checked one step late, so that logging never
stalls the device. The log only reports what it found; the loop in trainer.py acts on it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nsa.config import Config
from nsa.config.env import read
from nsa.files import complain
from nsa.model.cost import utilization
from nsa.model.stats import AttentionStats, HostCopy
from nsa.records import (
    TRAINING,
    VAL,
    CsvLog,
    Metrics,
    TrainingRow,
    ValRow,
    write_metrics,
)
from nsa.records.dumps import peak_memory_mib, rss_mib
from nsa.records.env import read_gpu
from nsa.records.metrics import METRICS_FILE
from nsa.records.spans import span
from nsa.train.distributed.strategy import Strategy
from nsa.train.errors import NonFiniteLoss
from nsa.train.loss import Evaluation
from nsa.train.progress import Progress, StepReport
from nsa.train.step import Updated
from nsa.train.telemetry import Telemetry

MAX_OVERFLOWS = 40
"""Consecutive fp16 overflows allowed: from a scale of 2^16, 40 halvings reach 2^-24."""

MAPS = 64
"""Approximate number of selection.jsonl lines per run; each takes about ten kilobytes."""

LATE = ("cuda",)
"""Asynchronous devices, whose lines are written one step late. All ranks must decide alike."""

SHOWN_INPUTS = 5
"""Updates at the start of a process whose input shape is logged."""


CARRIED = (
    *("loss_first", "loss_last", "val_loss", "val_ppl", "val_bits_per_byte"),
    *("train_s", "eval_and_save_s", "spikes"),
)
"""Counters of metrics.json that a resumed run continues."""


class Line(NamedTuple):
    """What is known about a log line before its loss arrives from the device."""

    step: int
    num_steps: int
    """Steps since the previous line."""
    lr: float
    stats: AttentionStats | None


class InFlight(NamedTuple):
    """The results of an update on their way to the host."""

    numbers: HostCopy
    """[loss, gradient norm, spike limit] in one tensor."""
    line: Line | None
    """None: the step has no line."""


class Spike(NamedTuple):
    """A loss spike after which the run must roll back."""

    step: int
    text: str


class RunLog:
    """Checks and logs the results of each step one step late, when they are on the host."""

    def __init__(
        self,
        folder: Path,
        metrics: Metrics,
        cfg: Config,
        progress: Progress,
        telemetry: Telemetry,
        *,
        resumed_at: int = 0,
        overflows: bool = False,
        ranks: Strategy | None = None,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """`overflows`: tolerate occasional gradient overflows, as loss scaling produces them.
        `is_ours`: whether the folder still belongs to this run.

        All ranks check the same reduced numbers; rank 0 writes them.
        """
        self._ranks = ranks or Strategy()
        csv = self._ranks.is_first and not read("NSA_DISABLE_CSV_LOGS")
        self.training = CsvLog(TrainingRow, folder / TRAINING if csv else None, resumed_at)
        self.val = CsvLog(ValRow, folder / VAL if csv else None, resumed_at)
        self._line_step = resumed_at  # step of the last line, written or pending
        self._first_step = resumed_at + 1
        self.metrics, self.progress, self.telemetry = metrics, progress, telemetry
        self._norm = math.nan  # gradient norm of the last step checked
        self._index_loss: float | None = None  # of that step, for models with an indexer
        self._shows_norm: bool = read("NSA_LOG_GRAD_NORM")
        self._tolerated, self._overflows = MAX_OVERFLOWS if overflows else 0, 0
        self.folder, self._every = folder, cfg.train.log_every
        self._spike_rule, self._is_ours = cfg.train.spike_rule, is_ours
        # Dense attention has no gates and selects nothing.
        wants_stats = not read("NSA_DISABLE_AUX_STATS")
        self._collects_stats = cfg.model.attention == "nsa" and wants_stats
        self._in_flight: deque[InFlight] = deque()
        self._due: Line | None = None  # the line of the step checked last, until it is written
        self._writes_late = telemetry.device.type in LATE
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
        self.telemetry.heartbeat.loader_error(error, self.metrics.step)

    def saw_input(self, step: int, shape: torch.Size) -> None:
        """Log the input shape of the first updates, so that a wrong shape is seen early."""
        if step < self._first_step + SHOWN_INPUTS:
            rank = f" | {self._ranks.name}" if self._ranks.name else ""
            self.progress.say_from_each(f"[debug] step {step}: input shape {shape}{rank}")

    def new_stats(self, step: int) -> AttentionStats | None:
        """What collects the attention statistics of a step; None if it logs none."""
        if not self._collects_stats or not self.is_logged(step):
            return None
        return AttentionStats(maps=self.is_mapped(step))

    def add(self, step: int, done: Updated, lr: float, stats: AttentionStats | None) -> None:
        """Take the results of an update; `check` looks at them when they are on the host."""
        line = None
        if self.is_logged(step):
            line = Line(step, step - self._line_step, lr, stats)
            self._line_step = step
        numbers = HostCopy([torch.stack([x.detach() for x in done if x is not None])])
        self._in_flight.append(InFlight(numbers, line))
        self.progress.advance()
        if stats is not None:
            stats.send()

    def check(self, *, settle: bool = False) -> Spike | None:
        """Check the results in flight, oldest first, and write their lines.

        Raises NonFiniteLoss. Returns early at a loss spike if spike_rule is rollback: roll back, or
        call again to check the rest. The newest results stay in flight unless their line is written
        at once, or with `settle`. Settle before anything is saved, so that a broken model never
        replaces a good one.
        """
        self._write_due_line()
        while len(self._in_flight) > (0 if settle or self._is_written_at_once() else 1):
            spike = self._check_oldest()
            if spike is not None:
                return spike
            self._write_due_line()
        return None

    def _is_written_at_once(self) -> bool:
        """Whether the newest results have a line that is not written one step late.

        The first step includes warm-up: it is settled at once, so that it is timed separately.
        """
        line = self._in_flight[-1].line if self._in_flight else None
        return line is not None and (not self._writes_late or line.step == self._first_step)

    def _check_oldest(self) -> Spike | None:
        """Check the oldest results in flight; blocks until they have arrived."""
        numbers, self._due = self._in_flight.popleft()
        with span("the device", waits=True) if self._writes_late else nullcontext():
            loss, norm, limit, *index_loss = numbers.wait()[0].tolist()
        self._index_loss = index_loss[0] if index_loss else None
        # metrics.step counts checked steps, not launched ones.
        self.metrics.step += 1
        self._overflows = 0 if math.isfinite(norm) else self._overflows + 1
        if not math.isfinite(loss) or self._overflows > self._tolerated:
            raise NonFiniteLoss(
                "[train][FATAL] non-finite loss detected — aborting run. "
                f"Step {self.metrics.step}: loss {loss}, gradient norm {norm}"
                f"{self._ranks.ranks_not_finite(late=len(self._in_flight))}; its update was "
                "skipped; lower train.lr, or check the data of that step",
                step=self.metrics.step,
            )
        self.metrics.loss_last, self._norm = loss, norm
        if self.metrics.loss_first is None:
            self.metrics.loss_first = loss
        return self._report_spike(loss, limit) if loss > limit else None

    def _report_spike(self, loss: float, limit: float) -> Spike | None:
        """Log a spike; return it if the run must roll back."""
        self.metrics.spikes += 1
        text = f"loss {loss:.4f} at step {self.metrics.step} is a spike: above {limit:.4f}"
        then = {"skip": "; its update was skipped", "log": "; training continues"}
        self.progress.say(f"[spike] {text}{then.get(self._spike_rule, '')}")
        return Spike(self.metrics.step, text) if self._spike_rule == "rollback" else None

    def add_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write a row of val.csv; raise NonFiniteLoss if the loss is not finite."""
        if not math.isfinite(evaluation.loss):
            raise NonFiniteLoss(
                f"[train][FATAL] non-finite loss on held-out rows after step {step}: "
                f"{evaluation.loss}; no model was written; lower train.lr",
                step=step,
            )
        self.val.append(ValRow(step, evaluation.loss, evaluation.ppl))
        self.telemetry.evaluated(step, evaluation)
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
        """Exclude the time of the block from the training time."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._since += seconds
        self.metrics.eval_and_save_s += seconds

    def state_dict(self) -> dict[str, Any]:
        """The counters for a checkpoint."""
        return {name: getattr(self.metrics, name) for name in CARRIED}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the counters of a checkpoint; older ones lack some."""
        for name in CARRIED:
            setattr(self.metrics, name, state.get(name, getattr(self.metrics, name)))

    def renew(self, step: int) -> None:
        """Rewrite all files from step 1 after the folder was removed."""
        self.training.renew()
        self.val.renew()
        self.write()

    def write(self) -> Path:
        """Replace metrics.json; on failure the old file stays, and the first failure is logged."""
        try:
            if self._is_ours():
                self._ranks.on_rank_0(write_metrics, self.folder, self.metrics)
        except OSError as error:
            if not self._stale:
                complain(self.folder / METRICS_FILE, error)
            self._stale = True
        else:
            self._stale = False
        return self.folder / METRICS_FILE

    def _write_due_line(self) -> None:
        line, self._due = self._due, None
        if line is not None:
            self._write_line(line)

    def _write_line(self, line: Line) -> None:
        now, metrics, stats = time.perf_counter(), self.metrics, line.stats
        # Excludes evaluations and saves: `paused` moves `_since` forward.
        seconds, self._since = now - self._since, now
        metrics.train_s += seconds
        metrics.toks_per_s = metrics.tokens_per_step * line.step / metrics.train_s
        metrics.mfu = self._mfu(metrics.toks_per_s)
        metrics.peak_mem_mib = peak_memory_mib(self.telemetry.device)
        if stats is not None:
            metrics.attention_stats = stats.summary()
        assert metrics.loss_last is not None, "a line is written after its step was checked"
        speed = metrics.tokens_per_step * line.num_steps / seconds
        row = TrainingRow(line.step, metrics.loss_last, line.lr, speed)
        self.training.append(row)
        self.write()
        step_s = self._step_s(line.step, seconds)
        report = self._report(row, seconds / line.num_steps, step_s, stats)
        self.telemetry.logged(report)
        self.progress.show(report)

    def _report(
        self, row: TrainingRow, step_time_s: float, usual_s: float, stats: AttentionStats | None
    ) -> StepReport:
        device = self.telemetry.device
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
                "index_loss": self._index_loss,
                **self.telemetry.fetch_times()._asdict(),
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

"""What the steps of a run report, and when it is written: CSV lines, metrics.json, the screen."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.config import TrainConfig
from nsa.config.env import read
from nsa.model.stats import AttentionStats
from nsa.telemetry import TRAINING, VAL, CsvLog, Metrics, TrainingRow, ValRow, write_metrics
from nsa.train.errors import NonFiniteLoss
from nsa.train.evaluate import Evaluation
from nsa.train.progress import Progress
from nsa.train.vitals import Vitals

MAX_OVERFLOWS = 40
"""In a row, with fp16: from a scale of 65536 even 2^-24 would have been tried by then."""

SHOWN_INPUTS = 5
"""Updates at the start of a process whose input shape is said."""


class Pending(NamedTuple):
    """A step whose numbers are on their way from the device."""

    values: Tensor  # [2] loss, gradient norm; on the CPU
    arrival: torch.cuda.Event | None

    @staticmethod
    def of(loss: Tensor, norm: Tensor) -> Pending:
        values = torch.stack([loss.detach(), norm.detach()])
        if values.device.type != "cuda":
            return Pending(values, None)
        copy = torch.empty(2, dtype=values.dtype, pin_memory=True)
        copy.copy_(values, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()
        return Pending(copy, arrival)

    def look(self) -> tuple[float, float]:
        """Wait for the numbers."""
        if self.arrival is not None:
            self.arrival.synchronize()
        loss, norm = self.values.tolist()
        return loss, norm


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
    ) -> None:
        """`overflows`: a gradient may do so now and then; loss scaling skips it and goes lower."""
        csv = not read("NSA_DISABLE_CSV_LOGS")
        self.training = CsvLog(TrainingRow, folder / TRAINING if csv else None, resumed_at)
        self.val = CsvLog(ValRow, folder / VAL if csv else None, resumed_at)
        self._line_step = resumed_at  # the step of the last line
        self._first_step = resumed_at + 1
        self.metrics, self.progress, self.vitals = metrics, progress, vitals
        self._norm = math.nan  # of the last step looked at
        self._tolerated, self._overflows = MAX_OVERFLOWS if overflows else 0, 0
        self.folder, self._every = folder, train.log_every
        self._waiting: deque[Pending] = deque()
        self._since = time.perf_counter()
        self._first_s = 0.0

    def is_logged(self, step: int) -> bool:
        """The first step, every log_every-th and the last get a line."""
        return step == self._first_step or step % self._every == 0 or step == self.metrics.steps

    def is_new(self, step: int) -> bool:
        """Whether the step was done by this process."""
        return step >= self._first_step

    def loader_failed(self, error: str) -> None:
        """No more data will come."""
        self.vitals.heartbeat.loader_error(error, self.metrics.step)

    def saw_input(self, step: int, shape: torch.Size) -> None:
        """Say what the first updates of a process read: a wrong shape shows before hours pass."""
        if step < self._first_step + SHOWN_INPUTS:
            self.progress.say(f"[debug] step {step}: input shape {shape}")

    def add(
        self, step: int, loss: Tensor, norm: Tensor, lr: float, stats: AttentionStats | None
    ) -> None:
        """Take the result of an update, and write a line where one is due."""
        self._waiting.append(Pending.of(loss, norm))
        self.progress.advance()
        self._look(at_most=len(self._waiting) - 1)
        if self.is_logged(step):
            self.settle()
            self._write_line(step, lr, stats)

    def settle(self) -> None:
        """Wait for the device, and raise NonFiniteLoss if a step went wrong.

        It is called before anything is saved, so a broken model never replaces a good one.
        """
        self._look(at_most=len(self._waiting))

    def _look(self, at_most: int) -> None:
        for _ in range(at_most):
            loss, norm = self._waiting.popleft().look()
            self.metrics.step += 1
            self._overflows = 0 if math.isfinite(norm) else self._overflows + 1
            if not math.isfinite(loss) or self._overflows > self._tolerated:
                raise NonFiniteLoss(
                    "[train][FATAL] non-finite loss detected — aborting run. "
                    f"Step {self.metrics.step}: loss {loss}, gradient norm {norm}; its update was "
                    "not done; lower train.lr, or look at the data of that step",
                    step=self.metrics.step,
                )
            self.metrics.loss_last, self._norm = loss, norm
            if self.metrics.loss_first is None:
                self.metrics.loss_first = loss

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

    def write(self) -> Path:
        """Replace metrics.json."""
        return write_metrics(self.folder, self.metrics)

    def _write_line(self, step: int, lr: float, stats: AttentionStats | None) -> None:
        now, metrics = time.perf_counter(), self.metrics
        seconds, self._since = now - self._since, now
        num_steps, self._line_step = step - self._line_step, step
        metrics.train_s += seconds
        metrics.toks_per_s = metrics.tokens_per_step * step / metrics.train_s
        if stats is not None:
            metrics.attention_stats = stats.summary()
        assert metrics.loss_last is not None, "settle() has seen this step"
        speed = metrics.tokens_per_step * num_steps / seconds
        row = TrainingRow(step, metrics.loss_last, lr, speed)
        self.training.append(row)
        self.write()
        self.vitals.logged(
            row,
            grad_norm=self._norm,
            step_time_s=seconds / num_steps,
            attention=metrics.attention_stats if stats is not None else None,
        )
        self.progress.show(row, (metrics.steps - step) * self._step_s(step, seconds))

    def _step_s(self, step: int, seconds: float) -> float:
        """Seconds for each step so far; the first one also warms up, and counts only alone."""
        if step == self._first_step:
            self._first_s = self.metrics.train_s
            return seconds
        return (self.metrics.train_s - self._first_s) / (step - self._first_step)

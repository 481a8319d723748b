"""What the steps of a run report, and when it is written: CSV lines, metrics.json, the screen."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from nsa.config import TrainConfig
from nsa.config.env import read
from nsa.model.stats import AttentionStats
from nsa.telemetry import TRAINING, VAL, CsvLog, Metrics, TrainingRow, ValRow, write_metrics
from nsa.train.errors import NonFiniteLoss
from nsa.train.evaluate import Evaluation
from nsa.train.progress import Progress


class RunLog:
    """Keeps the losses on the device until a step is logged: one wait then, none in between."""

    def __init__(
        self, folder: Path, metrics: Metrics, train: TrainConfig, progress: Progress
    ) -> None:
        csv = not read("NSA_DISABLE_CSV_LOGS")
        self.training = CsvLog(TrainingRow, folder / TRAINING if csv else None)
        self.val = CsvLog(ValRow, folder / VAL if csv else None)
        self.metrics, self.progress = metrics, progress
        self.folder, self._every = folder, train.log_every
        self._waiting: list[Tensor] = []  # [loss, gradient norm] of the steps not yet looked at
        self._since = time.perf_counter()
        self._first_s = 0.0

    def is_logged(self, step: int) -> bool:
        """The first step, every log_every-th and the last get a line."""
        return step == 1 or step % self._every == 0 or step == self.metrics.steps

    def add(
        self, step: int, loss: Tensor, norm: Tensor, lr: float, stats: AttentionStats | None
    ) -> None:
        """Take the result of an update, and write a line where one is due."""
        self._waiting.append(torch.stack([loss.detach(), norm.detach()]))
        self.progress.advance()
        if self.is_logged(step):
            self.settle()
            self._write_line(step, lr, stats)

    def settle(self) -> None:
        """Wait for the device, and raise NonFiniteLoss if any step since the last look went wrong.

        It is called before anything is saved, so a broken model never replaces a good one.
        """
        if not self._waiting:
            return
        values, self._waiting = torch.stack(self._waiting).tolist(), []
        for loss, norm in values:
            self.metrics.step += 1
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise NonFiniteLoss(
                    f"[train][FATAL] non-finite loss or gradient at step {self.metrics.step}: "
                    f"loss {loss}, gradient norm {norm}; no model was written; lower train.lr, or "
                    "look at the data of that step"
                )
            self.metrics.loss_last = loss
            if self.metrics.loss_first is None:
                self.metrics.loss_first = loss

    def add_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write a line of val.csv; a loss that is not finite ends the run here, too."""
        if not math.isfinite(evaluation.loss):
            raise NonFiniteLoss(
                f"[train][FATAL] non-finite loss on held-out rows after step {step}: "
                f"{evaluation.loss}; no model was written; lower train.lr"
            )
        self.val.append(ValRow(step, evaluation.loss, evaluation.ppl))
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
        num_steps = step - (self.training.rows[-1].step if self.training.rows else 0)
        metrics.train_s += seconds
        metrics.toks_per_s = metrics.tokens_per_step * step / metrics.train_s
        if stats is not None:
            metrics.attention_stats = stats.summary()
        assert metrics.loss_last is not None, "settle() has seen this step"
        speed = metrics.tokens_per_step * num_steps / seconds
        row = TrainingRow(step, metrics.loss_last, lr, speed)
        self.training.append(row)
        self.write()
        self.progress.show(row, (metrics.steps - step) * self._step_s(step, seconds))

    def _step_s(self, step: int, seconds: float) -> float:
        """Seconds for each step so far; the first one also warms up, and counts only alone."""
        if step == 1:
            self._first_s = seconds
            return seconds
        return (self.metrics.train_s - self._first_s) / (step - 1)

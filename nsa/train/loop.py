"""The training loop: updates, and what is due after one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from nsa.config import Config
from nsa.config.env import read
from nsa.data import Data, WaitEnded
from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.train.errors import Halted
from nsa.train.evaluate import evaluate
from nsa.train.log import RunLog
from nsa.train.loss import next_token_loss
from nsa.train.optimizer import clip_gradients, set_lr, skip_unless_finite
from nsa.train.resume import Identity
from nsa.train.runtime import Runtime
from nsa.train.saver import Saver
from nsa.train.schedule import lr_at
from nsa.train.state import capture
from nsa.train.stop import Stop


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A model, its data and its log, ready to go."""

    cfg: Config
    model: TinyLM
    optimizer: Optimizer
    scaler: GradScaler
    data: Data
    runtime: Runtime
    log: RunLog
    saver: Saver
    stop: Stop
    identity: Identity
    """What decides the numbers of the run; it is kept in checkpoints."""
    folder: Path

    def train(self, steps: int, done: int = 0) -> list[Path]:
        """Do the updates after the first `done`, and return the checkpoints that were written."""
        every_eval, every_save = self.cfg.train.eval_every, self.cfg.train.save_every
        wants_stats = not read("NSA_DISABLE_AUX_STATS")
        self.model.train()
        for step in range(done + 1, steps + 1):
            self.log.vitals.before_step(step)
            stats = AttentionStats() if wants_stats and self.log.is_logged(step) else None
            lr = lr_at(step, self.cfg.train)
            with self.obeying(step - 1):
                loss, norm = self.update(step, lr, stats)
            self.log.vitals.after_step(step)
            self.log.add(step, loss, norm, lr, stats)
            if every_eval and (step % every_eval == 0 or step == steps):
                self.evaluate(step)
            if every_save and step % every_save == 0:
                self.save(step)
            if asked := self.stop.requested():
                self.halt(step, asked)
        self.log.settle()
        self.saver.wait()
        return self.saver.written

    def update(
        self, step: int, lr: float, stats: AttentionStats | None
    ) -> tuple[Tensor, Tensor]:  # [] fp32 loss, [] fp32 gradient norm before clipping
        """Do one optimizer update: the mean gradient over all its micro-batches."""
        train, accumulate = self.cfg.train, self.cfg.train.accumulate_grad_batches
        losses = []
        for micro in range(accumulate):
            position = ((step - 1) * accumulate + micro) * train.batch_size
            with self.log.vitals.fetching():
                batch = self.data.train.batch(position, train.batch_size)
            if not micro:
                self.log.saw_input(step, batch[:, :-1].shape)
            batch = batch.to(self.runtime.device, non_blocking=True)
            loss = next_token_loss(self.model, batch, self.runtime, None if micro else stats)
            self.scaler.scale(loss / accumulate).backward()
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self.model, train.grad_clip)
        loss = sum(losses[1:], losses[0]) / accumulate
        set_lr(self.optimizer, lr)
        if not self.scaler.is_enabled():  # it skips by itself
            skip_unless_finite(self.optimizer, loss, norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def evaluate(self, step: int) -> None:
        """Measure the loss on held-out rows."""
        with self.log.paused():
            found = evaluate(self.model, self.data, self.cfg.train, self.runtime)
            self.log.add_evaluation(step, found)

    def save(self, step: int) -> None:
        """Start to write a checkpoint; pausing has made sure that all steps so far were finite."""
        with self.log.paused():
            self.saver.save(capture(self, step))

    @contextmanager
    def obeying(self, step: int) -> Iterator[None]:
        """Halt after `step` when somebody asks for it during the wait for the data of the next."""
        try:
            yield
        except WaitEnded:
            self.halt(step, self.stop.requested())

    def halt(self, step: int, asked: str) -> NoReturn:
        """Obey: save where the last step was not saved already, and leave."""
        if asked == ".HALT":
            self.log.progress.say("[train] HALT file detected — stopping gracefully.")
        raise Halted(f"stopped by {asked} after step {step}; {self.save_last(step)}")

    def save_last(self, step: int) -> str:
        """Save where the last step was not saved already, and say how the run can go on."""
        if self.log.is_new(step) and step % (self.cfg.train.save_every or step + 1):
            self.save(step)
        saved = self.saver.wait()
        return "the same command goes on from there" if saved else "no checkpoint could be written"

"""The training loop: updates, and what is due after one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from nsa.config import Config
from nsa.config.env import read
from nsa.data import Data
from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.train.errors import Halted
from nsa.train.evaluate import evaluate
from nsa.train.log import RunLog
from nsa.train.loss import next_token_loss
from nsa.train.optimizer import TrainOptimizer, clip_gradients, not_finite, set_lr
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
    optimizer: TrainOptimizer
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
            bounds = self.data.bounds(batch)
            batch = batch.to(self.runtime.device)
            kept = None if micro else stats
            loss = next_token_loss(self.model, batch, self.runtime, kept, bounds)
            self.scaler.scale(loss / accumulate).backward()
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self.model, train.grad_clip)
        loss = sum(losses[1:], losses[0]) / accumulate
        set_lr(self.optimizer, lr)
        # Loss scaling skips by itself, and counts it.
        self.optimizer.skip = None if self.scaler.is_enabled() else not_finite(loss, norm)
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

    def halt(self, step: int, asked: str) -> None:
        """Obey: save where the last step was not saved already, and leave."""
        if asked == ".HALT":
            self.log.progress.say("[train] HALT file detected — stopping gracefully.")
        if not self.cfg.train.save_every or step % self.cfg.train.save_every:
            self.save(step)
        saved = self.saver.wait()
        then = "the same command goes on from there" if saved else "no checkpoint could be written"
        raise Halted(f"stopped by {asked} after step {step}; {then}")

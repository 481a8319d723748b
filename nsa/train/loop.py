"""The training loop: updates, and what is due after one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.optim import Optimizer

from nsa.config import Config
from nsa.config.env import read
from nsa.data import Data
from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.train.evaluate import evaluate
from nsa.train.log import RunLog
from nsa.train.loss import next_token_loss
from nsa.train.model_file import save_checkpoint
from nsa.train.optimizer import clip_gradients, set_lr
from nsa.train.runtime import Runtime
from nsa.train.schedule import lr_at


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A model, its data and its log, ready to go."""

    cfg: Config
    model: TinyLM
    optimizer: Optimizer
    data: Data
    runtime: Runtime
    log: RunLog
    folder: Path

    def train(self, steps: int) -> list[Path]:
        """Do `steps` updates, and return the checkpoints that were written."""
        every_eval, every_save = self.cfg.train.eval_every, self.cfg.train.save_every
        wants_stats = not read("NSA_DISABLE_AUX_STATS")
        checkpoints = []
        self.model.train()
        for step in range(1, steps + 1):
            stats = AttentionStats() if wants_stats and self.log.is_logged(step) else None
            lr = lr_at(step, self.cfg.train)
            loss, norm = self.update(step, lr, stats)
            self.log.add(step, loss, norm, lr, stats)
            if every_eval and (step % every_eval == 0 or step == steps):
                self.evaluate(step)
            if every_save and step % every_save == 0:
                checkpoints.append(self.save(step))
        self.log.settle()
        return checkpoints

    def update(
        self, step: int, lr: float, stats: AttentionStats | None
    ) -> tuple[Tensor, Tensor]:  # [] fp32 loss, [] fp32 gradient norm before clipping
        """Do one optimizer update: the mean gradient over all its micro-batches."""
        train, accumulate = self.cfg.train, self.cfg.train.accumulate_grad_batches
        losses = []
        for micro in range(accumulate):
            position = ((step - 1) * accumulate + micro) * train.batch_size
            batch = self.data.train.batch(position, train.batch_size).to(self.runtime.device)
            loss = next_token_loss(self.model, batch, self.runtime, None if micro else stats)
            (loss / accumulate).backward()
            losses.append(loss.detach())
        norm = clip_gradients(self.model, train.grad_clip)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sum(losses[1:], losses[0]) / accumulate, norm

    def evaluate(self, step: int) -> None:
        """Measure the loss on held-out rows."""
        with self.log.paused():
            found = evaluate(self.model, self.data.val, self.cfg.train, self.runtime)
            self.log.add_evaluation(step, found)

    def save(self, step: int) -> Path:
        """Write a checkpoint; pausing has made sure that all steps so far were finite."""
        with self.log.paused():
            return save_checkpoint(self.folder, self.model, self.cfg, step)

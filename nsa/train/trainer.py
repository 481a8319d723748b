"""The training loop, and the state that checkpoints hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from nsa.config import Config, to_container
from nsa.data import Data, WaitEnded
from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.records.results import write_dtypes, write_opt_state
from nsa.records.spans import EVALUATE, SAVE, span
from nsa.train.checkpoint import find
from nsa.train.checkpoint.file import BadCheckpoint, Content
from nsa.train.checkpoint.identity import Identity, global_batch
from nsa.train.checkpoint.resume import Start
from nsa.train.checkpoint.writer import Saver
from nsa.train.distributed.strategy import Strategy, micro_positions
from nsa.train.errors import Halted
from nsa.train.locked_folder import LockedFolder
from nsa.train.log import RunLog, Spike
from nsa.train.loss import evaluate
from nsa.train.optimizer import TrainOptimizer, load_optimizer, lr_at, parameters_of_state
from nsa.train.runtime import Runtime
from nsa.train.spikes import LossSpike, Spikes, find_rollback
from nsa.train.step import EagerStep, MicroBatch, Updated
from nsa.train.stop import ORPHANED, Stop

CHECK_S = 60.0
"""How long the end of a run waits for the background check of shard hashes."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A model, its optimizer, data, log and checkpoints, ready to train."""

    cfg: Config
    model: TinyLM
    step: EagerStep
    data: Data
    log: RunLog
    saver: Saver
    stop: Stop
    identity: Identity
    """The settings and data that determine the losses; stored in checkpoints (identity.py)."""
    rows_asked: int
    """Rows per update and rank as configured, before a resume on another number of ranks adjusted
    the accumulation."""
    held: LockedFolder

    @property
    def folder(self) -> Path:
        return self.held.path

    @property
    def runtime(self) -> Runtime:
        return self.step.runtime

    @property
    def ranks(self) -> Strategy:
        return self.step.ranks

    @property
    def optimizer(self) -> TrainOptimizer:
        return self.step.optimizer

    @property
    def scaler(self) -> GradScaler:
        return self.step.scaler

    @property
    def spikes(self) -> Spikes:
        return self.step.spikes

    def train(self, steps: int, done: int = 0) -> list[Path]:
        """Run updates `done` + 1 to `steps`; return the checkpoints written."""
        every_eval, every_save = self.cfg.train.eval_every, self.cfg.train.save_every
        self.model.train()
        self.ranks.on_rank_0(self.write_types)
        for step in range(done + 1, steps + 1):
            self.stop.step = step
            self.log.telemetry.before_step(step)
            stats, lr = self.log.new_stats(step), lr_at(step, self.cfg.train)
            with self.halts_while_waiting(step - 1):
                updated = self.update(step, lr, stats)
            if step == done + 1:  # the first update has created the optimizer state
                self.ranks.on_rank_0(self.write_sizes)
                # Allocate pinned memory now: the first update is slow anyway.
                if every_save and self.ranks.saves:
                    self.saver.memory.reserve(self._large_state())
            self.log.telemetry.after_step(step)
            self.log.add(step, updated, lr, stats)
            self.check_losses()
            if every_eval and (step % every_eval == 0 or step == steps):
                self.evaluate(step)
            if every_save and (step % every_save == 0 or self.held.unsaved):
                self.save(step)
            # Decided collectively: a rank that stopped alone would leave the others in a
            # collective.
            if asked := self.ranks.stop_request(self.stop, last=step == steps):
                self.halt(step, asked)
        self.check_losses(settle=True)
        self.saver.wait()
        if self.data.check is not None:
            with self.ranks.fetching(started=True):
                patience_s = self.ranks.patience_s(CHECK_S)
                self.data.check.settle(patience_s, self.log.progress.say)
        return self.saver.written

    def write_types(self) -> None:
        """Write the dtypes of the weights (dtypes_report.txt)."""
        write_dtypes(self.folder, self.runtime.precision, self.model.named_parameters())

    def write_sizes(self) -> None:
        """Write the size of the optimizer state (opt_state_mb.txt)."""
        write_opt_state(self.folder, self.optimizer.state_dict())

    def position(self, step: int) -> int:
        """The first row of an update; data skipped by a rollback is not read again."""
        rows = global_batch(self.cfg, self.ranks.num_data_ranks)
        return (step - 1 + self.spikes.jumped) * rows

    def positions(self, step: int) -> list[int]:
        """The first row of each micro-batch of this rank in an update."""
        train = self.cfg.train
        first, num_micro = self.position(step), train.accumulate_grad_batches
        return micro_positions(self.ranks, first, train.batch_size, num_micro)

    def update(self, step: int, lr: float, stats: AttentionStats | None) -> Updated:
        """Run one optimizer update with the mean gradient over its micro-batches."""
        # With several ranks, one small collective per update: did the data arrive, did anybody
        # request a stop, is the folder still there.
        with self.ranks.fetching(self.stop, started=True, seen=self.held.check()):
            self.data.require_whole()
            batches = [self.fetch(position) for position in self.positions(step)]
        self.held.react_to(self.ranks.seen, step)
        self.log.saw_input(step, batches[0].rows[:, :-1].shape)
        self.model.index_warm_up = warm_up = step <= self.cfg.train.index_warmup_steps
        self.step.freeze(warm_up and self.cfg.train.index_warmup == "frozen")
        return self.step(batches, lr, stats)

    def fetch(self, position: int) -> MicroBatch:
        """Read a micro-batch into pinned host memory; the copy to the GPU is asynchronous."""
        with self.log.telemetry.fetching(), span("fetch"):
            rows = self.data.train.batch(position, self.cfg.train.batch_size)
        return MicroBatch(rows, self.data.bounds(rows))

    def check_losses(self, *, settle: bool = False) -> None:
        """Check and log the results that are on the host; with `settle`, wait for all of them.

        Raises NonFiniteLoss, and LossSpike if the run can roll back.
        """
        while (spike := self.log.check(settle=settle)) is not None:
            self.roll_back(spike)

    def roll_back(self, spike: Spike) -> None:
        """Raise LossSpike with the last valid checkpoint before the spike; return if there is
        none."""
        self.saver.wait()
        jumped, num_spikes = self.spikes.jumped, self.log.metrics.spikes
        back = find_rollback(self.ranks, self.folder, spike.step, jumped, num_spikes)
        if back is None:
            self.log.progress.say("[spike] there is no checkpoint before it; training continues")
            return
        if asked := self.ranks.stop_request(self.stop):
            self._say_halt(asked)
            raise Halted(
                f"stopped by {asked}; {spike.text}, so nothing was saved after it; "
                f"the same command resumes from {back.path.name}"
            )
        self.log.progress.say(
            f"[spike] back to {back.path.name}; from there on the data of {back.jumped} updates "
            "is skipped"
        )
        raise LossSpike(spike.text, back)

    def evaluate(self, step: int) -> None:
        """Measure the loss on held-out rows."""
        with span(EVALUATE):
            self.check_losses(settle=True)
            with self.log.paused():
                self.log.telemetry.entering(step, EVALUATE)
                found = evaluate(self.model, self.data, self.cfg.train, self.runtime, self.ranks)
                self.log.add_evaluation(step, found)

    def save(self, step: int) -> None:
        """Start writing a checkpoint, once all losses up to `step` are known to be finite."""
        with span(SAVE):
            self.check_losses(settle=True)
            with self.log.paused():
                self.log.telemetry.entering(step, SAVE)
                self.held.unsaved = False
                if self.ranks.saves:
                    self.saver.wait()
                    self.saver.save(self.state_dict())

    @contextmanager
    def halts_while_waiting(self, step: int) -> Iterator[None]:
        """Context of the wait for a batch: halt after `step` if a stop is requested meanwhile."""
        try:
            yield
        except WaitEnded:
            self.halt(step, self.stop.requested())

    def halt(self, step: int, asked: str) -> NoReturn:
        """Save unless the last step is saved already, then raise Halted."""
        self.held.mark_stopping()
        self._say_halt(asked)
        raise Halted(f"stopped by {asked} after step {step}; {self.save_last(step)}")

    def save_last(self, step: int) -> str:
        """Save unless the last step is saved already; return how to resume, as text."""
        self.held.recreate_if_removed(step)
        # save_every divides step: saved already. save_every=0: never saved before.
        if self.log.is_new(step) and step % (self.cfg.train.save_every or step + 1):
            self.save(step)
        saved = self.saver.wait()
        return "the same command resumes from there" if saved else "no checkpoint could be written"

    def leave_unsaved(self) -> str:
        """Save nothing, because the training data is damaged; return what to do, as text."""
        self.saver.wait()
        done = self.log.metrics.resumed_at or 0
        if not self.saver.written:
            return f"nothing was saved since step {done}; the same command resumes from there"
        names = ", ".join(path.name for path in self.saver.written)
        older = [p for p in find.paths_of(self.folder) if find.step_of(p) <= done]
        back = f"--resume {older[0]}" if older else "--resume none"
        return (
            f"{names} may have learned from it; once the shard is repaired, the same command with "
            f"{back} trains these steps again"
        )

    def _say_halt(self, asked: str) -> None:
        if asked == ".HALT":
            self.log.progress.say("[train] HALT file detected — stopping gracefully.")
        elif asked == ORPHANED:
            self.log.progress.say(
                "[train] torchrun, which started these ranks, is gone: stopping with a checkpoint, "
                "so that no orphans train on beside the next start"
            )

    # --- the state in a checkpoint; checkpoint/file.py has the schema ---

    def state_dict(self) -> Content:
        """Everything that training changes, after the last step checked, copied to the CPU.

        Later steps do not affect the copy, but the next call reuses its memory: write it before.
        """
        step = self.log.metrics.step
        tensors = self.saver.memory.copy(self._large_state())
        # Prefetched batches do not count as read: the next step starts here.
        position = self.position(step + 1)
        return {
            "step": step,
            "state_dict": tensors["state_dict"],
            "cfg": to_container(self.cfg),
            "identity": dict(self.identity),
            "batch": {"world_size": self.ranks.num_data_ranks, "rows_of_rank": self.rows_asked},
            "optimizer": tensors["optimizer"],
            "scaler": self.scaler.state_dict(),
            "rng": _rng_states(),
            "spikes": self.spikes.state_dict(),
            "data": {"position": position, "source": self.data.train.state_dict(position)},
            "tokens_seen": step * self.log.metrics.tokens_per_step,
            "metrics": self.log.state_dict(),
        }

    def load_state_dict(self, state: Content) -> None:
        """Load a state into a trainer that was built from the same config."""
        self.model.load_state_dict(state["state_dict"], strict=True)
        load_optimizer(self.optimizer, state["optimizer"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if "spikes" in state:  # older checkpoints have none
            self.spikes.load_state_dict(state["spikes"])
        self.data.train.load_state_dict(state["data"]["source"])
        _set_rng_states(state["rng"])
        self.log.metrics.step = state["step"]
        self.log.load_state_dict(state["metrics"])

    def resume(self, start: Start) -> None:
        """Load a checkpoint; raise BadCheckpoint if it does not fit."""
        state = self.ranks.load_checkpoint(start.path, start.content, self._parameters())
        try:
            self.load_state_dict(state)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise BadCheckpoint(
                f"{start.path} does not fit the run that it names "
                f"({type(error).__name__}: {reason}); it was damaged or made by another program; "
                "use an older checkpoint"
            ) from None
        self.log.metrics.resumed_at = state["step"]

    def _parameters(self) -> dict[str, Tensor]:
        """The parameters by the names of their tensors in `_large_state`; of moments, all but the
        last part of the name."""
        weights = self.model.state_dict().items()
        found = {f"state_dict.{name}": x for name, x in weights}
        return found | parameters_of_state(self.optimizer, "optimizer")

    def _large_state(self) -> dict[str, Any]:
        """The large tensors of a checkpoint: weights and optimizer state."""
        return {"state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def _rng_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def _set_rng_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    # On another number of GPUs the states cannot be assigned and are ignored.
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])

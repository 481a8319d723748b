"""One optimizer update as a function of its batches; graph_step.py replays the same as a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.telemetry.spans import span
from nsa.train.loss import next_token_loss
from nsa.train.optimizer import TrainOptimizer, clip_gradients, not_finite, set_lr
from nsa.train.ranks import Alone
from nsa.train.runtime import Runtime
from nsa.train.spikes import Spikes


class Updated(NamedTuple):
    """What an update did, as numbers on the device that nobody has waited for."""

    loss: Tensor  # [] fp32
    norm: Tensor  # [] fp32, of the gradient before clipping
    limit: Tensor  # [] fp32, above which the loss is a spike


class MicroBatch(NamedTuple):
    """Rows whose gradient is computed at a time."""

    rows: Tensor  # [B, S + 1] int64
    bounds: Tensor | None = None  # [documents + 1] int32, on the host


class _Loss(nn.Module):
    """The loss as a module: what ranks put around one sees every gradient become ready."""

    def __init__(self, model: TinyLM, runtime: Runtime) -> None:
        super().__init__()
        self.model, self._runtime = model, runtime

    def forward(
        self, rows: Tensor, stats: AttentionStats | None, bounds: Tensor | None
    ) -> Tensor:  # [B, S + 1] int64 -> [] fp32
        return next_token_loss(self.model, rows, self._runtime, stats, bounds)


class EagerStep:
    """The update as it is written: one kernel after the other."""

    def __init__(
        self,
        model: TinyLM,
        optimizer: TrainOptimizer,
        runtime: Runtime,
        grad_clip: float,
        scaler: GradScaler,
        spikes: Spikes,
        ranks: Alone | None = None,
    ) -> None:
        self.model, self.optimizer, self.runtime = model, optimizer, runtime
        self.grad_clip, self.scaler, self.spikes = grad_clip, scaler, spikes
        self.ranks = ranks or Alone()
        self._loss = self.ranks.wrap(_Loss(model, runtime), runtime)

    def __call__(
        self, batches: Sequence[MicroBatch], lr: float, stats: AttentionStats | None = None
    ) -> Updated:
        """Do the update: the mean gradient over all micro-batches. Nobody waits for the device."""
        self.ranks.warm_up(lambda: self._backward(batches[0]))
        set_lr(self.optimizer, lr)
        limit = self.spikes.limit()
        loss, norm = self._update(batches, limit, stats)
        self.optimizer.zero_grad(set_to_none=True)
        self.spikes.remember(loss)
        return Updated(loss, norm, limit)

    def _update(
        self, batches: Sequence[MicroBatch], limit: Tensor, stats: AttentionStats | None
    ) -> tuple[Tensor, Tensor]:  # [] fp32 loss, [] fp32 gradient norm before clipping
        """All but the rate; leaves the gradients where they are."""
        losses = []
        for micro, (rows, bounds) in enumerate(batches):
            rows = rows.to(self.runtime.device, non_blocking=True)
            kept = None if micro else stats
            last = micro == len(batches) - 1
            with self.ranks.micro_batch(last=last):
                with span("forward", waits=self.ranks.gathers):
                    loss = self._loss(rows, kept, bounds)
                with self._backward_span(last):
                    self.scaler.scale(loss / len(batches)).backward()
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self.model, self.grad_clip)
        loss = self.ranks.share(sum(losses[1:], losses[0]) / len(losses))
        self.optimizer.skip = self._skip(loss, norm, limit)
        with span("optimizer"):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, norm

    def _backward(self, batch: MicroBatch) -> None:
        rows = batch.rows.to(self.runtime.device, non_blocking=True)
        with self._backward_span(last=True):
            self._loss(rows, None, batch.bounds).backward()

    def _backward_span(self, last: bool) -> span:
        """The gradients of the last micro-batch are exchanged while they are made; weights that are
        shared out are gathered in every pass."""
        exchanges = (last and self.ranks.world_size > 1) or self.ranks.gathers
        return span("backward and all-reduce" if exchanges else "backward", waits=exchanges)

    def _skip(self, loss: Tensor, norm: Tensor, limit: Tensor) -> Tensor:  # [] fp32, 0 or 1
        """Whether to leave the update out; loss scaling looks for infinite gradients by itself."""
        skip = torch.zeros_like(loss) if self.scaler.is_enabled() else not_finite(loss, norm)
        return torch.maximum(skip, (loss > limit).float()) if self.spikes.skips else skip

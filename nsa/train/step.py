"""One optimizer update as a function of its micro-batches: EagerStep launches it kernel by kernel,
GraphStep replays it as a CUDA graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.records.spans import span
from nsa.train.distributed.strategy import Strategy
from nsa.train.loss import collect_stats, next_token_loss
from nsa.train.optimizer import TrainOptimizer, clip_gradients, not_finite, set_lr
from nsa.train.runtime import Runtime
from nsa.train.spikes import Spikes


class Updated(NamedTuple):
    """Results of an update, still on the device: reading them would synchronize."""

    loss: Tensor  # [] fp32
    norm: Tensor  # [] fp32, of the gradient before clipping
    limit: Tensor  # [] fp32, above which the loss is a spike
    index_loss: Tensor | None = None  # [] fp32, of the indexers, if the model has some


class MicroBatch(NamedTuple):
    """Rows of one forward and backward pass."""

    rows: Tensor  # [B, S + 1] int64
    bounds: Tensor | None = None  # [documents + 1] int32, on the host


class Losses(NamedTuple):
    """Losses of a micro-batch, [] fp32 each."""

    total: Tensor
    """What is minimized."""
    text: Tensor
    indexers: Tensor | None
    """Of the indexers, mean over layers."""


class _Loss(nn.Module):
    """The loss as a module: DDP needs one to wrap, to see each gradient become ready."""

    def __init__(self, model: TinyLM, runtime: Runtime, index_weight: float) -> None:
        super().__init__()
        self.model, self._runtime, self._index_weight = model, runtime, index_weight

    def forward(
        self, rows: Tensor, stats: AttentionStats | None, bounds: Tensor | None
    ) -> Losses:  # of rows [B, S + 1] int64
        found: list[Tensor] = []
        text = next_token_loss(self.model, rows, self._runtime, stats, bounds, found)
        if not found:
            return Losses(text, text, None)
        index = torch.stack(found).mean()
        return Losses(text + self._index_weight * index, text, index)


class EagerStep:
    """The update, launched kernel by kernel."""

    def __init__(
        self,
        model: TinyLM,
        optimizer: TrainOptimizer,
        runtime: Runtime,
        grad_clip: float,
        scaler: GradScaler,
        spikes: Spikes,
        ranks: Strategy | None = None,
        index_weight: float = 1.0,
    ) -> None:
        """`index_weight`: that of the indexers' loss."""
        self.model, self.optimizer, self.runtime = model, optimizer, runtime
        self.grad_clip, self.scaler, self.spikes = grad_clip, scaler, spikes
        self.ranks = ranks or Strategy()
        self.index_weight, self.only_indexers = index_weight, False
        self._loss = self._wrapped_loss()

    def __call__(
        self, batches: Sequence[MicroBatch], lr: float, stats: AttentionStats | None = None
    ) -> Updated:
        """Apply the mean gradient over all micro-batches. No host sync."""
        self.ranks.warm_up(lambda: self._backward(batches[0]))
        set_lr(self.optimizer, lr)
        limit = self.spikes.limit()
        loss, norm, index_loss = self._update(batches, limit, stats)
        self.optimizer.zero_grad(set_to_none=True)
        self.spikes.remember(loss)
        return Updated(loss, norm, limit, index_loss)

    def freeze(self, only_indexers: bool) -> None:
        """Let only the indexers learn, or everything. What is frozen has no gradient: the optimizer
        skips it, with its weight decay, and makes no state for it."""
        if only_indexers == self.only_indexers:
            return
        self.only_indexers = only_indexers
        learning = {id(p) for p in self.model.indexer_parameters()}
        for parameter in self.model.parameters():
            parameter.requires_grad_(not only_indexers or id(parameter) in learning)
        self._loss = self._wrapped_loss()  # DDP counts the gradients that it waits for

    def _wrapped_loss(self) -> nn.Module:
        return self.ranks.wrap(_Loss(self.model, self.runtime, self.index_weight), self.runtime)

    def _update(
        self, batches: Sequence[MicroBatch], limit: Tensor, stats: AttentionStats | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # [] fp32: loss, gradient norm, loss of indexers
        """Everything but the learning rate; does not clear the gradients."""
        losses, index_losses = [], []
        for micro, (rows, bounds) in enumerate(batches):
            rows = rows.to(self.runtime.device, non_blocking=True)
            kept = None if micro else stats  # statistics cover the first micro-batch only
            last = micro == len(batches) - 1
            with self.ranks.micro_batch(last=last):
                with span("forward", waits=self.ranks.gathers):
                    found: Losses = self._loss(rows, kept, bounds)
                with self._backward_span(last):
                    _backpropagate(self.scaler.scale(found.total / len(batches)))
            losses.append(found.text.detach())
            if found.indexers is not None:
                index_losses.append(found.indexers.detach())
        if stats is not None:
            self.ranks.combine_stats(stats)
        self.scaler.unscale_(self.optimizer)
        norm = clip_gradients(self.model, self.grad_clip)
        loss = self.ranks.mean_loss(sum(losses[1:], losses[0]) / len(losses))
        index_loss = None
        if index_losses:  # on all ranks, or on none: the model is the same
            index_loss = self.ranks.mean_over_ranks(torch.stack(index_losses).mean())
        self.optimizer.skip = self._skip(loss, norm, limit)
        with span("optimizer"):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss, norm, index_loss

    def _backward(self, batch: MicroBatch) -> None:
        rows = batch.rows.to(self.runtime.device, non_blocking=True)
        with self._backward_span(last=True):
            _backpropagate(self._loss(rows, None, batch.bounds).total)

    def _backward_span(self, last: bool) -> span:
        """DDP overlaps the all-reduce with the last backward; FSDP gathers in every pass."""
        exchanges = (last and self.ranks.world_size > 1) or self.ranks.gathers
        return span("backward and all-reduce" if exchanges else "backward", waits=exchanges)

    def _skip(self, loss: Tensor, norm: Tensor, limit: Tensor) -> Tensor:  # [] fp32, 0 or 1
        """1 to skip the update: not finite, or a spike under spike_rule=skip.

        With loss scaling, GradScaler itself skips non-finite gradients.
        """
        skip = torch.zeros_like(loss) if self.scaler.is_enabled() else not_finite(loss, norm)
        return torch.maximum(skip, (loss > limit).float()) if self.spikes.skips else skip


def _backpropagate(loss: Tensor) -> None:
    """Gradients, by this thread: one device needs no thread of its own, which costs a compiled step
    of few tokens a sixth of its time."""
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()


# --- the update as a CUDA graph ---
# For a small model, an eager update is bound by the host, which launches a few thousand kernels one
# by one. The graph launches forward, backward, clipping and optimizer at once. It replays fixed
# addresses, so inputs that change (batch, learning rate, spike limit) are copied into static
# tensors.

WARM_UP = 3
"""Updates before the capture with no effect: they compile, tune, and create optimizer state."""


class GraphStep(EagerStep):
    """The same update, captured at the first call and replayed.

    The optimizer must be built with `capturable`. Restore checkpoints before the first call;
    afterwards weights and optimizer state may be read or changed in place, but never replaced.
    """

    def __init__(self, *parts: Any, share: GraphStep | None = None) -> None:
        """`parts` as for EagerStep; `share`: a GraphStep whose memory pool this one reuses. The two
        must not run at the same time."""
        super().__init__(*parts)
        _check(self.optimizer, self.runtime)
        device = self.runtime.device
        # Static inputs of the graph; `_idle` is 1 during warm-up, which skips every update.
        self._lr, self._limit, self._idle = (torch.zeros((), device=device) for _ in range(3))
        self._stream: torch.cuda.Stream = share._stream if share else torch.cuda.Stream(device)
        self._pool: Any = share._pool if share else torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._rows: list[Tensor] = []
        self._found: tuple[Tensor, Tensor] | None = None

    @property
    def captured(self) -> bool:
        """Whether the graph exists."""
        return self._graph is not None

    def __call__(
        self, batches: Sequence[MicroBatch], lr: float, stats: AttentionStats | None = None
    ) -> Updated:
        """Run the update. Statistics need an extra forward pass: a graph cannot collect them."""
        rows = [batch.rows for batch in batches]
        self._check_form(batches)
        self._hold_lr()
        if self._graph is None:
            with torch.cuda.device(self.runtime.device):
                self._capture(rows)
        assert self._graph is not None and self._found is not None
        limit = self.spikes.limit()
        self._lr.fill_(lr)
        self._limit.copy_(limit)
        for held, given in zip(self._rows, rows, strict=True):
            held.copy_(given, non_blocking=True)
        if stats is not None:
            collect_stats(self.model, self._rows[0], self.runtime, stats)
        self._graph.replay()
        loss, norm = (x.clone() for x in self._found)  # the next replay overwrites them
        self.spikes.remember(loss)
        return Updated(loss, norm, limit)

    def _skip(self, loss: Tensor, norm: Tensor, limit: Tensor) -> Tensor:
        return torch.maximum(super()._skip(loss, norm, limit), self._idle)

    def _check_form(self, batches: Sequence[MicroBatch]) -> None:
        if any(batch.bounds is not None for batch in batches):
            raise ValueError(
                "a CUDA graph cannot replay packed documents: boundaries change with every batch; "
                "use EagerStep"
            )
        given = [list(batch.rows.shape) for batch in batches]
        held = [list(rows.shape) for rows in self._rows]
        if self._graph is not None and given != held:
            raise ValueError(
                f"batches of shapes {given}, but the graph was captured with {held}; "
                "a graph takes one shape: make another GraphStep"
            )

    def _hold_lr(self) -> None:
        """Make all groups read the learning rate from one tensor, also after a resume."""
        for group in self.optimizer.param_groups:
            if group["lr"] is self._lr:
                continue
            if self._graph is not None:
                raise RuntimeError(
                    "the optimizer was changed after its update was captured as a CUDA graph; "
                    "restore checkpoints before the first update, or make another GraphStep"
                )
            group["lr"] = self._lr

    def _capture(self, rows: Sequence[Tensor]) -> None:
        """Warm up with updates that have no effect, then capture one; a capture runs no kernel.

        Gradients are None before the capture, so backward allocates them in the graph's pool, and
        every replay overwrites them: no zero_grad is needed.
        """
        self._rows = [x.to(self.runtime.device, copy=True) for x in rows]
        batches = [MicroBatch(x) for x in self._rows]
        current = torch.cuda.current_stream(self.runtime.device)
        self._idle.fill_(1.0)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*capturable=True.*")  # not captured yet
            for _ in range(WARM_UP):
                self._update(batches, self._limit, None)
                self.optimizer.zero_grad(set_to_none=True)
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: the loader and checkpoint threads may call CUDA during the capture.
        where = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with where:
            self._found = self._update(batches, self._limit, None)[:2]
        self._idle.fill_(0.0)
        self._graph = graph


def _check(optimizer: Optimizer, runtime: Runtime) -> None:
    if runtime.device.type != "cuda":
        raise ValueError(
            f"a CUDA graph cannot run on {runtime.device}; it needs a CUDA device: use EagerStep"
        )
    if runtime.precision == "fp16":
        raise ValueError(
            "a CUDA graph of fp16 training would need its loss scale on the device; use bf16 or "
            "fp32, or EagerStep"
        )
    if not all(group.get("capturable") for group in optimizer.param_groups):
        raise ValueError(
            "the optimizer was not built for CUDA graphs; use build_optimizer(..., capturable=True)"
        )

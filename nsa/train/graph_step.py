"""One optimizer update as a function of its batch: run as it is, or replayed as a CUDA graph.

A small model spends most of an eager update on the host, which starts some thousand kernels one by
one. A CUDA graph starts them all at once: forward and backward of every micro-batch, clipping and
the optimizer. It replays the same addresses, so what changes from update to update goes through
tensors that stay: the batch and the learning rate.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nsa.model import TinyLM
from nsa.model.stats import AttentionStats
from nsa.train.loss import next_token_loss
from nsa.train.optimizer import clip_gradients, set_lr, skip_unless_finite
from nsa.train.runtime import Runtime

WARM_UP = 3
"""Eager updates before the capture: they compile, tune, and make the optimizer's state."""


class EagerStep:
    """The update as it is written: one kernel after the other."""

    def __init__(
        self, model: TinyLM, optimizer: Optimizer, runtime: Runtime, *, grad_clip: float
    ) -> None:
        self.model, self.optimizer, self.runtime = model, optimizer, runtime
        self.grad_clip = grad_clip

    def __call__(
        self,
        batches: Tensor,  # [micro-batches, B, S + 1] int64
        lr: float,
        stats: AttentionStats | None = None,
    ) -> tuple[Tensor, Tensor]:  # [] fp32 loss, [] fp32 gradient norm before clipping
        """Do the update: the mean gradient over all micro-batches."""
        set_lr(self.optimizer, lr)
        found = self._update(batches.to(self.runtime.device, non_blocking=True), stats)
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def _update(self, batches: Tensor, stats: AttentionStats | None) -> tuple[Tensor, Tensor]:
        """All but the rate; leaves the gradients where they are."""
        losses = []
        for micro, batch in enumerate(batches):
            loss = next_token_loss(self.model, batch, self.runtime, None if micro else stats)
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        norm = clip_gradients(self.model, self.grad_clip)
        loss = sum(losses[1:], losses[0]) / len(losses)
        skip_unless_finite(self.optimizer, loss, norm)
        self.optimizer.step()
        return loss, norm


class GraphStep(EagerStep):
    """The same update, replayed as a CUDA graph from the fourth on; the first ones are real, too.

    The optimizer must be built with `capturable`. A checkpoint is restored before the first call;
    afterwards weights and optimizer state may be read, or changed in place, and never replaced.
    """

    def __init__(
        self,
        model: TinyLM,
        optimizer: Optimizer,
        runtime: Runtime,
        *,
        grad_clip: float,
        share: GraphStep | None = None,
    ) -> None:
        """`share` is another one whose memory this one uses as well: never run both at once."""
        super().__init__(model, optimizer, runtime, grad_clip=grad_clip)
        _check(optimizer, runtime)
        self._lr = torch.zeros((), device=runtime.device)
        self._stream: torch.cuda.Stream = (
            share._stream if share else torch.cuda.Stream(runtime.device)
        )
        self._pool: Any = share._pool if share else torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batches: Tensor | None = None
        self._found: tuple[Tensor, Tensor] | None = None
        self._num_eager = 0

    @property
    def captured(self) -> bool:
        """Whether updates are replayed from now on."""
        return self._graph is not None

    def __call__(
        self, batches: Tensor, lr: float, stats: AttentionStats | None = None
    ) -> tuple[Tensor, Tensor]:
        """Do the update; with `stats` it runs eagerly, because a graph cannot collect them."""
        self._hold_lr()
        if stats is not None or self._num_eager < WARM_UP:
            self._num_eager += 1
            return self._beside(batches, lr, stats)
        if self._graph is None:
            self._capture(batches)
        assert self._graph is not None and self._batches is not None and self._found is not None
        if batches.shape != self._batches.shape:
            raise ValueError(
                f"a batch of shape {list(batches.shape)} for a graph that was captured with "
                f"{list(self._batches.shape)}; a graph takes one shape: make another GraphStep"
            )
        self._lr.fill_(lr)
        self._batches.copy_(batches, non_blocking=True)
        self._graph.replay()
        loss, norm = self._found
        return loss.clone(), norm.clone()  # the next replay writes over them

    def _hold_lr(self) -> None:
        """Let all groups read the rate from one tensor, also after a checkpoint was loaded."""
        for group in self.optimizer.param_groups:
            if group["lr"] is self._lr:
                continue
            if self._graph is not None:
                raise RuntimeError(
                    "the optimizer was changed after its update was captured as a CUDA graph; "
                    "restore checkpoints before the first update, or make another GraphStep"
                )
            group["lr"] = self._lr

    def _beside(
        self, batches: Tensor, lr: float, stats: AttentionStats | None
    ) -> tuple[Tensor, Tensor]:
        """An eager update on the stream of the capture, where libraries make their workspaces."""
        current = torch.cuda.current_stream(self.runtime.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*capturable=True.*")  # not captured: yes
            loss, norm = super().__call__(batches, lr, stats)
        current.wait_stream(self._stream)
        for tensor in (loss, norm):
            tensor.record_stream(current)
        return loss, norm

    def _capture(self, batches: Tensor) -> None:
        """Record one update; recording runs nothing.

        The gradients are absent here, so backward makes them in the memory of the graph, and every
        replay writes them anew: nothing has to be set to zero.
        """
        self._batches = batches.to(self.runtime.device, copy=True)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on meanwhile: one reads data, one writes checkpoints.
        where = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with where:
            self._found = self._update(self._batches, None)
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

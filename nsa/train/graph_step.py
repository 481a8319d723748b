"""An optimizer update that is replayed as a CUDA graph.

A small model spends most of an eager update on the host, which starts some thousand kernels one by
one. A CUDA graph starts them all at once: forward and backward of every micro-batch, clipping and
the optimizer. It replays the same addresses, so what changes from update to update goes through
tensors that stay: the batch, the learning rate, and the limit above which a loss is a spike.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nsa.model.stats import AttentionStats
from nsa.train.loss import collect_stats
from nsa.train.runtime import Runtime
from nsa.train.step import EagerStep, MicroBatch, Updated

WARM_UP = 3
"""Updates before the capture, which change nothing: they compile, tune, and make the state."""


class GraphStep(EagerStep):
    """The same update, replayed from the first on.

    The optimizer must be built with `capturable`. A checkpoint is restored before the first call;
    afterwards weights and optimizer state may be read, or changed in place, and never replaced.
    """

    def __init__(self, *parts: Any, share: GraphStep | None = None) -> None:
        """Of the parts of EagerStep; `share` is one whose memory this one uses, too, in turns."""
        super().__init__(*parts)
        _check(self.optimizer, self.runtime)
        device = self.runtime.device
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
        """Do the update. Statistics come from a pass of their own: a graph cannot collect them."""
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
        loss, norm = (x.clone() for x in self._found)  # the next replay writes over them
        self.spikes.remember(loss)
        return Updated(loss, norm, limit)

    def _skip(self, loss: Tensor, norm: Tensor, limit: Tensor) -> Tensor:
        return torch.maximum(super()._skip(loss, norm, limit), self._idle)

    def _check_form(self, batches: Sequence[MicroBatch]) -> None:
        if any(batch.bounds is not None for batch in batches):
            raise ValueError(
                "a CUDA graph cannot hold packed documents, whose borders change with every batch; "
                "use EagerStep"
            )
        given = [list(batch.rows.shape) for batch in batches]
        held = [list(rows.shape) for rows in self._rows]
        if self._graph is not None and given != held:
            raise ValueError(
                f"batches of shapes {given} for a graph that was captured with {held}; "
                "a graph takes one shape: make another GraphStep"
            )

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

    def _capture(self, rows: Sequence[Tensor]) -> None:
        """Record one update, after some that leave everything as it is; recording runs nothing.

        The gradients are absent here, so backward makes them in the memory of the graph, and every
        replay writes them anew: nothing has to be set to zero.
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
        # Other threads go on meanwhile: one reads data, one writes checkpoints.
        where = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        with where:
            self._found = self._update(batches, self._limit, None)
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

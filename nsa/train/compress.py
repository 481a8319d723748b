"""Gradients in 16 bits on the wire: half the bytes, on any backend.

torch's own hook for bf16 wants NCCL; this one runs on gloo, too. The sum over the ranks is in 16
bits, the gradients before and after it are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

WIRE_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compress_gradients(model: DistributedDataParallel, wire: str) -> None:
    """Exchange the gradients of the model as `wire`, a name of WIRE_TYPES."""
    # A lambda, because torch compares annotations, which are text in this file, with its types.
    model.register_comm_hook(WIRE_TYPES[wire], lambda kind, bucket: _exchange(kind, bucket))


def _exchange(wire: torch.dtype, bucket: Any) -> torch.futures.Future[Tensor]:
    """Divided before the sum, which in fp16 could overflow otherwise."""
    gradient = bucket.buffer()
    short = (gradient / dist.get_world_size()).to(wire)
    work: Any = dist.all_reduce(short, async_op=True)

    def widen(done: torch.futures.Future[Any]) -> Tensor:
        gradient.copy_(done.value()[0])
        return gradient

    return work.get_future().then(widen)

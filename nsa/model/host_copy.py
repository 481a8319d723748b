"""Tensors on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """Starts to copy; nobody waits before `wait`, and that not for work that was queued later."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        on_gpu = any(x.is_cuda for x in tensors)
        self._tensors = [_start(x.detach()) for x in tensors]
        self._arrival = torch.cuda.Event() if on_gpu else None
        if self._arrival is not None:
            self._arrival.record()

    def wait(self) -> list[Tensor]:
        """The tensors, on the host."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._tensors


def _start(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)

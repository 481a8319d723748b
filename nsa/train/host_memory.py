"""Host memory for copies of a training state, pinned and kept from one checkpoint to the next.

Of what a copy from a GPU costs, the transfer is the small part: getting pages from the system, and
giving them back while the interpreter waits, take ten times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.train.nested import map_tensors


class HostMemory:
    """Holds one copy of a state at a time: the next one is written over it."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, state: Any) -> Any:
        """The same containers with copies of their tensors on the CPU; of those in parts, the part.

        Later steps leave the copies alone; the next call does not.
        """
        copied = map_tensors(state, self._copy)
        if self._kept:
            torch.cuda.current_stream().synchronize()
        return copied

    def reserve(self, state: Any) -> None:
        """Get the memory that a copy will need, at a moment when that disturbs nobody."""
        map_tensors(state, self._place)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        place = self._place(name, tensor)
        if place is tensor:
            return tensor.detach().to("cpu", copy=True)
        return place.copy_(tensor.detach(), non_blocking=True)

    def _place(self, name: str, tensor: Tensor) -> Tensor:
        """Where the copy of a tensor goes; itself where no memory is kept for it."""
        if not _is_kept(tensor):
            return tensor
        place = self._kept.get(name)
        if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
            place = self._kept[name] = _pinned_like(tensor)
        return place


def _is_kept(tensor: Tensor) -> bool:
    """Those of a CPU are copied anew, as ever; so are parts of a tensor that ranks share."""
    return tensor.is_cuda and type(tensor.detach()) is Tensor


def _pinned_like(tensor: Tensor) -> Tensor:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:  # the system pins no more: a copy to other memory is slower, and right
        return torch.empty_like(tensor, device="cpu")

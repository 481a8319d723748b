"""Memory that is needed between the launches of a step, and by every step again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Workspace:
    """Buffers by name and size; layers that run one after another can share them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Tensor] = {}

    def get(self, name: str, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same memory for the same name and size."""
        key = (name, size, dtype, device)
        if key not in self._kept:
            self._kept[key] = torch.empty(size, dtype=dtype, device=device)
        return self._kept[key]

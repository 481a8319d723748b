"""Tensors in nested dicts, lists and tuples: what states and checkpoints are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(value: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """The same containers with changed tensors; `change` gets the keys on the way, with dots."""
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, dict):
        return {k: map_tensors(inner, change, f"{name}.{k}") for k, inner in value.items()}
    if isinstance(value, list | tuple):
        changed = (map_tensors(inner, change, f"{name}.{i}") for i, inner in enumerate(value))
        return type(value)(changed)
    return value

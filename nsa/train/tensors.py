"""Tensors in nested dicts, lists and tuples: what states and checkpoints are made of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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


# Tensors that ranks share out (DTensor), for code that works on this rank's part of them.
#
# All functions take ordinary tensors, too, and give them back as they are.


def part(x: Tensor) -> Tensor:
    """What this rank holds of it: the memory itself, no copy."""
    return x.to_local() if is_shared_out(x) else x


def whole(x: Tensor) -> Tensor:
    """All of it; every rank must ask for it."""
    return x.full_tensor() if is_shared_out(x) else x


def join(held: Tensor, like: Tensor) -> Tensor:
    """All of a tensor that is shared out as `like` is, from what each rank holds of it."""
    if not is_shared_out(like):
        return held
    from torch.distributed.tensor import DTensor

    shape, stride = like.shape, like.stride()
    mesh, how = like.device_mesh, like.placements
    return DTensor.from_local(held, mesh, how, shape=shape, stride=stride).full_tensor()


def cut(x: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of a tensor that all have, shared out as `like` is; nothing is sent."""
    if not is_shared_out(like):
        return x
    from torch.distributed.tensor import distribute_tensor

    return part(distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None))


def is_shared_out(x: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; none is unless somebody has imported them, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)

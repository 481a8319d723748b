"""Tensor helpers: map over nested containers, and convert between DTensors and local shards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def map_tensors(value: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """Apply `change(name, tensor)` to every tensor in nested dicts, lists and tuples.

    The name is the path of keys and indices, joined by dots.
    """
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, dict):
        return {k: map_tensors(inner, change, f"{name}.{k}") for k, inner in value.items()}
    if isinstance(value, list | tuple):
        changed = (map_tensors(inner, change, f"{name}.{i}") for i, inner in enumerate(value))
        return type(value)(changed)
    return value


# --- sharded tensors (DTensor) ---
# All functions return ordinary tensors unchanged, so callers need not know whether FSDP is on.


def local_shard(x: Tensor) -> Tensor:
    """The shard of this rank; a view, not a copy."""
    return x.to_local() if is_sharded(x) else x


def gather_tensor(x: Tensor) -> Tensor:
    """The full tensor. Collective: every rank must call it."""
    return x.full_tensor() if is_sharded(x) else x


def gather_shards(held: Tensor, like: Tensor) -> Tensor:
    """The full tensor from local shards that are laid out as those of `like`. Collective."""
    if not is_sharded(like):
        return held
    from torch.distributed.tensor import DTensor

    shape, stride = like.shape, like.stride()
    mesh, how = like.device_mesh, like.placements
    return DTensor.from_local(held, mesh, how, shape=shape, stride=stride).full_tensor()


def shard_like(x: Tensor, like: Tensor) -> Tensor:
    """This rank's shard, laid out as in `like`, of a full tensor that all ranks have.

    No communication.
    """
    if not is_sharded(like):
        return x
    from torch.distributed.tensor import distribute_tensor

    return local_shard(distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None))


def is_sharded(x: Tensor) -> TypeGuard[DTensor]:
    """Whether `x` is a DTensor."""
    # Importing the module takes a second; if nobody has imported it, there are no DTensors.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)

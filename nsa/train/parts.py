"""Tensors that ranks share out (DTensor), for code that works on this rank's part of them.

All functions take ordinary tensors, too, and give them back as they are.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def part(x: Tensor) -> Tensor:
    """What this rank holds of it: the memory itself, no copy."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """All of it; every rank must ask for it."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def join(held: Tensor, like: Tensor) -> Tensor:
    """All of a tensor that is shared out as `like` is, from what each rank holds of it."""
    if not isinstance(like, DTensor):
        return held
    shape, stride = like.shape, like.stride()
    mesh, how = like.device_mesh, like.placements
    return DTensor.from_local(held, mesh, how, shape=shape, stride=stride).full_tensor()


def cut(x: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of a tensor that all have, shared out as `like` is; nothing is sent."""
    if not isinstance(like, DTensor):
        return x
    return part(distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None))

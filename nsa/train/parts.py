"""Tensors that ranks share out (DTensor), for code that works on this rank's part of them.

All functions take ordinary tensors, too, and give them back as they are.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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

"""Linear layers of a decode step, with the norm before and the sum after them in one kernel.

Each function computes what its layers would, one after the other, and calls them where the kernel
does not run: on a CPU, for many rows, under autocast, for layers that are not plain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nsa.model.rope import RMSNorm
from nsa.ops.machine import interpreted, machine_obstacle, machine_of


def norm_and_project(
    x: Tensor,  # [B, 1, dim]
    norm: RMSNorm,
    first: nn.Linear,
    second: nn.Linear,
) -> tuple[Tensor, Tensor]:  # [B, 1, out of each]
    """Two layers of the normed x."""
    if not _runs(x, first, second, norm=norm):
        normed = norm(x)
        return first(normed), second(normed)
    out, out2 = _product(x, first, norm, second=second)
    assert out2 is not None
    return out, out2


def norm_and_activate(
    x: Tensor,  # [B, 1, dim]
    norm: RMSNorm,
    layer: nn.Linear,
    gate: nn.Linear | None,
) -> Tensor:  # [B, 1, out]
    """silu(layer(normed x)), or silu(gate(normed x)) * layer(normed x)."""
    if _runs(x, layer, gate, norm=norm):
        return _product(x, layer, norm, silu=gate is None, gate=gate)[0]
    normed, silu = norm(x), nn.functional.silu
    return silu(layer(normed)) if gate is None else silu(gate(normed)) * layer(normed)


def add_product(
    x: Tensor,  # [B, 1, out]
    layer: nn.Linear,
    y: Tensor,  # [B, 1, in]
) -> Tensor:  # [B, 1, out]
    """x + layer(y)."""
    if x.dtype == y.dtype and _runs(y, layer):
        return _product(y, layer, more=x)[0]
    return x + layer(y)


def is_plain(layer: nn.Module) -> bool:
    """Whether calling the layer does what its class says, on whole weights: it is not a subclass
    that shards, no hook looks on, and its parameters are not parts of others."""
    return (
        type(layer) in (nn.Linear, RMSNorm)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and all(type(w) is nn.Parameter for w in layer.parameters(recurse=False))
    )


def _runs(x: Tensor, *layers: nn.Linear | None, norm: RMSNorm | None = None) -> bool:
    """Whether the kernel takes these rows and layers."""
    if not (x.is_cuda or interpreted()) or torch.is_autocast_enabled(x.device.type):
        return False
    if x.is_cuda and machine_obstacle(machine_of(x.device)):
        return False
    from nsa.ops.triton.decode.linear import fits  # Triton exists for Linux only

    there = [layer for layer in (*layers, norm) if layer is not None]
    weights = [w for layer in there for w in layer.parameters(recurse=False)]
    return all(map(is_plain, there)) and fits(x, *weights)


def _product(
    x: Tensor,
    layer: nn.Linear,
    norm: RMSNorm | None = None,
    *,
    gate: nn.Linear | None = None,
    second: nn.Linear | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor | None]:
    from nsa.ops.triton.decode.linear import Matrix, Norm, product

    return product(
        x,
        Matrix(layer.weight, layer.bias),
        norm=None if norm is None else Norm(norm.weight, norm.eps),
        gate=None if gate is None else gate.weight,
        second=None if second is None else Matrix(second.weight, second.bias),
        **rest,
    )

"""Muon: momentum whose matrices are made orthogonal, so that every direction moves alike.

An update is U V^T of the momentum's singular value decomposition, nearly: five Newton-Schulz steps
bring the singular values between 0.7 and 1.2. It is scaled by 0.2 sqrt(max(rows, columns)), which
gives its entries the root mean square of 0.2 that AdamW's usually have, so that the learning rate
and the weight decay mean the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nsa.train.parts import cut, join, part

MOMENTUM = 0.95
RMS = 0.2
"""Of the entries of an update, before the learning rate."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a x + b x^3 + c x^5 moves every x in (0, 1] towards 1 as fast as a quintic can, not onto it."""
STEPS = 5
EPS = 1e-7


class Muon(Optimizer):
    """For matrices alone. `skip`, a number on the device, leaves everything as it is where 1.

    The rate may be a tensor. `capturable` is a word for those who ask: nothing reads the device.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float,
        weight_decay: float,
        *,
        capturable: bool = False,
    ) -> None:
        for parameter in params:
            if parameter.ndim != 2:
                raise ValueError(
                    f"Muon got a parameter of shape {list(parameter.shape)}; it takes matrices: "
                    "give the others to AdamW"
                )
        defaults = {"lr": lr, "weight_decay": weight_decay, "capturable": capturable}
        super().__init__(params, defaults)
        self.skip: Tensor | None = None  # [] fp32, 0 or 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("capturable", False)  # checkpoints had no such word at first

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all matrices; those of one shape go through the iteration together."""
        if closure is not None:
            raise ValueError("Muon takes no closure; call backward() before step()")
        for group in self.param_groups:
            found = sorted((p for p in group["params"] if p.grad is not None), key=_shape)
            for _, same in groupby(found, key=_shape):
                self._update(list(same), group["lr"], group["weight_decay"])

    def _update(self, params: list[Tensor], lr: float | Tensor, weight_decay: float) -> None:
        """Ranks that share matrices out update their parts; to be orthogonal takes whole ones."""
        gradients = [part(p.grad) for p in params if p.grad is not None]
        kept, held = [part(self._momentum(p)) for p in params], [part(p) for p in params]
        momenta = torch._foreach_lerp(kept, gradients, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # Nesterov's
        joined = [join(x, p) for x, p in zip(ahead, params, strict=True)]
        updates = orthogonalize(torch.stack(joined)).to(params[0].dtype)
        mine = [cut(x, p) for x, p in zip(updates, params, strict=True)]
        rate = lr * RMS * math.sqrt(max(params[0].shape))
        news = torch._foreach_mul(held, 1 - lr * weight_decay)
        torch._foreach_add_(news, torch._foreach_mul(mine, -rate))
        for old, new in zip([*held, *kept], [*news, *momenta], strict=True):
            old.copy_(new if self.skip is None else torch.where(self.skip > 0, old, new))

    def _momentum(self, parameter: Tensor) -> Tensor:
        state: dict[str, Any] = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        return momentum


def orthogonalize(matrices: Tensor) -> Tensor:  # [N, rows, columns] -> the same
    """Bring the singular values near 1; products in bf16 on a GPU, where that is exact enough."""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # the smaller square below
    x = x / (torch.linalg.vector_norm(x.float(), dim=(-2, -1), keepdim=True) + EPS).to(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def _shape(parameter: Tensor) -> tuple[int, int]:
    rows, columns = parameter.shape
    return rows, columns

"""The learning rate as a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import AdamW, Optimizer

from nsa.config import TrainConfig
from nsa.config.env import read
from nsa.train.runtime import Runtime
from nsa.train.tensors import cut, join, part, whole


def lr_at(step: int, train: TrainConfig) -> float:
    """Return the rate of update `step`, counted from 1: linear warm-up, then the schedule.

    The horizon of the cosine is train.steps, also when a run ends earlier. It reaches zero one step
    after the last update, so that no update is done with a rate of zero.
    """
    if step <= train.warmup_steps:
        return train.lr * step / train.warmup_steps
    if train.lr_schedule == "constant":
        return train.lr
    if train.lr_schedule == "wsd":
        falling = train.decay_steps or min(train.steps // 5, train.steps - train.warmup_steps)
        return train.lr * min((train.steps + 1 - step) / (falling + 1), 1.0)
    done = (step - train.warmup_steps) / (train.steps - train.warmup_steps + 1)
    return train.lr * 0.5 * (1.0 + math.cos(math.pi * done))


# Loss scaling for fp16, whose smallest numbers are too large for most gradients.


def new_scaler(runtime: Runtime) -> GradScaler:
    """A scaler with the settings of the environment; off, and transparent, in other precisions."""
    return GradScaler(
        runtime.device.type,
        init_scale=read("NSA_SCALER_INIT_SCALE"),
        growth_interval=read("NSA_SCALER_GROWTH_INTERVAL"),
        growth_factor=read("NSA_SCALER_GROWTH_FACTOR"),
        backoff_factor=read("NSA_SCALER_BACKOFF_FACTOR"),
        enabled=runtime.precision == "fp16",
    )


# Muon: momentum whose matrices are made orthogonal, so that every direction moves alike.
#
# An update is U V^T of the momentum's singular value decomposition, nearly: five Newton-Schulz
# steps bring the singular values between 0.7 and 1.2. It is scaled by 0.2 sqrt(max(rows, columns)),
# which gives its entries the root mean square of 0.2 that AdamW's usually have, so that the
# learning rate and the weight decay mean the same in both.

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


# The optimizer of a run: AdamW, or Muon for the matrices of the blocks and AdamW for the rest.
#
# All of them can be told, by a number on the device that nobody waits for, to leave an update out.

OWN = ("lr", "capturable")
"""Settings of a group that a checkpoint does not decide."""
BETAS = (0.9, 0.95)
"""A shorter memory of squared gradients than torch's 0.999: usual for language models."""


class SkippingAdamW(AdamW):
    """AdamW in its fused form, which leaves everything as it is where `skip` is 1."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, *, capturable: bool) -> None:
        super().__init__(groups, lr=lr, betas=BETAS, fused=True, capturable=capturable)
        self.skip: Tensor | None = None  # [] fp32, 0 or 1

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        given = getattr(self, "found_inf", None)
        self.found_inf = skipped(self)  # what the fused kernel looks at
        super().step(closure)
        self.found_inf = given


class MuonAndAdamW(Optimizer):
    """Muon and AdamW as one optimizer: one schedule, one decision to skip, one state."""

    _step_supports_amp_scaling = True
    """Loss scaling then says what it found, and does not wait to look at it."""

    def __init__(self, muon: Muon, adamw: SkippingAdamW) -> None:
        self._both = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.skip: Tensor | None = None  # [] fp32, 0 or 1

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        skip = skipped(self)
        for optimizer in self._both:
            optimizer.skip = skip
            optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        muon, adamw = self._both
        return {"muon": muon.state_dict(), "adamw": adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        muon, adamw = self._both
        muon.load_state_dict(state_dict["muon"])
        adamw.load_state_dict(state_dict["adamw"])
        self.param_groups = [*muon.param_groups, *adamw.param_groups]  # loading made new ones


TrainOptimizer = SkippingAdamW | MuonAndAdamW


def build_optimizer(
    model: nn.Module, train: TrainConfig, *, capturable: bool = False
) -> TrainOptimizer:
    """Build the optimizer of the config; `capturable`: a CUDA graph can hold its updates."""
    decayed, free = _by_decay(model)
    hidden: list[nn.Parameter] = []
    if train.optimizer == "muon":
        linear = (m for m in model.get_submodule("blocks").modules() if isinstance(m, nn.Linear))
        chosen = {id(layer.weight) for layer in linear}
        hidden = [p for p in decayed if id(p) in chosen]
        decayed = [p for p in decayed if id(p) not in chosen]
    groups = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    adamw = SkippingAdamW(
        [group for group in groups if group["params"]], train.lr, capturable=capturable
    )
    if not hidden:
        return adamw
    muon = Muon(hidden, train.lr, train.weight_decay, capturable=capturable)
    return MuonAndAdamW(muon, adamw)


def skipped(optimizer: Optimizer) -> Tensor | None:  # [] fp32, 0 or 1
    """1 where the update is to be left out: by our own word, or by that of loss scaling."""
    flags = [getattr(optimizer, name, None) for name in ("skip", "found_inf")]
    given = [flag.reshape(()) for flag in flags if flag is not None]
    return torch.stack(given).amax().clamp(max=1.0) if given else None


def load_optimizer(optimizer: TrainOptimizer, state: dict[str, Any]) -> None:
    """Restore moments and counts; how updates are run is this run's own, and so is the rate."""
    own = [{key: group.get(key) for key in OWN} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, kept in zip(optimizer.param_groups, own, strict=True):
        group.update({key: value for key, value in kept.items() if key in group})


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give all groups the rate of the next update; a rate that is a tensor stays the same one."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def not_finite(loss: Tensor, norm: Tensor) -> Tensor:  # [] fp32, 0 or 1
    """1 where the loss or the gradient is NaN or infinite: such an update must not be done."""
    return (~(loss.isfinite() & norm.isfinite())).float()


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:  # [] fp32
    """Scale the gradients down to `max_norm`, 0 for never, and return their norm before that.

    Where ranks hold parts of them, it is the norm of the whole, and the same on every rank.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients))
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm or float("inf"), norm)
    return norm


def _by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the parameters into those that decay and those that do not.

    Norm weights and biases do not: zero is not their neutral value, or they are too few to overfit.
    Embeddings do not either: a row gets gradients only when its token occurs, so decay would
    shrink the rows of rare tokens at every step with nothing to pull them back.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.ndim >= 2 and id(p) not in embeddings]
    free = [p for p in parameters if p.ndim < 2 or id(p) in embeddings]
    return decayed, free

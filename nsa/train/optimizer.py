"""The optimizer of a run: AdamW, or Muon for the matrices of the blocks and AdamW for the rest.

All of them can be told, by a number on the device that nobody waits for, to leave an update out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from nsa.config import TrainConfig
from nsa.train.muon import Muon
from nsa.train.parts import whole

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

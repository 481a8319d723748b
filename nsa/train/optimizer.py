"""AdamW, with weight decay on the matrices only."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from nsa.config import TrainConfig

BETAS = (0.9, 0.95)
"""A shorter memory of squared gradients than torch's 0.999: usual for language models."""


def build_optimizer(model: nn.Module, train: TrainConfig, *, capturable: bool = False) -> Optimizer:
    """Build the optimizer, in its fused form: one kernel instead of many for each parameter.

    With `capturable` a CUDA graph can hold its updates (graph_step.py).
    """
    decayed, free = _by_decay(model)
    groups = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=train.lr, betas=BETAS, fused=True, capturable=capturable)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give all groups the rate of the next update; a rate that is a tensor stays the same one."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def skip_unless_finite(optimizer: Optimizer, loss: Tensor, norm: Tensor) -> None:
    """Make the next update a no-op, on the device, where the loss or the gradient is not finite.

    The fused optimizer reads this attribute, as gradient scaling sets it; nobody waits for it.
    """
    finite = loss.isfinite() & norm.isfinite()
    optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:  # [] fp32
    """Scale the gradients down to `max_norm`, 0 for never, and return their norm before that."""
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))


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

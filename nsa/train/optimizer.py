"""Learning-rate schedule, fp16 loss scaling, Muon, and the optimizer of a run (AdamW, or Muon for
the matrices of the blocks and AdamW for the rest).

All optimizers here can skip an update by a flag on the device, without a host sync.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import AdamW, Optimizer

from nsa.config import TrainConfig
from nsa.config.env import read
from nsa.model import TinyLM
from nsa.train.runtime import Runtime
from nsa.train.tensors import gather_shards, gather_tensor, is_sharded, local_shard, shard_like


def lr_at(step: int, train: TrainConfig) -> float:
    """The learning rate of update `step`, counted from 1: linear warm-up, then the schedule.

    The horizon of the cosine is train.steps, even if the run ends earlier. It reaches zero one step
    after the last update, so that no update has a rate of zero.
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


# --- loss scaling: most gradients would underflow in fp16 ---


def new_scaler(runtime: Runtime) -> GradScaler:
    """A GradScaler with settings from the environment; a no-op unless the precision is fp16."""
    return GradScaler(
        runtime.device.type,
        init_scale=read("NSA_SCALER_INIT_SCALE"),
        growth_interval=read("NSA_SCALER_GROWTH_INTERVAL"),
        growth_factor=read("NSA_SCALER_GROWTH_FACTOR"),
        backoff_factor=read("NSA_SCALER_BACKOFF_FACTOR"),
        enabled=runtime.precision == "fp16",
    )


# --- torch's optimizers without its compiler ---


def _unwrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    """What torch has wrapped to keep Dynamo out of it; the wrapper imports torch._dynamo."""
    return getattr(method, "__wrapped__", method)


class _Eager(Optimizer):
    """Base of the optimizers here. Nobody compiles them, and importing Dynamo takes 3 s."""

    add_param_group = _unwrapped(Optimizer.add_param_group)
    zero_grad = _unwrapped(Optimizer.zero_grad)
    state_dict = _unwrapped(Optimizer.state_dict)
    load_state_dict = _unwrapped(Optimizer.load_state_dict)


# --- Muon: momentum with orthogonalized updates ---
# With momentum M = U S V^T, the update is about U V^T: five Newton-Schulz steps bring the singular
# values to [0.7, 1.2]. It is scaled by 0.2 sqrt(max(rows, columns)), so that its entries have the
# RMS of 0.2 that is typical for AdamW; learning rate and weight decay then mean the same in both.

MOMENTUM = 0.95
RMS = 0.2
"""RMS of the entries of an update, before the learning rate."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""(a, b, c) of a x + b x^3 + c x^5: moves x in (0, 1] towards 1 as fast as a quintic can, but does
not converge to 1."""
STEPS = 5
"""Newton-Schulz iterations."""
EPS = 1e-7


class Muon(_Eager):
    """Muon for 2-D parameters. If `skip`, a scalar on the device, is 1, the update has no effect.

    The learning rate may be a tensor. `capturable` changes nothing, because no step reads the
    device; GraphStep checks for it.
    """

    def __init__(
        self,
        params: list[nn.Parameter] | list[dict[str, Any]],
        lr: float,
        weight_decay: float,
        *,
        capturable: bool = False,
    ) -> None:
        """`params` may be groups of parameters, as those of torch's optimizers."""
        for parameter in _flat(params):
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
            group.setdefault("capturable", False)  # absent in older checkpoints

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all matrices; those of the same shape are batched."""
        if closure is not None:
            raise ValueError("Muon takes no closure; call backward() before step()")
        for group in self.param_groups:
            found = sorted((p for p in group["params"] if p.grad is not None), key=_shape)
            for _, same in groupby(found, key=_shape):
                self._update(list(same), group["lr"], group["weight_decay"])

    def _update(self, params: list[Tensor], lr: float | Tensor, weight_decay: float) -> None:
        """Update matrices of one shape. Under FSDP each rank updates its shards, but the
        orthogonalization needs the full matrices."""
        gradients = [local_shard(p.grad) for p in params if p.grad is not None]
        kept = [local_shard(self._momentum(p)) for p in params]
        held = [local_shard(p) for p in params]
        momenta = torch._foreach_lerp(kept, gradients, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # Nesterov momentum
        joined = [gather_shards(x, p) for x, p in zip(ahead, params, strict=True)]
        updates = orthogonalize(torch.stack(joined)).to(params[0].dtype)
        mine = [shard_like(x, p) for x, p in zip(updates, params, strict=True)]
        rate = lr * RMS * math.sqrt(max(params[0].shape))
        news = torch._foreach_mul(held, 1 - lr * weight_decay)
        torch._foreach_add_(news, torch._foreach_mul(mine, -rate))
        # torch.where, not an if: `skip` is on the device and must not be read by the host.
        for old, new in zip([*held, *kept], [*news, *momenta], strict=True):
            old.copy_(new if self.skip is None else torch.where(self.skip > 0, old, new))

    def _momentum(self, parameter: Tensor) -> Tensor:
        state: dict[str, Any] = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        return momentum


def orthogonalize(matrices: Tensor) -> Tensor:  # [N, rows, columns] -> the same
    """Newton-Schulz iteration: bring all singular values near 1. In bf16 on a GPU: exact enough."""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x  # x x^T is then the smaller of the two Gram matrices
    x = x / (torch.linalg.vector_norm(x.float(), dim=(-2, -1), keepdim=True) + EPS).to(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def _flat(params: list[nn.Parameter] | list[dict[str, Any]]) -> Iterator[nn.Parameter]:
    for part in params:
        yield from part["params"] if isinstance(part, dict) else [part]


def _shape(parameter: Tensor) -> tuple[int, int]:
    rows, columns = parameter.shape
    return rows, columns


# --- the optimizer of a run ---

SCALE = "lr_scale"
"""Group setting: its learning rate as a multiple of the run's; absent: 1."""
OWN = ("lr", "capturable", SCALE)
"""Group settings that this run decides, not the checkpoint."""
CLIP_EPS = 1e-6
"""Added to the norm that a gradient is divided by, as torch does."""
BETAS = (0.9, 0.95)
"""beta2 is below torch's 0.999, as is usual for language models."""


class SkippingAdamW(_Eager, AdamW):
    """Fused AdamW; the update has no effect where `skip` is 1."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, *, capturable: bool) -> None:
        super().__init__(groups, lr=lr, betas=BETAS, fused=True, capturable=capturable)
        self.skip: Tensor | None = None  # [] fp32, 0 or 1

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        given = getattr(self, "found_inf", None)
        self.found_inf = skipped(self)  # the fused kernel reads it on the device
        with torch.no_grad():  # as the wrapper does
            _unwrapped(AdamW.step)(self, closure)
        self.found_inf = given


class MuonAndAdamW(_Eager):
    """Muon and AdamW as one optimizer: one schedule, one skip flag, one state."""

    _step_supports_amp_scaling = True
    """GradScaler then sets `found_inf` instead of reading it on the host."""

    def __init__(self, muon: Muon, adamw: SkippingAdamW) -> None:
        self._optimizers = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.skip: Tensor | None = None  # [] fp32, 0 or 1

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        skip = skipped(self)
        for optimizer in self._optimizers:
            optimizer.skip = skip
            optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        muon, adamw = self._optimizers
        return {"muon": muon.state_dict(), "adamw": adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        muon, adamw = self._optimizers
        muon.load_state_dict(state_dict["muon"])
        adamw.load_state_dict(state_dict["adamw"])
        # load_state_dict creates new group dicts, so the combined list must be rebuilt.
        self.param_groups = [*muon.param_groups, *adamw.param_groups]


TrainOptimizer = SkippingAdamW | MuonAndAdamW


def build_optimizer(
    model: TinyLM, train: TrainConfig, *, capturable: bool = False
) -> TrainOptimizer:
    """Build the optimizer of the config; `capturable`: usable inside a CUDA graph."""
    decayed, free = _by_decay(model)
    hidden: list[nn.Parameter] = []
    if train.optimizer == "muon":
        linear = (m for m in model.get_submodule("blocks").modules() if isinstance(m, nn.Linear))
        chosen = {id(layer.weight) for layer in linear}
        hidden = [p for p in decayed if id(p) in chosen]
        decayed = [p for p in decayed if id(p) not in chosen]
    groups = [
        *(
            {**group, "weight_decay": train.weight_decay}
            for group in _by_rate(decayed, model, train)
        ),
        *({**group, "weight_decay": 0.0} for group in _by_rate(free, model, train)),
    ]
    adamw = SkippingAdamW(groups, train.lr, capturable=capturable)
    if not hidden:
        return adamw
    matrices = _by_rate(hidden, model, train)
    muon = Muon(matrices, train.lr, train.weight_decay, capturable=capturable)
    return MuonAndAdamW(muon, adamw)


def _by_rate(params: list[nn.Parameter], model: TinyLM, train: TrainConfig) -> list[dict[str, Any]]:
    """Groups of the parameters: one, or with train.index_lr another one for the indexers'."""
    if not train.index_lr:
        return [{"params": params}] if params else []
    indexers = {id(p) for p in model.indexer_parameters()}
    theirs = [p for p in params if id(p) in indexers]
    others = [p for p in params if id(p) not in indexers]
    ours = [{"params": others}] if others else []
    return ours + ([{"params": theirs, SCALE: train.index_lr / train.lr}] if theirs else [])


def skipped(optimizer: Optimizer) -> Tensor | None:  # [] fp32, 0 or 1
    """1 to skip the update: set by us (`skip`) or by GradScaler (`found_inf`); None if unset."""
    flags = [getattr(optimizer, name, None) for name in ("skip", "found_inf")]
    given = [flag.reshape(()) for flag in flags if flag is not None]
    return torch.stack(given).amax().clamp(max=1.0) if given else None


def parameters_of_state(optimizer: TrainOptimizer, name: str) -> dict[str, Tensor]:
    """The parameters by the names of their state in `state_dict()`, which is called `name`."""
    if isinstance(optimizer, MuonAndAdamW):
        muon, adamw = optimizer._optimizers
        parts: list[tuple[str, Optimizer]] = [(f"{name}.muon", muon), (f"{name}.adamw", adamw)]
    else:
        parts = [(name, optimizer)]
    return {
        f"{place}.state.{number}": parameter
        for place, part in parts
        for number, parameter in enumerate(p for g in part.param_groups for p in g["params"])
    }


def load_optimizer(optimizer: TrainOptimizer, state: dict[str, Any]) -> None:
    """Restore moments and step counts; the settings in OWN stay those of this run."""
    own = [{key: group.get(key) for key in OWN} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, kept in zip(optimizer.param_groups, own, strict=True):
        group.update({key: value for key, value in kept.items() if key in group})


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all groups; a rate that is a tensor is updated in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr * group.get(SCALE, 1.0)


def not_finite(loss: Tensor, norm: Tensor) -> Tensor:  # [] fp32, 0 or 1
    """1 if the loss or the gradient norm is NaN or infinite: the update must be skipped."""
    return (~(loss.isfinite() & norm.isfinite())).float()


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:  # [] fp32
    """Clip the gradients to `max_norm` (0: no clipping) and return their norm before clipping.

    For sharded gradients it is the global norm, the same on every rank. Under tensor parallelism
    some are sharded in one way and some in two.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    by_mesh = groupby(sorted(gradients, key=_mesh_name), key=_mesh_name)
    norms = [gather_tensor(nn.utils.get_total_norm(list(same))) for _, same in by_mesh]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    share = torch.clamp((max_norm or float("inf")) / (norm + CLIP_EPS), max=1.0)
    torch._foreach_mul_([local_shard(x) for x in gradients], share)
    return norm


def _mesh_name(x: Tensor) -> str:
    """Tensors with the same name are on one mesh, and one operation can take them together."""
    return str(x.device_mesh) if is_sharded(x) else ""


def _by_decay(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the parameters into those with weight decay and those without.

    No decay for norm weights and biases: zero is not their neutral value, or they are too few to
    overfit. None for embeddings either: a row gets gradients only when its token occurs, so decay
    would shrink the rows of rare tokens at every step.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    parameters = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in parameters if p.ndim >= 2 and id(p) not in embeddings]
    free = [p for p in parameters if p.ndim < 2 or id(p) in embeddings]
    return decayed, free

"""Loss scaling for fp16, whose smallest numbers are too large for most gradients."""

from __future__ import annotations

from torch.amp.grad_scaler import GradScaler

from nsa.config.env import read
from nsa.train.runtime import Runtime


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

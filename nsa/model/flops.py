"""Training FLOPs of the model per token, of the same model with dense attention, and the MFU.

These are model FLOPs: forward, and twice that in backward. What a kernel or a checkpointed layer
computes again is not in them, so a run that computes more for the same update has a lower MFU.
"""

from __future__ import annotations

import re
from dataclasses import replace

from nsa.config import Config
from nsa.model.counts import forward_flops, training_flops

TERA = 1e12
PEAKS = (
    (r"A100|A800", 312.0),
    (r"H100 PCIe", 756.0),
    (r"(H100|H200) NVL", 835.0),
    (r"GH200|H100|H200|H800", 989.0),
    (r"B200", 2250.0),
    (r"L40S", 362.0),
    (r"L4", 121.0),
)
"""Peak of dense 16-bit products in TFLOP/s, as NVIDIA states it; the first whole name counts."""
HALF = ("bf16", "fp16")
"""Precisions that the peaks are for; bf16 and fp16 have the same one on all these devices."""


def training_flops_per_token(config: Config) -> dict[str, float]:
    """Count forward and backward by part, averaged over the tokens of a row."""
    return _per_token(config, forward_flops(config))


def dense_training_flops_per_token(config: Config) -> dict[str, float]:
    """Count the same for causal attention over every earlier key: one K and V, and no gates."""
    return _per_token(config, dense_forward_flops(config))


def dense_forward_flops(config: Config, seq_len: int | None = None) -> dict[str, int]:
    """Count the FLOPs of one row through the dense twin of the model, by part."""
    return forward_flops(_dense_twin(config), seq_len)


def peak_flops(device_name: str, precision: str) -> float | None:
    """The FLOP/s that a device can do at most; None for one not in PEAKS, and for fp32."""
    if precision not in HALF:
        return None
    found = (peak for name, peak in PEAKS if re.search(rf"\b({name})\b", device_name))
    return next((TERA * peak for peak in found), None)


def utilization(
    flops_per_token: float, toks_per_s: float, peak: float | None, num_devices: int = 1
) -> float | None:
    """MFU: the share, 0 to 1, of the peak of all devices; None where the peak is not known."""
    return None if peak is None else flops_per_token * toks_per_s / (peak * num_devices)


def _dense_twin(config: Config) -> Config:
    model, runtime = config.model, config.runtime
    return replace(
        config,
        model=replace(model, attention="dense"),
        runtime=replace(runtime, backend="auto"),  # the twin refuses those of NSA
    )


def _per_token(config: Config, forward: dict[str, int]) -> dict[str, float]:
    seq_len = config.train.seq_len
    return {part: count / seq_len for part, count in training_flops(forward).items()}

"""The variables NSA_DDP_*: how ranks exchange gradients, and what else changes under DDP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from nsa.config import Config, ConfigError
from nsa.config.env import read

SAFE_BUCKET_MB = 2.0
AUTO, OFF = "auto", "off"


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """How DistributedDataParallel is built."""

    bucket_mb: float | None
    """Gradients are exchanged in pieces of this size; None is torch's own."""
    compress: str
    """Type of the gradients on the wire: bf16, fp16, or off."""
    static_graph: bool
    find_unused: bool
    bucket_view: bool
    """Gradients live in the pieces that are exchanged, which saves a copy of them."""


def read_settings(precision: str) -> DdpSettings:
    """As the environment says, for a run of that precision; NSA_DDP_SAFE_MODE wins over the rest.

    Gradients of bf16 products have lost their lower bits already, so bf16 on the wire costs little;
    those of fp32 have not, and a run in fp32 should not lose them to a default.
    """
    if read("NSA_DDP_SAFE_MODE"):
        return DdpSettings(
            bucket_mb=SAFE_BUCKET_MB,
            compress=OFF,
            static_graph=False,
            find_unused=read("NSA_DDP_FIND_UNUSED"),
            bucket_view=False,
        )
    compress = read("NSA_DDP_COMPRESS")
    if compress == AUTO:
        compress = "bf16" if precision == "bf16" else OFF
    return DdpSettings(
        bucket_mb=read("NSA_DDP_BUCKET_MB") or None,
        compress=compress,
        static_graph=read("NSA_DDP_STATIC_GRAPH"),
        find_unused=read("NSA_DDP_FIND_UNUSED"),
        bucket_view=True,
    )


def adapt_config(cfg: Config, say: Callable[[str], None]) -> Config:
    """The config as it is trained under DDP; every change is said."""
    if cfg.runtime.cuda_graph:
        raise ConfigError(
            "runtime.cuda_graph=true under DDP: the exchange of gradients is not in the graph; "
            "set it to false, or train in one process",
            key="runtime.cuda_graph",
        )
    runtime, layers = cfg.runtime, read("NSA_DDP_SAFE_GC_LAYERS")
    if layers:
        runtime = dataclasses.replace(runtime, gradient_checkpointing=True, gc_layers=layers)
        say(f"[ddp-safe] Progressive GC enabled under DDP for layers [{layers})")
    elif runtime.gradient_checkpointing and read("NSA_DDP_DISABLE_GC"):
        runtime = dataclasses.replace(runtime, gradient_checkpointing=False, gc_layers="")
        say("[ddp-safe] Disabled gradient checkpointing under DDP")
    if read("NSA_DDP_SAFE_MODE"):
        runtime = dataclasses.replace(runtime, use_flash=False)
        say(
            f"[ddp-safe] Safe mode: buckets of {SAFE_BUCKET_MB:g} MB that gradients are copied "
            "into, no compression, no static graph, no flash kernels"
        )
    return dataclasses.replace(cfg, runtime=runtime)

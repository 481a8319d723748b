"""What to say when a step does not fit into memory."""

from __future__ import annotations

import torch

from nsa.config import Config
from nsa.model.memory import training_memory
from nsa.train.runtime import Runtime

GIB = 2**30


def explain_memory(cfg: Config, runtime: Runtime, error: str) -> str:
    """The estimate by part, what the device has, and what to try, best first."""
    parts = training_memory(cfg)
    largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    has = ""
    if runtime.device.type == "cuda":
        total = torch.cuda.get_device_properties(runtime.device).total_memory
        has = f"; {runtime.device} has {total / GIB:.1f} GiB"
    return (
        f"out of memory ({error.strip().splitlines()[0]}); the estimate for this config is "
        f"{sum(parts.values()) / GIB:.1f} GiB ({named}){has}; try: {'; '.join(_advice(cfg))}"
    )


def _advice(cfg: Config) -> list[str]:
    train, tried = cfg.train, []
    if train.batch_size > 1:
        size, accumulate = train.batch_size, train.accumulate_grad_batches
        tried.append(
            f"train.batch_size={-(-size // 2)} train.accumulate_grad_batches={accumulate * 2}, "
            "which keeps the global batch"
        )
    if not cfg.runtime.gradient_checkpointing:
        tried.append("runtime.gradient_checkpointing=true, which recomputes activations")
    elif cfg.runtime.gc_layers:
        tried.append("runtime.gc_layers= (empty), which checkpoints all layers")
    if cfg.runtime.precision == "fp32":
        tried.append("runtime.precision=bf16")
    tried.append(f"train.seq_len={max(train.seq_len // 2, 1)}, a shorter context")
    tried.append("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, against fragments")
    return tried[:3]

"""Where and in which precision a run computes: resolved once, then fixed and printed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.config import ConfigError, RuntimeConfig
from nsa.config.env import read, set_default
from nsa.model.dense import describe_backends
from nsa.ops.plan import plan_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The device, the compute precision and the attention plan of a run."""

    device: torch.device
    precision: str
    """bf16 and fp16 compute matrix products in 16 bits; weights and optimizer stay fp32."""
    use_flash: bool
    plan: str
    """Which attention backend runs, and why."""

    @property
    def dtype(self) -> torch.dtype:
        """The type that products are computed in."""
        return DTYPES[self.precision]

    @contextmanager
    def compute(self) -> Iterator[None]:
        """The context of every forward pass."""
        half = self.precision != "fp32"
        kind = self.dtype if half else torch.bfloat16  # autocast wants one even where it is off
        with torch.autocast(self.device.type, dtype=kind, enabled=half):
            if self.use_flash:
                yield
            else:
                with sdpa_kernel(SDPBackend.MATH):
                    yield

    @property
    def device_name(self) -> str:
        """The name of the GPU's model, or cpu."""
        is_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if is_gpu else self.device.type

    def describe_device(self) -> str:
        """Name the device as a person would."""
        if self.device.type == "cuda":
            tf32 = "on" if torch.backends.cuda.matmul.allow_tf32 else "off"
            return f"{self.device} ({self.device_name}, TF32 {tf32})"
        return f"{self.device} ({torch.get_num_threads()} threads)"

    def describe_flash(self) -> str:
        """Say whether flash kernels may run; the plan says which branches use them."""
        if not self.use_flash:
            return "flash disabled (runtime.use_flash=false)"
        if read("NSA_SDPA_NO_FLASH"):
            return "flash disabled (NSA_SDPA_NO_FLASH=1)"
        return "flash enabled"


def resolve_runtime(
    config: RuntimeConfig, head_dims: tuple[int, ...] = (64,), attention: str = "nsa"
) -> Runtime:
    """Choose the device, allow TF32 on it, and ask for the plan for heads of these dims."""
    device = _device(config.device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    dtype, backend = DTYPES[config.precision], config.attention_backend
    if attention == "dense":
        plan = f"attention: dense, {describe_backends()}"
    else:
        plan = str(plan_attention(device, dtype, backend, head_dims))
    if not config.use_flash:
        plan += ", SDPA: math only (runtime.use_flash=false)"
    if config.compile:
        plan += ", blocks compiled in training"
    if config.deterministic:
        plan += ", deterministic (runtime.deterministic=true)"
    return Runtime(device=device, precision=config.precision, use_flash=config.use_flash, plan=plan)


@contextmanager
def ordered_sums(config: RuntimeConfig) -> Iterator[None]:
    """Let torch and our kernels sum in a fixed order where the config asks for it.

    It must be entered before the first product on a GPU: cuBLAS looks at its variable once. An
    operation that has no fixed order raises and names itself.
    """
    if not config.deterministic:  # whoever has chosen it for the process keeps it
        yield
        return
    set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one of two that are reproducible
    fills: Any = torch.utils.deterministic  # a module whose settings have no types
    cudnn = torch.backends.cudnn
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        fills.fill_uninitialized_memory,
        cudnn.deterministic,
        cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(True)
    # New memory is written by whoever asked for it; filling it before costs time and no order.
    fills.fill_uninitialized_memory = False
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        fills.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark = before[2:]


def _device(name: str) -> torch.device:
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"runtime.device={name}: this machine has {count} CUDA devices; "
            f"use {'cpu' if not count else f'cuda:0 to cuda:{count - 1}'}, or auto"
        )
    return device

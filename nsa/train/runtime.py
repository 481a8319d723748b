"""Device, precision, attention plan and determinism of a run: resolved once and logged at boot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.config import ConfigError, RuntimeConfig
from nsa.config.env import read, set_default
from nsa.model.dense import describe_backends
from nsa.ops.machine import machine_of
from nsa.ops.plan import choose_backend, plan_attention

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
        """The dtype of matrix products."""
        return DTYPES[self.precision]

    @contextmanager
    def compute(self) -> Iterator[None]:
        """The context of every forward pass: autocast and the choice of SDPA kernels."""
        half = self.precision != "fp32"
        kind = self.dtype if half else torch.bfloat16  # autocast checks it even if disabled
        with torch.autocast(self.device.type, dtype=kind, enabled=half), self.sdpa_kernels():
            yield

    def sdpa_kernels(self) -> AbstractContextManager[None]:
        """Within it, SDPA may use every kernel, or its math alone with runtime.use_flash=false."""
        return nullcontext() if self.use_flash else sdpa_kernel(SDPBackend.MATH)

    @property
    def device_name(self) -> str:
        """The GPU model, or cpu."""
        is_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if is_gpu else self.device.type

    def describe_device(self) -> str:
        """The device with its model and TF32 setting, or its number of CPU threads."""
        if self.device.type == "cuda":
            tf32 = "on" if torch.backends.cuda.matmul.allow_tf32 else "off"
            return f"{self.device} ({self.device_name}, TF32 {tf32})"
        return f"{self.device} ({torch.get_num_threads()} threads)"

    def describe_flash(self) -> str:
        """Whether flash kernels may run; the plan says which branches use them."""
        if not self.use_flash:
            return "flash disabled (runtime.use_flash=false)"
        if read("NSA_SDPA_NO_FLASH"):
            return "flash disabled (NSA_SDPA_NO_FLASH=1)"
        return "flash enabled"


def resolve_runtime(
    config: RuntimeConfig, head_dims: tuple[int, ...] = (64,), attention: str = "nsa"
) -> Runtime:
    """Choose the device, allow TF32 on it, and plan the attention for these head dims.

    `attention` is ModelConfig.attention_kind.
    """
    device = _device(config.device)
    if device.type == "cuda":
        # TF32: faster fp32 products with a 10-bit mantissa.
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    dtype, backend = DTYPES[config.precision], config.attention_backend
    if attention == "dense":
        plan = f"attention: dense, {describe_backends()}"
    elif attention == "nsa":
        plan = str(plan_attention(device, dtype, backend, head_dims))
    else:
        runs = choose_backend(machine_of(device), dtype, backend, head_dims)[0]
        plan = f"attention: {attention}, sparse_attention on {runs}"
    if not config.use_flash:
        plan += ", SDPA: math only (runtime.use_flash=false)"
    if config.compile:
        plan += ", blocks compiled in training"
    if config.deterministic:
        plan += ", deterministic (runtime.deterministic=true)"
    return Runtime(device=device, precision=config.precision, use_flash=config.use_flash, plan=plan)


@contextmanager
def deterministic_algorithms(config: RuntimeConfig) -> Iterator[None]:
    """Enable deterministic algorithms in torch and our kernels if the config asks for it.

    Enter before the first matrix product on a GPU: cuBLAS reads its variable once. Operations
    without a deterministic implementation raise.
    """
    if not config.deterministic:  # keep a setting that the caller made for the process
        yield
        return
    set_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # one of two reproducible values
    fills: Any = torch.utils.deterministic  # the module is untyped
    cudnn = torch.backends.cudnn
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        fills.fill_uninitialized_memory,
        cudnn.deterministic,
        cudnn.benchmark,
    )
    torch.use_deterministic_algorithms(True)
    # Filling new memory costs time and is not needed: our code writes all of it before use.
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

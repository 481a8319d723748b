"""Memory, load and temperature of the device that a run uses, for its heartbeat."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nsa.telemetry import nvml

if TYPE_CHECKING:
    import torch

MIB = 1024 * 1024


class GpuReading(NamedTuple):
    """One look at the GPU; all None on a CPU."""

    gpu_mem_alloc: int | None = None
    """MiB in tensors, as torch's allocator counts."""
    gpu_mem_reserved: int | None = None
    """MiB that the allocator holds."""
    gpu_util_pct: int | None = None
    """Share of the last moments in which a kernel ran; None without NVIDIA's driver library."""
    gpu_temp_c: int | None = None


def read_gpu(device: torch.device | str | None) -> GpuReading:
    """Look at the device: no wait for it, about a millisecond for load and temperature."""
    import torch  # readers of run folders start without it

    device = torch.device(device or "cpu")
    if device.type != "cuda":
        return GpuReading()
    load = nvml.read_load(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return GpuReading(
        torch.cuda.memory_allocated(device) // MIB,
        torch.cuda.memory_reserved(device) // MIB,
        load.util_pct,
        load.temp_c,
    )

"""What /proc tells about a process, so that a pid is never taken for another process."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


PROC = Path("/proc")
STATE, FLAGS, START_TICKS = 0, 6, 19
"""Fields after the name of the program: R, S, T and so on; flags of the kernel; clock ticks from
boot to its start."""


def stat_fields(pid: int | str) -> list[str] | None:
    """The fields after the name of the program, which may hold anything; None without a process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def start_ticks(pid: int | str = "self") -> int:
    """When a process started; with the pid it names one process for good. 0 where unknown."""
    fields = stat_fields(pid)
    return int(fields[START_TICKS]) if fields else 0


# What only NVIDIA's driver knows: load, temperature and version, asked of its own library.
#
# libnvidia-ml comes with the driver, so no Python package is needed; without it everything is None.

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
GPU_SENSOR = 0
VERSION_BYTES = 80


class Load(NamedTuple):
    """How busy and how warm a GPU is."""

    util_pct: int | None
    temp_c: int | None


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def read_load(uuid: str) -> Load:
    """Load of the GPU with this UUID; indices differ between NVML and CUDA, UUIDs do not."""
    library = _library()
    if library is None:
        return Load(None, None)
    device = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)) != SUCCESS:
        return Load(None, None)
    rates, degrees = _Utilization(), ctypes.c_uint()
    has_rates = library.nvmlDeviceGetUtilizationRates(device, ctypes.byref(rates)) == SUCCESS
    has_degrees = (
        library.nvmlDeviceGetTemperature(device, GPU_SENSOR, ctypes.byref(degrees)) == SUCCESS
    )
    return Load(rates.gpu if has_rates else None, degrees.value if has_degrees else None)


def driver_version() -> str | None:
    """Version of the installed driver."""
    library = _library()
    text = ctypes.create_string_buffer(VERSION_BYTES)
    if library is None or library.nvmlSystemGetDriverVersion(text, VERSION_BYTES) != SUCCESS:
        return None
    return text.value.decode("ascii", errors="replace")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:  # no driver on this machine
        return None
    return library if library.nvmlInit_v2() == SUCCESS else None


# Memory, load and temperature of the device that a run uses, for its heartbeat.

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
    load = read_load(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return GpuReading(
        torch.cuda.memory_allocated(device) // MIB,
        torch.cuda.memory_reserved(device) // MIB,
        load.util_pct,
        load.temp_c,
    )

"""Facts about the GPUs of the machine: load from NVML, memory from torch."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from nsa.files import MIB

if TYPE_CHECKING:
    import torch


# --- NVML: GPU load, temperature and driver version ---
# Called by ctypes: libnvidia-ml comes with the driver, so no Python package is needed. Without the
# library all values are None.

LIBRARY = "libnvidia-ml.so.1"
SUCCESS = 0
GPU_SENSOR = 0
VERSION_BYTES = 80


class Load(NamedTuple):
    """Utilization and temperature of a GPU."""

    util_pct: int | None
    temp_c: int | None


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def read_load(uuid: str) -> Load:
    """Load of the GPU with this UUID. NVML and CUDA may number GPUs differently."""
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


# --- the device of a run, for its heartbeat ---


class GpuReading(NamedTuple):
    """One sample of the GPU; all None on a CPU."""

    gpu_mem_alloc: int | None = None
    """MiB allocated to tensors by torch."""
    gpu_mem_reserved: int | None = None
    """MiB reserved by torch's caching allocator."""
    gpu_util_pct: int | None = None
    """Percent of recent time in which a kernel ran; None without NVML."""
    gpu_temp_c: int | None = None


def read_gpu(device: torch.device | str | None) -> GpuReading:
    """Sample the device without synchronizing it; NVML takes about a millisecond."""
    import torch  # imported here because readers of run folders must not need it

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

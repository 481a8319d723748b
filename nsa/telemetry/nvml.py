"""What only NVIDIA's driver knows: load, temperature and version, asked of its own library.

libnvidia-ml comes with the driver, so no Python package is needed; without it everything is None.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

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

"""What this machine can run: its GPU, the versions of torch and Triton, Triton's interpreter."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

TRITON_OLDEST = (3, 6)
"""Triton 3.3 lacks what the kernels import, and 3.4 fails at the second launch of a kernel."""
TORCH_OLDEST = (2, 11)
"""The torch that ships Triton 3.6; pyproject.toml names the same versions."""
TRITON_CAPABILITY = (8, 0)
"""Oldest GPU with what the kernels use: bf16 products and asynchronous copies."""


class Machine(NamedTuple):
    """Facts that decide about Triton beside the tensors: the device and the installed packages."""

    kind: str
    """cuda, cpu, ..."""
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU; None: no GPU is available."""
    rocm: bool = False
    """Whether torch is built for AMD GPUs, whose device type is cuda, too."""
    torch: tuple[int, int] = TORCH_OLDEST
    triton: tuple[int, int] | None = TRITON_OLDEST
    """Major and minor version; None: not installed. Looked up for CUDA devices only."""


def machine_of(device: torch.device) -> Machine:
    """The facts of a device, cached per device."""
    # `cuda` means the current device, which may change: resolved before the cache sees it.
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return _machine_of(device)


@cache
def _machine_of(device: torch.device) -> Machine:
    there = device.type == "cuda" and torch.cuda.is_available()
    return Machine(
        device.type,
        torch.cuda.get_device_capability(device) if there else None,
        rocm=torch.version.hip is not None,
        torch=_version(torch.__version__),
        triton=_triton_version() if device.type == "cuda" else None,
    )


def _triton_version() -> tuple[int, int] | None:
    """Version of the importable package; CUDA builds of torch install their own."""
    if find_spec("triton") is None:
        return None
    import triton

    return _version(triton.__version__)


def _version(text: str) -> tuple[int, int]:
    """Major and minor: `2.14.0a0+git1234` is (2, 14)."""
    major, minor = re.findall(r"\d+", text)[:2]
    return int(major), int(minor)


@cache
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors.

    The one answer for the whole package. TRITON_INTERPRET=1 counts when kernels are imported, so it
    is asked once.
    """
    if (_triton_version() or (0, 0)) < TRITON_OLDEST:
        return False
    # knobs exists only in recent versions of Triton, hence the check above.
    from triton import knobs

    return bool(knobs.runtime.interpret)


def machine_obstacle(machine: Machine) -> str:
    """Why no Triton kernel of this package runs on this machine; empty when they do."""
    if machine.rocm:
        return "torch is built for ROCm, the kernels are for NVIDIA's GPUs"
    if machine.triton is None:
        return "the package triton is not installed"
    for name, found, oldest in (
        ("Triton", machine.triton, TRITON_OLDEST),
        ("torch", machine.torch, TORCH_OLDEST),
    ):
        if found < oldest:
            return f"{name} is {_dotted(found)}, the kernels need {_dotted(oldest)} or later"
    if machine.capability is not None and machine.capability < TRITON_CAPABILITY:
        return (
            f"the GPU has compute capability {_dotted(machine.capability)}, the kernels need "
            f"{_dotted(TRITON_CAPABILITY)} or later"
        )
    return ""


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"

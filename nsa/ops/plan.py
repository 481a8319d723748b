"""Which backend runs a call, and why: decided from static facts, never from data; printable."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

from nsa.config.env import read

BACKENDS = ("auto", "reference", "torch", "triton")
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON_MAX_DIM = 256
TRITON_DIM_STEP = 8
"""The kernels take head dims that are multiples of this, up to the largest: a row of other 16-bit
heads is not aligned, and Triton 3.6 was seen to compute wrong values there (docs/kernels.md)."""


@dataclass(frozen=True)
class Plan:
    """The resolved choice for one kind of call."""

    requested: str
    """What the caller asked for: one of BACKENDS."""
    backend: str
    """What runs: reference, torch or triton."""
    reason: str
    """Why, in a sentence."""
    selection: str
    """Which function chooses the blocks: `fast` is the backend's own, `reference` the oracle's."""

    def __str__(self) -> str:
        return (
            f"attention backend: {self.backend} (asked for: {self.requested}; {self.reason}), "
            f"selection: {self.selection}"
        )


def plan_attention(
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    head_dims: tuple[int, ...] = (64,),
) -> Plan:
    """Resolve `backend` for tensors of this kind; an explicit backend runs or raises.

    `head_dims` are Dk and Dv.
    """
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is not known; use one of {', '.join(BACKENDS)} "
            f"(auto takes the fastest that can run)"
        )
    kind = torch.device(device).type
    chosen, reason = backend, "named by the caller"
    if backend in ("auto", "triton"):
        obstacle = _triton_obstacle(kind, dtype, head_dims, interpreter=backend == "triton")
        if backend == "triton" and obstacle:
            raise ValueError(
                f"backend='triton' cannot run: {obstacle}; use backend='torch', or 'auto' to take "
                f"the best there is"
            )
        if backend == "auto":
            chosen = "torch" if obstacle else "triton"
            reason = f"Triton cannot run: {obstacle}" if obstacle else f"the fastest on {kind}"
    if chosen == "reference":
        reason += "; float64 and quadratic, for checking only"
    fast = read("NSA_SEL_RANGES_V2") and chosen != "reference"
    return Plan(backend, chosen, reason, "fast" if fast else "reference")


def _triton_obstacle(
    kind: str, dtype: torch.dtype, head_dims: tuple[int, ...], *, interpreter: bool
) -> str:
    """Why the Triton kernels cannot take such tensors; empty when they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if kind != "cuda" and not (interpreter and _interpreted()):
        return f"the tensors are on {kind}, the kernels need a CUDA device"
    if dtype not in TRITON_DTYPES:
        return f"the kernels have no {dtype}"
    for dim in head_dims:
        if dim > TRITON_MAX_DIM or dim % TRITON_DIM_STEP:
            allowed = f"multiples of {TRITON_DIM_STEP} up to {TRITON_MAX_DIM}"
            return f"a head dim is {dim}, the kernels take {allowed}"
    return ""


@cache
def _interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    from triton import knobs

    return bool(knobs.runtime.interpret)

"""Which backend runs a call, and why: decided from static facts, never from data; printable."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nsa.config.env import read

BACKENDS = ("auto", "reference", "torch", "triton")


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
) -> Plan:
    """Resolve `backend` for tensors of this kind; an explicit backend runs or raises."""
    if backend not in BACKENDS:
        raise ValueError(
            f"backend={backend!r} is not known; use one of {', '.join(BACKENDS)} "
            f"(auto takes the fastest that can run)"
        )
    kind = torch.device(device).type
    if backend == "triton":
        raise ValueError(
            "backend='triton' cannot run: this version has no Triton kernels; "
            "use backend='torch', or 'auto' to take the best there is"
        )
    chosen = "torch" if backend == "auto" else backend
    reason = {
        "auto": f"the fastest that runs {dtype} on {kind}; this version has no Triton kernels",
        "torch": "named by the caller",
        "reference": "named by the caller; float64 and quadratic, for checking only",
    }[backend]
    fast = read("NSA_SEL_RANGES_V2") and chosen != "reference"
    return Plan(backend, chosen, reason, "fast" if fast else "reference")

"""What a compiled graph keeps of the choices of a call: they are made once, while it is traced.

Only a trace imports this module. `torch.compiler.assume_constant_result` loads torch._dynamo, which
takes as long as torch itself, and everybody else can do without it.
"""

from __future__ import annotations

import torch

from nsa import ops
from nsa.ops.plan import Plan


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def plan_call(
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    head_dims: tuple[int, ...],
    packed: bool,
) -> Plan:
    """The plan of every call that runs the graph."""
    return ops.plan_call(device, dtype, backend, head_dims, packed)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def backend_of_call(
    device: torch.device, dtype: torch.dtype, backend: str, head_dims: tuple[int, ...]
) -> str:
    """The backend of every call that runs the graph."""
    return ops.backend_of_call(device, dtype, backend, head_dims)

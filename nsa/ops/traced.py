"""Plan and backend of a call under torch.compile: resolved once, as constants of the graph.

Imported only while a graph is traced: `torch.compiler.assume_constant_result` loads torch._dynamo,
which takes as long to import as torch itself.
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

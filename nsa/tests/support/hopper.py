"""What the tests of the selected kernels in Gluon share: problems on a GPU, marks of cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa import BlockSpec
from nsa.ops.plan import NO_FLAGS
from nsa.ops.triton import problem
from nsa.tests.support.gpu import DEVICE, needs_gpu

FEW = BlockSpec(n_sel=4)
"""Few blocks, so that short sequences are beyond the masked order."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
on_sm_90 = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() != (9, 0),
    reason="the kernel is for compute capability 9.0",
)


def marked(*cases: Any) -> list[Any]:
    """Parameters of tests that need such a GPU."""
    return [pytest.param(case, marks=[*needs_gpu, on_sm_90]) for case in cases]


def problem_of(
    capability: int = 90,
    *,
    S: int,
    G: int,
    dims: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    spec: BlockSpec = FEW,
    docs: tuple[int, ...] = (),
    offset: int = 0,
) -> problem.Problem:
    """A problem on a GPU that is not here."""
    q = torch.empty(1, S, 2 * G, dims[0], dtype=dtype, device="meta")
    v = torch.empty(1, S, 2, dims[1], dtype=dtype, device="meta")
    places = ([S], [offset]) if offset else ((), ())
    made = problem.Problem(q, v, spec, 0.1, list(docs) or [S + offset], NO_FLAGS, *places)
    made.__dict__["capability"] = divmod(capability, 10)
    return made

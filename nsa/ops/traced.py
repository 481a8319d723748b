"""The functions of plan.py under torch.compile: called once, their results constants of the graph.

Imported only while a graph is traced: `torch.compiler.assume_constant_result` loads torch._dynamo,
which takes as long to import as torch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from nsa.ops import plan

Result = TypeVar("Result")

plan_call = torch.compiler.assume_constant_result(plan.plan_call)
plan_scoring = torch.compiler.assume_constant_result(plan.plan_scoring)
plan_sparse = torch.compiler.assume_constant_result(plan.plan_sparse)
plan_compression = torch.compiler.assume_constant_result(plan.plan_compression)


@torch.compiler.disable
def call_eagerly(function: Callable[..., Result], *args: object, **kwargs: object) -> Result:
    """Call outside of the graph: for what a compiler must not look into."""
    return function(*args, **kwargs)

"""The functions of plan.py under torch.compile: called once, their results constants of the graph.

Imported only while a graph is traced: `torch.compiler.assume_constant_result` loads torch._dynamo,
which takes as long to import as torch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nsa.ops import plan

plan_call = torch.compiler.assume_constant_result(plan.plan_call)
plan_scoring = torch.compiler.assume_constant_result(plan.plan_scoring)
plan_sparse = torch.compiler.assume_constant_result(plan.plan_sparse)
plan_compression = torch.compiler.assume_constant_result(plan.plan_compression)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


call_eagerly: Callable[..., Any] = torch.compiler.disable(_call)
"""Calls a function outside of the graph: for what a compiler must not look into."""

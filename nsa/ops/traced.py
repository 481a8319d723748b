"""The functions of plan.py under torch.compile: called once, their results constants of the graph.

Imported only while a graph is traced: `torch.compiler.assume_constant_result` loads torch._dynamo,
which takes as long to import as torch itself.
"""

from __future__ import annotations

import torch

from nsa.ops import plan

plan_call = torch.compiler.assume_constant_result(plan.plan_call)
plan_scoring = torch.compiler.assume_constant_result(plan.plan_scoring)
plan_sparse = torch.compiler.assume_constant_result(plan.plan_sparse)
plan_compression = torch.compiler.assume_constant_result(plan.plan_compression)

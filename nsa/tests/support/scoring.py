"""Choices of blocks by the scores of one kernel and of another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.ops.triton import problem
from nsa.ops.triton.choice import best
from nsa.ops.triton.problem import Problem
from nsa.tests.support.gpu import device_inputs
from nsa.tests.support.helpers import Case


def assert_same_choice(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores in Gluon have the bits of group_scores: they choose the same blocks."""
    inputs = device_inputs(case, dtype)
    lse = _log_sum_exp(case, inputs)
    q, k_cmp = inputs["q"], inputs["k_cmp"]

    def choose(in_gluon: bool) -> Tensor:
        monkeypatch.setattr(Problem, "scores_in_gluon", in_gluon)
        return best.choose(Problem(q, k_cmp, case.spec, case.Dk**-0.5, [case.S]), q, k_cmp, lse).ids

    found, wanted = choose(True), choose(False)
    assert torch.equal(found, wanted)
    assert (found[:, -1] >= 0).all()


def _log_sum_exp(case: Case, inputs: dict[str, Tensor]) -> Tensor:
    """Of the compressed branch, base 2 [B, Hq, S]; +inf where a query sees nothing."""
    q, k_cmp = inputs["q"].unflatten(2, (case.Hkv, -1)).float(), inputs["k_cmp"].float()
    t = torch.arange(case.S, device=q.device)
    num_seen = (t - case.spec.l + case.spec.d) // case.spec.d
    unseen = torch.arange(k_cmp.shape[1], device=q.device) >= num_seen[:, None]
    logits = torch.einsum("bsgnd,bkgd->bgnsk", q, k_cmp) * case.Dk**-0.5
    lse = logits.masked_fill(unseen, -torch.inf).logsumexp(-1) * problem.LOG2_E
    return lse.masked_fill(num_seen <= 0, torch.inf).flatten(1, 2).contiguous()

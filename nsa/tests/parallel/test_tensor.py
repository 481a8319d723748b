"""Several real ranks share the weights of a model: outputs and gradients are those of one
process."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nsa.tests.parallel.start import run_ranks
from nsa.tests.parallel.tensor_ranks import WITH_CONTEXT, names_of
from nsa.tests.support.nursery import Nursery

pytestmark = pytest.mark.dist

ROUNDING = 1e-12
"""Relative, in float64."""
FP32_LOSS = 1e-6
"""Relative; indexers compute their loss in float32."""


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def found(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank found in the cases; one group of processes for all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks("tensor_ranks.py", request.param, nursery, folder)


def test_ranks_compute_what_one_process_computes(found: list[dict[str, Any]]) -> None:
    """Logits, loss, every weight as a whole, and its gradient; on every rank, in every case.

    On four ranks also together with context parallelism; `after` comes after refused input.
    """
    cases = [*names_of(len(found)), "after"]
    if len(found) == 4:
        cases += [f"{name}, cp" for name in WITH_CONTEXT]
    for rank in found:
        for name in cases:
            errors = dict(rank[name])
            assert errors.pop("loss") < FP32_LOSS, name
            assert {what: e for what, e in errors.items() if e > ROUNDING} == {}, name
            assert len(errors) > 16, f"{name}: a model has more weights"


def test_fsdp_and_both_styles_take_the_step_of_one_process(found: list[dict[str, Any]]) -> None:
    """Clipped by the norm of all gradients; on four ranks, as cp=2 x tp=2."""
    for rank in found:
        errors = rank.get("fsdp", {})
        assert bool(errors) == (len(found) == 4)
        assert {weight: e for weight, e in errors.items() if e > ROUNDING} == {}


def test_a_kv_head_chooses_as_in_one_process(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert len(rank["choices"]) == 5
        assert set(rank["choices"].values()) == {0}


REFUSED = {
    "too many ranks": r"\d ranks with n_kv_groups=\d; .* by KV head.*: use at most \d ranks",
    "groups": r"n_kv_groups=\d cannot be divided by \d ranks; use a multiple of \d, such as",
    "mlp": r"mlp_dim=\d+ cannot be divided by \d ranks; use a multiple .* number of ranks",
    "vocab": r"vocab=25 cannot be divided by \d ranks; use a multiple of \d, such as 24 or 2[68]",
    "other weights": r"ranks \[1.*\] of \d have other weights than rank 0 .* on every rank",
    "two dimensions": "a mesh of 2 dimensions .*'dp', 'tp'.*takes one of them: pass mesh",
    "no layer": "Linear has no layer of nsa to split; give a TinyLM",
    "twice": "a TensorLM is split or sharded already.*once, before ContextParallel",
    "after context": "a ContextLM is split or sharded already.*once, before ContextParallel",
}


def test_all_ranks_refuse_together(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["refused"].keys() == REFUSED.keys()
        for name, message in REFUSED.items():
            assert re.search(message, rank["refused"][name]), (name, rank["refused"][name])

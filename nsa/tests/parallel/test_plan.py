"""The plan of an exchange says which way keys travel, the bytes of both ways, and why."""

from __future__ import annotations

import re

import pytest

from nsa.model.attention import NSAAttention
from nsa.model.dense import DenseAttention
from nsa.parallel import Split, plan_exchange, received_bytes

LAYER = NSAAttention(16, 4, 1, 8, 4, l=8, d=4, l_sel=8, n_sel=3, w=10)
LONG, SHORT = Split(4096, 4), Split(2048, 128)
"""Ranks with many queries can choose everything, those with 16 cannot."""
PLANS = {
    "gather": (LONG, "gather", None, r"gather \(asked for: gather; no sync; 3,072 tokens"),
    "unknown": (LONG, "chosen", None, r"by step \(asked for: chosen; .* no rank wants 3,072"),
    "few": (LONG, "chosen", [7, 9, 1, 0], r"chosen \(.* wants 9 tokens .* brings 3,072"),
    "all": (LONG, "chosen", [9, 3072, 1, 0], r"gather \(.* 3,072 tokens .* not fewer than the 3,0"),
    "always few": (SHORT, "chosen", None, r"chosen \(.* up to 384 tokens .* brings 2,032"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_says_the_way_and_the_reason(name: str) -> None:
    split, selected, wanted, expected = PLANS[name]
    plan = plan_exchange(LAYER, split, selected=selected, wanted=wanted)
    assert re.search(f"keys between ranks: {expected}", str(plan)), str(plan)
    assert plan.is_bound == (wanted is None)


def test_the_bytes_of_a_plan_are_those_of_its_busiest_rank() -> None:
    wanted = [7, 9, 1, 0]
    plan = plan_exchange(LAYER, LONG, selected="chosen", wanted=wanted, batch=3, number_bytes=4)
    for found, by_rank in ((plan.gather_bytes, [None] * 4), (plan.chosen_bytes, wanted)):
        assert found == max(
            received_bytes(LAYER, LONG, rank, batch=3, number_bytes=4, wanted=tokens)
            for rank, tokens in enumerate(by_rank)
        )
    assert f"gather {plan.gather_bytes / 2**20:.2f} MiB, chosen blocks" in str(plan)


def test_layers_with_one_k_and_v_gather() -> None:
    plan = plan_exchange(DenseAttention(16, 4, 2, 8, 4), LONG, selected="chosen")
    assert plan.way == "gather" and plan.chosen_bytes is None
    assert "a layer with one K and V gathers it" in str(plan)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="selected='some' is not known; use one of gather, chosen"):
        plan_exchange(LAYER, LONG, selected="some")

"""Several real ranks share one sequence: outputs and gradients are those of one process."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nsa.tests.parallel.ranks import COUNTED, FEW, WHOLE, names_of
from nsa.tests.parallel.start import run_ranks
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
    return run_ranks("ranks.py", request.param, nursery, folder)


def test_ranks_compute_what_one_process_computes(found: list[dict[str, Any]]) -> None:
    """Logits, loss, and the gradient of every weight, in every case.

    `fsdp` also shards the weights, over all ranks; `after` comes after refused input.
    """
    for name in (*names_of(len(found)), "fsdp", "after"):
        errors = dict(found[0][name])
        assert errors.pop("loss") < FP32_LOSS, name
        assert {weight: e for weight, e in errors.items() if e > ROUNDING} == {}, name
        assert len(errors) > 8, f"{name}: a model has more weights"


@pytest.mark.parametrize("name", COUNTED)
def test_the_bytes_sent_are_those_of_the_formula(found: list[dict[str, Any]], name: str) -> None:
    numbers = [rank["bytes"][name] for rank in found]
    assert [n["forward"] for n in numbers] == [n["formula"] for n in numbers]
    # A halo's gradient goes to the rank that sent it: equal only over all ranks.
    assert sum(n["backward"] for n in numbers) == sum(n["forward"] for n in numbers) > 0


def test_rows_are_gathered_by_a_collective_that_is_safe_over_gloo(
    found: list[dict[str, Any]],
) -> None:
    """Two of torch's all-gathers that end at once free the same memory there."""
    for rank in found:
        names = {name for case in (*COUNTED, *FEW) for name in rank["bytes"][case]["names"]}
        assert "all_to_all_single" in names
        assert [name for name in names if "gather" in name or "coalesced" in name] == []


def test_rows_are_gathered_on_a_cpu_as_on_a_gpu(found: list[dict[str, Any]]) -> None:
    for rank in found:
        on_cpu, on_gpu = rank["gathered"]
        assert on_cpu == on_gpu and len(on_cpu) == 3 * len(found) + 3


@pytest.mark.parametrize("name", FEW)
def test_chosen_blocks_alone_are_less_than_all(found: list[dict[str, Any]], name: str) -> None:
    numbers = [rank["bytes"][name] for rank in found]
    assert all(n["forward"] < n["formula"] for n in numbers)
    # Which blocks each rank wants has no gradient.
    forward, backward = (sum(n[way] for n in numbers) for way in ("forward", "backward"))
    assert 0 < backward < forward


@pytest.mark.parametrize("name", FEW)
def test_the_plan_of_chosen_blocks_has_the_bytes_that_were_sent(
    found: list[dict[str, Any]], name: str
) -> None:
    numbers = [rank["bytes"][name] for rank in found]
    assert all(n["is_chosen"] == 1 for n in numbers)
    assert {n["plan"] for n in numbers} == {max(n["forward"] for n in numbers)}
    assert all(n["plan"] <= n["bound"] for n in numbers)


def test_the_window_branch_runs_while_other_keys_are_in_flight(found: list[dict[str, Any]]) -> None:
    """Before it a rank waits for halos alone, of 9 tokens at most; after it for selected keys."""
    part_len = 96 // (2 * len(found))
    for rank in found:
        before, after = _around_window(rank["order"][COUNTED[0]])
        assert before and max(before) <= 9
        assert after.count(part_len) == 2 * len(found) and part_len > 9
        # Chosen blocks are known only after the compressed keys have arrived.
        before, after = _around_window(rank["order"][FEW[0]])
        assert before and after and max(before) < min(after)


def test_a_compiled_layer_is_one_graph_or_leaves_it_for_attend_alone(
    found: list[dict[str, Any]],
) -> None:
    """On two ranks; the graphs that are left are listed in docs/architecture.md."""
    for rank in found:
        assert bool(rank["graphs"]) == (len(found) == 2)
        for name, graphs in rank["graphs"].items():
            if name in WHOLE:
                assert graphs == {"num": 1, "left": []}, name
            else:
                assert graphs["num"] > 1 and len(graphs["left"]) == 1, name
                assert "torch.compiler.disable" in graphs["left"][0], name


def _around_window(log: list[str]) -> tuple[list[int], list[int]]:
    """Rows that were waited for before the window branch began, and after it ended."""
    begins, ends = log.index("window begins"), log.index("window ends")
    assert ends == begins + 1, "it waits for nothing"
    waits = (log[:begins], log[ends + 1 :])
    before, after = ([int(line.split()[2]) for line in part] for part in waits)
    return before, after


def test_statistics_of_the_ranks_together_are_those_of_the_row(
    found: list[dict[str, Any]],
) -> None:
    """Maps too, though documents go over borders."""
    for rank in found:
        alone, together = rank["statistics"]["summary"]
        assert alone.keys() == together.keys()
        for name, value in alone.items():
            assert together[name] == pytest.approx(value, rel=1e-6), name
        assert rank["statistics"]["maps"][1] == rank["statistics"]["maps"][0]


REFUSED = {
    "length": r"a sequence of (33|65) tokens cannot be split .* use a multiple of (4|8), such as",
    "other weights": r"ranks \[1.*\] of \d have other weights than rank 0 .* on every rank",
    "other parts": r"ranks \[1.*\] of \d have other parts than rank 0 .here: ",
    "two dimensions": "a mesh of 2 dimensions .*'dp', 'cp'.*takes one of them: pass mesh",
    "other exchange": "selected='some' is not known; use one of gather, chosen",
    "no layer": "Linear has no attention layer of nsa to split.*give a TinyLM",
    "twice": "a ContextLM is split or sharded already.*once, and before fully_shard",
    "bounds of a shard": "cu_seqlens goes from 0 to 4; .* whole row, .* they are not sharded",
    "documents in a batch": "cu_seqlens is given with B=2; packed documents need B=1",
    "bounds in int64": "cu_seqlens is torch.int64; give an int32 tensor",
    "odd shard": "cannot be split into",
}


def test_all_ranks_refuse_together(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["refused"].keys() == REFUSED.keys()
        for name, message in REFUSED.items():
            assert re.search(message, rank["refused"][name]), (name, rank["refused"][name])

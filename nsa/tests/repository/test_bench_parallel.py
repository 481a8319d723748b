"""The benchmark of context parallelism counts real collectives; its parts are rows of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bench import bench_parallel
from bench.attention.cases import Case, Shape
from bench.ranks import received
from bench.ranks.parts import Rank, Whole, relative_rms
from bench.results import read_json
from nsa.parallel import PARTS, Split

pytestmark = pytest.mark.usefixtures("forked_python")
ROUNDING = 1e-12
"""Relative, in float64."""


@pytest.mark.dist
def test_bytes_are_those_of_the_formula_for_every_rule_and_both_ways() -> None:
    rows = received.count_bytes(2)
    assert [row["equal"] for row in rows] == [True] * len(received.CASES) * len(PARTS)
    assert {row["rule"].split(",")[0] for row in rows} == {"nsa", "pooled", "msa", "reuse", "dense"}
    gathered, few, many = (
        next(row for row in rows if (row["rule"], row["selected"]) == case)
        for case in (("nsa", "gather"), ("nsa", "chosen"), ("nsa, many blocks", "chosen"))
    )
    assert max(few["received"]) < max(gathered["received"])
    # Where all blocks are chosen, they are gathered, after the ranks have told which they read.
    told = received.LENGTH // received.SIZES["l_sel"]
    assert max(many["received"]) == max(gathered["received"]) + told


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("one_call", [False, True], ids=["as ranks do", "one call"])
def test_parts_give_the_rows_and_gradients_of_the_whole(parts: str, one_call: bool) -> None:
    spec = bench_parallel.TINY_SPEC
    whole = Whole(Case(Shape(4, 2, 8, 16), 1, 192, 1), spec, torch.float64, "cpu")
    wanted, dk_sel = whole.run(), torch.zeros(())
    for number in range(4):
        rank = Rank(whole, Split(192, 4, parts), number, one_call=one_call)
        done = rank.run()
        assert relative_rms(done.out, rank.rows(wanted.out)) < 1e-6  # compared in fp32
        assert (done.out - rank.rows(wanted.out)).abs().max() < ROUNDING
        assert (done.dq - rank.rows(wanted.dq)).abs().max() < ROUNDING
        assert torch.equal(done.chosen, rank.rows(wanted.chosen))
        dk_sel = dk_sel + done.dk_sel
    assert (dk_sel - wanted.dk_sel).abs().max() < ROUNDING


def test_a_rehearsal_on_a_cpu_compares_and_claims_no_time(tmp_path, capsys) -> None:
    path = tmp_path / "r.json"
    arguments = ["--tiny", "--device", "cpu", "--bytes-ranks", "0", "--json", str(path)]
    assert bench_parallel.main(arguments) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    assert read_json(path, bench_parallel.VERSION, "bench_parallel.py") == result
    assert set(result["environment"]) >= {"command", "commit", "device", "torch", "triton"}
    assert [split["parts"] for split in result["splits"]] == list(PARTS)
    for split in result["splits"]:
        assert split["close"] and split["goal_met"] is None
        assert [row["rank"] for row in split["ranks"]] == [0, 1, 2, 3]
        assert all("ms" not in row for row in split["ranks"])
    assert "two_ended: not timed; results are those of the whole" in printed


def test_after_its_seconds_it_ends_with_what_it_has(capsys) -> None:
    arguments = ["--tiny", "--device", "cpu", "--bytes-ranks", "0", "--seconds", "0"]
    assert bench_parallel.main(arguments) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["splits"][0]["ranks"]
    assert [row["reason"] for row in rows] == ["not measured after 0 s"] * 4


def ranks_of(*times: float) -> dict[str, Any]:
    rows = [{"rank": i, "ms": ms, "out_error": 1e-3, "dq_error": 1e-3, "same_blocks": 1.0,
             "peak_mib": 1024} for i, ms in enumerate(times)]  # fmt: skip
    return {"parts": "two_ended", "ranks": rows, "dk_error": 1e-3}


@pytest.mark.parametrize(
    ("times", "met"),
    [((100.0, 110.0), True), ((100.0, 116.0), False), ((115.0, 115.0), True), ((80, 110), False)],
)
def test_the_slowest_rank_is_held_to_the_share_and_to_the_mean(times, met: bool) -> None:
    split = ranks_of(*times)
    found = split | bench_parallel.summarize(split, {"ms": 200.0}, torch.bfloat16)
    assert found["goal_met"] is met
    assert found["of_share"] == pytest.approx(max(times) / 100)
    result = {"bytes": [], "splits": [found], "whole": {"ms": 200.0, "peak_mib": 2048}}
    assert bench_parallel._is_good(result) is met
    assert ("goals met" if met else "goals missed") in bench_parallel.times_table(result)


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_a_rank_with_other_results_is_wrong_whatever_its_time(error: float) -> None:
    split = ranks_of(100.0, 100.0)
    split["ranks"][1]["dq_error"] = error
    found = split | bench_parallel.summarize(split, {"ms": 200.0}, torch.bfloat16)
    assert found["goal_met"] and not found["close"]
    assert not bench_parallel._is_good({"bytes": [], "splits": [found]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a GPU; on a CPU add --tiny"),
        (["--ranks", "1", "--tiny", "--bytes-ranks", "1"], "--bytes-ranks 1 is too small"),
        (["--tiny", "--repeats", "0"], "--repeats 0 is too small; use 1"),
        (["--ranks", "0", "--json", "nowhere/r.json"], "create it first"),
        (["--ranks", "0", "--shape", "4,3,8,8"], "multiple of Hkv"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_parallel.main(["--device", "cpu", *arguments])
    assert message in " ".join(capsys.readouterr().err.split())

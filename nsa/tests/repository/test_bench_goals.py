"""The benchmark of all goals, rehearsed: what it measures, prints, and does with what fails."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import bench_goals, goals, results
from bench.attention.cases import Shape
from bench.goals import Row, Run
from bench.training import report as train_report
from bench.training.cases import GOALS

pytestmark = pytest.mark.usefixtures("forked_python")

TINY = Run("cpu", tiny=True)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Exit code and lines of a rehearsal."""
    code = bench_goals.main(["--device", "cpu", "--tiny", *arguments])
    return code, capsys.readouterr().out.splitlines()


def test_a_part_is_measured_in_a_process_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "goals.json"
    code, lines = run(capsys, "--parts", "long", "--json", str(path), "--commit", "abc")
    result = json.loads(lines[-1])
    assert code == 0 and json.loads(path.read_text()) == result
    assert result["environment"]["commit"] == "abc"
    (row,) = result["rows"]
    assert (row["part"], row["reason"]) == ("long", "")
    assert "32/8/128 at 1048576, all memory" in lines[-2]


def test_every_goal_has_a_row_with_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {goals.SMALL: {4096: 0.48, 8192: 0.86}}
    monkeypatch.setattr(goals, "GRAPH_MS", small)
    rows = [*goals.attention(TINY), *goals.window(TINY)]
    assert [row.what.removeprefix("12/2/64 at ") for row in rows] == [
        *("4096, graph", "4096, eager", "8192, graph", "8192, eager / graph"),
        *(f"{length}, {way}" for length in (8192, 65536) for way in ("forward", "backward")),
    ]
    assert all(row.value is not None and row.value > 0 for row in rows if "back" not in row.what)
    monkeypatch.setattr(goals, "DECODE_OVER_DENSE", goals.DECODE_OVER_DENSE[:1])
    *steps, model = goals.decode(TINY)
    assert [row.limit for row in steps] == [105.0, 17.0, 1.0]
    assert all(row.value is not None and row.value > 0 for row in [*steps, model])
    assert model.at_least and model.unit == "tokens/s"


def test_the_long_row_is_longer_than_any_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goals, "REPEATS", {64: 1})
    monkeypatch.setattr(goals, "LONG", (Shape(2, 1, 16, 16), 128))
    (row,) = goals.long(Run("cpu"))
    assert (row.what, row.reason) == ("2/1/16 at 128, all memory", "")


def test_training_is_held_to_the_goals_of_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    def bench_train(command: list[str], **_: Any) -> Any:
        cell = command[command.index("--cells") + 1]
        cells.append(cell)
        assert "nsa-compiled,dense-compiled" in command
        row: dict[str, Any] = {"variant": "nsa-compiled", "tokens_per_s": 80_000.0, "ratio": 0.9}
        if cell == "65536x1":
            row = {"variant": "nsa-compiled", "reason": "out of memory"}
        result = train_report.new_result(command, "abc") | {"cells": [{"rows": [row]}]}
        if cell != "32768x1":
            results.write_json(command[command.index("--json") + 1], result)
        return subprocess.CompletedProcess(command, 1)

    cells: list[str] = []
    monkeypatch.setattr(subprocess, "run", bench_train)
    rows = list(goals.training(Run("cuda")))
    assert cells == [str(cell) for cell in GOALS]
    assert [(row.limit, row.value) for row in rows] == [
        *((0.88, 0.9), (1.1, 0.9), (2.2, None), (3.4, None), (70_000.0, 80_000.0))
    ]
    assert [row.reason for row in rows] == ["", "", "bench_train.py: exit 1", "out of memory", ""]


def test_kernels_of_the_window_are_found_by_name_and_none_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = {"gluon_forward": 2.0, "band_dkv": 3.0, "gluon_dq": 4.0, "sum_parts": 0.5, "mul": 9.0}
    slower = {name: 10 * ms for name, ms in call.items()}
    assert goals._kernels([call, slower, call], "forward") == 2.0
    assert goals._kernels([call, slower, call], "dkv", "dq", "sum_parts") == 7.5
    monkeypatch.setattr(goals, "_window_ms", lambda *_: (0.0, 0.0))
    for row in goals.window(Run("cuda")):
        assert row.missed_by is None and row.reason == "no kernel of the window was seen"


def test_a_goal_is_met_at_its_limit_and_what_has_no_value_is_not() -> None:
    def verdict(value: float | None, *, at_least: bool = False, reason: str = "") -> str:
        row = bench_goals.as_json(Row("decode", "a step", "us", 100.0, value, at_least, reason))
        return bench_goals.table([row]).splitlines()[1].split("us")[1].strip()

    assert [verdict(x) for x in (99.0, 100.0, 108.0)] == ["met", "met", "missed by 8.0%"]
    assert [verdict(x, at_least=True) for x in (101.0, 95.0)] == ["met", "missed by 5.0%"]
    assert verdict(None, reason="no memory") == "not measured: no memory"
    assert verdict(math.nan) == "not measured: no value"


def test_a_part_that_crashes_leaves_its_rows_and_is_not_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("decode", "one", "us", 100.0, 50.0)

    def crash(command: list[str], **_: Any) -> Any:
        Path(command[command.index("--child") + 1]).write_text(json.dumps(row) + '\n["half')
        return subprocess.CompletedProcess(command, -11)

    monkeypatch.setattr(subprocess, "run", crash)
    code, lines = run(capsys, "--parts", "decode", "--commit", "abc")
    assert code == 1
    assert "the rest" in lines[-2] and "its process ended with code -11" in lines[-2]
    assert json.loads(lines[-1])["rows"][0]["value"] == 50.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiny", "--parts", "speed"], "choose from attention, window, long, training, decode"),
        (["--tiny", "--json", "nowhere/g.json"], "create it first"),
        ([], "add --tiny to rehearse"),
    ],
)
def test_it_refuses_before_it_measures(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_goals.main(["--device", "cpu", *arguments])
    assert message in " ".join(capsys.readouterr().err.split())

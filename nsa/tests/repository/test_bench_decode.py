"""The decode benchmark at sizes of a CPU: what it measures, counts, writes and refuses."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from bench import bench_decode
from bench.attention.cases import Shape
from bench.decoding import cell as decode_cell
from bench.decoding import report as decode_report
from bench.decoding.cell import Cell, measure_dense, measure_ours, nsa_cache
from nsa import BlockSpec
from nsa.ops.eager.attention import attend_cached
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.helpers import assert_near

pytestmark = pytest.mark.usefixtures("forked_python")

SPEC = BlockSpec(l=8, d=4, l_sel=8, n_sel=4, w=12)
CELL = Cell(Shape(4, 2, 8, 16), SPEC, 3, 75, 1, "cpu", torch.float32)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    small = ["--device", "cpu", "--repeats", "1"]
    code = bench_decode.main([*small, *arguments])
    out = capsys.readouterr().out
    return code, json.loads(out.splitlines()[-1]), out


def test_decode_bench_runs_as_the_runbook_calls_it() -> None:
    command = ["bench/bench_decode.py", "--config", "configs/base.yaml"]
    small = ["--lengths", "600", "--repeats", "1", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, *command, *small], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    ours, dense = result["attention"]
    assert (ours["Hq"], ours["Hkv"], ours["Dk"], ours["Dv"]) == (64, 4, 192, 128)
    assert ours["eager_ms"] > 0 and dense["eager_ms"] > 0
    assert ours["reads"] == ours["reads_expected"] == BlockSpec().num_reads(600)
    assert (dense["name"], dense["reads"]) == ("any-rows", 600)


def test_decode_bench_measures_batches_lengths_and_whole_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv")]
    model = ["--model", "configs/quickstart.yaml"]
    shape = ["--shape", "4,2,8,16", "--lengths", "40", "700", "--batch", "1", "3"]
    code, result, out = run(capsys, *shape, *model, *paths)
    assert code == 0
    assert decode_report.read_result(tmp_path / "r.json") == result
    ours = [row for row in result["attention"] if row["name"] == "nsa"]
    cells = [(1, 40), (1, 700), (3, 40), (3, 700)]
    assert [(row["B"], row["S"]) for row in ours] == cells
    assert [row["reads"] for row in ours] == [BlockSpec().num_reads(S) for _, S in cells]
    models = [(row["name"], row["B"], row["S"]) for row in result["model"]]
    assert models == [(name, *cell) for name in ("nsa", "dense") for cell in cells]
    for row in result["model"]:
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["B"] / row["eager_ms"])
    with (tmp_path / "r.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0])[:7] == [
        *("S", "ms_total", "ms_cmp", "ms_sel", "ms_win", "reads_actual", "reads_expected")
    ]
    assert [(int(line["B"]), int(line["S"])) for line in lines] == cells
    assert all(float(line["ratio"]) > 0 for line in lines)
    assert "tokens/s" in out and "4,2,8,16" in out


def test_ours_is_counted_from_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measure_ours(CELL)
    assert row["reads"] == row["reads_expected"] == SPEC.num_reads(75)
    assert row["cache_bytes"] == nsa_cache(CELL).nbytes()

    def reads_more(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, reads = attend_cached(*args)
        return out, reads + 1

    monkeypatch.setattr("bench.decoding.cell.attend_cached", reads_more)
    assert measure_ours(CELL)["reads"] == SPEC.num_reads(75) + 3


def test_reads_beside_the_formula_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(cell: Cell) -> dict[str, Any]:
        return measure_ours(cell) | {"reads_expected": 1}

    monkeypatch.setattr(bench_decode, "measure_ours", wrong)
    code, _, _ = run(capsys, "--shape", "2,1,8,8", "--lengths", "40")
    assert code == 1


def test_dense_attention_is_the_same_by_heads_and_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    outs = []
    real = F.scaled_dot_product_attention

    def recording(*args: Any, **options: Any) -> torch.Tensor:
        outs.append(real(*args, **options))
        return outs[-1]

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    monkeypatch.setitem(decode_cell.BACKENDS, "flash", decode_cell.ANY)
    for name in ("flash", "any-rows"):
        torch.manual_seed(0)
        assert measure_dense(CELL, name)["reads"] == 75
    assert_near(outs[-1].flatten(1), outs[0].flatten(1), 1e-5)


def test_a_kernel_that_cannot_run_has_a_row_with_the_reason() -> None:
    row = measure_dense(CELL, "cudnn")
    assert row["reason"] and "eager_ms" not in row
    table = decode_report.table({"attention": [row], "model": []})
    assert f"not measured: {row['reason']}" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "0"], "whole numbers >= 1"),
        (["--shape", "4,3,8,8"], "multiple of Hkv"),
        (["--csv", "no/such/r.csv"], "create it first"),
        (["--config", "no-such.yaml"], "no-such.yaml"),
        (["--dense", "fast"], "invalid choice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_decode_bench_refuses_before_it_measures(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_decode.main(["--device", "cpu", *arguments])
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_result_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"version": 0}')
    with pytest.raises(ValueError, match="version 0; this reader knows 1"):
        decode_report.read_result(tmp_path / "r.json")

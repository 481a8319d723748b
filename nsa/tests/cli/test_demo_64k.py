"""scripts/demo_64k.py as the runbook calls it, at sizes of a CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa import BlockSpec
from nsa.tests.conftest import REPOSITORY
from nsa.tests.model.test_prefill_memory import peak_bytes
from nsa.tests.support.gpu import needs_gpu
from scripts import demo_64k

SMALL = ["--S", "1500", "--prefill_tile", "256", "--w", "128", "--dim", "64", "--device", "cpu"]


def summary(out: str) -> tuple[float, int]:
    match = re.search(r"^prefill_time_ms=([\d.]+) reads_total=(\d+)$", out, re.MULTILINE)
    assert match, out
    return float(match[1]), int(match[2])


@pytest.mark.parametrize("tile", ["0", "1", "256", "5000"])
def test_demo_reads_what_the_formula_says(tile: str, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--S", "300"] if tile == "1" else []
    assert demo_64k.main([*SMALL, *size, "--prefill_tile", tile]) == 0
    out = capsys.readouterr().out
    spec = BlockSpec(l=32, d=16, l_sel=64, n_sel=8, w=128)
    assert summary(out)[1] == spec.num_reads(300 if size else 1500)
    assert "-- demo_64k summary --" in out and "device: cpu" in out
    assert "dim=64 heads=8 G=2 dk=64 dv=64\nl=32 d=16 l_sel=64 n_sel=8 w=128\n" in out


def test_demo_runs_as_a_script_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / "demo_64k.py"), *SMALL]
    flags = ["--rope_scale", "8.0", "--use_fa2", "1", "--S", "600"]
    done = subprocess.run([*command, *flags], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rope_scale=8.0 prefill_tile=256 use_fa2=1" in done.stdout


def test_demo_estimates_more_memory_than_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--S", "1500", "--prefill_tile", "128", "--w", "128", "--dim", "32", "--device", "cpu"]
    peak = peak_bytes(lambda: demo_64k.main(small))
    out = capsys.readouterr().out
    match = re.search(r"cache_mib=([\d.]+) memory_estimate_mib=([\d.]+)", out)
    assert match and float(match[1]) < peak / 2**20 < float(match[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--S", "0"], "--S 0 is below 1"),
        (["--prefill_tile", "-1"], "use 0 for the whole prompt"),
        (["--S", str(10**13)], "GiB are free on cpu; use a smaller --S"),
        (["--l", "33"], "l=33 is not a multiple of d=16"),
        (["--heads", "3"], "n_heads=3 is not a multiple"),
        (["--device", "tpu"], "use auto, cpu, cuda"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_demo_refuses_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo_64k.main([*SMALL, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("_", [pytest.param(0, marks=needs_gpu, id="cuda")])
def test_demo_of_the_runbook_takes_seconds_on_a_gpu(
    _: int, capsys: pytest.CaptureFixture[str]
) -> None:
    runbook = ["--S", "65536", "--prefill_tile", "4096", "--rope_scale", "8.0", "--use_fa2", "1"]
    torch.cuda.reset_peak_memory_stats()
    assert demo_64k.main(runbook) == 0
    out = capsys.readouterr().out
    elapsed_ms, reads = summary(out)
    assert reads == 4095 + 8 * 64 + 4096
    assert elapsed_ms < 30e3
    estimate = re.search(r"memory_estimate_mib=([\d.]+)", out)
    assert estimate and torch.cuda.max_memory_allocated() / 2**20 < float(estimate[1])

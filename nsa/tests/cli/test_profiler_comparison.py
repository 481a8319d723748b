"""The comparison script trains for real, and its figures are those of the runs it started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.training import compare, compare_report
from bench.training.compare import RunFailed, step_times
from nsa.config import Config
from nsa.records import Heartbeat, read_metrics, write_config
from scripts import train_showcase
from scripts.profiler_comparison import main

pytestmark = pytest.mark.usefixtures("forked_python")

STEPS, WARMUP = 4, 1


def run_here(variant: compare.Variant, config_file: Path, folder: Path, steps: int) -> None:
    """What run_variant does, without a process for a single rank; a run that fails has one."""
    if variant.ranks > 1:
        return RUN_VARIANT(variant, config_file, folder, steps)
    arguments = ["--config", str(config_file), "--steps", str(steps)]
    arguments += ["--out-dir", str(folder / variant.name), "--resume", "none"]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"NSA_HEARTBEAT_EVERY": "1", **variant.environ}.items():
            patch.setenv(name, value)
        assert train_showcase.main(arguments) == 0


RUN_VARIANT = compare.run_variant


def test_it_trains_every_way_and_reports_what_the_runs_measured(
    tiny_config: Callable[..., Config],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compare, "run_variant", run_here)
    config, out = write_config(tmp_path, tiny_config(), "test"), tmp_path / "out"
    arguments = f"--steps {STEPS} --warmup {WARMUP} --config {config} --out-dir {out} --device cpu"

    assert main([*arguments.split(), "train.seq_len=48"]) == 0

    found = compare_report.read_comparison(out)
    assert [result.name for result in found.results] == [v.name for v in compare.VARIANTS]
    for result in found.results:
        metrics = read_metrics(out / result.name)
        assert (metrics.step, metrics.seq_len, metrics.device) == (STEPS, 48, "cpu")
        assert (result.loss_last, result.plan) == (metrics.loss_last, metrics.attention)
        times = step_times(out / result.name / "heartbeat_rank0.jsonl", STEPS)[WARMUP:]
        assert (len(times), result.num_steps) == (3, 3)
        assert result.step_p50_ms == pytest.approx(1e3 * sorted(times)[1])
        assert result.step_p95_ms == pytest.approx(1e3 * max(times))
        tokens = found.tokens_per_step * result.ranks
        assert result.toks_per_s == pytest.approx(tokens / sorted(times)[1])
        assert metrics.world_size == result.ranks
    v2, v1, nvtx, two, bf16 = found.results
    assert "selection: fast" in v2.plan and "selection: reference" in v1.plan
    assert "NVTX" in nvtx.plan and "NVTX" not in v2.plan
    assert v2.loss_last == pytest.approx(v1.loss_last, abs=1e-4) and nvtx.loss_is_equal
    logs = [(out / f"{result.name}.log").read_text() for result in (two, bf16)]
    assert ["gradient compression enabled: bf16" in log for log in logs] == [False, True]
    assert bf16.loss_last == pytest.approx(two.loss_last, abs=1e-3)

    text, printed = (out / compare_report.REPORT).read_text(), capsys.readouterr().out
    assert text in printed and "these are CPU figures" in text
    assert (
        f"| `two_ranks_bf16` | {bf16.toks_per_s:.0f} | {bf16.toks_per_s / two.toks_per_s:.2f}x |"
        in text
    )
    assert f"| `selection_v1` | {v1.toks_per_s:.0f} |" in text


def test_a_run_that_fails_is_named_with_its_last_words(
    tiny_config: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = write_config(tmp_path, tiny_config(), "test"), tmp_path / "out"
    arguments = ["--steps", "3", "--warmup", "0", "--config", str(config), "--out-dir", str(out)]

    assert main([*arguments, "--device", "cpu", "train.lr=1e30"]) == 1

    error = capsys.readouterr().err
    assert "selection_v2 ended with exit code 10" in error and "non-finite loss" in error
    assert not (out / compare_report.RESULTS).exists()


@pytest.mark.parametrize(("steps", "warmup"), [("3", "3"), ("3", "-1")])
def test_a_warmup_without_steps_after_it_is_refused(
    steps: str, warmup: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--steps", steps, "--warmup", warmup, "--out-dir", str(tmp_path / "o")]) == 2
    assert f"--warmup {warmup} must be less than --steps 3" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_heartbeat_with_steps_missing_is_refused(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path)
    heartbeat.beat(1)
    heartbeat.progress(2, loss=1.0, toks_per_s=1.0, lr=0.1)
    with pytest.raises(RunFailed, match="1 beats and 1 ends of 2 steps"):
        step_times(heartbeat.path, 2)


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / compare_report.RESULTS).write_text(json.dumps({"version": 1}))
    with pytest.raises(ValueError, match="has version 1; this program reads version 2"):
        compare_report.read_comparison(tmp_path)

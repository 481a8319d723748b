"""The trainer under the name that the runbooks use: flags, exit codes, and where it starts from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nsa.config import Config
from nsa.records import read_config, read_metrics, write_config
from nsa.tests.support.effects import keep_mkldnn
from scripts.train_showcase import main

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "train_showcase.py"


@pytest.fixture
def config_file(tiny_config: Callable[..., Config], tmp_path: Path) -> Path:
    return write_config(tmp_path, tiny_config(), "test")


def test_flags_reach_the_config(config_file: Path, tmp_path: Path) -> None:
    arguments = f"--config {config_file} --dataset synthetic --precision bf16 --seq-len 16"
    arguments += f" --batch-size 1 --accum-batches 2 --no-gc --out-dir {tmp_path / 'o'} --steps 2"
    arguments += f" --save {tmp_path / 'my.pt'}"
    assert main(arguments.split()) == 0
    cfg, metrics = read_config(tmp_path / "o"), read_metrics(tmp_path / "o")
    assert (cfg.data.dataset, cfg.runtime.precision) == ("synthetic", "bf16")
    assert (cfg.train.seq_len, cfg.train.batch_size) == (16, 1)
    assert cfg.train.accumulate_grad_batches == 2
    assert (metrics.step, cfg.train.steps) == (2, 3)
    assert (tmp_path / "my.pt").exists() and (tmp_path / "o" / "sample.txt").exists()


def test_no_gc_wins_over_the_file(tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    cfg = tiny_config("runtime.gradient_checkpointing=true", "runtime.gc_layers=0:1")
    path = write_config(tmp_path, cfg, "test")
    assert main(["--config", str(path), "--no-gc", "--steps", "1"]) == 0
    assert not read_config(Path(cfg.train.out_dir)).runtime.gradient_checkpointing


def test_more_steps_than_the_config_lengthen_run_and_schedule(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(config_file), "--steps", "5"]) == 0
    assert read_config(tmp_path / "run").train.steps == 5
    assert read_metrics(tmp_path / "run").step == 5
    assert "--steps 5 is more than train.steps=3" in capsys.readouterr().out


def test_config_comes_from_the_environment(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONFIG", str(config_file))
    monkeypatch.setenv("NSA_LR", "0.25")
    assert main(["--steps", "1"]) == 0
    assert read_metrics(tmp_path / "run").config_file == str(config_file)
    assert read_metrics(tmp_path / "run").lr == 0.25


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("--dataset shakespear", 2, "shakespeare"),
        ("--seq-len 9999999", 2, "use a train.seq_len of at most"),
        ("--steps 5000", 3, "train.save_every=0"),
        ("--ddp 1", 3, "use torchrun --nproc_per_node=N"),
    ],
)
def test_bad_input_and_refusals_have_their_exit_codes(
    config_file: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    code: int,
    message: str,
) -> None:
    assert main(["--config", str(config_file), *arguments.split()]) == code
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--batchsize 4", "unknown flag '--batchsize'; the nearest known one is '--batch-size'"),
        ("--steps 0", "'0' is not a whole number >= 1"),
        ("--steps many", "'many' is not a whole number >= 1"),
        ("--loader-timeout 0", "'0' is not a number of seconds above 0"),
        ("--loader-timeout soon", "'soon' is not a number of seconds above 0"),
        ("--fwe-report-docs 0", "'0' is not a whole number >= 1"),
        ("--ddp 2", "invalid choice: 2"),
    ],
)
def test_wrong_flags_are_errors_that_help(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_non_finite_loss_has_its_exit_code(
    tiny_config: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, tiny_config("train.lr=1e30"), "test")
    assert main(["--config", str(path)]) == 10
    assert "[FATAL] non-finite loss" in capsys.readouterr().err


def test_unknown_variable_is_refused(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_LEARNING_RATE", "1")
    assert main(["--config", str(config_file)]) == 2
    assert "NSA_LEARNING_RATE" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 says so
def test_a_run_prints_the_lines_that_runbooks_look_for(
    tiny_config: Callable[..., Config],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = tiny_config("runtime.precision=bf16", "runtime.gradient_checkpointing=true")
    path = write_config(tmp_path, cfg, "test")
    with keep_mkldnn():
        assert main(["--config", str(path), "--steps", "1"]) == 0
        printed = capsys.readouterr().out
        monkeypatch.setenv("NSA_SDPA_NO_FLASH", "1")
        assert main(["--config", str(path), "--steps", "1", "--no-gc"]) == 0
        without = capsys.readouterr().out

    for pattern in (
        rf"^\[boot\] loading config {re.escape(str(path))}$",
        r"^\[boot\] effective config: S=32 B=2 accum=1 gc=on$",
        r"^\[boot\] flash enabled \| precision BF16$",
        r"^\[train\] gradient_checkpointing=on$",
        r"^step 0001 \| loss \d+\.\d{4} \| lr \d\.\d\de-\d\d \| toks/s \d+ \| fetch \d+ms \| "
        r"fetch_p50 \d+ms \| fetch_p95 \d+ms \| rss \d+\.\d\dGiB \| eta \d+:\d\d$",
    ):
        assert re.search(pattern, printed, re.MULTILINE), pattern
    assert "[train] gradient_checkpointing=off\n" in without and " gc=off\n" in without
    assert "[boot] flash disabled (NSA_SDPA_NO_FLASH=1) | precision BF16\n" in without


def test_script_runs_from_anywhere_without_pythonpath(config_file: Path, tmp_path: Path) -> None:
    """-S hides an installed nsa, and the libraries with it; they are given back by their path."""
    command = [sys.executable, "-S", str(SCRIPT), "--config", str(config_file), "--steps", "1"]
    libraries = [p for p in sys.path if p and SCRIPT.parent.parent not in (Path(p), Path(p).parent)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(libraries)}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 0001" in done.stdout

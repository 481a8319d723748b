"""nsa triage: real runs with a real fault, planted from outside, and what clears it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nsa.cli.__main__ import main
from nsa.config import Config
from nsa.config.env import TABLE
from nsa.operate.triage import trials
from nsa.operate.triage.command import Triage, find, read_triage, write_triage
from nsa.operate.triage.trials import BASELINE, Toggle, Trial, matrix, run_trial
from nsa.records import write_config
from nsa.tests.support.nursery import Nursery

BROKEN = {"fails": "raise RuntimeError('broken')", "hangs": "import time; time.sleep(600)"}
"""What a TensorBoard does that is installed wrongly."""


@pytest.fixture
def config_file(tiny_config: Callable[..., Config], tmp_path: Path) -> Path:
    return write_config(tmp_path, tiny_config("train.eval_every=0"), "test")


def plant_tensorboard(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tensorboard").mkdir(parents=True)
    (folder / "tensorboard" / "__init__.py").write_text(BROKEN[what])
    monkeypatch.setenv("PYTHONPATH", str(folder))


def triage(config_file: Path, folder: Path, *arguments: object) -> tuple[int, Triage]:
    command = ["triage", "--config", config_file, "--steps", 2, "--out-dir", folder, *arguments]
    code = main([str(word) for word in command])
    return code, read_triage(folder)


@pytest.fixture
def quick(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of a triage are processes of the nursery."""
    monkeypatch.setattr(sys, "executable", str(nursery.python))


@pytest.mark.usefixtures("quick")
def test_a_healthy_run_has_nothing_to_clear(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = triage(config_file, tmp_path / "t")
    assert (code, found.verdict, found.cleared_by) == (0, "healthy", [])
    assert [(o.name, o.kind, o.steps_done) for o in found.outcomes] == [("baseline", "ok", 2)]
    assert "there is nothing to clear" in capsys.readouterr().out
    assert "there is nothing to clear" in (tmp_path / "t" / "triage.md").read_text()


@pytest.mark.usefixtures("quick")
def test_a_broken_tensorboard_is_found_by_its_toggle(
    config_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It fails as it is, not without TensorBoard, and then again; the rest is not tried."""
    plant_tensorboard("fails", tmp_path / "packages", monkeypatch)
    code, found = triage(config_file, tmp_path / "t", "--only", "logs_off,no_flash")
    assert (code, found.verdict, found.cleared_by) == (0, "cleared", ["logs_off"])
    assert [o.name for o in found.outcomes] == ["baseline", "logs_off", "baseline"]
    assert [o.kind for o in found.outcomes] == ["exit 1", "ok", "exit 1"]
    assert "broken" in found.outcomes[0].fault
    printed = capsys.readouterr().out
    assert "NSA_TB_DISABLE=1 NSA_DISABLE_CSV_LOGS=1" in printed
    assert "points to TensorBoard, the CSV files" in printed


@pytest.mark.usefixtures("quick")
def test_a_fault_that_nothing_clears_is_an_exit_code(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = triage(config_file, tmp_path / "t", "--only", "stats_off", "train.lr=1e30")
    assert (code, found.verdict, found.cleared_by) == (1, "not_cleared", [])
    assert [o.kind for o in found.outcomes] == ["exit 10"] * 2
    assert found.overrides == ["train.lr=1e30"]
    assert "no toggle cleared the fault (exit code 10" in capsys.readouterr().out


def test_a_fault_that_comes_and_goes_is_not_called_cleared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from nsa.operate.triage import command as module
    from nsa.operate.triage.trials import Outcome

    def outcome(fault: str) -> Outcome:
        words: dict[str, Any] = dict.fromkeys(("name", "setting", "meaning", "log", "kind"), "x")
        numbers: dict[str, Any] = dict(exit_code=0, steps_done=1, loss_last=1.0, seconds=0.1)
        return Outcome(**words, **numbers, fault=fault)

    ends = iter([outcome("it hung"), outcome(""), outcome("")])
    monkeypatch.setattr(module, "run_trial", lambda *_: next(ends))
    trial = Trial(config_path="c", overrides=(), folder=tmp_path, steps=1, timeout_s=1.0)
    found = find(trial, [Toggle(name="x", meaning="nothing")])
    assert found.verdict == "intermittent"
    write_triage(tmp_path, found)
    assert read_triage(tmp_path) == found


def test_nothing_of_a_run_that_was_ended_is_left(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_tensorboard("hangs", tmp_path / "packages", monkeypatch)
    monkeypatch.setattr(trials, "END_S", 1.0)  # it ignores SIGTERM in its hang
    monkeypatch.setattr(trials, "DUMP_S", 1.0)
    trial = Trial(
        config_path=str(config_file), overrides=(), folder=tmp_path, steps=1, timeout_s=6.0
    )
    outcome = run_trial(trial, BASELINE, "hung")
    assert (outcome.kind, outcome.exit_code) == ("timeout", None)
    mine = str(tmp_path / "hung.yaml").encode()
    assert [pid for pid in os.listdir("/proc") if pid.isdigit() and mine in _command(pid)] == []


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# The matrix


def test_the_matrix_is_in_order_and_fits_the_run(tiny_config: Callable[..., Config]) -> None:
    one = [toggle.name for toggle in matrix(tiny_config(), 1, on_cuda=False)]
    assert one == [
        *("stats_off", "logs_off", "synthetic_data", "no_flash", "fa2_off", "selection_v1"),
        *("gradient_checkpointing", "shorter_rows"),
    ]
    two = [toggle.name for toggle in matrix(tiny_config(), 2, on_cuda=True)]
    assert [name for name in two if name not in one] == [
        *("compress_off", "static_graph_off", "find_unused", "bucket_25", "bucket_50"),
        *("safe_mode", "launch_blocking", "one_process", "fsdp"),
    ]
    sharded = matrix(tiny_config("runtime.strategy=fsdp"), 2, on_cuda=False)
    assert [toggle.name for toggle in sharded] == [*one, "one_process"]
    cfg = tiny_config("data.dataset=synthetic", "runtime.gradient_checkpointing=true")
    names = [toggle.name for toggle in matrix(cfg, 1, on_cuda=False)]
    assert not {"synthetic_data", "gradient_checkpointing"} & {*names}


def test_toggles_only_use_what_exists(tiny_config: Callable[..., Config]) -> None:
    local = ("data.dataset=fineweb_edu_local", "data.local_path=documents.jsonl")
    toggles = matrix(tiny_config(*local), 2, on_cuda=True)
    assert len({toggle.name for toggle in toggles}) == len(toggles)
    for toggle in toggles:
        assert toggle.environ.keys() <= TABLE.keys()
        tiny_config(*local, *toggle.overrides)  # none of them is refused
    assert trials.SELECTION in toggles


def test_a_toggle_that_the_config_forbids_is_an_outcome(config_file: Path, tmp_path: Path) -> None:
    trial = Trial(
        config_path=str(config_file), overrides=(), folder=tmp_path, steps=1, timeout_s=1.0
    )
    toggle = Toggle(name="odd", meaning="nothing", overrides=("train.seq_len=0",))
    outcome = run_trial(trial, toggle, "odd")
    assert outcome.kind == "exit 2" and "train.seq_len" in outcome.fault


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "must both be at least 1"),
        (["--timeout", "nan"], "a number of seconds above 0"),
        (["--only", "stats_of"], "--only stats_of is not a toggle of this run; use stats_off"),
        (["train.stepz=3"], "train.stepz"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    config_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    out = tmp_path / "t"
    command = ["triage", "--config", str(config_file), "--out-dir", str(out), *arguments]
    assert main(command) == 2
    assert message in capsys.readouterr().err and not out.exists()


def test_list_runs_nothing(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["triage", "--config", str(config_file), "--out-dir", str(tmp_path / "t"), "--list"]
    assert main(command) == 0
    assert "stats_off: NSA_DISABLE_AUX_STATS=1: " in capsys.readouterr().out
    assert not (tmp_path / "t").exists()


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    for content, message in (({"version": 2}, "has version 2"), ({"version": 1}, "is not the")):
        (tmp_path / "triage.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            read_triage(tmp_path)

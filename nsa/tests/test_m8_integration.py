"""The parts of a run together: environment, data, trainer, and the files it is watched by."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nsa.config import Config, ConfigError, DataConfig, load_config
from nsa.config.env import check_environment, in_effect
from nsa.data import ByteTokenizer, open_data
from nsa.data.prepare import prepare
from nsa.operate.run_folder import number, read_run
from nsa.records import (
    TRAINING,
    VAL,
    Heartbeat,
    TrainingRow,
    ValRow,
    age_seconds,
    last_beat,
    last_rows,
    read_env,
    read_heartbeat,
    read_metrics,
    read_rows,
    sentinels,
    write_config,
)
from nsa.tests.conftest import REPOSITORY
from nsa.train import Halted, RunRefused, load_model, run
from nsa.train.checkpoint import file as checkpoint_file
from scripts import _watchdog
from scripts.train_showcase import TinyLM, main

BuildConfig = Callable[..., Config]
SCRIPT = REPOSITORY / "scripts" / "train_showcase.py"


# the environment


def test_a_variable_that_does_not_exist_stops_the_entry_before_it_trains(
    tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path, tiny_config(), "test")
    monkeypatch.setenv("NSA_PREFIL_BATCHED", "1")
    assert main(["--config", str(path)]) == 2
    with pytest.raises(ConfigError, match="the nearest known one is NSA_PREFILL_BATCHED"):
        check_environment()
    assert not (tmp_path / "run").exists()


def test_the_environment_of_the_runbooks_is_accepted_and_recorded(
    tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(tmp_path, tiny_config(), "test")
    given = {"NSA_PREFILL_BATCHED": "1", "NSA_SEL_RANGES_V2": "1", "NSA_ACCUM": "2"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main(["--config", str(path), "--steps", "1"]) == 0
    assert in_effect() == {"NSA_ACCUM": "2"}
    assert read_env(tmp_path / "run").env.items() >= given.items()
    assert read_metrics(tmp_path / "run").batch_global == 4


def test_settings_win_in_the_order_file_environment_command_line(
    tiny_config: BuildConfig, tmp_path: Path
) -> None:
    path = write_config(tmp_path, tiny_config("train.batch_size=5"), "test")
    environ = {"NSA_BATCH_SIZE": "6"}
    assert load_config(path, environ={}).train.batch_size == 5
    assert load_config(path, environ=environ).train.batch_size == 6
    assert load_config(path, ["train.batch_size=7"], environ=environ).train.batch_size == 7


# what a watchdog reads


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps, from the entry that the runbooks call."""
    folder = tmp_path_factory.mktemp("finished")
    base = REPOSITORY / "configs" / "train_showcase.yaml"
    overrides = ["train.seq_len=64", "train.batch_size=1", "train.log_every=2"]
    overrides += ["train.eval_every=3", "train.save_every=3", "train.eval_batches=1"]
    overrides += ["model.dim=32", "runtime.device=cpu"]
    cfg = load_config(base, overrides, environ={})
    path = write_config(folder, cfg, "test")
    arguments = ["--config", str(path), "--steps", "6", "--out-dir", str(folder / "run")]
    assert main([*arguments, "--dataset", "synthetic"]) == 0
    return folder / "run"


def test_the_tail_of_a_heartbeat_has_the_last_line_of_each_kind(finished: Path) -> None:
    path = finished / "heartbeat_rank0.jsonl"
    last, progress = last_beat(path), last_beat(path, "progress")
    assert last is not None and (last.step, last.msg) == (6, "beat")
    assert last.extra == {"phase": "save"}, "the last thing that the run did"
    assert progress is not None and progress.step == 6
    assert progress.extra["loss"] == pytest.approx(read_metrics(finished).loss_last)
    assert progress.extra["entropy_mean"] == progress.extra["gate_entropy_mean"] > 0.5
    assert {beat.step for beat in read_heartbeat(path) if beat.msg == "beat"} == set(range(1, 7))


def test_the_tail_of_a_heartbeat_survives_a_line_that_is_being_written(
    finished: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "heartbeat_rank0.jsonl"
    whole = (finished / copy.name).read_bytes()
    copy.write_bytes(whole + b'{"ts": 17.0, "step": 7, "ms')
    beat = last_beat(copy)
    assert beat is not None and beat.step == 6


def test_a_heartbeat_of_five_minutes_ago_is_that_old(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path)
    heartbeat.write(step=4, msg="progress")
    age = age_seconds(heartbeat.path, now=time.time() + 300)
    assert age is not None and 300 <= age < 310
    assert age_seconds(tmp_path / "heartbeat_rank1.jsonl") is None


def test_the_tail_of_training_csv_leaves_the_header_and_a_cut_line_out(
    finished: Path, tmp_path: Path
) -> None:
    rows = read_rows(TrainingRow, finished / TRAINING)
    assert [row.step for row in rows] == [1, 2, 4, 6]
    assert last_rows(TrainingRow, finished / TRAINING, 2) == rows[-2:]
    assert last_rows(TrainingRow, finished / TRAINING, 99) == rows
    assert last_rows(ValRow, finished / VAL, 1)[0].step == 6
    copy = tmp_path / TRAINING
    copy.write_bytes((finished / TRAINING).read_bytes() + b"8,3.1")
    assert last_rows(TrainingRow, copy, 1) == rows[-1:]
    copy.write_text("step,loss,lr,toks_per_s\n")
    assert last_rows(TrainingRow, copy, 5) == []
    assert last_rows(TrainingRow, tmp_path / "none.csv", 5) == []


def test_a_broken_line_in_the_tail_is_named(tmp_path: Path) -> None:
    path = tmp_path / TRAINING
    path.write_text("step,loss,lr,toks_per_s\n1,2.0,1e-3,10\n2,oops,1e-3,10\n")
    with pytest.raises(ValueError, match="training.csv, the line at byte .*'2,oops,1e-3,10'"):
        last_rows(TrainingRow, path, 1)


# the watchdog


def test_the_watchdog_starts_from_anywhere_and_names_its_flags(tmp_path: Path) -> None:
    script = REPOSITORY / "scripts" / "_watchdog.py"
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script), "--help"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert all(flag in done.stdout for flag in ("--dir", "--halt", "--interval", "--once"))
    assert callable(_watchdog.main)


def test_the_watchdog_reads_the_tail_of_the_heartbeat(finished: Path) -> None:
    (rank,) = read_run(finished).ranks
    assert rank.last is not None and rank.last.step == 6 and rank.last.is_pause
    assert [beat.step for beat in rank.progress] == [1, 2, 4, 6]
    assert len(rank.gaps) == 4 and min(rank.gaps) > 0
    assert number(rank.progress[-1], "grad_norm") is not None


def test_the_watchdog_reads_the_tail_of_training_csv_without_its_header(finished: Path) -> None:
    run = read_run(finished)
    assert run.rows == read_rows(TrainingRow, finished / TRAINING)
    assert [step for step, _ in run.losses] == [1, 2, 4, 6]
    assert run.problems == [] and run.ended


def test_the_watchdog_halts_a_run_whose_heartbeat_is_300_s_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heartbeat = Heartbeat(tmp_path, rank=0)
    heartbeat.write(step=10, msg="progress", extra={"loss": 2.5})
    now = time.time()
    arguments = ["--dir", str(tmp_path), "--halt", "1", "--interval", "1", "--once"]
    monkeypatch.setattr("nsa.operate.run_folder.time.time", lambda: now + 100)
    _watchdog.main(arguments)
    assert sentinels.read_halt(tmp_path) is None
    monkeypatch.setattr("nsa.operate.run_folder.time.time", lambda: now + 300)
    assert _watchdog.main(arguments) == 1
    assert (tmp_path / ".HALT").read_text() == "halt: heartbeat_stall\n"
    assert sentinels.read_anomaly(tmp_path) == "heartbeat_stall"
    assert "[watch] NOTE heartbeat_stall at step 10" in capsys.readouterr().out


# data


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    texts = (f"Document number {i}: " + "words and more words. " * (i % 5 + 1) for i in range(300))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def local(path: Path) -> DataConfig:
    return DataConfig(dataset="fineweb_edu_local", local_path=str(path))


def test_documents_become_full_rows_that_end_them_with_the_end_mark(documents: Path) -> None:
    data = open_data(local(documents), seq_len=48, seed=1)
    assert data.train.num_rows is not None and data.counts is not None
    batch = data.train.batch(0, data.train.num_rows)
    assert batch.shape == (data.train.num_rows, 49) and batch.dtype == torch.int64
    trained_on = data.counts.documents - data.counts.held_out
    ends = (batch[:, 1:] == data.tokenizer.eos).sum().item()
    assert trained_on - 2 <= ends <= trained_on, "a rest shorter than a row may hold the last"


def test_a_row_depends_on_seed_and_position_alone(documents: Path) -> None:
    first, again, other = (open_data(local(documents), 48, seed).train for seed in (1, 1, 2))
    assert torch.equal(first.batch(10, 4), torch.cat([again.batch(i, 1) for i in range(10, 14)]))
    assert not torch.equal(first.batch(0, 8), other.batch(0, 8))


def test_held_out_documents_are_never_trained_on(documents: Path) -> None:
    data = open_data(local(documents), seq_len=48, seed=1)
    assert data.counts is not None and 0 < data.counts.held_out < data.counts.documents

    def names(side: str) -> set[str]:
        rows = getattr(data, side)
        text = data.tokenizer.decode(rows.batch(0, rows.num_rows).flatten().tolist())
        return {part.split(":")[0] for part in text.split("number ")[1:] if ":" in part[:5]}

    assert names("train") and names("val") and not names("train") & names("val")


def test_prepared_shards_train_as_the_documents_do(
    documents: Path, tiny_config: BuildConfig, tmp_path: Path
) -> None:
    prepare(documents, tmp_path / "shards", ByteTokenizer(), shard_tokens=4000)
    losses = []
    for dataset, path in (("fineweb_edu_local", documents), ("shards", tmp_path / "shards")):
        source = (f"data.dataset={dataset}", f"data.local_path={path}")
        cfg = tiny_config(*source, f"train.out_dir={tmp_path / dataset}")
        losses.append(run(cfg, config_path="tiny", out=io.StringIO()).metrics.loss_last)
    assert losses[0] == losses[1]


# the trainer


def test_the_entry_exports_the_model_and_runs_without_pythonpath(tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CONFIG")}
    code = f"import runpy; m = runpy.run_path({str(SCRIPT)!r}); print(m['TinyLM'].__name__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.stdout == "TinyLM\n", done.stderr
    model = TinyLM(256, 16, 1, 2, 1, 8, 8, 8, 4, 8, 3, 8)
    assert model(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, 256)


def test_heartbeat_writes_step_message_and_extra_fields(tmp_path: Path) -> None:
    Heartbeat(tmp_path, rank=0).write(step=3, msg="progress", extra={"loss": 2.5})
    (beat,) = read_heartbeat(tmp_path / "heartbeat_rank0.jsonl")
    assert (beat.step, beat.msg, beat.rank, beat.extra) == (3, "progress", 0, {"loss": 2.5})


def test_a_halt_file_stops_a_run_that_the_same_command_then_finishes(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_config("train.steps=5")
    folder = Path(cfg.train.out_dir)
    real = Heartbeat.beat

    def beat(self: Heartbeat, step: int, phase: str = "step_start") -> None:
        real(self, step, phase)
        if step == 3 and not (folder / ".HALT.done").exists():
            sentinels.write_halt(folder, "operator")

    monkeypatch.setattr(Heartbeat, "beat", beat)
    with pytest.raises(Halted, match="after step 3"):
        run(cfg, config_path="tiny", out=io.StringIO())
    assert checkpoint_file.steps_of(folder) == [3]
    result = run(cfg, config_path="tiny", out=io.StringIO())
    assert (result.metrics.resumed_at, result.metrics.step) == (3, 5)
    assert result.metrics.status == "finished"


def test_a_halt_from_before_keeps_a_run_from_starting(tiny_config: BuildConfig) -> None:
    cfg = tiny_config()
    Path(cfg.train.out_dir).mkdir(parents=True)
    sentinels.write_halt(cfg.train.out_dir, "heartbeat_stall")
    with pytest.raises(RunRefused, match="remove"):
        run(cfg, config_path="tiny")


def test_sigterm_ends_the_process_with_a_checkpoint_and_code_zero(
    tiny_config: BuildConfig, tmp_path: Path
) -> None:
    path = write_config(tmp_path, tiny_config("train.steps=4000"), "test")
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--config", str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    )
    folder = tmp_path / "run"
    try:
        deadline = time.monotonic() + 60
        while not last_rows(TrainingRow, folder / TRAINING, 1) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert read_metrics(folder).status == "halted"
    assert checkpoint_file.verify(
        folder / checkpoint_file.NAME.format(step=read_metrics(folder).step)
    )


def test_the_files_of_a_run_agree_with_each_other(finished: Path) -> None:
    metrics, rows = read_metrics(finished), read_rows(TrainingRow, finished / TRAINING)
    assert (metrics.status, metrics.step) == ("finished", 6)
    assert rows[-1].loss == pytest.approx(metrics.loss_last, abs=1e-6)
    assert read_rows(ValRow, finished / VAL)[-1].loss == pytest.approx(metrics.val_loss, abs=1e-6)
    model, cfg = load_model(finished / "model.pt")
    saved = checkpoint_file.read(finished / "checkpoint_step6.pt")["state_dict"]
    assert all(torch.equal(x, saved[name]) for name, x in model.state_dict().items())
    assert cfg.train.out_dir == str(finished)
    assert sum(p.numel() for p in model.parameters()) == metrics.num_params

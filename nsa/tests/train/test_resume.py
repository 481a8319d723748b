"""Checkpoints: a run that was stopped and continues is, bit for bit, the run that was not."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nsa.config import Config, load_config
from nsa.records import TRAINING, VAL, TrainingRow, ValRow, read_metrics, read_rows
from nsa.records.folder import RUN as RUN_LOCK
from nsa.records.metrics import write_metrics
from nsa.tests.conftest import REPOSITORY
from nsa.tests.support.nursery import Nursery
from nsa.train import BadCheckpoint, Halted, NonFiniteLoss, RunRefused, TrainResult, run
from nsa.train.checkpoint import file as checkpoint_file
from nsa.train.checkpoint import find
from nsa.train.checkpoint.find import back_up
from nsa.train.checkpoint.writer import Saver
from nsa.train.loss import next_token_loss
from nsa.train.step import Updated

BuildConfig = Callable[..., Config]
LONG = ("train.steps=8", "train.save_every=3", "train.log_every=1", "train.eval_every=4")


def train(cfg: Config, **options: object) -> tuple[TrainResult, str]:
    """Run and return the result with what was printed."""
    out = io.StringIO()
    result = run(cfg, config_path="configs/tiny.yaml", out=out, **options)  # type: ignore[arg-type]
    return result, out.getvalue()


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal arrives while step `step` is being computed."""
    from nsa.train.trainer import Trainer

    real = Trainer.update

    def update(self: Trainer, number: int, *args: object) -> Updated:
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, number, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "update", update)


def weights(result: TrainResult) -> dict[str, Tensor]:
    return result.model.state_dict()


def losses(cfg: Config) -> list[tuple[int, float, float]]:
    rows = read_rows(TrainingRow, Path(cfg.train.out_dir) / TRAINING)
    return [(row.step, row.loss, row.lr) for row in rows]


SETTINGS = {
    "plain": (),
    "accumulated": ("train.accumulate_grad_batches=2",),
    "checkpointed": ("runtime.gradient_checkpointing=true",),
    "synthetic": ("data.dataset=synthetic",),
    "bf16": ("runtime.precision=bf16",),
    "fp16": ("runtime.precision=fp16", "train.accumulate_grad_batches=2"),
    "muon": ("train.optimizer=muon", "train.accumulate_grad_batches=2"),
    "muon-fp16": ("train.optimizer=muon", "runtime.precision=fp16"),
    "mlp": ("nsa.phi=mlp", "nsa.gate=sigmoid", "model.tie_embeddings=true"),
    "msa": ("model.rule=msa,reuse", "nsa.l_sel=16", "nsa.d_index=8", "train.index_warmup_steps=4"),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    settings: str, tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped on a checkpoint, and between two."""
    overrides = (*LONG, *SETTINGS[settings])
    whole = tiny_config(*overrides, f"train.out_dir={tmp_path / 'whole'}")
    expected, _ = train(whole)
    for step in (3, 5):
        folder = tmp_path / f"parts{step}"
        parts = tiny_config(*overrides, f"train.out_dir={folder}")
        with monkeypatch.context() as patch:
            stop_after(step, patch)
            with pytest.raises(Halted, match=f"SIGTERM after step {step}"):
                train(parts)
        assert read_metrics(folder).status == "halted"

        resumed, printed = train(parts)

        assert f"{step} of 8 steps are done" in printed
        assert losses(parts) == losses(whole)
        assert read_rows(ValRow, folder / VAL) == read_rows(ValRow, tmp_path / "whole" / VAL)
        for name, tensor in weights(expected).items():
            assert torch.equal(weights(resumed)[name], tensor), name
        metrics = read_metrics(folder)
        assert (metrics.status, metrics.step, metrics.resumed_at) == ("finished", 8, step)
        assert metrics.loss_first == read_metrics(tmp_path / "whole").loss_first


def test_a_run_killed_before_its_model_file_is_finished_by_the_same_command(
    tiny_config: BuildConfig, tmp_path: Path
) -> None:
    """The last checkpoint is written before model.pt, and holds everything."""
    config = tiny_config(*LONG, "train.save_every=4")
    expected, _ = train(config)
    folder = Path(config.train.out_dir)
    write_metrics(folder, replace(read_metrics(folder), status="running"))
    (folder / "model.pt").unlink()

    finished, printed = train(config)

    assert "8 of 8 steps are done" in printed
    for name, tensor in weights(expected).items():
        assert torch.equal(weights(finished)[name], tensor), name
    metrics = read_metrics(folder)
    assert (metrics.status, metrics.step, metrics.resumed_at) == ("finished", 8, 8)


def test_lines_after_the_last_checkpoint_are_written_again_once(
    tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed without a chance to save: the log is ahead of the checkpoint."""
    cfg = tiny_config(*LONG)
    folder = Path(cfg.train.out_dir)
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        with pytest.raises(Halted):
            train(cfg)
    for name in ("checkpoint_step5.pt", "checkpoint_step5.json"):
        (folder / name).unlink()  # as if the kill had come first

    train(cfg)

    assert [step for step, *_ in losses(cfg)] == list(range(1, 9))


def test_every_checkpoint_loads_as_plain_containers_and_as_a_model(
    tiny_config: BuildConfig,
) -> None:
    from nsa.train import load_model

    cfg = tiny_config(*LONG)
    result, _ = train(cfg)
    path = Path(cfg.train.out_dir) / "checkpoint_step6.pt"
    content = torch.load(path, map_location="cpu", weights_only=True)
    assert content["step"] == 6
    assert content["tokens_seen"] == 6 * result.metrics.tokens_per_step
    model, loaded = load_model(path)
    assert loaded == cfg
    assert sum(p.numel() for p in model.parameters()) == result.metrics.num_params


def stopped(cfg: Config, step: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patch:
        stop_after(step, patch)
        with pytest.raises(Halted):
            train(cfg)
    return Path(cfg.train.out_dir)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no manifest", "empty manifest"])
def test_a_damaged_latest_checkpoint_is_skipped_with_a_warning(
    damage: str, tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_config(*LONG)
    folder = stopped(cfg, 5, monkeypatch)
    path, manifest = folder / "checkpoint_step5.pt", folder / "checkpoint_step5.json"
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(content[:-100])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("")

    with pytest.raises(BadCheckpoint, match="checkpoint_step5"):
        train(cfg, resume=str(path))
    _, printed = train(cfg)

    assert "[resume] skipped" in printed and "checkpoint_step5" in printed
    assert "3 of 8 steps are done" in printed


def test_another_run_in_the_folder_moves_the_old_one_aside(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stopped(tiny_config(*LONG), 5, monkeypatch)
    other = tiny_config(*LONG, "train.seed=7", "model.dim=24")

    _, printed = train(other)

    assert "train.seed: 1337 there, 7 here" in printed
    assert "there, 24 here" in printed
    assert len(list(folder.glob("previous/*/checkpoint_step5.pt"))) == 1
    assert read_metrics(folder).resumed_at is None


@pytest.mark.parametrize(
    ("schedule", "first", "then"),
    [
        (("train.lr_schedule=constant", "train.warmup_steps=2"), "train.steps=6", "train.steps=9"),
        (("train.lr_schedule=wsd",), "train.steps=10", "train.steps=15"),
    ],
    ids=["constant", "wsd"],
)
def test_a_run_that_is_extended_equals_one_of_that_length_from_the_start(
    schedule: tuple[str, ...], first: str, then: str, tiny_config: BuildConfig, tmp_path: Path
) -> None:
    """Without decay_steps, the fall of wsd is a fifth of the steps: also of the new ones."""
    usual = (*LONG, *schedule, "train.eval_every=0")
    whole = tiny_config(*usual, then, f"train.out_dir={tmp_path / 'whole'}")
    expected, _ = train(whole)
    train(tiny_config(*usual, first), stop_after=6)

    extended = tiny_config(*usual, then)
    resumed, printed = train(extended)

    assert "[resume] train.steps" in printed and "6 of" in printed
    assert losses(extended) == losses(whole)
    for name, tensor in weights(expected).items():
        assert torch.equal(weights(resumed)[name], tensor), name
    content = checkpoint_file.read(Path(extended.train.out_dir) / "checkpoint_step9.pt")
    assert f"train.steps={content['identity']['train.steps']}" == then


def test_a_long_run_is_not_put_aside_by_a_plain_command(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stopped(tiny_config(*LONG), 5, monkeypatch)
    metrics = read_metrics(folder)
    metrics.train_s = 3600.0
    write_metrics(folder, metrics)
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir() if p.name != RUN_LOCK}
    other = tiny_config(*LONG, "train.seed=7")

    with pytest.raises(RunRefused, match="after 1:00:00 of training") as refused:
        train(other)

    assert refused.value.exit_code == 3
    assert "the same command with train.seed=1337\n" in str(refused.value)
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir() if p.name != RUN_LOCK} == before
    train(tiny_config(*LONG, "train.seed=7", "train.seed=1337"))  # as the message says
    assert read_metrics(folder).resumed_at == 5


def test_a_restart_goes_on_from_what_was_written_after_the_named_checkpoint(
    tiny_config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stopped(tiny_config(*LONG), 5, monkeypatch)
    elsewhere = tiny_config(*LONG, f"train.out_dir={tmp_path / 'other'}")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    _, printed = train(elsewhere, resume=str(folder / "checkpoint_step3.pt"))
    assert "3 of 8 steps are done" in printed, "nothing there yet"
    _, printed = train(tiny_config(*LONG), resume=str(folder / "checkpoint_step3.pt"))
    assert "5 of 8 steps are done" in printed
    other = tiny_config(*LONG, "train.seed=7", f"train.out_dir={tmp_path / 'third'}")
    stopped(other, 4, monkeypatch)
    cfg = tiny_config(*LONG, f"train.out_dir={tmp_path / 'third'}")
    with pytest.raises(RunRefused, match="a restart moves no files aside"):
        train(cfg, resume=str(folder / "checkpoint_step3.pt"))


def test_a_named_checkpoint_of_another_run_is_refused(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stopped(tiny_config(*LONG), 5, monkeypatch)
    other = tiny_config(*LONG, "model.dim=24")
    for wanted in (str(folder / "checkpoint_step5.pt"), "latest"):
        with pytest.raises(BadCheckpoint, match=r"model.dim: \d+ there, 24 here"):
            train(other, resume=wanted)
    with pytest.raises(BadCheckpoint, match="does not exist"):
        train(other, resume=str(folder / "checkpoint_step99.pt"))


def test_latest_needs_a_checkpoint_and_none_ignores_it(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_config(*LONG)
    with pytest.raises(BadCheckpoint, match="no usable checkpoint"):
        train(cfg, resume="latest")
    folder = stopped(cfg, 5, monkeypatch)
    _, printed = train(cfg, resume="none")
    assert "[resume] from" not in printed
    assert len(list(folder.glob("previous/*/checkpoint_step5.pt"))) == 1


def test_a_batch_cut_otherwise_goes_on_and_a_larger_one_does_not(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_config(*LONG, "train.batch_size=2", "train.accumulate_grad_batches=1")
    stopped(cfg, 5, monkeypatch)
    same = tiny_config(*LONG, "train.batch_size=1", "train.accumulate_grad_batches=2")
    larger = tiny_config(*LONG, "train.batch_size=4")
    with pytest.raises(BadCheckpoint, match="global batch: 2 there, 4 here"):
        train(larger, resume="latest")
    _, printed = train(same)
    assert "5 of 8 steps are done" in printed


def test_only_the_newest_checkpoints_are_kept(tiny_config: BuildConfig) -> None:
    cfg = tiny_config("train.steps=6", "train.save_every=1", "train.keep_last=2")
    train(cfg)
    assert checkpoint_file.steps_of(Path(cfg.train.out_dir)) == [6, 5]
    assert len(list(Path(cfg.train.out_dir).glob("checkpoint_step*.json"))) == 2


def test_what_does_not_match_its_manifest_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint_file.write(tmp_path, {"step": step})
    with (tmp_path / "checkpoint_step4.pt").open("ab") as file:
        file.write(b"!")
    assert [p.name for p in find.remove_old(tmp_path, 1)] == [
        "checkpoint_step2.pt",
        "checkpoint_step1.pt",
    ]
    assert checkpoint_file.steps_of(tmp_path) == [4, 3]


def test_backups_are_verified_copies(tiny_config: BuildConfig, tmp_path: Path) -> None:
    backup = tmp_path / "elsewhere"
    cfg = tiny_config(*LONG, f"train.backup_dir={backup}")
    train(cfg)
    assert checkpoint_file.steps_of(backup) == [6, 3]
    assert checkpoint_file.read(backup / "checkpoint_step6.pt")["step"] == 6
    with (backup / "checkpoint_step6.pt").open("ab") as file:
        file.write(b"!")
    with pytest.raises(BadCheckpoint, match="bytes"):
        back_up(backup / "checkpoint_step6.pt", tmp_path / "third")


def test_a_backup_that_fails_is_said_and_the_checkpoint_counts(
    tiny_config: BuildConfig, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file where a folder is wanted")
    cfg = tiny_config(*LONG, f"train.backup_dir={tmp_path / 'taken'}")
    _, printed = train(cfg)
    assert f"checkpoint_step6.pt: no copy in {tmp_path / 'taken'}" in printed
    assert checkpoint_file.steps_of(Path(cfg.train.out_dir)) == [6, 3]


def test_gradients_that_overflow_without_end_end_the_run(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowing(*args: object) -> Tensor:
        return torch.tensor(float("inf"))

    monkeypatch.setattr("nsa.train.step.clip_gradients", overflowing)
    monkeypatch.setattr("nsa.train.log.MAX_OVERFLOWS", 3)
    cfg = tiny_config(*LONG, "runtime.precision=fp16")
    with pytest.raises(NonFiniteLoss, match="Step 4: loss .*gradient norm inf"):
        train(cfg)


def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_config(*LONG)
    real = torch.save

    def save(content: dict[str, object], file: Path) -> None:
        if content.get("step") == 6:
            file.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(content, file)

    monkeypatch.setattr(torch, "save", save)
    _, printed = train(cfg)
    folder = Path(cfg.train.out_dir)
    assert re.search(r"checkpoint_step6.pt in .*: not written: disk full: need .*, have ", printed)
    assert checkpoint_file.steps_of(folder) == [3]
    assert not list(folder.glob(".*tmp"))
    assert read_metrics(folder).status == "finished"


def test_writing_happens_beside_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, threads = threading.Event(), []

    def write(folder: Path, content: dict[str, object]) -> Path:
        threads.append(threading.current_thread().name)
        assert release.wait(30)
        return folder / "checkpoint_step1.pt"

    monkeypatch.setattr(checkpoint_file, "write", write)
    saver = Saver(tmp_path, keep=0, backup=None, say=print)
    saver.save({"step": 1})  # returns although nothing is written yet
    release.set()
    assert saver.wait()
    assert threads == ["checkpoint"]


def test_a_halt_file_stops_after_the_step_and_is_put_aside(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nsa.train.trainer import Trainer

    cfg = tiny_config(*LONG)
    folder = Path(cfg.train.out_dir)
    real = Trainer.update

    def update(self: Trainer, number: int, *args: object) -> Updated:
        if number == 4:
            (folder / ".HALT").touch()
        return real(self, number, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "update", update)
    out = io.StringIO()
    with pytest.raises(Halted) as halted:
        run(cfg, config_path="tiny", out=out)
    assert halted.value.exit_code == 0
    assert "[train] HALT file detected — stopping gracefully." in out.getvalue()
    assert not (folder / ".HALT").exists() and (folder / ".HALT.done").exists()
    assert checkpoint_file.steps_of(folder) == [4, 3]


def test_a_halt_file_from_before_is_refused_with_the_way_out(tiny_config: BuildConfig) -> None:
    cfg = tiny_config(*LONG)
    folder = Path(cfg.train.out_dir)
    folder.mkdir(parents=True)
    (folder / ".HALT").touch()
    with pytest.raises(RunRefused, match=r"remove .*\.HALT to start"):
        train(cfg)
    (folder / ".HALT").unlink()
    train(cfg)


def test_a_loss_that_is_not_finite_leaves_the_last_good_state_and_blocks_a_restart(
    tiny_config: BuildConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_config(*LONG)
    folder = Path(cfg.train.out_dir)
    real = next_token_loss
    calls = []

    def poisoned(*args: object, **options: object) -> Tensor:
        calls.append(1)
        loss = real(*args, **options)  # type: ignore[arg-type]
        return loss * float("nan") if len(calls) == 5 else loss

    monkeypatch.setattr("nsa.train.step.next_token_loss", poisoned)
    with pytest.raises(NonFiniteLoss, match="Step 5: loss nan") as failed:
        train(cfg)
    assert failed.value.exit_code == 10
    assert (folder / ".anomaly_type").read_text().strip() == "nan_loss"
    assert (folder / ".HALT").read_text().strip() == "halt: nan_loss"
    assert read_metrics(folder).status == "non_finite"
    assert checkpoint_file.steps_of(folder) == [3]
    found = torch.load(folder / "anomaly_step5.pt", weights_only=True)
    assert found["step"] == 5 and found["batch"].shape[1] == cfg.train.seq_len + 1
    assert all(x.isfinite().all() for x in found["state_dict"].values())
    with pytest.raises(NonFiniteLoss, match="nan_loss") as again:
        train(cfg)
    assert again.value.exit_code == 10


KILLED = """
import os, signal, sys, threading
from pathlib import Path
import torch
from scripts.train_showcase import main

skipped, moment, saves, events = int(sys.argv[1]), int(sys.argv[2]), [], []
real = torch.save

def save(content, file):
    saves.append(file)
    if len(saves) == skipped + 1 and moment == 0:
        Path(file).write_bytes(bytes(1000))
        os.kill(os.getpid(), signal.SIGKILL)
    real(content, file)

def happens(event, args):
    if event in ("os.rename", "os.remove") and len(saves) == skipped + 1:
        if threading.current_thread().name == "checkpoint":
            events.append(f"{event} {args}")
            if len(events) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

torch.save = save
sys.addaudithook(happens)
code = main(sys.argv[3:])
print(*events, sep="\\n")
sys.exit(code)
"""
"""Dies while a checkpoint is written: in torch.save, or before a file is renamed or removed, the
`moment`-th since then. Without dying, it prints what happened to files."""


def test_kill_9_at_any_moment_of_a_checkpoint_loses_at_most_the_steps_since_the_last(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Every restart finds a checkpoint that is whole, and the end is the same."""
    folder, config = tmp_path / "run", _tiny(tmp_path)
    command = [str(nursery.python), "-c", KILLED]
    arguments = ["--config", str(config), "--out-dir", str(folder)]
    seen, moment = 0, 0
    while True:
        # Each attempt writes one checkpoint, and dies in the second.
        words = [*command, "1", str(moment), *arguments]
        done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, f"it ended by itself, and badly: {done.stderr}"
        steps = [s for s in checkpoint_file.steps_of(folder) if _is_whole(folder, s)]
        assert steps and steps[0] in (seen + 2, seen + 4), f"{moment}: {steps} after {seen}"
        seen, moment = steps[0], moment + 1
    renamed = [line for line in done.stdout.splitlines() if line.startswith("os.rename")]
    assert len(renamed) == 2 and moment > 4, "the file, its manifest, and old ones were at stake"
    assert (read_metrics(folder).status, read_metrics(folder).step) == ("finished", STEPS)
    steps_logged = [row.step for row in read_rows(TrainingRow, folder / TRAINING)]
    assert steps_logged == list(range(1, STEPS + 1))
    train(load_config(config, [f"train.out_dir={tmp_path / 'whole'}"], environ={}))
    parts, whole = (
        torch.load(path / "model.pt", weights_only=True)["state_dict"]
        for path in (folder, tmp_path / "whole")
    )
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def _is_whole(folder: Path, step: int) -> bool:
    try:
        checkpoint_file.verify(folder / checkpoint_file.NAME.format(step=step))
    except BadCheckpoint:
        return False
    return True


STEPS = 60


def _tiny(folder: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(
        "model: {dim: 16, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 8, d_v: 8}\n"
        "nsa: {l: 8, d: 4, l_sel: 8, n_sel: 3, w: 8}\n"
        f"train: {{steps: {STEPS}, seq_len: 32, batch_size: 1, log_every: 1, eval_every: 0, "
        "save_every: 2, keep_last: 3}\n"
        "data: {dataset: synthetic}\n"
        "runtime: {device: cpu, precision: fp32}\n"
    )
    return path


def test_a_manifest_names_its_file_its_size_and_its_hash(tmp_path: Path) -> None:
    path = checkpoint_file.write(tmp_path, {"step": 7})
    manifest = json.loads((tmp_path / "checkpoint_step7.json").read_text())
    assert manifest["file"] == path.name and manifest["step"] == 7
    assert manifest["bytes"] == path.stat().st_size
    assert manifest["sha256"] == checkpoint_file.file_sha256(path)

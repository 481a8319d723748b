"""Training through the product's own trainer, in a process of its own that can be stopped.

Every stage is a run of its own, which starts from the weights of the one before it. A trainer that
is out of time is asked to stop; it writes a checkpoint, and the same command goes on from there.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from nsa.config.load import REPOSITORY
from nsa.records import MODEL, read_metrics
from nsa.records.metrics import METRICS_FILE
from studies.long_context.presets import Preset
from studies.long_context.text import TOKENIZER

BASE = REPOSITORY / "configs" / "base.yaml"
STOP_S = 60.0
"""Seconds that a trainer has to write its checkpoint."""


class OutOfTime(Exception):
    """The budget ended; what was done stays, and the same command goes on from there."""


class TrainingFailed(Exception):
    """The trainer ended with an error, which its own lines tell."""


def train_stage(
    attention: str, preset: Preset, number: int, text: Path, out: Path, left_s: float
) -> dict[str, float]:
    """Train, or go on training; what the run measured. A run that has finished is only read."""
    folder = stage_folder(out, attention, preset, number)
    if not is_trained(folder):
        command = [sys.executable, "-m", "nsa.cli", "train", "--config", str(BASE)]
        command += overrides(attention, preset, number, text, out)
        _run(command, folder, left_s)
    metrics = read_metrics(folder)
    return {
        "parameters": metrics.num_params,
        "steps": metrics.step,
        "tokens": metrics.step * metrics.tokens_per_step,
        "seconds": round(metrics.train_s, 2),
        "tokens_per_s": round(metrics.toks_per_s or 0.0, 1),
        "loss": round(metrics.loss_last or 0.0, 4),
        "val_loss": round(metrics.val_loss or 0.0, 4),
    }


def total(stages: list[dict[str, float]]) -> dict[str, float]:
    """Of all stages together; what is no sum is that of the last."""
    summed = {name: sum(stage[name] for stage in stages) for name in ("steps", "tokens", "seconds")}
    return stages[-1] | summed


def stage_folder(out: Path, attention: str, preset: Preset, number: int) -> Path:
    """The run folder of a stage."""
    return out / f"{attention}-{preset.stages[number].seq_len}"


def shards_folder(out: Path, preset: Preset, number: int) -> Path:
    """The training rows of a stage."""
    return out / f"shards-{preset.stages[number].seq_len}"


def is_trained(folder: Path) -> bool:
    """Whether the run of the folder came to its end."""
    if not (folder / METRICS_FILE).is_file() or not (folder / MODEL).is_file():
        return False
    return read_metrics(folder).status == "finished"


def overrides(attention: str, preset: Preset, number: int, text: Path, out: Path) -> list[str]:
    """The run of a stage as overrides of configs/base.yaml."""
    stage = preset.stages[number]
    settings = {
        "model.attention": attention,
        "train.steps": stage.steps,
        "train.seq_len": stage.seq_len,
        "train.batch_size": stage.batch_size,
        "train.seed": preset.seed,
        "train.out_dir": stage_folder(out, attention, preset, number),
        "data.dataset": "shards",
        "data.local_path": shards_folder(out, preset, number),
        "data.tokenizer": text / TOKENIZER,
        **stage.settings,
        **preset.settings,
    }
    if number:
        settings["train.init_from"] = stage_folder(out, attention, preset, number - 1) / MODEL
    return [f"{key}={value}" for key, value in settings.items()]


def _run(command: list[str], folder: Path, left_s: float) -> None:
    if left_s <= 0:
        raise OutOfTime
    process = subprocess.Popen(command, cwd=REPOSITORY)
    try:
        code = process.wait(timeout=left_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if not is_trained(folder):
            raise OutOfTime from None
        return
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code:
        raise TrainingFailed(f"the trainer ended with code {code}; its lines above say why")

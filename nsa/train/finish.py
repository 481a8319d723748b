"""The end of a run: model file, loss curve, sample and summary; or the record of a NaN loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nsa.config import to_container
from nsa.data import Tokenizer
from nsa.files import best_effort, replacing
from nsa.model import TinyLM
from nsa.records import Metrics, PlotUnavailable, draw_loss_curve, write_sample
from nsa.records.results import CURVE_FILE, PROMPT, SAMPLE_FILE, Sample, append_sample
from nsa.records.sentinels import write_anomaly, write_halt
from nsa.train.checkpoint.model_file import save_model
from nsa.train.checkpoint.writer import num_tensor_bytes, why_not_written
from nsa.train.errors import TrainError
from nsa.train.progress import clock
from nsa.train.trainer import Trainer

Sampler = Callable[[TinyLM, Tokenizer, int], str]
"""Generates text: (model, tokenizer, seed) -> text, prompt first, as nsa.generate.sample_text."""


def finish(
    trainer: Trainer, model: TinyLM, sampler: Sampler | None, model_path: Path
) -> list[Path]:
    """Write the results of a finished run; return all its files except the checkpoints.

    `model` is the full model; under FSDP the trainer only has shards.
    """
    log, say = trainer.log, trainer.log.progress.say
    files = [path for path in (log.training.path, log.val.path) if path is not None]
    try:
        files.append(save_model(model_path, model, trainer.cfg))
    except (OSError, RuntimeError) as error:  # torch wraps the errors of its file writer
        reason = why_not_written(error, model_path.parent, num_tensor_bytes(model.state_dict()))
        raise TrainError(
            f"training has finished, but {model_path} could not be written ({reason}); the "
            f"weights are in the newest checkpoint of {trainer.folder}, if there is one "
            "(nsa checkpoint export)"
        ) from None
    try:
        title = f"{trainer.cfg.data.dataset}, {log.metrics.num_params:,} parameters"
        with best_effort(trainer.folder / CURVE_FILE):
            files.append(draw_loss_curve(trainer.folder, log.training.rows, log.val.rows, title))
    except PlotUnavailable as missing:
        say(f"[done] no loss curve: {missing}")
    if sampler is not None:
        files += _sample(trainer, model, sampler)
    log.metrics.status = "finished"
    files.append(log.write())
    return files


def _sample(trainer: Trainer, model: TinyLM, sampler: Sampler) -> list[Path]:
    """Write a sample to its files; a model trained under FSDP may not fit on one device."""
    say, device = trainer.log.progress.say, trainer.runtime.device
    try:
        text = sampler(model.to(device), trainer.data.tokenizer, trainer.cfg.train.seed)
    except torch.OutOfMemoryError:
        say(f"[done] no sample: the full model does not fit on {device}")
        return []
    say(f"\n----- sample -----\n{_printable(text)}\n------------------\n")
    prompt = PROMPT if text.startswith(PROMPT) else ""
    sample = Sample(
        ts=round(time.time(), 3),
        step=trainer.log.metrics.step,
        prompt=prompt,
        text=text.removeprefix(prompt),
    )
    files = [append_sample(trainer.folder, sample)]
    with best_effort(trainer.folder / SAMPLE_FILE):
        files.append(write_sample(trainer.folder, text))
    return files


def summarize(metrics: Metrics, files: Sequence[Path]) -> str:
    """The last lines of a run: what it reached, in which time, and where to look."""
    # Resumed at its last step, a run has trained nothing itself and measured no rate.
    rate = "" if metrics.toks_per_s is None else f" ({metrics.toks_per_s:.0f} toks/s)"
    lines = [
        f"[done] {metrics.step} steps in {clock(metrics.train_s)} of training{rate} and "
        f"{clock(metrics.eval_and_save_s)} of evaluation",
        f"[done] training loss {metrics.loss_first:.4f} -> {metrics.loss_last:.4f} nats per token",
    ]
    if metrics.val_loss is not None:
        lines.append(
            f"[done] held-out loss {metrics.val_loss:.4f} nats per token, ppl "
            f"{metrics.val_ppl:.2f}, {metrics.val_bits_per_byte:.3f} bits per byte"
        )
    return "\n".join([*lines, "[done] wrote:", *(f"  {file}" for file in files)])


def _printable(text: str) -> str:
    """Replace control characters other than newlines by dots: they could garble a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "." for c in text)


# --- the record of a non-finite loss ---
# anomaly_step{N}.pt, a dict that loads with `weights_only=True`: `step`, `batch` (token rows of
# that update, [rows, S+1]), `state_dict` (weights before that update) and `cfg`. Ranks above 0
# write their own rows to anomaly_step{N}_rank{r}.pt, without weights.

KIND = "nan_loss"


def record_anomaly(trainer: Trainer, step: int) -> Path:
    """Write .anomaly_type and .HALT, which block a restart, then the batch and the weights."""
    ranks, size = trainer.ranks, trainer.cfg.train.batch_size
    # The small files first: they must exist even if the disk has no space for the batch.
    ranks.on_rank_0(write_anomaly, trainer.folder, KIND)
    ranks.on_rank_0(write_halt, trainer.folder, KIND)
    batches = [trainer.data.train.batch(first, size) for first in trainer.positions(step)]
    content = {
        "step": step,
        "batch": torch.cat(batches),
        "state_dict": ranks.weights(trainer.model),
        "cfg": to_container(trainer.cfg),
    }
    suffix = "" if ranks.is_first else f"_rank{ranks.rank}"
    path = trainer.folder / f"anomaly_step{step}{suffix}.pt"
    with best_effort(path), replacing(path) as temporary:
        torch.save(content, temporary)
    return path

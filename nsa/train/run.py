"""A run from its config to its files: prepare, train, save, show."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from nsa.config import Config
from nsa.data import open_data
from nsa.model import TinyLM
from nsa.telemetry import MODEL, Metrics, open_folder, write_config
from nsa.train.announce import announce
from nsa.train.errors import Interrupted, NonFiniteLoss
from nsa.train.finish import Sampler, finish, summarize
from nsa.train.guard import refuse_waste
from nsa.train.log import RunLog
from nsa.train.loop import Trainer
from nsa.train.optimizer import build_optimizer
from nsa.train.progress import Progress
from nsa.train.runtime import Runtime, resolve_runtime


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a finished run leaves behind."""

    model: TinyLM
    metrics: Metrics
    folder: Path
    files: list[Path]
    """What the run wrote."""


def run(
    cfg: Config,
    *,
    config_path: str,
    out: TextIO | None = None,
    config_named: bool = True,
    allow_long_run: bool = False,
    stop_after: int | None = None,
    model_path: Path | None = None,
    sampler: Sampler | None = None,
) -> TrainResult:
    """Train the model of `cfg` and write everything under cfg.train.out_dir.

    `config_path` is printed and stored; `config_named` is false when that file was a default.
    `stop_after` ends the run earlier than train.steps; the learning-rate schedule stays.
    `model_path` replaces <out_dir>/model.pt. Without a `sampler` no sample is written.
    """
    steps = min(cfg.train.steps, stop_after or cfg.train.steps)
    if not allow_long_run:
        refuse_waste(cfg, steps, config_path=config_path, config_named=config_named)
    runtime = resolve_runtime(cfg.runtime, (cfg.model.d_k, cfg.model.d_v))
    data = open_data(cfg.data, cfg.train.seq_len, cfg.train.seed)
    torch.manual_seed(cfg.train.seed)
    model = TinyLM.from_config(cfg, data.tokenizer.vocab).to(runtime.device)
    metrics = _new_metrics(cfg, model, runtime, config_path, steps)

    with Progress(out or sys.stdout, steps) as progress:
        folder = open_folder(Path(cfg.train.out_dir))
        announce(cfg, metrics, data, runtime, folder, progress)
        files = [write_config(folder.path, cfg, config_path)]
        log = RunLog(folder.path, metrics, cfg.train, progress)
        trainer = Trainer(
            cfg=cfg,
            model=model,
            optimizer=build_optimizer(model, cfg.train),
            data=data,
            runtime=runtime,
            log=log,
            folder=folder.path,
        )
        with _ending_is_recorded(log):
            files += trainer.train(steps)
    files += finish(trainer, sampler, model_path or folder.path / MODEL)
    progress.say(summarize(metrics, files))
    return TrainResult(model=model, metrics=metrics, folder=folder.path, files=files)


@contextmanager
def _ending_is_recorded(log: RunLog) -> Iterator[None]:
    """Leave the reason in metrics.json when a run ends before its last step."""
    log.write()
    try:
        yield
    except NonFiniteLoss:
        log.metrics.status = "non_finite"
        log.write()
        raise
    except KeyboardInterrupt:
        log.metrics.status = "interrupted"
        log.write()
        raise Interrupted(
            f"interrupted after step {log.metrics.step}; the logs are in {log.folder}, no model "
            "was written, and this version cannot resume; start again"
        ) from None


def _new_metrics(
    cfg: Config, model: TinyLM, runtime: Runtime, config_path: str, steps: int
) -> Metrics:
    rows = cfg.train.batch_size * cfg.train.accumulate_grad_batches
    return Metrics(
        config_file=config_path,
        num_params=sum(p.numel() for p in model.parameters()),
        tokens_per_step=rows * cfg.train.seq_len,
        device=str(runtime.device),
        dtype=runtime.precision,
        attention=runtime.plan,
        steps=steps,
        seq_len=cfg.train.seq_len,
        batch_global=rows,
        lr=cfg.train.lr,
    )

"""A run from its config to its files: prepare, train, save, show."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from nsa.config import Config
from nsa.model import TinyLM
from nsa.telemetry import MODEL, Metrics, open_folder, write_config
from nsa.telemetry.sentinels import obeyed, write_anomaly
from nsa.train.announce import announce
from nsa.train.anomaly import record_anomaly
from nsa.train.errors import Halted, Interrupted, LoaderFailed, NonFiniteLoss, OutOfMemory
from nsa.train.feed import (
    LoaderOptions,
    failures,
    fetch_first,
    open_in_time,
    read_ahead,
    without_data,
)
from nsa.train.finish import Sampler, finish, summarize
from nsa.train.guard import refuse_halted, refuse_waste
from nsa.train.log import RunLog
from nsa.train.loop import Trainer
from nsa.train.memory_advice import explain_memory
from nsa.train.optimizer import build_optimizer
from nsa.train.progress import Progress
from nsa.train.resume import AUTO, find_start, identity_of
from nsa.train.runtime import Runtime, resolve_runtime
from nsa.train.saver import new_saver
from nsa.train.scaler import new_scaler
from nsa.train.state import restore
from nsa.train.stop import Stop
from nsa.train.vitals import Vitals


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
    resume: str = AUTO,
    loader: LoaderOptions | None = None,
) -> TrainResult:
    """Train the model of `cfg` and write everything under cfg.train.out_dir.

    `config_path` is printed and stored; `config_named` is false when that file was a default.
    `stop_after` ends the run earlier than train.steps; the learning-rate schedule stays.
    `model_path` replaces <out_dir>/model.pt. Without a `sampler` no sample is written.
    `resume` is auto, latest, none or a checkpoint (resume.py). `loader` is the patience with data.
    """
    steps = min(cfg.train.steps, stop_after or cfg.train.steps)
    if not allow_long_run:
        refuse_waste(cfg, steps, config_path=config_path, config_named=config_named)
    loader = loader or LoaderOptions()
    progress = Progress(out or sys.stdout, steps)
    job = _Job(
        config_path=config_path,
        steps=steps,
        model_path=model_path,
        sampler=sampler,
        resume=resume,
        loader=loader,
    )
    try:
        return _run(cfg, job, progress)
    except LoaderFailed as error:
        if error.started or not loader.synthetic_on_fail:
            raise
        return _run(without_data(cfg, error, progress.say), job, progress, str(error))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What was asked for beside the config; `run` explains it."""

    config_path: str
    steps: int
    model_path: Path | None
    sampler: Sampler | None
    resume: str
    loader: LoaderOptions


def _run(cfg: Config, job: _Job, progress: Progress, fallback: str | None = None) -> TrainResult:
    """One attempt; `fallback` says why the data of the attempt before did not come."""
    path, steps = Path(cfg.train.out_dir), job.steps
    refuse_halted(path)
    runtime = resolve_runtime(cfg.runtime, (cfg.model.d_k, cfg.model.d_v))
    since = time.perf_counter()
    data = open_in_time(cfg, job.loader, progress.say)
    opened_s = time.perf_counter() - since
    loader = read_ahead(data.train, cfg, runtime)
    data = data._replace(train=loader)
    torch.manual_seed(cfg.train.seed)
    model = TinyLM.from_config(cfg, data.tokenizer.vocab).to(runtime.device)
    metrics = _new_metrics(cfg, model, runtime, job.config_path, steps)

    metrics.data_fallback = fallback
    identity = identity_of(cfg, data)

    with progress, closing(loader):
        start = find_start(path, job.resume, identity, steps, progress.say)
        done = start.content["step"] if start else 0
        goes_on = start is not None and start.path.parent.resolve() == path.resolve()
        folder = open_folder(path, resumed=goes_on)
        announce(cfg, metrics, data, runtime, folder, progress)
        files = [write_config(folder.path, cfg, job.config_path)]
        with (
            Stop(folder.path) as stop,
            Vitals(folder.path, runtime, done if goes_on else 0, progress.say) as vitals,
        ):
            log = RunLog(
                *(folder.path, metrics, cfg.train, progress, vitals),
                resumed_at=done,
                overflows=runtime.precision == "fp16",
            )
            trainer = Trainer(
                cfg=cfg,
                model=model,
                optimizer=build_optimizer(model, cfg.train),
                scaler=new_scaler(runtime),
                data=data,
                runtime=runtime,
                log=log,
                saver=new_saver(folder.path, cfg.train, progress.say),
                stop=stop,
                identity=identity,
                folder=folder.path,
            )
            if start is not None:
                restore(trainer, start.content)
                metrics.resumed_at = done
                progress.advance(done)
                progress.say(f"[resume] from {start.path}: {done} of {steps} steps are done")
            if fallback is not None:
                vitals.heartbeat.loader_error(fallback, done)
            loader.interrupted = stop.requested
            with _ending_is_recorded(trainer):
                with trainer.obeying(done):
                    fetch_first(loader, cfg, done, job.loader, opened_s, vitals, progress.say)
                files += trainer.train(steps, done)
    files += finish(trainer, job.sampler, job.model_path or folder.path / MODEL)
    progress.say(summarize(metrics, files))
    return TrainResult(model=model, metrics=metrics, folder=folder.path, files=files)


@contextmanager
def _ending_is_recorded(trainer: Trainer) -> Iterator[None]:
    """Leave the reason in the run folder when a run ends before its last step."""
    log = trainer.log
    log.write()
    try:
        with failures(trainer.cfg, started=True, note=log.loader_failed):
            yield
    except LoaderFailed as error:
        log.metrics.status = "no_data"
        log.settle()
        then = trainer.save_last(log.metrics.step)
        log.write()
        raise LoaderFailed(
            f"{error}; stopped after step {log.metrics.step}; {then}",
            started=error.started,
            exit_code=error.exit_code,
        ) from error
    except NonFiniteLoss as error:
        log.metrics.status = "non_finite"
        log.write()
        trainer.saver.wait()
        record_anomaly(trainer, error.step)
        raise
    except Halted:
        log.metrics.status = "halted"
        log.write()
        obeyed(log.folder)
        raise
    except torch.OutOfMemoryError as error:
        log.metrics.status = "oom"
        log.write()
        trainer.saver.wait()
        write_anomaly(log.folder, "oom")
        raise OutOfMemory(explain_memory(trainer.cfg, trainer.runtime, str(error))) from None
    except KeyboardInterrupt:
        log.metrics.status = "interrupted"
        log.write()
        trainer.saver.wait()
        raise Interrupted(
            f"interrupted after step {log.metrics.step}; the logs are in {log.folder}; the same "
            "command goes on from the last checkpoint, if there is one"
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

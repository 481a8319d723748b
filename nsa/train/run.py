"""A run from its config to its files: prepare, train, save, show."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from nsa.config import Config
from nsa.model import TinyLM
from nsa.model.flops import peak_flops, training_flops_per_token
from nsa.telemetry import MODEL, Metrics, open_folder, write_config
from nsa.telemetry.sentinels import obeyed, write_anomaly
from nsa.telemetry.tracker import open_tracker, require_tracker
from nsa.train.announce import announce
from nsa.train.anomaly import record_anomaly
from nsa.train.build import build_model, build_step
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
from nsa.train.progress import Progress
from nsa.train.resume import AUTO, find_start, identity_of
from nsa.train.rollback import Rollback, with_rollbacks
from nsa.train.runtime import Runtime, resolve_runtime
from nsa.train.saver import new_saver
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
    require_tracker(cfg.train.tracker)
    job = _Job(
        config_path=config_path,
        steps=steps,
        out=out or sys.stdout,
        model_path=model_path,
        sampler=sampler,
        resume=resume,
        loader=loader or LoaderOptions(),
    )
    fallback: str | None = None

    def attempt(back: Rollback | None) -> TrainResult:
        nonlocal cfg, fallback
        try:
            return _run(cfg, job, back, fallback)
        except LoaderFailed as error:
            if error.started or not job.loader.synthetic_on_fail:
                raise
            cfg, fallback = without_data(cfg, error, partial(print, file=job.out)), str(error)
            return _run(cfg, job, back, fallback)

    return with_rollbacks(attempt)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What was asked for beside the config; `run` explains it."""

    config_path: str
    steps: int
    out: TextIO
    model_path: Path | None
    sampler: Sampler | None
    resume: str
    loader: LoaderOptions


def _run(cfg: Config, job: _Job, back: Rollback | None, fallback: str | None) -> TrainResult:
    """One attempt: `back` is where to go on after a loss spike, `fallback` why no data came."""
    path, steps = Path(cfg.train.out_dir), job.steps
    refuse_halted(path)
    runtime = resolve_runtime(cfg.runtime, (cfg.model.d_k, cfg.model.d_v), cfg.model.attention)
    progress = Progress(job.out, steps)
    since = time.perf_counter()
    data = open_in_time(cfg, job.loader, progress.say)
    opened_s = time.perf_counter() - since
    loader = read_ahead(data.train, cfg, runtime)
    data = data._replace(train=loader)
    model = build_model(cfg, data.tokenizer.vocab, runtime)
    step = build_step(cfg, model, runtime)
    metrics = _new_metrics(cfg, model, runtime, job.config_path, steps)

    metrics.data_fallback = fallback
    identity = identity_of(cfg, data)

    with progress, closing(loader):
        start = find_start(
            path, str(back.path) if back else job.resume, identity, steps, progress.say
        )
        done = start.content["step"] if start else 0
        goes_on = start is not None and start.path.parent.resolve() == path.resolve()
        folder = open_folder(path, resumed=goes_on)
        announce(cfg, metrics, data, runtime, folder, progress)
        files = [write_config(folder.path, cfg, job.config_path)]
        with (
            Stop(folder.path) as stop,
            open_tracker(cfg, folder.path, resumed=goes_on, say=progress.say) as tracker,
            Vitals(folder.path, runtime, done if goes_on else 0, progress.say, tracker) as vitals,
        ):
            log = RunLog(
                *(folder.path, metrics, cfg.train, progress, vitals),
                resumed_at=done,
                overflows=runtime.precision == "fp16",
            )
            trainer = Trainer(
                cfg=cfg,
                model=model,
                step=step,
                data=data,
                log=log,
                saver=new_saver(folder.path, cfg.train, progress.say),
                stop=stop,
                identity=identity,
                folder=folder.path,
            )
            if start is not None:
                restore(trainer, start.content)
                metrics.resumed_at = done
                if back is not None:
                    trainer.spikes.jumped, metrics.spikes = back.jumped, back.spikes
                progress.advance(done)
                progress.say(f"[resume] from {start.path}: {done} of {steps} steps are done")
            if fallback is not None:
                vitals.heartbeat.loader_error(fallback, done)
            loader.interrupted = stop.requested
            with _ending_is_recorded(trainer):
                with trainer.obeying(done):
                    place = (done, trainer.position(done + 1))
                    fetch_first(loader, cfg, *place, job.loader, opened_s, vitals, progress.say)
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
        flops_per_token=sum(training_flops_per_token(cfg).values()),
        peak_flops=peak_flops(runtime.device_name, runtime.precision),
        device=str(runtime.device),
        dtype=runtime.precision,
        attention=runtime.plan,
        steps=steps,
        seq_len=cfg.train.seq_len,
        batch_global=rows,
        lr=cfg.train.lr,
    )

"""A run from its config to its files: open data and folder, build the model, resume, train, finish.

`run` is the entry point; `_run` is one attempt, repeated after a loss spike or a data fallback.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO, cast

import torch

from nsa.config import Config
from nsa.files import best_effort
from nsa.model import TinyLM
from nsa.model.cost import peak_flops, training_flops_per_token
from nsa.ops import fallbacks
from nsa.records import MODEL, Metrics, open_folder, write_config
from nsa.records.folder import Folder
from nsa.records.metrics import CONFIG_FILE
from nsa.records.sentinels import obeyed, write_anomaly
from nsa.records.sinks import Tracker, open_tracker, require_tracker
from nsa.records.spans import forget
from nsa.train.batches import (
    LoaderOptions,
    checking,
    failures,
    fetch_first,
    open_in_time,
    read_ahead,
    without_data,
)
from nsa.train.build import build_model, build_step, explain_memory
from nsa.train.checkpoint.identity import INITIAL, global_batch, identity_of, rows_of_rank
from nsa.train.checkpoint.init_from import find_origin
from nsa.train.checkpoint.resume import AUTO, Asked, find_start_together, was_restarted
from nsa.train.checkpoint.writer import new_saver
from nsa.train.distributed.hang import HangWatch, end_calls
from nsa.train.distributed.process_group import open_ranks
from nsa.train.distributed.strategy import AUTO as AUTO_RANKS
from nsa.train.distributed.strategy import Strategy, fingerprint_of_rank
from nsa.train.errors import (
    CHECKPOINT_COPIES,
    Halted,
    Interrupted,
    LoaderFailed,
    NonFiniteLoss,
    OutOfMemory,
    refuse_full_disk,
    refuse_halted,
    refuse_waste,
)
from nsa.train.finish import Sampler, finish, record_anomaly, summarize
from nsa.train.locked_folder import HeldFolder, hold
from nsa.train.log import RunLog, Vitals
from nsa.train.progress import Progress, Steady, announce
from nsa.train.runtime import Runtime, ordered_sums, resolve_runtime
from nsa.train.stop import Stop, launcher_pid
from nsa.train.trainer import Rollback, Trainer, restore, with_rollbacks


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a finished run."""

    model: TinyLM
    metrics: Metrics
    folder: Path
    files: list[Path]
    """Files that the run wrote."""


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
    ddp: int = AUTO_RANKS,
) -> TrainResult:
    """Train the model of `cfg` and write everything under cfg.train.out_dir.

    `config_path` is logged and stored; `config_named` is false if that file was a default.
    `stop_after` ends the run before train.steps without changing the learning-rate schedule.
    `model_path` replaces <out_dir>/model.pt. Without a `sampler` no sample is written.
    `resume` is auto, latest, none or a checkpoint (checkpoint/resume.py). `loader` sets the
    timeouts for data. `ddp` says whether this process is one of several ranks
    (distributed/strategy.py); rank 0 writes the files.
    """
    steps = min(cfg.train.steps, stop_after or cfg.train.steps)
    if not allow_long_run:
        refuse_waste(cfg, steps, config_path=config_path, config_named=config_named)
    require_tracker(cfg.train.tracker)
    steady = Steady(out or sys.stdout)
    say = partial(print, file=steady, flush=True)
    fallbacks.reset()  # the counters are global to the process; count this run only
    # Read the parent now: once torchrun has died, getppid() names another process.
    parent, folder = launcher_pid(), Path(cfg.train.out_dir)
    sums = ordered_sums(cfg.runtime)
    # Nesting order: the lock outlives the process group, so it is held until all ranks have left.
    with sums, hold(folder, say) as lock, open_ranks(ddp, cfg, say) as ranks:
        job = _Job(
            ranks=ranks,
            held=lock(ranks),
            parent=parent,
            config_path=config_path,
            steps=steps,
            out=cast("TextIO", steady),
            model_path=model_path,
            sampler=sampler,
            resume=resume,
            loader=loader or LoaderOptions(),
        )
        return _run_with_fallbacks(ranks.adapt(cfg), job)


def _run_with_fallbacks(cfg: Config, job: _Job) -> TrainResult:
    """Train; roll back after a loss spike; fall back to random tokens if the data never arrives
    and --synthetic-on-fail allows it."""
    fallback: str | None = None
    say = partial(job.ranks.on_first, print, file=job.out)

    def attempt(back: Rollback | None) -> TrainResult:
        nonlocal cfg, fallback
        try:
            return _run(cfg, job, back, fallback)
        except LoaderFailed as error:
            if error.started or error.damaged or not job.loader.synthetic_on_fail:
                raise
            cfg, fallback = without_data(cfg, error, say), str(error)
            return _run(cfg, job, back, fallback)

    return with_rollbacks(attempt)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The arguments of `run` other than the config, and what it opened."""

    ranks: Strategy
    held: HeldFolder
    parent: int | None
    """Pid of torchrun if it started this rank."""
    config_path: str
    steps: int
    out: TextIO
    model_path: Path | None
    sampler: Sampler | None
    resume: str
    loader: LoaderOptions


def _run(cfg: Config, job: _Job, back: Rollback | None, fallback: str | None) -> TrainResult:
    """One attempt. `back`: where to resume after a loss spike; `fallback`: why data is missing."""
    # 1. Data, and which checkpoint to start from. All ranks must agree before anything is built.
    path, steps, ranks, held = job.held.path, job.steps, job.ranks, job.held
    ranks.from_first(partial(refuse_halted, path))
    heads = (cfg.model.d_k, cfg.model.d_v)
    runtime = resolve_runtime(ranks.place(cfg.runtime), heads, cfg.model.attention)
    progress = Progress(job.out, steps, quiet=not ranks.is_first)
    since = time.perf_counter()
    with ranks.fetching():
        data = open_in_time(cfg, job.loader, progress.say)
    opened_s = time.perf_counter() - since
    origin = find_origin(ranks, cfg, data.tokenizer.vocab)
    identity = identity_of(cfg, data, ranks.world_size) | origin.identity
    ranks.check_same(partial(fingerprint_of_rank, cfg, identity, runtime, ranks.world_size))
    asked = Asked(
        folder=path,
        wanted=str(back.path) if back else job.resume,
        cfg=cfg,
        identity=identity,
        steps=steps,
        world_size=ranks.world_size,
        restarted=back is None and was_restarted(),
    )
    begin = find_start_together(ranks, asked, progress.say)
    start, rows_asked, cfg = begin.start, rows_of_rank(cfg.train), begin.adapt(cfg)
    origin.require(ranks, start)
    # 2. Model, optimizer and update.
    loader = read_ahead(data.train, cfg, runtime, ranks)
    data = data._replace(train=loader)
    model = build_model(cfg, data.tokenizer.vocab, runtime, ranks)
    step = build_step(cfg, model, runtime, ranks=ranks)
    metrics = _new_metrics(cfg, model, runtime, job, fallback)

    # 3. The run folder and its writers. From here on, files of an earlier run may be moved.
    with progress, closing(loader), checking(data, ranks, progress.say):
        done = start.content["step"] if start else 0
        folder = _open_folder(ranks, cfg, job, begin.keeps, metrics.num_params)
        announce(cfg, metrics, data, runtime, folder, progress)
        files = [path / CONFIG_FILE] if ranks.is_first else []
        tracking = ranks.on_first(open_tracker, cfg, path, resumed=begin.keeps, say=progress.say)
        beats_from = done if begin.keeps else 0
        with (
            Stop(path, parent=job.parent, heard=held.stopping, quiet=not ranks.is_first) as stop,
            tracking or Tracker() as tracker,
            Vitals(
                *(path, runtime, beats_from, progress.say, tracker),
                rank=ranks.rank,
                hear=stop.hear,
            ) as vitals,
            HangWatch(path, ranks, vitals.heartbeat) as hang_watch,
        ):
            log = RunLog(
                *(folder.path, metrics, cfg.train, progress, vitals),
                resumed_at=done,
                overflows=runtime.precision == "fp16",
                ranks=ranks,
            )
            trainer = Trainer(
                cfg=cfg,
                model=model,
                step=step,
                data=data,
                log=log,
                saver=new_saver(folder.path, cfg.train, progress.say, ranks),
                stop=stop,
                identity=start.fit.identity if start else identity,
                rows_asked=rows_asked,
                held=held,
            )
            _register_renewals(trainer, job.config_path, hang_watch)
            # 4. Initial weights, or the state of a checkpoint.
            metrics.init_from = origin.path or None
            metrics.init_sha256 = trainer.identity.get(INITIAL)
            if start is None:
                origin.begin(model, ranks, progress.say)
            else:
                origin.stand_back(start, progress.say)
                restore(trainer, start)
                metrics.resumed_at = done
                if back is not None:
                    trainer.spikes.jumped, metrics.spikes = back.jumped, back.spikes
                progress.advance(done)
                progress.say(f"[resume] from {start.path}: {done} of {steps} steps are done")
            if fallback is not None:
                vitals.heartbeat.loader_error(fallback, done)
            # 5. Train.
            loader.interrupted = stop.requested
            with _record_ending(trainer):
                with trainer.obeying(done), ranks.fetching(stop):
                    place = (done, trainer.positions(done + 1)[0])
                    fetch_first(loader, cfg, *place, job.loader, opened_s, vitals, progress.say)
                files += trainer.train(steps, done)
                ranks.from_first(partial(held.require, steps))
            held.stopping()
    # 6. The model file, the loss curve and a sample.
    model = ranks.whole(model, cfg)
    model_path = job.model_path or path / MODEL
    files += ranks.on_first(finish, trainer, model, job.sampler, model_path) or []
    progress.say(summarize(metrics, files))
    return TrainResult(model=model, metrics=metrics, folder=folder.path, files=files)


def _register_renewals(trainer: Trainer, config_path: str, hang_watch: HangWatch) -> None:
    """Register the files whose loss reveals a removed run folder, and what to write again then."""
    held, log, ranks = trainer.held, trainer.log, trainer.ranks

    def write(step: int) -> None:
        trainer.saver.written.clear()
        with best_effort(held.path):
            ranks.on_first(write_config, held.path, trainer.cfg, config_path)
        ranks.on_first(trainer.write_types)
        ranks.on_first(trainer.write_sizes)

    log.is_ours = trainer.saver.is_ours = held.is_ours
    csv = [log.training.file] if log.training.path is not None else []
    held.watched = [log.vitals.heartbeat.file, *csv]
    held.renewals = (write, log.vitals.renew, hang_watch.renew, log.renew)


@contextmanager
def _record_ending(trainer: Trainer) -> Iterator[None]:
    """If the run ends before its last step, record the reason in the run folder."""
    log = trainer.log
    log.write()
    try:
        with failures(trainer.cfg, started=True, note=log.loader_failed):
            yield
    except LoaderFailed as error:
        log.metrics.status = "bad_data" if error.damaged else "no_data"
        log.settle()
        # Weights trained on damaged data must not become a checkpoint.
        then = trainer.leave_unsaved() if error.damaged else trainer.save_last(log.metrics.step)
        log.write()
        raise LoaderFailed(
            f"{error}; stopped after step {log.metrics.step}; {then}",
            started=error.started,
            exit_code=error.exit_code,
            damaged=error.damaged,
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
        trainer.ranks.on_first(obeyed, log.folder)
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
            "command resumes from the last checkpoint, if there is one"
        ) from None


def _open_folder(ranks: Strategy, cfg: Config, job: _Job, goes_on: bool, num_params: int) -> Folder:
    """Open the run folder on rank 0, before any other rank writes to it."""
    path = Path(cfg.train.out_dir)

    def make() -> str:
        refuse_full_disk(path, 4 * num_params * CHECKPOINT_COPIES if cfg.train.save_every else 0)
        moved = open_folder(path, resumed=goes_on).previous
        end_calls(path)
        forget(path)
        write_config(path, cfg, job.config_path)
        return str(moved or "")

    moved = ranks.from_first(make)
    return Folder(path, Path(moved) if moved else None)


def _new_metrics(
    cfg: Config, model: TinyLM, runtime: Runtime, job: _Job, fallback: str | None
) -> Metrics:
    world_size = job.ranks.world_size
    rows = global_batch(cfg, world_size)
    peak = peak_flops(runtime.device_name, runtime.precision)
    return Metrics(
        config_file=job.config_path,
        data_fallback=fallback,
        world_size=world_size,
        num_params=sum(p.numel() for p in model.parameters()),
        tokens_per_step=rows * cfg.train.seq_len,
        flops_per_token=sum(training_flops_per_token(cfg).values()),
        peak_flops=None if peak is None else peak * world_size,
        device=str(runtime.device),
        dtype=runtime.precision,
        attention=runtime.plan,
        steps=job.steps,
        seq_len=cfg.train.seq_len,
        batch_global=rows,
        lr=cfg.train.lr,
    )

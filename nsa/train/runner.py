"""A run from its config to its files.

`run` is the entry point: it locks the folder and opens the process group. `_run` is one attempt,
repeated after a loss spike or a data fallback: plan, open, load, train, finish.
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
from nsa.data import Data, Loader
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
    converting_data_errors,
    fetch_first,
    open_in_time,
    read_ahead,
    verifying_shards,
    with_random_tokens,
)
from nsa.train.build import build_model, build_step, explain_memory
from nsa.train.checkpoint.identity import (
    INITIAL,
    Identity,
    global_batch,
    identity_of,
    rows_of_rank,
)
from nsa.train.checkpoint.init_from import Origin, find_origin
from nsa.train.checkpoint.resume import (
    AUTO,
    Beginning,
    RequestedRun,
    agree_on_start,
    was_restarted,
)
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
from nsa.train.locked_folder import LockedFolder, locked
from nsa.train.log import RunLog
from nsa.train.progress import HangupSafeStream, Progress, print_boot_messages
from nsa.train.runtime import Runtime, deterministic_algorithms, resolve_runtime
from nsa.train.spikes import Rollback, with_rollbacks
from nsa.train.stop import Stop, launcher_pid
from nsa.train.telemetry import Telemetry
from nsa.train.trainer import Trainer


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
    stream = HangupSafeStream(out or sys.stdout)
    say = partial(print, file=stream, flush=True)
    fallbacks.reset()  # the counters are global to the process; count this run only
    # Read the parent now: once torchrun has died, getppid() names another process.
    parent, folder = launcher_pid(), Path(cfg.train.out_dir)
    sums = deterministic_algorithms(cfg.runtime)
    # Nesting order: the lock outlives the process group, so it is held until all ranks have left.
    with sums, locked(folder, say) as lock, open_ranks(ddp, cfg, say) as ranks:
        job = _Job(
            ranks=ranks,
            held=lock(ranks),
            parent=parent,
            config_path=config_path,
            steps=steps,
            out=cast("TextIO", stream),
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
    say = partial(job.ranks.on_rank_0, print, file=job.out)

    def attempt(back: Rollback | None) -> TrainResult:
        nonlocal cfg, fallback
        try:
            return _run(cfg, job, back, fallback)
        except LoaderFailed as error:
            if error.started or error.damaged or not job.loader.synthetic_on_fail:
                raise
            cfg, fallback = with_random_tokens(cfg, error, say), str(error)
            return _run(cfg, job, back, fallback)

    return with_rollbacks(attempt)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The arguments of `run` other than the config, and what it opened."""

    ranks: Strategy
    held: LockedFolder
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
    plan = _make_plan(cfg, job, back, fallback)
    with _open_trainer(plan, job) as trainer:
        _load_start(trainer, plan)
        checkpoints = _train(trainer, plan, job)
    return _finish(trainer, job, checkpoints)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What the ranks agreed on before anything is built: data, settings, and where to start."""

    cfg: Config
    """With the accumulation that preserves the global batch of the checkpoint."""
    rows_asked: int
    """Rows per update and rank as configured, before that."""
    runtime: Runtime
    data: Data
    loader: Loader
    """data.train: it prefetches batches."""
    opened_s: float
    """Seconds that opening the data took."""
    identity: Identity
    origin: Origin
    begin: Beginning
    back: Rollback | None
    fallback: str | None
    progress: Progress

    @property
    def done(self) -> int:
        """Steps that the checkpoint has done."""
        return self.begin.start.content["step"] if self.begin.start else 0


def _make_plan(cfg: Config, job: _Job, back: Rollback | None, fallback: str | None) -> _Plan:
    """Open the data and choose the checkpoint to start from; raise on all ranks if they differ."""
    path, ranks = job.held.path, job.ranks
    ranks.from_rank_0(partial(refuse_halted, path))
    heads = (cfg.model.d_k, cfg.model.d_v)
    runtime = resolve_runtime(ranks.assign_device(cfg.runtime), heads, cfg.model.attention_kind)
    progress = Progress(job.out, job.steps, quiet=not ranks.is_first)
    since = time.perf_counter()
    with ranks.fetching():
        data = open_in_time(cfg, job.loader, progress.say)
    opened_s = time.perf_counter() - since
    origin = find_origin(ranks, cfg, data.tokenizer.vocab)
    identity = identity_of(cfg, data, ranks.num_data_ranks) | origin.identity
    ranks.check_same(partial(fingerprint_of_rank, cfg, identity, runtime, ranks.world_size))
    asked = RequestedRun(
        folder=path,
        wanted=str(back.path) if back else job.resume,
        cfg=cfg,
        identity=identity,
        steps=job.steps,
        world_size=ranks.num_data_ranks,
        restarted=back is None and was_restarted(),
    )
    begin = agree_on_start(ranks, asked, progress.say)
    rows_asked, cfg = rows_of_rank(cfg.train), begin.adapt(cfg)
    origin.require(ranks, begin.start)
    loader = read_ahead(data.train, cfg, runtime, ranks)
    return _Plan(
        cfg=cfg,
        rows_asked=rows_asked,
        runtime=runtime,
        data=data._replace(train=loader),
        loader=loader,
        opened_s=opened_s,
        identity=begin.start.fit.identity if begin.start else identity,
        origin=origin,
        begin=begin,
        back=back,
        fallback=fallback,
        progress=progress,
    )


@contextmanager
def _open_trainer(plan: _Plan, job: _Job) -> Iterator[Trainer]:
    """Build the model, then open the run folder with its writers; the end closes them.

    The weights are the initial random ones.
    """
    cfg, data, runtime, progress = plan.cfg, plan.data, plan.runtime, plan.progress
    ranks, held, path = job.ranks, job.held, job.held.path
    model = build_model(cfg, data.tokenizer.vocab, runtime, ranks)
    step = build_step(cfg, model, runtime, ranks=ranks)
    metrics = _new_metrics(plan, model, job)
    with progress, closing(plan.loader), verifying_shards(data, ranks, progress.say):
        # From here on, files of an earlier run may be moved.
        keeps = plan.begin.keeps
        folder = _open_folder(ranks, cfg, job, keeps, metrics.num_params)
        print_boot_messages(cfg, metrics, data, runtime, folder, progress)
        tracking = ranks.on_rank_0(open_tracker, cfg, path, resumed=keeps, say=progress.say)
        beats_from, quiet = plan.done if keeps else 0, not ranks.is_first
        with (
            Stop(path, parent=job.parent, on_request=held.mark_stopping, quiet=quiet) as stop,
            tracking or Tracker() as tracker,
            Telemetry(
                *(path, runtime, beats_from, progress.say, tracker),
                rank=ranks.rank,
                on_signal=stop.count_signal,
            ) as telemetry,
            HangWatch(path, ranks, telemetry.heartbeat) as hang_watch,
        ):
            log = RunLog(
                *(path, metrics, cfg, progress, telemetry),
                resumed_at=plan.done,
                overflows=runtime.precision == "fp16",
                ranks=ranks,
                is_ours=held.is_ours,
            )
            trainer = Trainer(
                cfg=cfg,
                model=model,
                step=step,
                data=data,
                log=log,
                saver=new_saver(path, cfg.train, progress.say, ranks, held.is_ours),
                stop=stop,
                identity=plan.identity,
                rows_asked=plan.rows_asked,
                held=held,
            )
            _register_renewals(trainer, job.config_path, hang_watch)
            yield trainer


def _load_start(trainer: Trainer, plan: _Plan) -> None:
    """Load the state of the checkpoint, or the weights that train.init_from names."""
    start, origin = plan.begin.start, plan.origin
    metrics, progress = trainer.log.metrics, plan.progress
    metrics.init_from = origin.path or None
    metrics.init_sha256 = trainer.identity.get(INITIAL)
    if start is None:
        origin.load_into(trainer.model, trainer.ranks, progress.say)
        return
    origin.discard_weights(start, progress.say)
    trainer.resume(start)
    if plan.back is not None:
        trainer.spikes.jumped, metrics.spikes = plan.back.jumped, plan.back.spikes
    progress.advance(plan.done)
    progress.say(f"[resume] from {start.path}: {plan.done} of {metrics.steps} steps are done")


def _train(trainer: Trainer, plan: _Plan, job: _Job) -> list[Path]:
    """Wait for the first batch, train, and return the checkpoints written."""
    done, log, ranks = plan.done, trainer.log, trainer.ranks
    if plan.fallback is not None:
        log.telemetry.heartbeat.loader_error(plan.fallback, done)
    plan.loader.interrupted = trainer.stop.requested
    with _record_ending(trainer):
        with trainer.halts_while_waiting(done), ranks.fetching(trainer.stop):
            place = (done, trainer.positions(done + 1)[0])
            waited = (job.loader, plan.opened_s)
            fetch_first(plan.loader, plan.cfg, *place, *waited, log.telemetry, log.progress.say)
        checkpoints = trainer.train(job.steps, done)
        ranks.from_rank_0(partial(trainer.held.require_ours, job.steps))
    trainer.held.mark_stopping()
    return checkpoints


def _finish(trainer: Trainer, job: _Job, checkpoints: list[Path]) -> TrainResult:
    """Write the model file, the loss curve and a sample."""
    ranks, metrics, path = job.ranks, trainer.log.metrics, job.held.path
    model = ranks.gather_model(trainer.model, trainer.cfg)
    model_path = job.model_path or path / MODEL
    files = [path / CONFIG_FILE] if ranks.is_first else []
    files += checkpoints
    files += ranks.on_rank_0(finish, trainer, model, job.sampler, model_path) or []
    trainer.log.progress.say(summarize(metrics, files))
    return TrainResult(model=model, metrics=metrics, folder=path, files=files)


def _register_renewals(trainer: Trainer, config_path: str, hang_watch: HangWatch) -> None:
    """Register the files whose loss reveals a removed run folder, and what to write again then."""
    held, log, ranks = trainer.held, trainer.log, trainer.ranks

    def write(step: int) -> None:
        trainer.saver.written.clear()
        with best_effort(held.path):
            ranks.on_rank_0(write_config, held.path, trainer.cfg, config_path)
        ranks.on_rank_0(trainer.write_types)
        ranks.on_rank_0(trainer.write_sizes)

    csv = [log.training.file] if log.training.path is not None else []
    held.watched = [log.telemetry.heartbeat.file, *csv]
    held.renewals = (write, log.telemetry.renew, hang_watch.renew, log.renew)


@contextmanager
def _record_ending(trainer: Trainer) -> Iterator[None]:
    """If the run ends before its last step, record the reason in the run folder."""
    log = trainer.log
    log.write()
    try:
        with converting_data_errors(trainer.cfg, started=True, note=log.loader_failed):
            yield
    except LoaderFailed as error:
        log.metrics.status = "bad_data" if error.damaged else "no_data"
        trainer.check_losses(settle=True)
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
        trainer.ranks.on_rank_0(obeyed, log.folder)
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


def _open_folder(ranks: Strategy, cfg: Config, job: _Job, keeps: bool, num_params: int) -> Folder:
    """Open the run folder on rank 0, before any other rank writes to it."""
    path = Path(cfg.train.out_dir)

    def make() -> str:
        refuse_full_disk(path, 4 * num_params * CHECKPOINT_COPIES if cfg.train.save_every else 0)
        moved = open_folder(path, resumed=keeps).previous
        end_calls(path)
        forget(path)
        write_config(path, cfg, job.config_path)
        return str(moved or "")

    moved = ranks.from_rank_0(make)
    return Folder(path, Path(moved) if moved else None)


def _new_metrics(plan: _Plan, model: TinyLM, job: _Job) -> Metrics:
    cfg, runtime, world_size = plan.cfg, plan.runtime, job.ranks.world_size
    rows = global_batch(cfg, job.ranks.num_data_ranks)
    peak = peak_flops(runtime.device_name, runtime.precision)
    return Metrics(
        config_file=job.config_path,
        data_fallback=plan.fallback,
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

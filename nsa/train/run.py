"""A run from its config to its files: prepare, train, save, show."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from nsa.config import Config, ConfigError
from nsa.data import open_data
from nsa.model import TinyLM
from nsa.model.flops import peak_flops, training_flops_per_token
from nsa.telemetry import MODEL, Metrics, open_folder, write_config
from nsa.telemetry.sentinels import obeyed, write_anomaly
from nsa.telemetry.tracker import open_tracker, require_tracker
from nsa.train.announce import announce
from nsa.train.anomaly import record_anomaly
from nsa.train.build import build_step
from nsa.train.compiler import compile_blocks
from nsa.train.errors import Halted, Interrupted, NonFiniteLoss, OutOfMemory
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
) -> TrainResult:
    """Train the model of `cfg` and write everything under cfg.train.out_dir.

    `config_path` is printed and stored; `config_named` is false when that file was a default.
    `stop_after` ends the run earlier than train.steps; the learning-rate schedule stays.
    `model_path` replaces <out_dir>/model.pt. Without a `sampler` no sample is written.
    `resume` is auto, latest, none or a checkpoint (resume.py).
    """

    def attempt(back: Rollback | None) -> TrainResult:
        return _run(
            cfg,
            config_path=config_path,
            out=out,
            config_named=config_named,
            allow_long_run=allow_long_run,
            stop_after=stop_after,
            model_path=model_path,
            sampler=sampler,
            resume=resume,
            back=back,
        )

    return with_rollbacks(attempt)


def _run(
    cfg: Config,
    *,
    config_path: str,
    out: TextIO | None,
    config_named: bool,
    allow_long_run: bool,
    stop_after: int | None,
    model_path: Path | None,
    sampler: Sampler | None,
    resume: str,
    back: Rollback | None,
) -> TrainResult:
    """Run once; `back` is where to go on after a loss spike."""
    resume = str(back.path) if back else resume
    steps = min(cfg.train.steps, stop_after or cfg.train.steps)
    if not allow_long_run:
        refuse_waste(cfg, steps, config_path=config_path, config_named=config_named)
    require_tracker(cfg.train.tracker)
    runtime = resolve_runtime(cfg.runtime, (cfg.model.d_k, cfg.model.d_v), cfg.model.attention)
    data = open_data(cfg.data, cfg.train.seq_len, cfg.train.seed)
    torch.manual_seed(cfg.train.seed)
    model = TinyLM.from_config(cfg, data.tokenizer.vocab).to(runtime.device)
    if cfg.runtime.cuda_graph and runtime.device.type != "cuda":
        raise ConfigError(
            f"runtime.cuda_graph=true on {runtime.device}; a CUDA graph needs a CUDA device: set "
            "it to false, or choose runtime.device=cuda",
            key="runtime.cuda_graph",
        )
    if cfg.runtime.compile:
        compile_blocks(model, runtime.device)
    metrics = _new_metrics(cfg, model, runtime, config_path, steps)

    identity = identity_of(cfg, data)
    path = Path(cfg.train.out_dir)
    refuse_halted(path)

    with Progress(out or sys.stdout, steps) as progress:
        start = find_start(path, resume, identity, steps, progress.say)
        done = start.content["step"] if start else 0
        goes_on = start is not None and start.path.parent.resolve() == path.resolve()
        folder = open_folder(path, resumed=goes_on)
        announce(cfg, metrics, data, runtime, folder, progress)
        files = [write_config(folder.path, cfg, config_path)]
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
                step=build_step(cfg, model, runtime),
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
            with _ending_is_recorded(trainer):
                files += trainer.train(steps, done)
    files += finish(trainer, sampler, model_path or folder.path / MODEL)
    progress.say(summarize(metrics, files))
    return TrainResult(model=model, metrics=metrics, folder=folder.path, files=files)


@contextmanager
def _ending_is_recorded(trainer: Trainer) -> Iterator[None]:
    """Leave the reason in the run folder when a run ends before its last step."""
    log = trainer.log
    log.write()
    try:
        yield
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

"""Checks that rehearse the run: all-reduce, data, a few steps, save and resume; ETA and cost."""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nsa.config import Config
from nsa.config.describe import duration, first_line
from nsa.config.env import read, with_package
from nsa.data import SourceLost, within
from nsa.data.shards import verify_shards
from nsa.files import size
from nsa.operate.launch.plan import Nodes, trainer_command
from nsa.operate.preflight.config_checks import PlannedRun
from nsa.operate.report.evidence import Question
from nsa.operate.report.verdict import Row
from nsa.operate.run_folder import number
from nsa.records import read_heartbeat, read_metrics, write_config
from nsa.records.heartbeat import HEARTBEAT_FILE, PROGRESS
from nsa.train import LoaderFailed, TrainError, run
from nsa.train.batches import LoaderOptions, open_in_time
from nsa.train.checkpoint import find

PART_STEPS = 3
"""Steps before and after the rehearsal's checkpoint; the first step of each part is warm-up."""


def all_reduce(plan: PlannedRun) -> Row:
    """All ranks join the process group and all-reduce a tensor."""
    backend = group_backend(plan)
    asked = Question("all-reduce", f"the right sum within {plan.limits.all_reduce_s:g} s")
    start = time.perf_counter()
    device, timeout_s = plan.runtime.device.type, plan.limits.all_reduce_s
    problem = reduce_once(plan.ranks, plan.scratch / "store", backend, device, timeout_s)
    seconds = time.perf_counter() - start
    return asked.judged(
        not problem and seconds <= plan.limits.all_reduce_s,
        problem or f"{plan.ranks} ranks, {seconds:.2f} s including process start",
        evidence=f"{backend}, {plan.ranks} processes on this machine",
        advice="NCCL_DEBUG=INFO says more; NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1, TORCH_BACKEND",
    )


def group_backend(plan: PlannedRun) -> str:
    """The backend of the run's process group."""
    chosen: str = read("TORCH_BACKEND")
    return chosen or ("nccl" if plan.runtime.device.type == "cuda" else "gloo")


def first_batch(plan: PlannedRun) -> Row:
    """The first batch arrives in time, and its token ids fit the vocabulary."""
    limit_s, config = plan.limits.first_batch_s, plan.config
    asked = Question("first batch", f"within {limit_s:g} s; ids below {config.data.vocab}")
    start = time.perf_counter()
    try:
        batch = within(limit_s, lambda: _read_batch(plan, limit_s), "the first batch")
    except (SourceLost, LoaderFailed, ValueError, OSError) as error:
        return asked.judged(
            False,
            first_line(error)[:200],
            evidence=f"data.dataset={config.data.dataset}",
            advice="check the network, or prepare shards of local documents (`nsa data prepare`)",
        )
    seconds, largest = time.perf_counter() - start, int(batch.max())
    return asked.judged(
        largest < config.data.vocab and int(batch.min()) >= 0,
        f"{seconds:.2f} s, {tuple(batch.shape)}, largest id {largest}",
        evidence=f"data.dataset={config.data.dataset}",
        advice="the tokenizer of the data is not that of the config",
    )


def shards(plan: PlannedRun) -> Row | None:
    """Prepared shards match the checksums in their manifest."""
    asked = Question("shards", "the sha256 of the manifest")
    if plan.config.data.dataset != "shards":
        return None
    folder, start = Path(plan.config.data.local_path), time.perf_counter()
    problems = verify_shards(folder)
    seconds = time.perf_counter() - start
    more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
    return asked.judged(
        not problems,
        problems[0][:200] + more if problems else f"all match their sha256 ({seconds:.1f} s)",
        evidence=str(folder),
        advice="copy the shards again, or prepare them again (`nsa data prepare`)",
    )


def _read_batch(plan: PlannedRun, limit_s: float) -> torch.Tensor:
    # The loader writes its error files to out_dir: keep them out of the run folder.
    train = dataclasses.replace(plan.config.train, out_dir=str(plan.scratch))
    config = dataclasses.replace(plan.config, train=train)
    options = LoaderOptions(timeout_s=limit_s, report_docs=0)
    data = open_in_time(config, options, lambda text: None)
    return data.train.batch(0, config.train.batch_size)


class Rehearsal(NamedTuple):
    """A few steps of the run itself, with a save and a resume in between."""

    problem: str = ""
    """Why the rehearsal failed; empty if it did not."""
    step_s: float = 0.0
    """Seconds per step, without the first step of each part."""
    checkpoint_bytes: int = 0
    resumed_at: int | None = None
    loss: float = 0.0


def rehearse(plan: PlannedRun) -> Rehearsal:
    """Train a few steps on random tokens, save, verify, resume and train on.

    In this process, or on as many ranks of this machine as share a row.
    """
    folder = plan.scratch / "run"
    config = rehearsal_config(plan.config, folder)
    train = _train_here if config.runtime.sharing == 1 else _train_on_ranks
    try:
        # The second call resumes from the checkpoint of the first.
        for until in (PART_STEPS, 2 * PART_STEPS):
            train(plan, config, until)
            newest = find.paths_of(folder)[0]
            manifest = find.verify(newest)
        metrics = read_metrics(folder)
    except (TrainError, ValueError, OSError, RuntimeError) as error:
        return Rehearsal(problem=first_line(error))
    return Rehearsal(
        step_s=median(_step_times(folder)),
        checkpoint_bytes=manifest.bytes,
        resumed_at=metrics.resumed_at,
        loss=metrics.loss_last or 0.0,
    )


def _train_here(plan: PlannedRun, config: Config, until: int) -> None:
    given: Any = {"out": io.StringIO(), "allow_long_run": True, "ddp": 0}
    run(config, config_path=plan.config_path, stop_after=until, **given)


def _train_on_ranks(plan: PlannedRun, config: Config, until: int) -> None:
    """As `nsa launch` would start them; RuntimeError with their last line if they fail."""
    file = write_config(plan.scratch, config, plan.config_path)
    words = ["--config", str(file), "--steps", str(until), "--allow-long-run"]
    command = trainer_command(words, ranks=config.runtime.sharing, nodes=Nodes())
    done = subprocess.run(command, env=with_package(), capture_output=True, text=True, check=False)
    if done.returncode:
        # Below it is what torchrun says of the failure.
        said = [x for x in done.stderr.splitlines() if x.startswith(("train_showcase: ", "nsa: "))]
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(said[0] if said else last)


def _step_times(folder: Path) -> list[float]:
    """Seconds per step from the heartbeat, without the first step of each part."""
    beats = read_heartbeat(folder / HEARTBEAT_FILE.format(rank=0))
    # The first step of each part compiles kernels or fills caches.
    lines = [beat for beat in beats if beat.msg == PROGRESS and beat.step % PART_STEPS != 1]
    return [seconds for beat in lines if (seconds := number(beat, "step_time_s")) is not None]


def rehearsal_config(config: Config, folder: Path) -> Config:
    """The same run in another folder, on random tokens, with every step logged."""
    train = dataclasses.replace(
        config.train,
        out_dir=str(folder),
        steps=max(config.train.steps, 2 * PART_STEPS),
        save_every=PART_STEPS,
        log_every=1,
        eval_every=0,
        keep_last=0,
        backup_dir="",
        tracker="none",
    )
    data = dataclasses.replace(
        config.data,
        dataset="synthetic",
        local_path="",
        hub_subset="",
        hub_revision="",
        respect_documents=False,
    )
    # Of data parallel ranks it has one, where a strategy may be refused; `all_reduce` has them all.
    runtime = dataclasses.replace(config.runtime, strategy="auto")
    return dataclasses.replace(config, train=train, data=data, runtime=runtime)


def saves_and_resumes(plan: PlannedRun, rehearsal: Rehearsal) -> Row:
    """A checkpoint is written, verified and resumed from."""
    asked = Question("checkpoint", f"written, verified, resumed at step {PART_STEPS}")
    return asked.judged(
        not rehearsal.problem and rehearsal.resumed_at == PART_STEPS,
        rehearsal.problem[:200]
        or f"{size(rehearsal.checkpoint_bytes)}, verified, resumed at step {rehearsal.resumed_at}",
        evidence=f"{2 * PART_STEPS} updates of the run on random tokens, in two parts",
        advice="the message says what to change; `nsa prove-resume` shows more",
    )


def eta_and_cost(plan: PlannedRun, rehearsal: Rehearsal) -> Row:
    """The run finishes in time and within the agreed cost."""
    cost_limit = "" if plan.max_cost is None else f", cost <= {plan.max_cost:g}"
    asked = Question("time", f"<= {plan.limits.eta_h:g} h{cost_limit}")
    if rehearsal.problem:
        todo = "the checkpoint check says what to change"
        return asked.missing("no step was done", todo, essential=True)
    if plan.max_cost is not None and plan.price_per_h is None:
        todo = "pass --price, or set NSA_PRICE_PER_H"
        return asked.missing("no price for an hour", todo, essential=True)
    # Weak scaling is assumed: ranks with rows of their own do not slow each other down.
    seconds = plan.config.train.steps * rehearsal.step_s
    value = f"{duration(seconds)} for {plan.config.train.steps} steps"
    cost = None if plan.price_per_h is None else seconds / 3600 * plan.price_per_h
    if cost is not None:
        value += f", cost {cost:,.2f} at {plan.price_per_h:g}/h"
    is_cheap = plan.max_cost is None or cost is None or cost <= plan.max_cost
    speed, sharing = plan.tokens_per_step / rehearsal.step_s, plan.config.runtime.sharing
    measured = "one rank" if sharing == 1 else f"the {sharing} ranks of a row"
    return asked.judged(
        seconds / 3600 <= plan.limits.eta_h and is_cheap,
        value,
        evidence=f"{rehearsal.step_s:.3g} s per step, {speed:,.0f} tokens/s, measured on "
        f"{measured}, without evaluations",
        advice="fewer train.steps, runtime.cuda_graph=true, more GPUs; or another limit (--limit)",
    )


# --- all-reduce: one process per rank ---

NUMBERS = 1 << 16
"""Elements of the reduced tensor."""


def reduce_once(ranks: int, store: Path, backend: str, device: str, timeout_s: float) -> str:
    """All-reduce once among `ranks` processes that meet through a file; the error, or ""."""
    arguments = (ranks, str(store), backend, device, timeout_s)
    if ranks == 1:
        try:
            take_part(0, *arguments)
        except (RuntimeError, ValueError) as error:
            return first_line(error)
        return ""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=take_part, args=(r, *arguments)) for r in range(ranks)]
    for process in processes:
        process.start()
    # One deadline for all ranks, not one after the other.
    until = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        processes[rank].kill()
        processes[rank].join()
    if late:
        return f"rank {late[0]} did not finish within {timeout_s:g} s"
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    return f"rank {failed[0]} failed: see its message above" if failed else ""


def take_part(
    rank: int, world_size: int, store: str, backend: str, device: str, timeout_s: float
) -> None:
    """One rank: join the group, all-reduce, and check the sum."""
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(where)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        # Rank r adds r + 1; the sum n (n + 1) / 2 is exact, and wrong if a rank is missing.
        tensor = torch.full((NUMBERS,), float(rank + 1), device=where)
        dist.all_reduce(tensor)
        expected = world_size * (world_size + 1) / 2
        if not bool((tensor == expected).all()):
            raise RuntimeError(f"rank {rank}: the sum is {tensor[0].item():g}, not {expected:g}")
    finally:
        dist.destroy_process_group()

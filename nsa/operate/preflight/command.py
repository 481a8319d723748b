"""`nsa preflight`: run all checks that are possible before a run starts, in one table."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from nsa.config import Config
from nsa.config.describe import first_line
from nsa.config.env import read
from nsa.files import write_text
from nsa.operate.limits import limits_for, with_values
from nsa.operate.preflight import config_checks, kernel_checks, machine_checks, run_checks
from nsa.operate.preflight.config_checks import Check, PlannedRun
from nsa.operate.report.command import parse_limits
from nsa.operate.report.evidence import Question
from nsa.operate.report.verdict import FAIL, Row, Verdict
from nsa.records.heartbeat import iso
from nsa.train import TrainError
from nsa.train.runtime import resolve_runtime

POINT = "preflight"
# Checks run in this order: first those that compute nothing.
CHEAP: dict[str, Check] = {
    "config": config_checks.config_named,
    "settings": config_checks.config_sane,
    "mesh": config_checks.mesh,
    "precision": config_checks.precision,
    "save_every": config_checks.checkpoints,
    "environment": config_checks.switches,
    "disk space": machine_checks.disk_space,
    "disk speed": machine_checks.disk_speed,
    "memory": machine_checks.memory,
    "processes": machine_checks.processes,
    "halt file": machine_checks.halt_file,
    "versions": machine_checks.versions,
}
BLOCKING = ("mesh", "disk space", "memory", "processes")
"""If one of these fails, the expensive checks are skipped: they would fail too, or harm a running
job."""
LARGE: dict[str, Check] = {
    "kernel parity": kernel_checks.parity,
    "causality": kernel_checks.causality,
    "all-reduce": run_checks.all_reduce,
    "shards": run_checks.shards,
    "first batch": run_checks.first_batch,
}
REHEARSED: dict[str, Callable[[PlannedRun, run_checks.Rehearsal], Row]] = {
    "checkpoint": run_checks.saves_and_resumes,
    "time": run_checks.eta_and_cost,
}
EXPECTED = (OSError, ValueError, RuntimeError, TrainError)
"""Exceptions that a check may raise on a misconfigured machine; reported as a failed row."""


def examine(
    config: Config,
    config_path: str,
    *,
    config_named: bool = True,
    ranks: int | None = None,
    price_per_h: float | None = None,
    max_cost: float | None = None,
    limits: Mapping[str, float] | None = None,
) -> Verdict:
    """Check a planned run; its folder is only read.

    `ranks` defaults to one per GPU. Raises ValueError for an unknown limit or device.
    """
    # The backend depends on the head sizes, so the plan must see them.
    heads = (config.model.d_k, config.model.d_v)
    runtime = resolve_runtime(config.runtime, heads, config.model.attention_kind)
    allowed = limits_for(runtime.device.type, runtime.device_name)
    with scratch_beside(Path(config.train.out_dir)) as scratch:
        plan = PlannedRun(
            config=config,
            config_path=config_path,
            config_named=config_named,
            ranks=ranks or max(1, torch.cuda.device_count()),
            runtime=runtime,
            limits=with_values(allowed, limits or {}),
            scratch=scratch,
            price_per_h=price_per_h,
            max_cost=max_cost,
        )
        rows = _check(plan)
    facts = {
        "device": f"{plan.ranks} x {runtime.describe_device()}, {runtime.precision}",
        "attention": " ".join(runtime.plan.split()),
    }
    made = iso(time.time())
    return Verdict(folder=str(plan.folder), at=POINT, made=made, facts=facts, rows=rows)


def preflight(config: Config, config_path: str, named: bool, args: argparse.Namespace) -> int:
    """Print the table, with GO or NO-GO in the last line, and return the matching exit code."""
    if args.ranks is not None and args.ranks < 1:
        raise ValueError(f"--ranks {args.ranks} is not a number of processes; use 1 or more")
    verdict = examine(
        config,
        config_path,
        config_named=named,
        ranks=args.ranks,
        price_per_h=read("NSA_PRICE_PER_H") if args.price is None else args.price,
        max_cost=args.max_cost,
        limits=parse_limits(args.limit),
    )
    if args.out is not None:
        write_text(args.out, verdict.json())
    print(verdict.json() if args.json else verdict.text())
    return verdict.exit_code


def _check(plan: PlannedRun) -> list[Row]:
    rows = [row for name, check in CHEAP.items() if (row := _try(name, check, plan)) is not None]
    # Skipped checks still get a row, NOT MEASURED, so that the verdict cannot be GO.
    stopped = [row.name for row in rows if row.name in BLOCKING and row.verdict == FAIL]
    if stopped:
        arise = [n for n in LARGE if n != "shards" or plan.config.data.dataset == "shards"]
        return rows + [_not_tried(name, stopped[0]) for name in (*arise, *REHEARSED)]
    rows += [row for name, check in LARGE.items() if (row := _try(name, check, plan)) is not None]
    if plan.runtime.device.type == "cuda":
        torch.cuda.empty_cache()  # the oracle's memory must not count against the rehearsal
    rehearsal = run_checks.rehearse(plan)
    return rows + [check(plan, rehearsal) for check in REHEARSED.values()]


def _try(name: str, check: Check, plan: PlannedRun) -> Row | None:
    asked = Question(name, "done without an error")
    try:
        return check(plan)
    except EXPECTED as error:
        return asked.judged(
            False,
            first_line(error)[:200],
            evidence=type(error).__name__,
            advice="see the message",
        )


def _not_tried(name: str, failed: str) -> Row:
    asked = Question(name, "tried")
    return asked.missing(f"skipped, because of {failed}", f"see {failed}", essential=True)


@contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    """A temporary folder on the same disk as the run folder; removed at the end."""
    # Same disk as the run folder, which may not exist yet: its nearest existing parent.
    above = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    if above == folder:
        above = folder.absolute().parent  # never write into the run folder itself
    try:
        scratch = Path(tempfile.mkdtemp(prefix=".nsa-preflight-", dir=above))
    except OSError as error:
        raise ValueError(
            f"{above} cannot be written to ({error.strerror}); choose another train.out_dir"
        ) from None
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
